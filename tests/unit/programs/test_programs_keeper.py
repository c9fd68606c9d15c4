"""The keeper publishes complete checkpoints of a program, whole, and nothing else."""

import io
import json
import os
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.polling import eventually
from tests.unit.programs.gang_of_keepers import Bench, settle

from muster.storage.errors import StoreError
from muster.storage.file_store import FileStore
from muster.storage.small_files import write_whole
from muster.storage.store import nobody
from muster.trainer.errors import UserError
from muster.words.checkpoint import FileEntry
from muster.words.names import KEEPER_STATE, PREPARED, SAVE_REQUEST, ExitCode


def archive(text: str) -> bytes:
    """A file as torch.save writes it, in its outer form."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as written:
        written.writestr(zipfile.ZipInfo("archive/data.pkl"), text)  # of a fixed time
    return buffer.getvalue()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_is_renamed_into_place_is_published(bench: Bench, tmp_path: Path) -> None:
    bench.write(".step-7.partial/deep/weights", b"w")
    bench.write(".step-7.partial/empty", b"")
    bench.settle()
    assert bench.steps() == ()
    (bench.folder / ".step-7.partial").rename(bench.folder / "step-7")
    bench.settle()
    assert bench.steps() == (7,)
    assert bench.loaded(7, tmp_path / "fresh") == {"deep/weights": b"w", "empty": b""}
    commit = bench.commit(7)
    assert (commit.kind, commit.entry, commit.attempt, commit.world_size) == ("folder", "step-7", 1, 1)
    state = json.loads((bench.around.worker_dir / KEEPER_STATE).read_bytes())
    assert (state["state"], state["committedStep"], state["fault"]) == ("idle", 7, None)
    bench.settle()  # it is published once
    assert bench.commit(7) == commit


def test_a_folder_written_in_place_needs_a_mark_and_a_later_step_of_every_rank(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ranks=2)
    bench.write("checkpoint-10/model.bin")
    bench.write("logs/lines.txt")
    bench.stepped(11, rank=0)
    bench.stepped(11, rank=1)
    bench.settle()
    assert bench.steps() == ()  # no mark
    assert "checkpoint-10 is not published: it was written in place" in (bench.keeper.state.fault or "")
    bench.write("checkpoint-10/trainer_state.json", json.dumps({"global_step": 10}).encode())
    bench.stepped(11, rank=0)
    bench.stepped(10, rank=1, after=-60)  # still saving
    bench.settle()
    assert bench.steps() == ()
    bench.stepped(11, rank=1)
    bench.settle()
    assert bench.steps() == (10,)


def test_data_newer_than_dcp_s_metadata_are_of_a_save_under_way(bench: Bench) -> None:
    bench.write("last/__0_0.distcp")
    metadata = bench.write("last/.metadata")
    os.utime(metadata, ns=(1, (bench.folder / "last/__0_0.distcp").stat().st_mtime_ns - 1))
    bench.stepped(20)
    bench.settle()
    assert bench.steps() == ()
    os.utime(metadata)
    bench.stepped(20)
    bench.settle()
    assert bench.steps() == (20,)  # no step in its name: the ranks' own


def test_files_in_the_folder_itself_are_one_checkpoint_and_are_not_written_twice(bench: Bench, tmp_path: Path) -> None:
    bench.write("best.pt", archive("best"))
    bench.write("last.pt", archive("five")[:-9])  # half way
    bench.write("notes.txt")
    bench.stepped(5)
    bench.settle()
    assert bench.steps() == ()
    bench.write("last.pt", archive("five"))
    bench.stepped(6)
    bench.settle()
    assert bench.loaded(6, tmp_path / "first") == {"best.pt": archive("best"), "last.pt": archive("five")}
    bench.write("last.tmp", archive("ten!"))
    (bench.folder / "last.tmp").rename(bench.folder / "last.pt")  # complete at once, without a step
    bench.stepped(10, after=-60)
    bench.settle()
    assert bench.steps() == (6, 10)
    assert bench.loaded(10, tmp_path / "second") == {"best.pt": archive("best"), "last.pt": archive("ten!")}
    assert {file.key for file in bench.commit(10).files} == {
        "step-00000006/attempt-1/files/best.pt",
        "step-00000010/attempt-1/files/last.pt",
    }


def test_a_request_of_muster_run_is_a_step_s_word(bench: Bench) -> None:
    folder = bench.write("mine/weights").parent
    request = {"step": 33, "folder": str(folder)}
    write_whole(bench.around.worker_dir / SAVE_REQUEST.format(step=33), json.dumps(request))
    bench.settle()
    assert bench.steps() == (33,)


def test_all_ranks_that_ended_well_leave_what_is_marked_complete(bench: Bench) -> None:
    bench.write("checkpoint-10/model.bin")
    bench.write("checkpoint-10/trainer_state.json", json.dumps({"global_step": 10}).encode())
    bench.ended(0)
    assert bench.keeper.run() == 0
    assert bench.steps() == (10,)
    assert bench.keeper.state.state == "done"


def test_after_a_failure_only_what_was_complete_is_published(bench: Bench) -> None:
    bench.save("step-9")
    later = bench.write("checkpoint-10/trainer_state.json", b"{}")
    os.utime(later, (time.time() + 1, time.time() + 1))  # so that no clock's grain decides
    bench.ended(0, 1)
    assert bench.keeper.run() == 0
    assert bench.steps() == (9,)


def test_the_program_may_delete_and_rewrite_during_the_upload(tmp_path: Path) -> None:
    def rewrite(key: str) -> None:
        (saving.folder / "step-1" / "b").write_bytes(b"torn")
        for path in saving.folder.glob("step-1/*"):
            path.unlink()

    saving = Bench(tmp_path, store=WatchedStore(tmp_path / "store" / "uid", rewrite))
    saving.save("step-1", a=b"a" * 1000, b=b"b" * 1000)
    saving.settle()
    assert saving.loaded(1, tmp_path / "fresh") == {"a": b"a" * 1000, "b": b"b" * 1000}


def test_a_deleted_checkpoint_is_said_and_never_half_published(bench: Bench) -> None:
    bench.save("step-1")
    bench.keeper._watch.wait(1.0)
    (bench.folder / "step-1" / "weights").unlink()
    bench.settle()
    assert bench.steps() == ()
    bench.save("step-2")
    bench.settle()
    assert bench.steps() == (2,)


def test_an_old_one_that_the_program_was_killed_deleting_is_not_published(bench: Bench, tmp_path: Path) -> None:
    bench.save("step-9", a=b"1", b=b"2")
    bench.save("step-10", a=b"3", b=b"4")  # by its name before the other
    (bench.folder / "step-9/a").unlink()
    bench.settle()
    assert bench.steps() == (10,)
    assert bench.loaded(10, tmp_path / "fresh") == {"a": b"3", "b": b"4"}
    bench.stepped(20)
    bench.settle()
    assert bench.steps() == (10,)


def test_one_that_loses_files_after_it_was_published_is_not_a_new_one(bench: Bench) -> None:
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        bench.write(f"last/{name}")
    bench.stepped(10)
    bench.settle()
    (bench.folder / "last/__0_0.distcp").unlink()
    bench.stepped(20)
    bench.settle()
    assert bench.steps() == (10,)


def test_a_part_that_may_be_half_deleted_fails_the_checkpoint(tmp_path: Path) -> None:
    first, second = Bench(tmp_path, worker=0, workers=2), Bench(tmp_path, worker=1, workers=2)
    first.save("step-5", a=b"1")
    second.save("step-5", b=b"2", c=b"3")
    second.save("step-6", b=b"4", c=b"5")
    (second.folder / "step-5/b").unlink()
    settle(first, second)
    assert first.steps() == ()
    assert "step-5: the program had step-6 by then, and may be deleting this one" in (first.keeper.state.fault or "")


def test_one_that_changes_whenever_it_is_copied_is_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from muster.trainer.programs import snapshot

    copy = snapshot._copy

    def copy_and_grow(source: Path, target: Path) -> None:
        copy(source, target)
        source.write_bytes(source.read_bytes() + b"more")

    monkeypatch.setattr(snapshot, "_copy", copy_and_grow)
    bench.save("step-1")
    bench.look(5)
    assert bench.steps() == ()
    assert "weights was changed while it was copied; it is not published" in (bench.keeper.state.fault or "")


@pytest.mark.parametrize(("make", "says"), [("link", "is a link"), ("fifo", "is no regular file")])
def test_links_and_fifos_are_refused_by_their_path(bench: Bench, make: str, says: str) -> None:
    folder = bench.write(".partial/weights").parent
    if make == "link":
        (folder / "odd").symlink_to("/etc/passwd")
    else:
        os.mkfifo(folder / "odd")
    folder.rename(bench.folder / "step-4")
    bench.settle()
    assert bench.steps() == ()
    assert f"step-4/odd {says}" in (bench.keeper.state.fault or "")


def test_a_full_disk_is_said_and_the_next_one_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from muster.trainer.programs import snapshot

    copy = snapshot._copy

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(snapshot, "_copy", full)
    bench.save("step-1")
    bench.settle()
    assert "the node's disk has no room for a copy" in (bench.keeper.state.fault or "")
    monkeypatch.setattr(snapshot, "_copy", copy)
    bench.save("step-2")
    bench.settle()
    assert (bench.steps(), bench.keeper.state.fault) == ((2,), None)


class WatchedStore(FileStore):
    """Calls `before` with each key that is about to be written; raises what that raises."""

    def __init__(self, root: Path, before: Callable[[str], None]) -> None:
        super().__init__(root, links=False)
        self._before = before

    def write(self, key: str, data: memoryview, sent: Callable[[int], None] = nobody) -> FileEntry:
        self._before(key)
        return super().write(key, data, sent)


def test_a_failing_store_is_tried_again_and_nothing_is_lost(tmp_path: Path) -> None:
    failures = [StoreError("the disk is full"), StoreError("the disk is full"), OSError("reset")]

    def fail(key: str) -> None:
        if failures:
            raise failures.pop()

    bench = Bench(tmp_path, store=WatchedStore(tmp_path / "store" / "uid", fail))
    bench.save("step-1")
    bench.settle()
    assert (bench.steps(), failures, bench.keeper.state.fault) == ((1,), [], None)


def test_a_stale_attempt_publishes_nothing(tmp_path: Path) -> None:
    fence = tmp_path / "status.json"
    fence.write_text(json.dumps({"metadata": {"uid": "uid"}, "status": {"attempt": 2}}))
    bench = Bench(tmp_path, fence=fence.as_uri())
    bench.save("step-1")
    assert bench.keeper.run() == ExitCode.STALE_ATTEMPT
    assert bench.steps() == ()
    assert "attempt 1 of job uid is not current" in (bench.keeper.state.fault or "")


def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    first = Bench(tmp_path / "one", folder=str(tmp_path / "shared"))
    with pytest.raises(UserError, match="another job's program writes its checkpoints there"):
        Bench(tmp_path / "two", folder=str(tmp_path / "shared"))
    assert first.steps() == ()


def test_what_was_resumed_from_is_not_published_again(tmp_path: Path) -> None:
    folder = tmp_path / "attempt-1" / "worker-0" / "checkpoints" / "checkpoint-5"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    write_whole(tmp_path / "attempt-1" / "worker-0" / PREPARED, json.dumps({"entry": "checkpoint-5"}))
    bench = Bench(tmp_path, resume_step="5")
    bench.stepped(6)
    bench.settle()
    assert bench.steps() == ()
    bench.save("checkpoint-2")  # a program that began again
    bench.settle()
    assert bench.steps() == ()
    assert "the program does not resume; have it load $MUSTER_RESUME_DIR" in (bench.keeper.state.fault or "")


def test_a_keeper_that_is_started_again_publishes_nothing_twice(tmp_path: Path) -> None:
    first = Bench(tmp_path)
    first.write("checkpoint-10/trainer_state.json", b'{"global_step": 10}')
    first.stepped(11)
    first.settle()
    made = first.commit(10)
    os.close(first.keeper._lock)  # it was killed
    second = Bench(tmp_path)
    second.stepped(12)
    second.settle()
    assert second.commit(10) == made
    second.save("checkpoint-20")
    second.settle()
    assert second.steps() == (10, 20)


def test_one_that_a_store_refuses_gives_way_to_a_newer_one(tmp_path: Path) -> None:
    def refuse(key: str) -> None:
        if "step-00000001" in key:
            raise StoreError("the store is down")

    bench = Bench(tmp_path, store=WatchedStore(tmp_path / "store" / "uid", refuse))
    bench.save("step-1")
    bench.look()
    bench.save("step-2")
    bench.settle()
    assert bench.steps() == (2,)


def test_the_best_and_the_kept_are_those_of_the_program_s_own_metrics(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checkpoint=json.dumps({"keep": {"last": 1, "best": 1}}))
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5)):
        bench.stepped(step, after=-60, loss=loss + 1, values={"evaluation_loss": loss, "odd": "text"}, tokens=step * 8)
        bench.save(f"step-{step}")
        bench.settle()
    assert bench.steps() == (2, 3)
    assert (bench.commit(2).best, bench.commit(3).best) == (True, False)
    assert (bench.commit(3).metrics, bench.commit(3).tokens) == ({"evaluation_loss": 2.5, "loss": 3.5}, 24)


def gang(tmp_path: Path, **more: str) -> tuple[Bench, Bench]:
    first = Bench(tmp_path, worker=0, workers=2, **more)
    return first, Bench(tmp_path, worker=1, workers=2, **more)


def test_each_node_s_part_is_in_one_checkpoint(tmp_path: Path) -> None:
    first, second = gang(tmp_path)
    second.save("step-3", **{"rank-1.pt": b"one", "same": b"s"})
    first.save("step-3", **{"rank-0.pt": b"zero", "same": b"s"})
    settle(first, second)
    assert first.loaded(3, tmp_path / "fresh") == {"rank-0.pt": b"zero", "rank-1.pt": b"one", "same": b"s"}
    assert not (tmp_path / "store" / "uid" / "parts" / "attempt-1" / "step-00000003").exists()


def test_a_node_without_a_part_says_so_once_its_ranks_are_past_the_step(tmp_path: Path) -> None:
    first, second = gang(tmp_path)
    second.stepped(2)
    first.save("step-3")
    for bench in (first, second) * 3:
        bench.look()
    assert first.steps() == ()
    second.stepped(3)
    settle(first, second)
    assert first.steps() == (3,)


def test_a_shared_folder_is_uploaded_once(tmp_path: Path) -> None:
    first, second = gang(tmp_path, folder=str(tmp_path / "shared"))
    first.save("step-3", **{"rank-0.pt": b"zero", "rank-1.pt": b"one"})
    settle(first, second)
    assert [file.key for file in first.commit(3).files] == [
        "step-00000003/attempt-1/files/rank-0.pt",
        "step-00000003/attempt-1/files/rank-1.pt",
    ]


def test_two_nodes_with_different_files_of_one_name_are_refused(tmp_path: Path) -> None:
    first, second = gang(tmp_path)
    second.save("step-3", state=b"one")
    first.save("step-3", state=b"zero")
    settle(first, second)
    assert first.steps() == ()
    assert "different files by the name state" in (first.keeper.state.fault or "")


def test_a_node_whose_part_is_unfit_fails_the_checkpoint_by_its_name(tmp_path: Path) -> None:
    first, second = gang(tmp_path)
    folder = second.write(".partial/weights").parent
    (folder / "odd").symlink_to("weights")
    folder.rename(second.folder / "step-3")
    first.save("step-3")
    settle(first, second)
    assert first.steps() == ()
    assert "worker 1: " in (first.keeper.state.fault or "")
    assert "odd is a link" in (first.keeper.state.fault or "")


def test_a_worker_whose_rank_failed_does_not_wait_for_what_worker_0_may_order_one_day(tmp_path: Path) -> None:
    """Its end is what ends worker 0's ranks; where it waited for them, a killed rank cost five minutes."""
    first, second = Bench(tmp_path, worker=0, workers=2), Bench(tmp_path, worker=1, workers=2)
    first.save("step-00000005")
    second.stepped(7)
    settle(first, second)
    assert first.steps() == (5,)
    second.ended(-9)
    assert second.keeper.run() == 0
    assert second.keeper.ended_at is not None


