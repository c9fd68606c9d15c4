"""A save happens or says that it did not: killed and hanging upload processes, stores that refuse, stale attempts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.drills.checkpoint.faulty_proxy import Plan, faulty_proxy
from tests.integration.checkpoint import gang
from tests.integration.checkpoint.one_rank import fence, outcomes, saver, state
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.s3_servers import BUCKET, S3Server

from muster.storage.commits import parse_commit
from muster.trainer.checkpoint import list_commits, load, read_commit, upload_process
from muster.trainer.checkpoint.channel import MessageChannel
from muster.trainer.errors import StaleAttempt
from muster.words.checkpoint import commit_key
from muster.words.job import Keep


def test_a_commit_says_what_was_saved(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    model, optimizer = gang.build("none", seed=0)
    with saver(folder) as saving:
        # The optimizer has no state yet; NaN is no metric.
        blocked = saving.save(state(model, optimizer, 7, metrics={"loss": 2.5, "broken": float("nan")}, best=True))
        assert blocked > 0
        assert outcomes(saving) == [(7, True, None)]
    commit = read_commit(folder, "best")
    assert commit == parse_commit((tmp_path / "uid" / commit_key(7)).read_bytes(), step=7, folder="uid")
    assert "embedding.weight" in commit.stateless
    assert (commit.job, commit.job_uid, commit.attempt, commit.step, commit.world_size) == ("job", "uid", 1, 7, 1)
    assert (commit.metrics, commit.best, commit.tokens, commit.cursor.sample) == ({"loss": 2.5}, True, 70, 7)
    assert (commit.config, commit.architecture, commit.tokenizer) == ({"seed": 0}, {"dim": 16}, {"kind": "bytes"})
    assert not any(name.startswith("optimizer/") for name in commit.tensors)
    loaded, fresh = gang.build("none", seed=1)
    gang.step_once(loaded, fresh, 1)
    load(folder, 7, loaded, fresh)
    assert gang.digest(loaded, fresh) == gang.digest(model, optimizer), "state that the checkpoint lacks must go"


def test_training_may_change_the_weights_while_they_are_uploaded(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    model, optimizer = gang.build("none", seed=0)
    with saver(folder) as saving:
        gang.step_once(model, optimizer, 1)
        saved = gang.digest(model, optimizer)
        saving.save(state(model, optimizer, 1))
        for step in range(2, 6):
            gang.step_once(model, optimizer, step)
        assert outcomes(saving) == [(1, True, None)]
    loaded, fresh = gang.build("none", seed=1)
    load(folder, 1, loaded, fresh)
    assert gang.digest(loaded, fresh) == saved != gang.digest(model, optimizer)


def test_a_regular_save_is_skipped_while_one_is_in_flight_and_an_emergency_one_waits(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    model, optimizer = gang.build("none", seed=0)
    with saver(folder) as saving:
        uploader = psutil.Process(saving._process.pid)
        uploader.suspend()
        saving.save(state(model, optimizer, 1))
        saving.save(state(model, optimizer, 2))
        assert [(o.step, o.committed, o.error) for o in saving.finished()] == [
            (2, False, "skipped: the upload of an earlier checkpoint is still under way")
        ]
        uploader.resume()
        saving.save(state(model, optimizer, 3), emergency=True)
        assert outcomes(saving) == [(1, True, None), (3, True, None)]
    assert list_commits(folder) == (1, 3)


def test_with_little_time_left_the_upload_that_ends_sooner_is_committed(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    model, optimizer = gang.build("none", seed=0)
    with saver(folder) as saving:
        uploader = psutil.Process(saving._process.pid)
        uploader.suspend()
        saving.save(state(model, optimizer, 1))
        # Nothing is known of the speed, so a new save is thought to take longer than what is left.
        saving.save(state(model, optimizer, 2), emergency=True, seconds_left=5)
        uploader.resume()
        assert outcomes(saving) == [
            (2, False, "skipped: the upload of an earlier checkpoint is still under way"),
            (1, True, None),
        ]
        uploader.suspend()
        saving.save(state(model, optimizer, 3))
        saving._rates = [1e12]  # as if saves were quick and only this one stood still
        gang.step_once(model, optimizer, 4)
        saving.save(state(model, optimizer, 4), emergency=True, seconds_left=1e-4)
        assert outcomes(saving) == [
            (3, False, "the emergency checkpoint of step 4 took its place"),
            (4, True, None),
        ]
    assert list_commits(folder) == (1, 4)
    loaded, fresh = gang.build("none", seed=1)
    load(folder, 4, loaded, fresh)
    assert gang.digest(loaded, fresh) == gang.digest(model, optimizer)


def test_shards_of_terminating_nodes_are_stored_first(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    said = gang.run_gang(3, "fsdp", "train", folder, steps=3, seconds_left=60, terminating=[2])
    assert [outcome["committed"] for rank in said for outcome in rank["outcomes"]] == [True] * 9
    for step in (1, 2, 3):
        written = [(tmp_path / "uid" / file.key).stat().st_mtime_ns for file in read_commit(folder, step).files]
        assert written[2] == min(written)


def test_a_save_that_is_not_over_in_time_is_given_up_and_never_mixed_with_the_next(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    model, optimizer = gang.build("none", seed=0)
    with saver(folder) as saving:
        psutil.Process(saving._process.pid).suspend()
        saving.save(state(model, optimizer, 1))
        assert outcomes(saving, 0.2) == [(1, False, "not uploaded within the 0.2 s that were left")]
        gang.step_once(model, optimizer, 2)
        saving.save(state(model, optimizer, 2))
        assert outcomes(saving) == [(2, True, None)]
    assert list_commits(folder) == (2,)
    loaded, fresh = gang.build("none", seed=1)
    load(folder, 2, loaded, fresh)
    assert gang.digest(loaded, fresh) == gang.digest(model, optimizer)


def test_the_upload_process_is_replaced_and_the_save_goes_on(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    model, optimizer = gang.build("none", seed=0)
    with saver(folder) as saving:
        for step in (1, 2, 3):
            gang.step_once(model, optimizer, step)
            pid = saving._process.pid
            if step == 2:
                psutil.Process(pid).suspend()
            saving.save(state(model, optimizer, step), emergency=True)
            os.kill(pid, signal.SIGKILL)
            assert outcomes(saving) == [(step, True, None)]
            assert saving._process.pid != pid or step == 3
    assert list_commits(folder) == (1, 2, 3)


YOUNG_RANK = """
import os, sys
import psutil
from muster.trainer.checkpoint.upload_process import fork_while_young

