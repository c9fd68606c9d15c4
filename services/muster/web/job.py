"""`/jobs/{id}`: one job. Its story first, then its curves, where its time went, and what can be done with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from muster.charts import goodput
from muster.charts.timeline import BEGINS, COMMITTED, WORDS, timeline
from muster.documents.yaml_text import write_yaml
from muster.plan.plan_words import plan_facts, program_facts
from muster.recipe.document import JobSpec
from muster.replies.views import plan_view
from muster.web import api
from muster.web.api import ApiError, JobRow, Principal, Services, ServicesDependency
from muster.web.chart_data import sources
from muster.web.notes import PageNote, go_on
from muster.web.rendering import page
from muster.web.session import Posted, Visitor
from muster.web.sparkline import SparklineCache
from muster.words.status import Phase

router = APIRouter(prefix="/jobs/{job_id}", include_in_schema=False)

JobId = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[^\x00:]*$")]
TABS = (
    ("", "Overview"),
    ("logs", "Logs"),
    ("events", "Events"),
    ("checkpoints", "Checkpoints"),
    ("chat", "Chat"),
    ("data", "Data"),
    ("samples", "Samples"),
    ("config", "Configuration"),
)
_STORY_MAX = 2_000  # events that begin a state: a job with more restarts shows its first ones only
_COMMITS_BACK = 3_000  # of a job with more events only the newest commits are on the picture
_SAMPLES = 8  # evaluations of the table of samples: more of them are asked for
_sparklines = SparklineCache()
_Name = Annotated[str, Query(max_length=64)]


async def show(
    request: Request, services: Services, visitor: Principal, row: JobRow, tab: str, status: int = 200, **values: Any
) -> Response:
    """A page of the job, with what all of them have: its head, its tabs and what may be done."""
    return page(
        request,
        f"job_{tab or 'overview'}.html",
        visitor,
        status,
        current="jobs",
        job=api.document(services, visitor, row),
        tab=tab,
        tabs=TABS,
        may_act=api.may_act(visitor, row),
        live=row.live,
        **values,
    )


@router.get("")
async def show_job(request: Request, services: ServicesDependency, visitor: Visitor, job_id: JobId) -> Response:
    async with request.app.state.reading:
        row = await api.find(services, visitor, job_id)
        tried, reason, newest, committed = await asyncio.gather(
            api.attempts(services, visitor, job_id),
            api.why(services, visitor, job_id),
            api.events(services, job_id, 0, _STORY_MAX, tuple(BEGINS)),
            api.events(services, job_id, max(0, row.last_event - _COMMITS_BACK), _COMMITS_BACK, (COMMITTED,)),
        )
    now = row.finished_at or time.time()
    story = timeline(
        row.created_at,
        now,
        tried["items"],
        tried["costs"],
        sorted((*newest, *committed), key=lambda event: int(event["id"])),
    )
    sparks = await run_in_threadpool(_sparklines.of, services.settings.layout, [job_id])
    return await show(
        request,
        services,
        visitor,
        row,
        "",
        story=story,
        state_words=WORDS,
        why=reason,
        spent=tried["cost"],
        parts=goodput.parts((row.status.get("ledger") or {}).get("seconds") or {}),
        spark=sparks[job_id],
        curve_sources=sources([(row, None)]),
        hardware_gap=hardware_gap(row.spec),
        program=program_facts(row.spec, row.status),
    )


# Groups of events by their name in the address: words, and the types; all of them for the first.
EVENT_GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "": ("All", ()),
    "problems": (
        "Problems",
        (
            "job.suspected",
            "job.restarting",
            "job.failed",
            "attempt.failed",
            "attempt.preempted",
            "attempt.rejected",
            "node.excluded",
            "condition.changed",
        ),
    ),
    "phases": ("Phases", (*(f"job.{phase.lower()}" for phase in Phase), "job.waiting", "attempt.started")),
    "checkpoints": ("Checkpoints and evaluations", ("checkpoint.committed", "evaluation.completed")),
    "requests": (
        "Requests",
        ("job.created", "job.suspend_requested", "job.resume_requested", "job.cancel_requested"),
    ),
}


def hardware_gap(spec: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the series of hardware that such a job should have, and what to say where it is not recorded."""
    if spec.get("program"):
        words = (
            "Use of the hardware by a program is not recorded here: the node agent and Grafana show it of its nodes."
        )
        return "hardware.cpuCores", words
    if (spec.get("gang") or {}).get("gpusPerNode"):
        words = (
            "Use and power of the GPU are not recorded: install nvidia-ml-py in the job's image, by which it is asked."
        )
        return "hardware.gpuUse", words
    return None


