"""Which commits there are is read from names; a store that doesn't answer is not an empty one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from muster.contract.checkpoint import Commit, DataCursor, sealed
from muster.operator.commits import Commits, CommitSeen, CommitsUnreadable


def document(step: int, attempt: int = 1, best: bool = False, at: float = 5.0) -> bytes:
    return json.dumps({"step": step, "attempt": attempt, "committedAt": at, "best": best, "tensors": {}}).encode()


def put(folder: Path, step: int, content: bytes) -> None:
    path = folder / "commits" / f"step-{step:08d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_bytes(content)
    os.replace(path.with_suffix(".tmp"), path)


def test_commits_are_read_in_the_order_of_their_steps(tmp_path: Path) -> None:
    commits, folder = Commits(), f"file://{tmp_path}"
    assert commits.read(folder) == ()
    for step in (1200, 5, 123_456_789):
        put(tmp_path, step, document(step, best=step == 5))
    assert commits.read(folder) == (
        CommitSeen(5, 1, 5.0, best=True),
        CommitSeen(1200, 1, 5.0, best=False),
        CommitSeen(123_456_789, 1, 5.0, best=False),
    )
    assert commits.read(str(tmp_path)) == commits.read(folder)
    (tmp_path / "commits" / "step-00000005.json").unlink()
    assert [commit.step for commit in commits.read(folder)] == [1200, 123_456_789]


def test_each_commit_is_read_once_and_a_replaced_one_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits, folder, reads = Commits(), f"file://{tmp_path}", []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path.name) or real(path))
    put(tmp_path, 5, document(5, attempt=1))
    assert commits.read(folder) == commits.read(folder)
    assert reads == ["step-00000005.json"]
    put(tmp_path, 5, document(5, attempt=2))
    assert [commit.attempt for commit in commits.read(folder)] == [2]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"step": 6}', document(7)], ids=["", "{", "[]", "few", "other"]
)
def test_what_is_no_commit_does_not_count(tmp_path: Path, content: bytes) -> None:
    put(tmp_path, 5, document(5))
    put(tmp_path, 6, content)
    (tmp_path / "commits" / "notes.txt").write_text("hello")
    assert [commit.step for commit in Commits().read(f"file://{tmp_path}")] == [5]


def test_a_commit_that_was_changed_does_not_count(tmp_path: Path) -> None:
    whole = Commit(
        job="tiny", job_uid="uid-1", attempt=1, step=5, committed_at=5.0, world_size=2, files=(), tensors={},
        cursor=DataCursor(seed=0, epoch=0, sample=5), config={"lr": 0.25}, architecture={},
    )  # fmt: skip
    put(tmp_path, 5, sealed(whole))
    put(tmp_path, 6, sealed(whole.model_copy(update={"step": 6})).replace(b"0.25", b"0.75"))
    put(tmp_path, 7, document(7)[:-1] + b', "version": 99, "seal": "of another kind"}')
    assert [commit.step for commit in Commits().read(f"file://{tmp_path}")] == [5, 7]


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "commits").write_text("a file")
    with pytest.raises(CommitsUnreadable, match=r"can't list the commits in .*: Not a directory"):
        Commits().read(f"file://{tmp_path}")


def test_an_address_of_another_kind_is_named() -> None:
    with pytest.raises(CommitsUnreadable, match=r"gs://bucket/x: checkpoints lie under file:// or s3://, not gs://"):
        Commits().read("gs://bucket/x")


def test_commits_in_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        client = boto3.client("s3")
        client.create_bucket(Bucket="ckpt")
        commits = Commits()
        assert commits.read("s3://ckpt/team/uid-1") == ()
        for step in (10, 20):
            client.put_object(Bucket="ckpt", Key=f"team/uid-1/commits/step-{step:08d}.json", Body=document(step))
        client.put_object(Bucket="ckpt", Key="team/uid-1/commits/step-00000030.json", Body=b"{")
        client.put_object(Bucket="ckpt", Key="team/uid-10/commits/step-00000099.json", Body=document(99))
        assert [commit.step for commit in commits.read("s3://ckpt/team/uid-1")] == [10, 20]
        with pytest.raises(CommitsUnreadable, match=r"can't list s3://nowhere/uid-1/commits/: .*NoSuchBucket"):
            commits.read("s3://nowhere/uid-1")
    finally:
        server.stop()
