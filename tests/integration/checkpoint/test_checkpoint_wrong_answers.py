"""Stores that answer wrongly once, or for a while: what was said to be committed loads, and every other save was
reported. Behind the proxy are both kinds of S3 server."""

import functools
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.drills.checkpoint.faulty_proxy import FAULTS, Plan, faulty_proxy
from tests.integration.checkpoint import gang
from tests.integration.checkpoint.one_rank import outcomes, saver, state, trained
from tests.s3_servers import BUCKET, KEYS, S3Server

from muster.storage.errors import NotFound, StorageError, StoreError, TruncatedObject
from muster.storage.file_store import FileStore
from muster.storage.opening import open_store
from muster.storage.pins import pin
from muster.storage.readers import being_read, reading
from muster.storage.store import Store, StoredObject
from muster.trainer.checkpoint import UnusableCommit, list_commits, load, resume
from muster.trainer.checkpoint.__main__ import main
from muster.trainer.checkpoint.collect import CollectionState, collect
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.quarantine import must_not_lose_all, quarantine
from muster.trainer.checkpoint.verify import verify
from muster.words.checkpoint import Commit, FileEntry, is_frozen_key
from muster.words.job import Keep
from muster.words.names import ExitCode

STEPS = 3


class Lagging(FileStore):
    """A folder whose listings don't show the newest of what they are asked for; `behind` None: they are empty."""

    behind: int | None = 0

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        found = list(super().objects(prefix))
        if prefix.startswith("step-") or self.behind == 0:
            return iter(found)
        return iter([] if self.behind is None else found[: -self.behind])


def loadable(folder: str, digests: dict[int, dict[str, str]]) -> list[int]:
    """The steps whose state comes back as it was saved."""
    right = []
    for step, digest in digests.items():
        model, optimizer = gang.build("none", seed=1)
        try:
            load(folder, step, model, optimizer)
        except StorageError:
            continue
        if gang.digest(model, optimizer) == digest:
            right.append(step)
    return right


@pytest.mark.parametrize("behind", [1, 2, None])
def test_no_listing_makes_the_collector_delete_what_is_committed(tmp_path: Path, behind: int | None) -> None:
    folder, store, seen = (tmp_path / "uid").as_uri(), Lagging(tmp_path / "uid"), CollectionState()
    digests = trained(folder, STEPS)
    for store.behind in (behind, behind, 0, behind, 0, behind):
        assert collect(store, 1, STEPS, Keep(last=STEPS), seen) == []
        assert collect(store, 1, STEPS, Keep(last=STEPS)) == [], "by a process that has just begun"
    assert loadable(folder, digests) == [1, 2, 3]


def test_retention_goes_on_while_listings_lag(tmp_path: Path) -> None:
    folder, store, seen = (tmp_path / "uid").as_uri(), Lagging(tmp_path / "uid"), CollectionState()
    digests = trained(folder, STEPS)
    store.behind = 1
    assert collect(store, 1, STEPS, Keep(last=1), seen) == [1, 2]
    assert loadable(folder, digests) == list(list_commits(folder)) == [3]
    assert [entry.key for entry in store.objects("step-")] == [commit_in(store, 3).files[0].key]


def test_the_commit_just_made_stays_beside_newer_ones_of_an_older_attempt(tmp_path: Path) -> None:
    folder, store = (tmp_path / "uid").as_uri(), FileStore(tmp_path / "uid")
    digests = trained(folder, STEPS)
    assert collect(store, 2, 1, Keep(last=1), CollectionState()) == [2]
    assert loadable(folder, digests) == [1, 3]


def test_what_a_failed_save_left_goes_when_two_listings_say_so(tmp_path: Path) -> None:
    folder, store, seen = (tmp_path / "uid").as_uri(), Lagging(tmp_path / "uid"), CollectionState()
    trained(folder, 2)
    left = "step-00000001/attempt-0/shard-00000-of-00001.safetensors"
    store.create(left, b"of an attempt that ended")

    def is_there(behind: int | None) -> bool:
        store.behind = behind
        collect(store, 1, 2, Keep(), seen)
        return (tmp_path / "uid" / left).exists()

    assert [is_there(behind) for behind in (0, 1, 0, 0)] == [True, True, True, False]


