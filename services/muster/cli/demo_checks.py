"""Promises of the demo, each checked against the API's records: a demo that only looks good fails here.

A pure module: Evidence in, CheckResults out. tests/unit/cli/test_cli_demo_checks.py breaks each promise in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from muster.words.times import epoch_seconds

# The books are kept by two processes that look a few times a second, so they agree within that and not to the bit.
BOOKS_SECONDS = 3.0
KILLED = (137, -9)


@dataclass(frozen=True)
class DemoKill:
    """The SIGKILL that the demo sent, with the step of the rank's last heartbeat and of the newest commit then."""

    at: float
    pid: int
    worker: int
    rank: int
    attempt: int
    step: int
    commit_step: int


@dataclass(frozen=True)
class DemoEvidence:
    """The API's own documents, and what only the demo can know."""

    server: str  # the address that the job was posted to
    job: dict[str, Any]
    attempts: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]
    metrics: dict[str, Any]
    kill: DemoKill | None
    sample: str  # text that the best commit generated
    left_running: tuple[str, ...]  # command lines of processes that lived after everything was told to stop
    sample_fault: str = ""  # why there is no text, as the program that should have written it says
    sample_skipped: str = ""  # why the text was not waited for: that says nothing of the commit
    report: str = ""  # the file that tells of the run (`muster report`)


@dataclass(frozen=True)
class CheckResult:
    """A promise with what shows that it was kept, or how it was broken."""

    promise: str
    kept: bool
    because: str
    skipped: bool = False  # it was not looked at, for the reason given

    @property
    def broken(self) -> bool:
        return not self.kept and not self.skipped


class CheckFailed(Exception):
    """Raised by a check; the text says what is missing."""


class CheckSkipped(Exception):
    """Raised by a check that can't be made; the text says why."""


def run_checks(evidence: DemoEvidence) -> tuple[CheckResult, ...]:
    return tuple(_run_check(promise, check, evidence) for promise, check in CHECKS.items())


def _run_check(promise: str, check: Callable[[DemoEvidence], str], evidence: DemoEvidence) -> CheckResult:
    try:
        return CheckResult(promise, True, check(evidence))
    except CheckSkipped as error:
        return CheckResult(promise, False, str(error), skipped=True)
    except CheckFailed as error:
        return CheckResult(promise, False, str(error))


def _submitted(evidence: DemoEvidence) -> str:
    if not evidence.server.startswith("http://"):
        raise CheckFailed(f"the job was not posted to an HTTP address but to {evidence.server!r}")
    created = [event for event in evidence.events if event["type"] == "job.created"]
    if len(created) != 1 or created[0]["jobId"] != evidence.job["id"]:
        raise CheckFailed(f"the API tells of {len(created)} submissions of job {evidence.job['id']}, not of one")
    return f"POST {evidence.server}/api/v1/jobs made job {evidence.job['id']}"


def _lost_a_worker(evidence: DemoEvidence) -> str:
    kill = _kill(evidence)
    failed = [
        event for event in evidence.events if event["type"] == "attempt.failed" and event["attempt"] == kill.attempt
    ]
    if not failed:
        raise CheckFailed(f"pid {kill.pid} was killed, but attempt {kill.attempt} is not recorded as failed")
    attempt = _attempt(evidence, kill.attempt)
    if attempt["outcome"] != "failed" or attempt["cause"] != "infrastructure":
        raise CheckFailed(
            f"attempt {kill.attempt} ended as {attempt['outcome']} by {attempt['cause']}, not by a lost worker"
        )
    code = _exit_code(evidence, kill.attempt)
    if code not in KILLED:
        raise CheckFailed(f"attempt {kill.attempt} ended with exit code {code}, not with that of SIGKILL (137)")
    whom = f"rank {kill.rank} (pid {kill.pid}) at step {kill.step}"
    return f"SIGKILL to {whom}: attempt {kill.attempt} failed, exit code {code}"


def _resumed(evidence: DemoEvidence) -> str:
    kill = _kill(evidence)
    later = [attempt for attempt in evidence.attempts if attempt["number"] > kill.attempt]
    if not later:
        raise CheckFailed(f"there is no attempt after attempt {kill.attempt}")
    resumed_at = later[0]["resumeStep"]
    if resumed_at <= 0:
        raise CheckFailed(f"attempt {later[0]['number']} began at step {resumed_at}: nothing was resumed")
    commits = [
        e for e in evidence.events if e["type"] == "checkpoint.committed" and e["data"].get("step") == resumed_at
    ]
    if not any(_happened_at(commit) <= epoch_seconds(later[0]["createdAt"]) for commit in commits):
        raise CheckFailed(
            f"attempt {later[0]['number']} resumed at step {resumed_at}, which was not committed before it"
        )
    first = [point["step"] for point in evidence.metrics["points"] if point["attempt"] == later[0]["number"]]
    if not first or min(first) != resumed_at + 1:
        raise CheckFailed(f"after the checkpoint of step {resumed_at} it trained step {min(first, default=None)} first")
    return (
        f"attempt {later[0]['number']} loaded the checkpoint of step {resumed_at}, then trained step {resumed_at + 1}"
    )