def test_a_part_that_was_written_in_place_before_its_ranks_were_killed_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody knows whether it is whole. Both keepers waited a minute for it, and held their pods."""
    first, second = gang(tmp_path)
    second.stepped(4, after=-60)
    second.write("step-00000005/part", b"second")
    first.save("step-00000005", other=b"first")
    while not list(first.store.objects("parts/attempt-1/order.json")):
        first.look()
    second.look()
    assert not list(first.store.objects("parts/attempt-1/step-00000005")), "its next step would show that it is whole"
    second.ended(-15)
    assert second.keeper.run() == 0
    settle(first)
    assert first.steps() == ()
    assert "worker 1: step-00000005: the ranks were gone" in (first.keeper.state.fault or "")


def test_a_worker_whose_rank_failed_waits_for_the_order_of_what_is_whole_on_its_node(tmp_path: Path) -> None:
    """The engine of `run.save` commits on all nodes what dead ranks left, and each keeper hears of it by itself."""
    first, second = gang(tmp_path)
    settle(first, second)
    second.save("step-00000005", part=b"second")
    request(second, 5)
    second.ended(-9)
    keeping = threading.Thread(target=second.keeper.run)
    keeping.start()
    eventually(lambda: second.keeper.ended_at is not None, "worker 1's keeper to see its ranks' end")
    first.save("step-00000005", other=b"first")
    request(first, 5)
    first.settle()
    keeping.join()
    assert first.loaded(5, tmp_path / "fresh") == {"other": b"first", "part": b"second"}


def test_a_part_that_is_about_to_be_renamed_is_waited_for(tmp_path: Path) -> None:
    first, second = gang(tmp_path)
    second.stepped(7)
    second.write(".step-00000005.partial/part", b"second")
    first.save("step-00000005", other=b"first")
    while not list(first.store.objects("parts/attempt-1/order.json")):
        first.look()
    second.look()
    (second.folder / ".step-00000005.partial").rename(second.folder / "step-00000005")
    settle(first, second)
    assert first.loaded(5, tmp_path / "fresh") == {"other": b"first", "part": b"second"}


def request(bench: Bench, step: int) -> None:
    document = {"step": step, "folder": str(bench.folder / f"step-{step:08d}"), "at": 0.0}
    write_whole(bench.around.worker_dir / SAVE_REQUEST.format(step=step), json.dumps(document))