def test_a_pin_that_no_listing_shows_keeps_its_commit(tmp_path: Path) -> None:
    folder, store = (tmp_path / "uid").as_uri(), Lagging(tmp_path / "uid")
    digests = trained(folder, STEPS)
    pin(store, 1)
    store.behind = None
    assert collect(store, 1, STEPS, Keep(last=1), CollectionState(frozenset({1, 2, 3}))) == [2]
    assert loadable(folder, digests) == [1, 3]


def test_a_readers_mark_that_the_store_fails_to_give_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    with reading(store, 2):
        (mark,) = store.objects("readers/")
        monkeypatch.setattr(FileStore, "read", lambda *_: b"")
        assert being_read(store, mark.modified_at + 1) == {2}
        assert being_read(store, mark.modified_at + 4_000) == set()


def test_removing_by_hand_leaves_what_a_listing_that_lags_may_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (model, optimizer) = tmp_path / "uid", gang.build("none", seed=0, frozen=True)
    with saver(folder.as_uri()) as saving:
        for step in (1, 2):
            gang.step_once(model, optimizer, step)
            saving.save(state(model, optimizer, step), emergency=True)
            assert outcomes(saving) == [(step, True, None)]
    real = FileStore.objects

    def lags(store: FileStore, prefix: str) -> Iterator[StoredObject]:
        shown = (entry for entry in real(store, prefix) if prefix != "commits/" or "2.json" not in entry.key)
        return iter([*shown] if prefix != "commits/" else [StoredObject("commits/step-00000001.json", 1, 0.0, "")])

    with monkeypatch.context() as stale:
        stale.setattr(FileStore, "objects", lags)
        assert main(["rm", str(folder), "1", "--force"]) == 0
    fresh = gang.build("none", seed=9, frozen=True)
    load(folder.as_uri(), 2, *fresh)
    assert gang.digest(*fresh) == gang.digest(model, optimizer)


@pytest.mark.parametrize("error", [NotFound, TruncatedObject])
def test_one_wrong_answer_for_a_shard_sets_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[StoreError]
) -> None:
    folder, real = (tmp_path / "uid").as_uri(), FileStore.read_into
    trained(folder, STEPS)
    wrong = {"asked": 2}

    def read_into(store: FileStore, key: str, start: int, into: memoryview, tag: str | None = None) -> None:
        if "shard-" in key and wrong["asked"]:
            wrong["asked"] -= 1
            raise error(f"{key}: a wrong answer")
        real(store, key, start, into, tag)

    monkeypatch.setattr(FileStore, "read_into", read_into)
    model, optimizer = gang.build("none", seed=1)
    said: list[str] = []
    assert resume(folder, 9, model, optimizer, said.append).step == STEPS
    assert (said, wrong["asked"]) == ([], 0)


def test_one_404_for_a_commit_passes_nothing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real, wrong = (tmp_path / "uid").as_uri(), FileStore.read, [2]
    trained(folder, STEPS)

    def read(store: FileStore, key: str, *more: int) -> bytes:
        if "commits/" in key and wrong[0]:
            wrong[0] -= 1
            raise NotFound(f"{key}: a wrong answer")
        return real(store, key, *more)

    monkeypatch.setattr(FileStore, "read", read)
    model, optimizer = gang.build("none", seed=1)
    assert resume(folder, 9, model, optimizer, print).step == STEPS


def broken_and_set_aside(folder: Path) -> Callable[[], object]:
    """Take a shard of the newest commit away, so that it is set aside; what is returned brings it back."""
    (shard,) = folder.glob(f"step-{STEPS:08d}/*/*")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    model, optimizer = gang.build("none", seed=1)
    assert resume(folder.as_uri(), 9, model, optimizer, print).step == STEPS - 1
    assert list_commits(folder.as_uri()) == (1, 2)
    return functools.partial(shard.write_bytes, data)


def test_the_next_attempt_puts_back_what_verifies_after_all(tmp_path: Path) -> None:
    """It goes on from there, though its operator could only choose an older one."""
    folder = tmp_path / "uid"
    digests = trained(folder.as_uri(), STEPS)
    restore = broken_and_set_aside(folder)
    model, optimizer = gang.build("none", seed=1)
    said: list[str] = []
    chosen = STEPS - 1
    assert resume(folder.as_uri(), chosen, model, optimizer, said.append).step == chosen, "it is still damaged"
    restore()
    assert resume(folder.as_uri(), chosen, model, optimizer, said.append).step == STEPS
    assert said == [f"commit {STEPS} was set aside, and verifies now: it is put back"]
    assert gang.digest(model, optimizer) == digests[STEPS]
    assert not list(folder.glob("quarantine/*"))