@router.get("/events")
async def show_events(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    job_id: JobId,
    before: Annotated[int | None, Query(ge=1, le=2**62)] = None,
    only: Annotated[str, Query(max_length=40)] = "",
) -> Response:
    """Show the events, newest first: all of them, or only those of a group."""
    row = await api.find(services, visitor, job_id)
    only = only if only in EVENT_GROUPS else ""
    _, kinds = EVENT_GROUPS[only]
    matches = await api.newest_events(services, job_id, before, api.EVENTS_PER_PAGE + 1, kinds)
    page_events = matches[: api.EVENTS_PER_PAGE]
    return await show(
        request,
        services,
        visitor,
        row,
        "events",
        events=page_events,
        groups={name: words for name, (words, _) in EVENT_GROUPS.items()},
        only=only,
        earlier=page_events[-1]["id"] if len(matches) > len(page_events) else None,
        newest=before is None,
    )


@router.get("/samples")
async def show_samples(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    job_id: JobId,
    last: Annotated[int, Query(ge=1, le=100)] = _SAMPLES,
) -> Response:
    row = await api.find(services, visitor, job_id)
    fault = ""
    written: dict[str, Any] = {"items": [], "total": 0}
    try:
        written = await api.samples(services, visitor, job_id, last)
    except ApiError as error:
        if error.code != "storage_unavailable":
            raise
        fault = error.detail
    more = min(100, written["total"]) if written["total"] > len(written["items"]) and last < 100 else None
    rows = by_prompt(written["items"])
    return await show(request, services, visitor, row, "samples", written=written, rows=rows, more=more, fault=fault)


def by_prompt(evaluations: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any] | None]]]:
    """Each prompt with what the model wrote after it at each of the evaluations, None where it was not asked."""
    written = [{sample["prompt"]: sample for sample in each["samples"]} for each in evaluations]
    prompts = dict.fromkeys(prompt for samples in reversed(written) for prompt in samples)
    return [(prompt, [samples.get(prompt) for samples in written]) for prompt in prompts]


@router.get("/config")
async def show_config(
    request: Request, services: ServicesDependency, visitor: Visitor, job_id: JobId, against: _Name = ""
) -> Response:
    """The spec, or how it differs from another job's."""
    row = await api.find(services, visitor, job_id)
    spec = api.document(services, visitor, row)["spec"]
    other, differences, fault = None, [], ""
    if against.strip():
        try:
            other = await api.find_named(services, visitor, row, against.strip())
            differences = changed(api.document(services, visitor, other)["spec"], spec)
        except ApiError as error:
            fault = error.detail
    return await show(
        request,
        services,
        visitor,
        row,
        "config",
        text=write_yaml(spec),
        facts=in_words(row),
        other=other,
        differences=differences,
        against=against,
        fault=fault,
    )


def in_words(row: JobRow) -> list[tuple[str, str]]:
    """Return what the spec asks for, in the words of its plan; nothing of one that a newer Muster wrote."""
    try:
        spec = JobSpec.model_validate(row.spec)
    except ValidationError:
        return []
    return [fact for fact in plan_facts(plan_view(row.name, row.namespace, row.labels, spec)) if fact[0] != "job"]


def changed(before: Any, after: Any, path: str = "") -> list[tuple[str, str, str]]:
    """(path, before, after) of every value that differs; a value that is not there is an empty text."""
    if isinstance(before, dict) and isinstance(after, dict):
        changes = []
        for key in dict.fromkeys([*before, *after]):
            changes += changed(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
        return changes
    return [] if before == after else [(path, _value(before), _value(after))]


def _value(value: Any) -> str:
    return "" if value is None else write_yaml(value).strip().removesuffix("\n...")


@router.get("/clone")
async def clone(services: ServicesDependency, visitor: Visitor, job_id: JobId) -> Response:
    """Return the address of the form for a new job like this one."""
    row = await api.find(services, visitor, job_id)
    return RedirectResponse(f"/submit?clone={row.id}", status_code=303)


@router.post("/{verb}")
async def act(
    services: ServicesDependency,
    form: Posted,
    job_id: JobId,
    verb: Annotated[str, Path(pattern="^(cancel|suspend|resume)$")],
) -> Response:
    words = {
        "cancel": "Cancellation was asked for: the job ends and keeps its record and checkpoints.",
        "suspend": "Suspension was asked for: the gang stops at a checkpoint and gives its nodes back.",
        "resume": "The job may go on from its last checkpoint.",
    }
    try:
        await api.act(services, form.caller, job_id, verb)
    except ApiError as error:
        if error.status != 409:
            raise
        return go_on(f"/jobs/{job_id}", [PageNote(False, error.detail)])
    return go_on(f"/jobs/{job_id}", [PageNote(True, words[verb])])