fork_while_young(sys.argv[1])
assert "torch" not in sys.modules
(young,) = psutil.Process().children()
from tests.integration.checkpoint import gang
from tests.integration.checkpoint.one_rank import outcomes, saver, state

model, optimizer = gang.build("none", seed=0)
with saver(sys.argv[1]) as saving:
    assert saving._process.pid == young.pid and young.name() == "muster-upload" and os.getpgid(young.pid) == young.pid
    for step in (1, 2):
        gang.step_once(model, optimizer, step)
        saving.save(state(model, optimizer, step))
        assert outcomes(saving) == [(step, True, None)]
        if step == 1:
            young.kill()
    (program,) = psutil.Process().children()
    assert program.pid == saving._process.pid != young.pid and "uploader" in " ".join(program.cmdline())
assert not psutil.Process().children()
"""


def test_the_first_upload_process_is_forked_and_the_next_is_a_program(
    moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto_s3.environment().items():
        monkeypatch.setenv(name, value)
    folder = f"s3://{BUCKET}/young/uid"
    done = subprocess.run([sys.executable, "-c", YOUNG_RANK, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list_commits(folder) == (1, 2)


def test_an_upload_process_that_keeps_dying_is_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = gang.build("none", seed=0)
    with saver((tmp_path / "uid").as_uri()) as saving:
        psutil.Process(saving._process.pid).suspend()
        saving.save(state(model, optimizer, 1))
        start, found = upload_process._start_anew, []
        killed: set[int] = set()

        def start_that_stands_still() -> tuple[upload_process.ProcessHandle, MessageChannel]:
            process, channel = start()
            os.kill(process.pid, signal.SIGSTOP)  # it uploads nothing before it is killed
            return process, channel

        def kill_each() -> bool:
            if (pid := saving._process.pid) not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            found.extend(saving.finished())
            return bool(found)

        with monkeypatch.context() as dying:
            dying.setattr(upload_process, "_start_anew", start_that_stands_still)
            eventually(kill_each, "the save to be given up")
        psutil.Process(saving._process.pid).resume()
        assert (found[0].committed, found[0].error) == (
            False, "the upload process died 3 times, the last time with exit code -9; see this rank's log",
        )  # fmt: skip
        gang.step_once(model, optimizer, 2)
        saving.save(state(model, optimizer, 2))
        assert outcomes(saving) == [(2, True, None)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_group_do_not_end_the_upload(tmp_path: Path, number: int) -> None:
    model, optimizer = gang.build("none", seed=0)
    with saver((tmp_path / "uid").as_uri()) as saving:
        saving.save(state(model, optimizer, 1))
        assert outcomes(saving) == [(1, True, None)]
        pid = saving._process.pid
        os.kill(pid, number)
        saving.save(state(model, optimizer, 2))
        assert outcomes(saving) == [(2, True, None)]
        assert saving._process.pid == pid


def test_a_stale_attempt_neither_commits_nor_goes_on(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    model, optimizer = gang.build("none", seed=0)
    address = fence(tmp_path / "cluster.db", 1)
    with saver(folder, fence=address) as saving:
        saving.save(state(model, optimizer, 1))
        assert outcomes(saving) == [(1, True, None)]
        fence(tmp_path / "cluster.db", 2)
        saving.save(state(model, optimizer, 2))
        with pytest.raises(StaleAttempt, match="attempt 1 of job uid is not current: attempt 2 is"):
            saving.drain(WAIT_SECONDS_MAX)
    assert list_commits(folder) == (1,)


def test_a_fence_that_can_not_be_read_commits_nothing(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    model, optimizer = gang.build("none", seed=0)
    with saver(folder, fence=f"file://{tmp_path}/nothing.json") as saving:
        saving.save(state(model, optimizer, 1))
        ((_, committed, error),) = outcomes(saving)
    assert not committed
    assert "can't read the job's status" in (error or "")
    assert list_commits(folder) == ()


def test_a_newer_attempt_takes_a_step_over_and_an_older_one_can_not(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    model, optimizer = gang.build("none", seed=0)
    for attempt in (1, 2):
        with saver(folder, attempt=attempt) as saving:
            saving.save(state(model, optimizer, 5))
            assert outcomes(saving) == [(5, True, None)]
        assert read_commit(folder, 5).attempt == attempt
    with saver(folder, attempt=1) as saving:
        saving.save(state(model, optimizer, 5))
        with pytest.raises(StaleAttempt, match="already committed by attempt 2"):
            saving.drain(WAIT_SECONDS_MAX)
    assert read_commit(folder, 5).attempt == 2


def test_a_folder_that_can_not_be_written_is_an_outcome(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, optimizer = gang.build("none", seed=0)
    with saver((tmp_path / "file" / "uid").as_uri()) as saving:
        saving.save(state(model, optimizer, 1))
        ((_, committed, error),) = outcomes(saving)
    assert not committed
    assert "a part of the path is a file; choose another checkpoint.uri" in (error or "")


def test_state_that_json_can_not_hold_is_an_outcome(tmp_path: Path) -> None:
    model, optimizer = gang.build("none", seed=0)
    with saver((tmp_path / "uid").as_uri()) as saving:
        saving.save(state(model, optimizer, 1, state={"best": float("inf")}))
        ((_, committed, error),) = outcomes(saving)
        assert not committed
        assert "TrainState.state or .rng holds what JSON can't" in (error or "")
        saving.save(state(model, optimizer, 2))
        assert outcomes(saving) == [(2, True, None)]


def test_retention_runs_after_each_commit(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    model, optimizer = gang.build("none", seed=0)
    with saver(folder, Keep(last=2, best=1)) as saving:
        for step in range(1, 6):
            loss = {1: 3.0, 2: 1.0}.get(step, 2.0)
            saving.save(
                state(model, optimizer, step, metrics={"evaluation_loss": loss}, best=step == 2), emergency=True
            )
        assert [committed for _, committed, _ in outcomes(saving)] == [True] * 5
    assert list_commits(folder) == (2, 4, 5)
    assert sorted(path.name for path in (tmp_path / "uid").glob("step-*")) == [f"step-0000000{n}" for n in (2, 4, 5)]


def test_a_store_that_goes_away_fails_the_save_and_not_the_training(
    rclone_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan()
    with faulty_proxy(rclone_s3.url, plan) as url:
        for name, value in {**S3Server(url).environment(), "MUSTER_S3_RETRY_SECONDS": "0.5"}.items():
            monkeypatch.setenv(name, value)
        model, optimizer = gang.build("none", seed=0)
        with saver(f"s3://{BUCKET}/away") as saving:
            found = []
            for step, plan.gone in ((1, False), (2, True), (3, False)):
                gang.step_once(model, optimizer, step)
                saving.save(state(model, optimizer, step))
                found += outcomes(saving)
            assert [(step, committed) for step, committed, _ in found] == [(1, True), (2, False), (3, True)]
            assert "the store can't be reached" in (found[1][2] or "")
        assert list_commits(f"s3://{BUCKET}/away") == (1, 3)