def test_an_attempt_that_was_to_begin_anew_does_not_where_a_commit_verifies_after_all(tmp_path: Path) -> None:
    folder = tmp_path / "uid"
    trained(folder.as_uri(), STEPS)
    restore = broken_and_set_aside(folder)
    for step in (1, 2):
        quarantine(FileStore(folder), step, "the loss is not finite", damaged=False)
    must_not_lose_all(folder.as_uri(), print)
    restore()
    with pytest.raises(StorageError, match=f"commit {STEPS} was set aside, and verifies now: it is put back"):
        must_not_lose_all(folder.as_uri(), print)
    assert list_commits(folder.as_uri()) == (STEPS,)
    must_not_lose_all((tmp_path / "none").as_uri(), print)


def test_verify_puts_back_what_verifies_after_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "uid"
    digests = trained(folder.as_uri(), STEPS)
    restore = broken_and_set_aside(folder)
    assert main(["verify", str(folder)]) == 0
    assert f"step {STEPS}: was set aside, and does not verify" in capsys.readouterr().out
    restore()
    assert main(["verify", str(folder)]) == 0
    assert "it was set aside, and is put back" in capsys.readouterr().out
    assert loadable(folder.as_uri(), digests) == list(list_commits(folder.as_uri())) == [1, 2, 3]


def test_what_a_save_sweeps_while_it_is_verified_is_not_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "uid"
    trained(folder.as_uri(), STEPS)
    broken_and_set_aside(folder)()

    def verified_and_swept(store: Store, commit: Commit, progress: Callable[[int, int], None]) -> None:
        verify(store, commit, progress)
        store.delete(commit.files[0].key)

    monkeypatch.setattr("muster.trainer.checkpoint.quarantine.verify", verified_and_swept)
    assert main(["verify", str(folder), str(STEPS)]) == 1, "the step that is asked for is not sound"
    assert "does not verify" in capsys.readouterr().out
    assert list_commits(folder.as_uri()) == (1, 2)


def test_a_commit_that_training_failed_from_stays_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, store = tmp_path / "uid", FileStore(tmp_path / "uid")
    trained(folder.as_uri(), STEPS)
    quarantine(store, STEPS, "the loss is not finite", damaged=False)
    model, optimizer = gang.build("none", seed=1)
    assert resume(folder.as_uri(), 9, model, optimizer, print).step == STEPS - 1
    assert main(["verify", str(folder)]) == 0
    assert "was set aside because training failed from it" in capsys.readouterr().out
    assert list_commits(folder.as_uri()) == (1, 2)
    assert main(["verify", str(folder), "9"]) == ExitCode.STORAGE


