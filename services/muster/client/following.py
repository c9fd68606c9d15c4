"""A job as it goes on: what is new since the last look, until it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muster.client.operations import ENDED, ask
from muster.client.steps import FoundResult, PauseStep, Steps

POLL_SECONDS = 0.5
_RECENT_STEPS = 8  # whose mean speed the estimate of the end goes by
_EVENTS_MAX = 500


@dataclass(frozen=True)
class JobMoment:
    """Changes since the last look: the whole job, and the events and steps that came since.

    The status reports progress every few seconds; the steps are as new as the workers' own records.
    """

    job: dict[str, Any]
    events: tuple[dict[str, Any], ...] = ()
    steps: tuple[dict[str, Any], ...] = ()

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.job["status"]
        return status

    @property
    def phase(self) -> str:
        return str(self.status["phase"])

    @property
    def progress(self) -> dict[str, Any]:
        """Return the progress of the status, updated by the newest step."""
        reported: dict[str, Any] = self.status.get("progress") or {}
        if not self.steps or self.ended:
            return reported
        newest, recent = self.steps[-1], self.steps[-_RECENT_STEPS:]
        # Step 0 is an evaluation before the first step: nothing is known of the speed yet.
        speeds = [seconds for step in recent if (seconds := step.get("stepSeconds"))]
        left = newest["steps"] - newest["step"] if newest.get("steps") and speeds else None
        live = {key: newest.get(key) for key in ("step", "steps", "loss", "tokensPerSecond")}
        return reported | live | {"etaSeconds": left * sum(speeds) / len(speeds) if left is not None else None}

    @property
    def ended(self) -> bool:
        return self.phase in ENDED


def moments(job_id: str, after_event: int = 0) -> Steps[dict[str, Any]]:
    """Finds a Moment every half second; the last one is of the ended job, with its last events. Returns that job."""
    steps: tuple[dict[str, Any], ...] = ()
    while True:
        job = yield from ask("GET", f"jobs/{job_id}")  # before the events: what the job says has its event by then
        page = yield from ask("GET", f"jobs/{job_id}/events", after=after_event, limit=_EVENTS_MAX)
        news = page["items"]
        after_event = max([after_event, *(event["id"] for event in news)])
        steps = yield from _newest_steps(job, steps)
        moment = JobMoment(job, tuple(news), steps)
        yield FoundResult(moment)
        if moment.ended and len(news) < _EVENTS_MAX:
            return dict(job)
        yield PauseStep(POLL_SECONDS)


def _newest_steps(job: dict[str, Any], before: tuple[dict[str, Any], ...]) -> Steps[tuple[dict[str, Any], ...]]:
    """Steps of the running attempt since the last look, or that look's again where there are none."""
    attempt = job["status"]["attempt"]
    if job["status"]["phase"] != "Running":
        return ()
    steps = [step for step in before if step["attempt"] == attempt]
    after = steps[-1]["step"] if steps else job["status"]["resumeStep"]
    history = yield from ask("GET", f"jobs/{job['id']}/metrics", afterStep=after, points=500)
    newer = (point for point in history["points"] if point["attempt"] == attempt and point["step"] > after)
    return tuple(newer) or tuple(steps)
