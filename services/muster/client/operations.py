"""Operations on jobs, as steps: written once for programs with threads, with asyncio, and for the
command line.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from muster.client.errors import JobFailed, NotFound, WaitTimeout
from muster.client.steps import FoundResult, PauseStep, RequestStep, Steps
from muster.words.names import Phase

PAGE_MAX = 500  # of a list, that the API gives at once
ENDED = tuple(phase for phase in Phase if phase.terminal)
POLL_SECONDS = 0.3
POLL_SECONDS_MAX = 2.0


def ask(method: str, path: str, body: Any = None, key: str | None = None, **params: Any) -> Steps[Any]:
    """The answer's JSON."""
    answer = yield RequestStep(method, path, params, body, key)
    return answer


def _document(method: str, path: str, body: Any = None, key: str | None = None, **params: Any) -> Steps[dict[str, Any]]:
    """The same, of an answer that is a mapping."""
    answer: dict[str, Any] = yield RequestStep(method, path, params, body, key)
    return answer


def find(name: str) -> Steps[str]:
    """The id of the newest job of that name, or of that id. Raises NotFound for none."""
    try:
        return str(uuid.UUID(name))
    except ValueError:
        pass
    listed = yield from ask("GET", "jobs", name=name, limit=1)
    if not listed["items"]:
        raise NotFound(f"there is no job {name!r}", "job_not_found")
    return str(listed["items"][0]["id"])


def get(name: str) -> Steps[dict[str, Any]]:
    job_id = yield from find(name)
    return (yield from _document("GET", f"jobs/{job_id}"))


def inspect(document: Any) -> Steps[dict[str, Any]]:
    """The report of the data of a job that is not submitted, once it is made."""
    while (answer := (yield from _document("POST", "jobs:inspect", document)))["state"] == "reading":
        yield PauseStep(POLL_SECONDS_MAX)
    report: dict[str, Any] = answer["report"]
    return report


def pages(limit: int | None, filters: dict[str, Any], path: str = "jobs") -> Steps[None]:
    """The newest `limit` of a list or all, newest first: finds each page, a list of what the list shows."""
    cursor, left = None, limit if limit is not None else 1 << 62
    while left > 0:
        page = yield from ask("GET", path, limit=min(left, PAGE_MAX), cursor=cursor, **filters)
        yield FoundResult(page["items"][:left])
        left -= len(page["items"])
        cursor = page["nextCursor"]
        if not cursor:
            return


def submit(document: Any, key: str) -> Steps[dict[str, Any]]:
    """The job. However often this is sent again under the same key, there is one job."""
    return (yield from _document("POST", "jobs", document, key))


def plan(document: Any) -> Steps[dict[str, Any]]:
    """Return the plan of a submission and its refusals. Nothing is stored."""
    return (yield from _document("POST", "jobs", document, dryRun=True))


def clone(job_id: str, name: str | None, spec: dict[str, Any] | None, key: str) -> Steps[dict[str, Any]]:
    body = ({"name": name} if name else {}) | ({"spec": spec} if spec else {})
    return (yield from _document("POST", f"jobs/{job_id}:clone", body, key))


def annotate(job_id: str, add: Sequence[str], remove: Sequence[str], note: str | None) -> Steps[dict[str, Any]]:
    """The job with its tags and note changed. To repeat it changes nothing more."""
    change: dict[str, Any] = {"addTags": [*add], "removeTags": [*remove]}
    return (yield from _document("PATCH", f"jobs/{job_id}", change | ({} if note is None else {"note": note})))


def profile(job_id: str, steps: int, ranks: tuple[int, ...]) -> Steps[dict[str, Any]]:
    """The request. It is sent once: a second one would be refused while the first is served."""
    answer: dict[str, Any] = yield RequestStep(
        "POST", f"jobs/{job_id}/profiles", body={"steps": steps, "ranks": [*ranks]}, repeat=False
    )
    return answer


def events(job_id: str, after: int, types: tuple[str, ...]) -> Steps[list[dict[str, Any]]]:
    """Return all events after the one of that id."""
    items: list[dict[str, Any]] = []
    while True:
        page = yield from ask("GET", f"jobs/{job_id}/events", after=after, limit=2000, type=list(types))
        items += page["items"]
        if len(page["items"]) < 2000:
            return items
        after = page["lastId"]


def log(job_id: str, attempt: int | None, worker: int, tail: int | None) -> Steps[str]:
    """Return the worker's log up to now. Default: of the newest attempt."""
    path = f"jobs/{job_id}/logs"
    page = yield from ask("GET", path, attempt=attempt, worker=worker, tail=tail)
    text, attempt = page["text"], page["attempt"]
    while not page["complete"] and page["text"]:
        page = yield from ask("GET", path, attempt=attempt, worker=worker, offset=page["nextOffset"])
        text += page["text"]
    return str(text)


def wait(
    job_id: str, timeout_seconds: float | None, check: bool, show: Callable[[dict[str, Any]], None] = lambda _: None
) -> Steps[dict[str, Any]]:
    """The job once it has ended, shown at every look. Raises WaitTimeout, and JobFailed to whoever wants a `check`."""
    deadline = time.monotonic() + timeout_seconds if timeout_seconds is not None else None
    pause = POLL_SECONDS
    while True:
        job = yield from ask("GET", f"jobs/{job_id}")
        show(job)
        if job["status"]["phase"] in ENDED:
            if check and (failure := _failure_of(job)):
                raise failure
            return dict(job)
        if deadline is not None and time.monotonic() + pause > deadline:
            raise _waited_too_long(job, timeout_seconds)
        yield PauseStep(pause)
        pause = min(pause * 1.5, POLL_SECONDS_MAX)


def _waited_too_long(job: dict[str, Any], timeout_seconds: float | None) -> WaitTimeout:
    name, status = job["metadata"]["name"], job["status"]
    return WaitTimeout(
        f"{name} has not ended within {timeout_seconds:g} s: it is {status['phase']}, {status['because']}",
        "wait-timeout",
        next_step="the job goes on: wait() again, or cancel() it",
        details={"id": job["id"], "phase": status["phase"]},
    )


def _failure_of(job: dict[str, Any]) -> JobFailed | None:
    """Return the error to raise for an ended job, or None if it succeeded."""
    name, status = job["metadata"]["name"], job["status"]
    if status["phase"] == Phase.SUCCEEDED:
        return None
    failure = status.get("lastFailure") or {}
    what = f"{name} {'was cancelled' if status['phase'] == Phase.CANCELLED else 'failed'}: {status['because']}"
    if status["phase"] == Phase.FAILED and failure:
        where = ", ".join(f"{key} {failure[key]}" for key in ("worker", "rank", "node") if failure.get(key) is not None)
        what += f"\n  {failure['cause']} in attempt {failure['attempt']}{f' ({where})' if where else ''}: "
        what += failure["message"]
    code = str(failure.get("cause") or status["phase"]).lower()
    details = {"id": job["id"], "phase": status["phase"], "lastFailure": failure or None}
    return JobFailed(what, code, next_step="why() says what to do, logs() what the workers wrote", details=details)