def test_a_sound_commit_that_training_cant_go_on_from_is_not_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be tried and set aside again by every second attempt, and count as progress each time."""
    folder = tmp_path / "uid"
    trained(folder.as_uri(), STEPS)
    model, optimizer = gang.build("none", seed=1)

    def check(commit: Commit, *rest: object) -> None:
        if commit.step == STEPS:
            raise UnusableCommit("of the optimizer's state something is missing")

    monkeypatch.setattr("muster.trainer.checkpoint.loader.expect_whole_state", check)
    for _ in range(2):
        said: list[str] = []
        assert resume(folder.as_uri(), 9, model, optimizer, said.append).step == STEPS - 1
        assert list_commits(folder.as_uri()) == (1, 2)
    assert said == []


# --- real servers, behind a proxy ---

QUICK = ("all resets", "listings lag by one", "slow_down", "listings are empty", "all lengths")
TROUBLES: dict[str, Callable[[Plan], None]] = {
    **{fault: lambda plan, fault=fault: plan.rates.update({fault: 0.15}) for fault in FAULTS},  # type: ignore[misc]
    "none": lambda plan: None,
    "listings lag by one": lambda plan: setattr(plan, "lagging", 1),
    "listings lag by two": lambda plan: setattr(plan, "lagging", 2),
    "listings are empty": lambda plan: setattr(plan, "lagging", None),
    "all resets": lambda plan: plan.rates.update(reset_before=0.15, reset_after=0.15, truncated=0.15),
    "all lengths": lambda plan: plan.rates.update(halved=0.1, emptied=0.1, truncated=0.1, missing=0.1),
}


def life(url: str, plan: Plan, troubles: Sequence[str], environment: pytest.MonkeyPatch) -> None:
    """Saves under each trouble in turn, the last under none, and what became of them."""
    for name, value in {**KEYS, "MUSTER_S3_ENDPOINT": url, "MUSTER_S3_RETRY_SECONDS": "10"}.items():
        environment.setenv(name, value)
    folder, (model, optimizer), claimed = f"s3://{BUCKET}/{uuid.uuid4().hex}/uid", gang.build("none", seed=0), {}
    with saver(folder, Keep(last=3)) as saving:
        for step, trouble in enumerate([*troubles, "none"], 1):
            TROUBLES[trouble](plan)
            gang.step_once(model, optimizer, step)
            saving.save(state(model, optimizer, step), emergency=True)
            ((_, committed, error),) = outcomes(saving)
            assert committed == (error is None), "a save that failed says why"
            if committed:
                claimed[step] = gang.digest(model, optimizer)
            plan.rates, plan.lagging = {}, 0
    newest = {step: claimed[step] for step in sorted(claimed)[-3:]}  # when the last collection is over
    assert loadable(folder, newest) == list(newest)
    for plan.first_time in ("missing", "halved", "emptied"):
        plan.seen.clear()
        fresh, said = gang.build("none", seed=1), list[str]()
        assert resume(folder, 10**6, *fresh, said.append).step == len(troubles) + 1, said
        assert gang.digest(*fresh) == claimed[len(troubles) + 1]
    plan.first_time = None
    assert not list(open_store(folder).objects("quarantine/"))


@pytest.mark.parametrize("kind", ["moto", "rclone"])
def test_what_is_said_to_be_committed_loads_whatever_the_store_answers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    server: S3Server = request.getfixturevalue(f"{kind}_s3")
    plan = Plan(seed=1, checks_crc32=kind == "moto")
    with faulty_proxy(server.url, plan) as url:
        life(url, plan, QUICK, monkeypatch)
    assert min(plan.done[fault] for fault in ("missing", "halved", "emptied", "lagging listings")) > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["moto", "rclone"])
def test_many_orders_of_troubles(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    server: S3Server = request.getfixturevalue(f"{kind}_s3")
    plan, dice = Plan(seed=seed, checks_crc32=seed % 2 == 0, hides_md5=seed % 3 == 0), random.Random(seed)
    with faulty_proxy(server.url, plan) as url:
        life(url, plan, dice.choices(list(TROUBLES), k=30), monkeypatch)


def test_rights_that_are_lost_midway_cost_saves_and_no_commit(
    moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan()
    with faulty_proxy(moto_s3.url, plan) as url:
        for name, value in {**KEYS, "MUSTER_S3_ENDPOINT": url, "MUSTER_S3_RETRY_SECONDS": "1"}.items():
            monkeypatch.setenv(name, value)
        folder, (model, optimizer), digests = f"s3://{BUCKET}/{uuid.uuid4().hex}/uid", gang.build("none", seed=0), {}
        with saver(folder) as saving:
            for step, refused in enumerate((None, (403, "AccessDenied"), None), 1):
                plan.refuse_writes_with = refused
                gang.step_once(model, optimizer, step)
                saving.save(state(model, optimizer, step), emergency=True)
                ((_, committed, error),) = outcomes(saving)
                assert (committed, "access denied" in str(error)) == (refused is None, refused is not None)
                if committed:
                    digests[step] = gang.digest(model, optimizer)
        assert loadable(folder, digests) == list(digests) == [1, 3]


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (400, "InvalidRequest")])
def test_a_store_that_refuses_checksums_is_written_by_its_etags(
    moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch, refusal: tuple[int, str]
) -> None:
    plan = Plan(refuses_checksums=refusal)
    with faulty_proxy(moto_s3.url, plan) as url:
        for name, value in {**KEYS, "MUSTER_S3_ENDPOINT": url}.items():
            monkeypatch.setenv(name, value)
        store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}/uid")
        entry: FileEntry = store.write("step-00000001/attempt-1/x", memoryview(bytes(20 << 20)))
        store.verify(entry)
        assert store.create("commits/a", b"1")
        assert not store.create("commits/a", b"2")
        assert store.server.integrity == "etag"  # type: ignore[attr-defined]
    assert plan.done["checksums refused"] > 0
    assert not is_frozen_key(entry.key)
