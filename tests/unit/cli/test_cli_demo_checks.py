"""The demo's judge: it believes an honest record, and no record with one thing doctored."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from muster.cli import demo, demo_report
from muster.cli.demo_checks import (
    CHECKS,
    DemoEvidence,
    DemoKill,
    detection_seconds,
    recovery_seconds,
    run_checks,
    slowest_start_seconds,
)
from muster.replies.views import with_times
from muster.words.times import rfc3339

JOB = "6f1f7a0e-8f0a-4c6e-9a55-0d0f3c1c3a11"
STEPS = 100
KILLED_AT = 1_030.0


def honest() -> DemoEvidence:
    """A job of 100 steps: a commit at 40, a SIGKILL at step 49, resumed at 40, done."""

    def event(number: int, kind: str, at: float, attempt: int | None, **data: Any) -> dict[str, Any]:
        return {
            "id": number,
            "jobId": JOB,
            "type": kind,
            "at": rfc3339(at),
            "attempt": attempt,
            "message": "",
            "data": data,
        }

    points = [{"step": s, "attempt": 1, "at": 1_005.0 + s / 2, "loss": 5 - s / 50} for s in range(1, 41)]
    points += [{"step": s, "attempt": 2, "at": 1_020.0 + s / 2, "loss": 5 - s / 50} for s in range(41, STEPS + 1)]
    return DemoEvidence(
        server="http://127.0.0.1:40000",
        job={
            "id": JOB,
            "metadata": {"name": "demo", "creationTimestamp": rfc3339(1_000.0)},
            "spec": {"training": {"length": {"steps": STEPS}}},
            "status": {
                "phase": "Succeeded",
                "because": "all steps are done",
                "attempt": 2,
                "finishedAt": rfc3339(1_075.0),
                "progress": {"step": STEPS, "steps": STEPS},
                "ledger": {"seconds": {"queue": 1.0, "starting": 10.0, "productive": 60.0, "lost": 4.0}},
                "lastFailure": {"attempt": 1, "exitCode": 137, "cause": "infrastructure"},
            },
        },
        attempts=(
            {"number": 1, "createdAt": rfc3339(1_001.0), "resumeStep": 0, "lastStep": 49, "lostSteps": 9,
             "outcome": "failed", "cause": "infrastructure"},
            {"number": 2, "createdAt": rfc3339(1_031.5), "resumeStep": 40, "lastStep": STEPS, "lostSteps": 0,
             "outcome": "succeeded", "cause": None},
        ),
        events=(
            event(1, "job.created", 1_000.0, None),
            event(2, "checkpoint.committed", 1_010.0, 1, step=20),
            event(3, "checkpoint.committed", 1_025.0, 1, step=40),
            event(4, "attempt.failed", 1_030.4, 1, exitCode=137),
            event(5, "attempt.started", 1_031.5, 2),
            event(6, "checkpoint.committed", 1_060.0, 2, step=80),
        ),
        metrics={
            "points": with_times(points),
            "evaluations": [{"step": s, "loss": 5.0 - s / 50, "attempt": 1, "at": 0.0} for s in (0, 50, STEPS)],
        },
        kill=DemoKill(KILLED_AT, 4711, 1, 1, 1, 49, 40),
        sample="def demo():\n    return 1\n",
        left_running=(),
    )  # fmt: skip


def broken(evidence: DemoEvidence) -> set[str]:
    return {result.promise for result in run_checks(evidence) if not result.kept}


def doctored(change: Callable[[DemoEvidence], Any]) -> DemoEvidence:
    """An honest record whose documents were changed in place."""
    evidence = copy.deepcopy(honest())
    change(evidence)
    return evidence


def test_an_honest_record_is_believed() -> None:
    assert broken(honest()) == set()
    assert [result.promise for result in run_checks(honest())] == list(CHECKS)
    assert recovery_seconds(honest()) == pytest.approx(1_020 + 41 / 2 - KILLED_AT)
    assert detection_seconds(honest()) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("promise", "change"),
    [
        ("submitted over HTTP", lambda e: e.events[0].update(type="job.imported")),
        ("submitted over HTTP", lambda e: e.events[0].update(jobId="another")),
        ("lost a worker", lambda e: e.events[3].update(type="attempt.preempted")),
        ("lost a worker", lambda e: e.attempts[0].update(cause="user_error")),
        ("lost a worker", lambda e: e.attempts[0].update(outcome="suspended")),
        ("lost a worker", lambda e: (e.job["status"].update(lastFailure=None), e.events[3]["data"].update(exitCode=1))),
        ("lost a worker", lambda e: (e.job["status"].update(lastFailure=None), e.events[3]["data"].clear())),
        ("lost a worker", lambda e: e.job["status"]["lastFailure"].update(exitCode=143)),
        ("resumed from a checkpoint", lambda e: e.attempts[1].update(resumeStep=0)),
        ("resumed from a checkpoint", lambda e: e.attempts[1].update(resumeStep=60)),
        ("resumed from a checkpoint", lambda e: e.events[2].update(at=rfc3339(1_040.0))),
        ("resumed from a checkpoint", lambda e: e.metrics["points"].pop(40)),
        ("resumed from a checkpoint", lambda e: [p.update(attempt=1) for p in e.metrics["points"]]),
        ("finished", lambda e: e.job["status"].update(phase="Failed")),
        ("finished", lambda e: e.metrics["points"].pop()),
        ("finished", lambda e: e.metrics["points"].pop(60)),
        ("finished", lambda e: e.metrics["points"].append({"step": 3, "attempt": 2, "at": 0.0, "loss": 1.0})),
        ("finished", lambda e: e.job["status"]["progress"].update(step=99)),
        ("learned", lambda e: e.metrics["evaluations"][-1].update(loss=5.0)),
        ("learned", lambda e: e.metrics["evaluations"][-1].update(loss=None)),
        ("learned", lambda e: e.metrics["evaluations"].pop(0)),
        ("learned", lambda e: e.metrics["evaluations"].pop()),
        ("learned", lambda e: e.metrics["evaluations"].clear()),
        ("time accounted for", lambda e: e.job["status"]["ledger"]["seconds"].update(productive=50.0)),
        ("time accounted for", lambda e: e.job["status"]["ledger"]["seconds"].update(productive=65.0, lost=-1.0)),
    ],
)
def test_one_doctored_document_breaks_its_promise(promise: str, change: Callable[[DemoEvidence], Any]) -> None:
    assert promise in broken(doctored(change))


@pytest.mark.parametrize(
    ("promises", "change"),
    [
        ({"submitted over HTTP"}, {"server": "unix:///tmp/socket"}),
        ({"lost a worker", "resumed from a checkpoint"}, {"kill": None}),
        ({"best checkpoint generates"}, {"sample": " \n"}),
        ({"best checkpoint generates"}, {"sample": "", "sample_fault": "no checkpoint is best"}),
        ({"left nothing running"}, {"left_running": ("4712 python -m muster.trainer",)}),
        ({"lost a worker", "resumed from a checkpoint"}, {"attempts": ()}),
        ({"submitted over HTTP", "lost a worker", "resumed from a checkpoint"}, {"events": ()}),
    ],
)
def test_one_missing_thing_breaks_its_promises(promises: set[str], change: dict[str, Any]) -> None:
    assert broken(replace(honest(), **change)) == promises


def test_every_promise_can_be_broken() -> None:
    cases = [mark for test in (test_one_doctored_document_breaks_its_promise,) for mark in test.pytestmark]
    named = {case[0] for mark in cases for case in mark.args[1]}
    assert named | {"best checkpoint generates", "left nothing running"} == set(CHECKS)


def test_results_say_why() -> None:
    said = {result.promise: result.because for result in run_checks(honest())}
    assert said["resumed from a checkpoint"] == "attempt 2 loaded the checkpoint of step 40, then trained step 41"
    assert said["lost a worker"] == "SIGKILL to rank 1 (pid 4711) at step 49: attempt 1 failed, exit code 137"
    assert "3.000" in said["learned"]


def test_a_text_that_a_busy_machine_had_no_time_for_is_a_check_that_was_skipped() -> None:
    busy = replace(honest(), sample="", sample_skipped="generating took longer than 405 s")
    (speaks,) = [result for result in run_checks(busy) if result.promise == "best checkpoint generates"]
    assert (speaks.kept, speaks.skipped, speaks.broken) == (False, True, False)
    assert speaks.because == "generating took longer than 405 s"
    document = demo_report.document(busy, run_checks(busy), 1.0)
    assert document["kept"]
    assert {p["promise"]: p["skipped"] for p in document["promises"]}["best checkpoint generates"]
    failed = replace(busy, left_running=("1 python",))
    assert not demo_report.document(failed, run_checks(failed), 1.0)["kept"]


def test_the_verdict_says_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    busy = replace(honest(), sample="", sample_skipped="generating took longer than 405 s")
    results = tuple(result for result in run_checks(busy) if result.promise == "best checkpoint generates")
    demo_report.show_results(results)
    assert capsys.readouterr().out.startswith("skipped  best checkpoint generates: generating took longer than 405 s")


def test_what_a_start_took_is_told_from_the_records() -> None:
    evidence = honest()
    assert slowest_start_seconds(evidence.attempts, evidence.metrics["points"]) == pytest.approx(9.0)
    assert slowest_start_seconds(evidence.attempts, []) == 0.0


def test_generating_has_a_limit_and_says_so() -> None:
    found = demo.generate("file:///nowhere", seconds_max=0.001, start_seconds=27.0)
    assert (found.text, found.fault) == ("", "")
    assert found.skipped == "generating took longer than 0 s, where a worker's start took 27 s: this machine is busy"