def _finished(evidence: DemoEvidence) -> str:
    status, steps = evidence.job["status"], evidence.job["spec"]["training"]["length"]["steps"]
    if status["phase"] != "Succeeded":
        raise CheckFailed(f"the job is {status['phase']}: {status['because']}")
    trained = sorted(point["step"] for point in evidence.metrics["points"])
    if trained != list(range(1, steps + 1)):
        gap = next((b for a, b in pairwise([0, *trained]) if b != a + 1), trained[-1] if trained else 0)
        raise CheckFailed(f"the loss curve does not hold every step from 1 to {steps} once (see step {gap})")
    if status["progress"]["step"] != steps:
        raise CheckFailed(f"the job says Succeeded at step {status['progress']['step']} of {steps}")
    return f"Succeeded at step {steps} of {steps} in attempt {status['attempt']}"


def _learned(evidence: DemoEvidence) -> str:
    evaluations = sorted(evidence.metrics["evaluations"], key=lambda entry: entry["step"])
    if len(evaluations) < 2 or evaluations[0]["step"] != 0:
        steps = [entry["step"] for entry in evaluations]
        raise CheckFailed(f"there must be an evaluation at step 0 and one later; there are some at {steps}")
    first, last = evaluations[0]["loss"], evaluations[-1]["loss"]
    if first is None or last is None or not last < first:
        raise CheckFailed(f"the evaluation loss was {first} at the start and is {last} at the end")
    if evaluations[-1]["step"] != evidence.job["spec"]["training"]["length"]["steps"]:
        raise CheckFailed(f"the last evaluation is of step {evaluations[-1]['step']}, before the end")
    return f"evaluation loss {first:.3f} → {last:.3f} on documents that were never trained on"


def _accounted(evidence: DemoEvidence) -> str:
    status = evidence.job["status"]
    life = epoch_seconds(status["finishedAt"]) - epoch_seconds(evidence.job["metadata"]["creationTimestamp"])
    booked = sum(status["ledger"]["seconds"].values())
    if abs(booked - life) > BOOKS_SECONDS:
        raise CheckFailed(f"the job lived {life:.1f} s and {booked:.1f} s of that are accounted for")
    if any(seconds < 0 for seconds in status["ledger"]["seconds"].values()):
        raise CheckFailed(f"a state has less than no time: {status['ledger']['seconds']}")
    return f"{booked:.1f} s of the job's {life:.1f} s are accounted for"


def _speaks(evidence: DemoEvidence) -> str:
    if evidence.sample_skipped:
        raise CheckSkipped(evidence.sample_skipped)
    if evidence.sample_fault:
        raise CheckFailed(f"the text could not be generated: {evidence.sample_fault}")
    if not evidence.sample.strip():
        raise CheckFailed("the best checkpoint generated no text")
    return f"{len(evidence.sample)} characters generated from the best checkpoint"


def _left_nothing(evidence: DemoEvidence) -> str:
    if evidence.left_running:
        raise CheckFailed(f"{len(evidence.left_running)} processes were left: {'; '.join(evidence.left_running)}")
    return "no process of the platform or of a worker is left"


CHECKS: dict[str, Callable[[DemoEvidence], str]] = {
    "submitted over HTTP": _submitted,
    "lost a worker": _lost_a_worker,
    "resumed from a checkpoint": _resumed,
    "finished": _finished,
    "learned": _learned,
    "time accounted for": _accounted,
    "best checkpoint generates": _speaks,
    "left nothing running": _left_nothing,
}


def slowest_start_seconds(attempts: Sequence[dict[str, Any]], points: Sequence[dict[str, Any]]) -> float:
    """Return the longest time from an attempt's start to the end of its first step; 0 if no attempt made a step.

    It says how busy this machine is: most of a start is the same import of torch that other programs wait for, too.
    """
    first: dict[int, float] = {}
    for point in points:
        at = epoch_seconds(point["at"])
        first[point["attempt"]] = min(at, first.get(point["attempt"], at))
    waits = [first[a["number"]] - epoch_seconds(a["createdAt"]) for a in attempts if a["number"] in first]
    return max(waits, default=0.0)


def recovery_seconds(evidence: DemoEvidence) -> float | None:
    """Return the time from the SIGKILL to the end of the first step of the next attempt."""
    if evidence.kill is None:
        return None
    after = [
        epoch_seconds(point["at"]) for point in evidence.metrics["points"] if point["attempt"] > evidence.kill.attempt
    ]
    return min(after) - evidence.kill.at if after else None


def detection_seconds(evidence: DemoEvidence) -> float | None:
    """Return the time from the SIGKILL to the operator's record that the attempt has ended."""
    failed = [_happened_at(e) for e in evidence.events if e["type"] == "attempt.failed"]
    return min(failed) - evidence.kill.at if evidence.kill and failed else None


def _happened_at(event: dict[str, Any]) -> float:
    """The event's own time, where it was heard of after a later one."""
    return epoch_seconds(event["data"].get("happenedAt", event["at"]))


def _kill(evidence: DemoEvidence) -> DemoKill:
    if evidence.kill is None:
        raise CheckFailed("no rank was killed: the job ended before there was a checkpoint to come back to")
    return evidence.kill


def _attempt(evidence: DemoEvidence, number: int) -> dict[str, Any]:
    for attempt in evidence.attempts:
        if attempt["number"] == number:
            return attempt
    raise CheckFailed(f"attempt {number} is not in the list of attempts")


def _exit_code(evidence: DemoEvidence, attempt: int) -> int | None:
    """Return the exit code of the attempt as the failure in the status, or the event of the attempt's end, reports
    it."""
    failure = evidence.job["status"].get("lastFailure") or {}
    if failure.get("attempt") == attempt and failure.get("exitCode") is not None:
        return int(failure["exitCode"])
    for event in evidence.events:
        if event["type"] == "attempt.failed" and event["attempt"] == attempt:
            code = event["data"].get("exitCode")
            return None if code is None else int(code)
    return None
