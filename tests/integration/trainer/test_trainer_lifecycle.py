"""How workers end: each way with the exit code that tells it, and nothing lost."""

import json
import math
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from tests.integration.trainer.gangs import ARCHITECTURE, Job, Part, samples, train_many, training, write_corpus
from tests.polling import eventually

from muster.storage.small_files import write_whole
from muster.trainer.convert import generate
from muster.words.names import ExitCode
from muster.words.signals import Heartbeat, RankFailure

# Real ranks on a machine that may be busy with others: the bound is for broken code only.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("lifecycle") / "corpus")


def scraped(beat: Heartbeat) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{beat.metrics_port}/metrics") as reply:
        text: str = reply.read().decode()
        return text


def adds_up(beat: Heartbeat) -> bool:
    """Return whether its seconds are all since its process started. A heartbeat that was made while the machine was
    busy may have looked at the clock before and after."""
    return abs(sum(beat.seconds.model_dump().values()) - (beat.at - beat.started_at)) < 0.1


def test_a_stop_is_agreed_committed_and_resumed(tmp_path: Path, source: str) -> None:
    """One of two workers is told, by SIGTERM and then by SIGINT; both stop after the same step, which is committed."""
    job = Job(tmp_path, training(source, length={"steps": 100_000}, parallel={"shard": "fsdp"}))
    gang = job.start(workers=2)
    gang.reaches(3)
    beat = eventually(lambda: (b := gang.heartbeat(1)).metrics_port and b, "the metrics' port")
    assert beat
    assert "muster_trainer_steps_total" in scraped(beat)
    assert eventually(lambda: adds_up(gang.heartbeat(1)), "a heartbeat whose seconds add up to its age")

    gang.launchers[1].terminate()
    assert [end.exit_code for end in gang.ends()] == [ExitCode.PREEMPTED_COMMITTED] * 2, gang.log()
    (stopped,) = job.commits()
    assert [gang.heartbeat(rank).step for rank in (0, 1)] == [stopped, stopped]
    assert job.steps(1)[-1].step == stopped

    again = job.start(attempt=2, resume_step=stopped, workers=2, forked=True)
    again.reaches(stopped + 2)
    again.launchers[1].send_signal(signal.SIGINT)
    assert [end.exit_code for end in again.ends()] == [ExitCode.PREEMPTED_COMMITTED] * 2, again.log()
    assert job.steps(2)[0].step == stopped + 1
    assert job.steps(2)[-1].step == job.commits()[-1]


def test_a_stop_before_the_first_step(tmp_path: Path, source: str) -> None:
    job = Job(tmp_path, training(source))
    gang = job.start()
    path = job.worker_dir(1) / "rank-0.json"
    eventually(path.exists, "the rank's first heartbeat, before torch is imported")
    gang.launchers[0].terminate()
    (end,) = gang.ends()
    assert end.exit_code == ExitCode.PREEMPTED_NO_COMMIT
    assert job.commits() == []


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path, source: str) -> None:
    job = Job(tmp_path, training(source, length={"steps": 100_000}))
    gang = job.start(ranks=2)
    pids = [gang.reaches(1, rank).pid for rank in (0, 1)]
    tree = psutil.Process(gang.launchers[0].pid).children(recursive=True)
    assert {process.pid for process in tree} >= set(pids)
    gang.launchers[0].kill()
    gang.launchers[0].wait()
    eventually(lambda: not any(process.is_running() for process in tree), "the end of every process of the worker")


def tell(path: Path, attempt: int) -> str:
    """The fence, as the operator of one machine writes it."""
    write_whole(path, json.dumps({"metadata": {"uid": "job-uid"}, "status": {"attempt": attempt}}))
    return path.as_uri()


def test_a_stale_attempt_ends_before_torch_is_loaded(tmp_path: Path, source: str) -> None:
    job = Job(tmp_path / "job", training(source), fence=tell(tmp_path / "fence.json", 2))
    (end,) = job.start().ends()
    assert end.exit_code == ExitCode.STALE_ATTEMPT
    assert end.message == "attempt 1 of job job-uid is not current: attempt 2 is"
    assert end.rank is None
    assert not (job.worker_dir(1) / "rank-0.json").exists()


