"""Which commits there are is read from names; a store that doesn't answer is not an empty one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.s3_servers import moto_server

from muster.operator.commit_lookup import newest
from muster.operator.core.observed import CommittedSteps
from muster.storage.errors import StoreError
from muster.storage.file_store import FileStore
from muster.storage.listing import CommitListing, CommitSummary
from muster.trainer.checkpoint.__main__ import main
from muster.trainer.checkpoint.commits import read_commit
from muster.words.address import AddressError, parse_address
from muster.words.checkpoint import FORMAT_VERSION, Commit, DataCursor, sealed


def commit(step: int, attempt: int = 1, best: bool = False) -> Commit:
    return Commit(
        job="tiny", job_uid="uid-1", attempt=attempt, step=step, committed_at=5.0, world_size=2, files=(), tensors={},
        cursor=DataCursor(seed=0, epoch=0, sample=5), config={"lr": 0.25}, architecture={}, best=best,
        metrics={"loss": 2.5},
    )  # fmt: skip


def put(folder: Path, step: int, content: bytes) -> None:
    path = folder / "commits" / f"step-{step:08d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_bytes(content)
    os.replace(path.with_suffix(".tmp"), path)


def steps(folder: str, listing: CommitListing | None = None) -> list[int]:
    return [seen.step for seen in (listing or CommitListing()).read(parse_address(folder))]


def test_commits_are_listed_in_the_order_of_their_steps(tmp_path: Path) -> None:
    listing, folder = CommitListing(), parse_address(f"file://{tmp_path}")
    assert listing.read(folder) == ()
    for step in (1200, 5, 123_456_789):
        put(tmp_path, step, sealed(commit(step, best=step == 5)))
    assert listing.read(folder)[0] == CommitSummary(5, 1, 5.0, 2, 0, {"loss": 2.5}, best=True, bytes=0, files=0)
    assert steps(str(tmp_path), listing) == steps(f"file://{tmp_path}", listing) == [5, 1200, 123_456_789]
    assert newest(listing.read(folder)) == CommittedSteps(123_456_789, 5.0, 5)
    (tmp_path / "commits" / "step-00000005.json").unlink()
    assert steps(f"file://{tmp_path}", listing) == [1200, 123_456_789]


def test_one_commit_is_marked_best_whoever_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of 5, 6 and 8 was the best when it was made; 8 is what `--step best` takes."""
    for step in (5, 6, 8, 9):
        put(tmp_path, step, sealed(commit(step, best=step != 9)))
    listed = CommitListing().read(parse_address(str(tmp_path)))
    assert [(seen.step, seen.best) for seen in listed] == [(5, False), (6, False), (8, True), (9, False)]
    assert newest(listed) == CommittedSteps(9, 5.0, 8)
    assert read_commit(str(tmp_path), "best").step == 8
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert [row["best"] for row in json.loads(capsys.readouterr().out)["commits"]] == [False, False, True, False]
    for step in (6, 8):
        assert main(["inspect", str(tmp_path), str(step), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["best"] == (step == 8)


def test_each_commit_is_read_once_and_a_replaced_one_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing, folder, reads = CommitListing(), parse_address(f"file://{tmp_path}"), []
    real = FileStore.read
    monkeypatch.setattr(FileStore, "read", lambda store, key, cap: reads.append(key) or real(store, key, cap))
    put(tmp_path, 5, sealed(commit(5)))
    put(tmp_path, 6, b"{")
    assert listing.read(folder) == listing.read(folder)
    assert reads == ["commits/step-00000005.json", "commits/step-00000006.json"]
    put(tmp_path, 5, sealed(commit(5, attempt=2)))
    assert [seen.attempt for seen in listing.read(folder)] == [2]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"[" * 200_000, b'{"step": 6}', sealed(commit(7)), sealed(commit(6)).replace(b"0.25", b"0.75")],
    ids=["", "{", "[]", "deep", "few", "other", "changed"],
)
def test_what_is_no_commit_does_not_count(tmp_path: Path, content: bytes) -> None:
    put(tmp_path, 5, sealed(commit(5)))
    put(tmp_path, 6, content)
    (tmp_path / "commits" / "notes.txt").write_text("hello")
    assert steps(f"file://{tmp_path}") == [5]


def test_a_newer_musters_commit_counts(tmp_path: Path) -> None:
    """Its trainer will judge it; not to believe it would mean to begin again at step 0."""
    put(tmp_path, 5, sealed(commit(5)))
    newer = {"version": FORMAT_VERSION + 1, "attempt": 3, "committedAt": 7.5, "tensors": "of another kind"}
    put(tmp_path, 6, json.dumps(newer).encode())
    assert CommitListing().read(parse_address(f"file://{tmp_path}"))[1] == CommitSummary(6, 3, 7.5)


def test_what_is_no_file_neither_counts_nor_hangs(tmp_path: Path) -> None:
    put(tmp_path, 5, sealed(commit(5)))
    folder = tmp_path / "commits"
    os.mkfifo(folder / "step-00000006.json")
    (folder / "step-00000007.json").symlink_to("step-00000007.json")
    (folder / "step-00000008.json").symlink_to("/dev/zero")
    (folder / "step-00000009.json").mkdir()
    with open(folder / "step-00000010.json", "wb") as file:
        file.truncate(1 << 40)
    assert steps(f"file://{tmp_path}") == [5]


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "commits").write_text("a file")
    with pytest.raises(StoreError, match="what leads to it is no folder; remove it"):
        CommitListing().read_at(f"file://{tmp_path}")


def test_an_address_of_another_kind_is_named() -> None:
    with pytest.raises(AddressError, match="nothing reads gs://"):
        CommitListing().read_at("gs://bucket/x")


def test_commits_in_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        client = server.client()
        client.create_bucket(Bucket="ckpt")
        listing = CommitListing()
        assert steps("s3://ckpt/team/uid-1", listing) == []
        for step in (10, 20):
            body = sealed(commit(step))
            client.put_object(Bucket="ckpt", Key=f"team/uid-1/commits/step-{step:08d}.json", Body=body)
        client.put_object(Bucket="ckpt", Key="team/uid-1/commits/step-00000030.json", Body=b"{")
        client.put_object(Bucket="ckpt", Key="team/uid-10/commits/step-00000099.json", Body=sealed(commit(99)))
        assert steps("s3://ckpt/team/uid-1", listing) == [10, 20]
        with pytest.raises(StoreError, match=r"s3://nowhere/uid-1/commits/: can't list it: the bucket does not exist"):
            steps("s3://nowhere/uid-1", listing)