def test_a_fence_that_is_passed_by_while_training_ends_the_worker(tmp_path: Path, source: str) -> None:
    document, path = training(source, length={"steps": 100_000}), tmp_path / "fence.json"
    job = Job(tmp_path / "job", document, {"every": 20}, fence=tell(path, 1))
    gang = job.start(forked=True)
    eventually(lambda: gang.reaches(1).last_commit_step, "a checkpoint of attempt 1")
    tell(path, 2)
    (end,) = gang.ends()
    assert end.exit_code == ExitCode.STALE_ATTEMPT, gang.log()
    assert "attempt 2 is" in end.message


def test_what_the_user_got_wrong(tmp_path: Path, source: str) -> None:
    """Three short workers at once: a typing error, missing data, a batch that two ranks can't divide."""
    typo = Job(tmp_path / "typo", training(source, sede=3))
    missing = Job(tmp_path / "missing", training(str(tmp_path / "nothing-here" / "*.txt")))
    uneven = Job(tmp_path / "uneven", training(source, batch={"tokensPerStep": 96, "microBatch": 3}))
    gangs = [typo.start(forked=True), missing.start(forked=True), uneven.start(ranks=2, forked=True)]
    ends = [gang.ends()[0] for gang in gangs]
    assert [end.exit_code for end in ends] == [ExitCode.USER_ERROR] * 3, gangs[1].log()
    assert "training.sede: unknown key. Did you mean 'seed'?" in ends[0].message
    assert "nothing-here" in ends[1].message
    assert "can't be divided over 2 ranks" in ends[2].message
    failure = RankFailure.model_validate_json((missing.worker_dir(1) / "rank-0.failure.json").read_text())
    assert failure.message == ends[1].message
    assert "nothing-here" in ends[1].log_tail


def test_a_model_that_does_not_fit_shows_the_arithmetic(tmp_path: Path, source: str) -> None:
    """auto finds nothing that fits; an explicit ddp is believed, until the allocator says no."""
    huge = {"architecture": {**ARCHITECTURE, "ffnDim": 10**12}}
    planned = Job(tmp_path / "planned", training(source, model=huge))
    tried = Job(tmp_path / "tried", training(source, model=huge, parallel={"shard": "ddp"}))
    gangs = [planned.start(forked=True), tried.start(forked=True)]
    for gang in gangs:
        (end,) = gang.ends()
        assert end.exit_code == ExitCode.OUT_OF_MEMORY, gang.log()
        assert "a rank needs about" in end.message
        assert "choose a smaller model" in end.message


def test_a_rendezvous_port_that_is_taken(tmp_path: Path, source: str) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (end,) = Job(tmp_path, training(source)).start(port=port).ends()
    assert end.exit_code == ExitCode.PREFLIGHT_FAILED
    assert "could not be started" in end.message
    assert str(port) in end.message


def test_a_checkpoint_folder_that_cannot_be_written(tmp_path: Path, source: str) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    job = Job(tmp_path, training(source, length={"steps": 100_000}), {"every": 2})
    gang = job.start(forked=True)
    (end,) = gang.ends()
    assert end.exit_code == ExitCode.USER_ERROR, gang.log()  # no attempt would ever be let write there
    assert f"checkpoint.uri: {tmp_path / 'checkpoints'}" in end.message


def test_numbers_that_are_not_finite_name_the_step(tmp_path: Path, source: str) -> None:
    wild = {"lr": 9.9, "clipNorm": 0, "weightDecay": 10.0}  # weights grow a hundredfold with each step
    job = Job(tmp_path, training(source, optimizer=wild, length={"steps": 100}))
    gang = job.start(forked=True)
    (end,) = gang.ends()
    assert end.exit_code == ExitCode.NUMERIC, gang.log()
    assert end.step is not None
    assert f"at step {end.step + 1}" in end.message
    assert job.steps(1)[-1].step == end.step


@pytest.mark.long
def test_best_commits_early_stopping_other_weights_and_precisions(tmp_path: Path, source: str) -> None:
    """Several jobs on one set of ranks, because to start ranks takes most of the time."""
    watched = {"every": 4, "holdout": 0.2, "samples": 10, "metric": "perplexity"}
    base = Job(tmp_path / "base", training(source, length={"steps": 12}, evaluation=watched), uid="base")
    patient = {**watched, "every": 2, "metric": "loss", "earlyStopping": {"patience": 2, "minDelta": 5.0}}
    stops = Job(tmp_path / "stops", training(source, length={"steps": 50}, evaluation=patient), uid="stops")
    start = {"from": {"uri": f"file://{base.folder}", "step": 12}}
    tuned = Job(tmp_path / "tuned", training(source, model=start, length={"steps": 4}, evaluation=watched), uid="tuned")
    full, *half = (
        Job(tmp_path / name, training(source, precision=precision, parallel={"shard": shard}), uid=name)
        for name, precision, shard in (
            ("fp32", "fp32", "fsdp"),
            ("bf16", "bf16", "fsdp"),
            ("fp16", "fp16", "fsdp"),
            ("bf16-ddp", "bf16", "ddp"),
        )
    )
    parts = [Part(job) for job in (base, stops, tuned, full, *half)]
    assert train_many(tmp_path, 2, parts) == [ExitCode.DONE] * 7

    lines = [json.loads(line) for line in (base.worker_dir(1) / "steps.jsonl").read_text().splitlines()]
    evaluated = {line["step"]: line["evaluationLoss"] for line in lines if "evaluationLoss" in line}
    assert list(evaluated) == [0, 4, 8, 12]
    assert evaluated[12] < evaluated[4] < evaluated[0]
    assert base.commit(12)["best"] is True
    assert base.commit(12)["metrics"]["evaluation_loss"] == evaluated[12]
    perplexity = base.commit(12)["metrics"]["evaluation_perplexity"]
    assert perplexity == pytest.approx(math.exp(evaluated[12]))
    judged = {"metric": "perplexity", "better": "lower", "loss": perplexity, "step": 12, "withoutImprovement": 0}
    assert base.commit(12)["state"]["best"] == judged

    assert stops.steps(1)[-1].step == 4  # the evaluation at step 0 set the mark, those at 2 and 4 did not beat it by 5
    assert stops.commits() == [4]

    first = json.loads((tuned.worker_dir(1) / "steps.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0
    assert first["evaluationLoss"] == pytest.approx(evaluated[12], rel=1e-6)
    assert tuned.steps(1)[-1].step == 4

    reference = [record.loss for record in full.steps(1)]
    for job in half:
        # fp16 may first have to find its scale, and skips a step each time that it overflows.
        skipped = round(math.log2(65_536 / job.commit(10)["state"]["scaler"]["value"])) if job.uid == "fp16" else 0
        assert skipped in range(4)
        found = [record.loss for record in job.steps(1)]
        assert found == pytest.approx(reference, rel=0.02 if not skipped else 0.08)
        assert found[-1] < 0.9 * found[0]
    assert samples(base, 1, ranks=2, micro_batch=4)[1] != samples(base, 1, ranks=2, micro_batch=4)[2]


def test_generation_from_a_commit(tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, training(source, length={"steps": 5}, optimizer={"lr": 5e-3}))
    job.start(forked=True).ends_well()
    asked = ["--checkpoint", f"file://{job.folder}", "--prompt", "abc", "--tokens", "20", "--seed"]

    def generated(seed: str) -> str:
        assert generate.main([*asked, seed]) == 0
        return capsys.readouterr().out

    first = generated("4")
    assert first.startswith("abc")
    assert generated("4") == first
    assert generated("5") != first
    missing = subprocess.run(
        [sys.executable, "-m", "muster.trainer.convert.generate", *asked, "4", "--step", "3"],
        capture_output=True,
        text=True,
    )
    assert missing.returncode == ExitCode.STORAGE
    assert "step 3" in missing.stderr
