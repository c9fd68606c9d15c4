"""`/jobs`: all jobs that one may see, filtered, searched, in order, by pages; and what is done with several at once."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool

from muster.contract.status import Phase
from muster.web import api
from muster.web.api import (
    ANY_JOB,
    JOBS_PER_PAGE,
    ORDERS,
    ApiError,
    JobSelection,
    JobsPage,
    Principal,
    Services,
    ServicesDependency,
)
from muster.web.news import NewsBoard
from muster.web.notes import PageNote, go_on
from muster.web.rendering import page, render
from muster.web.session import Posted, Visitor, local_path
from muster.web.sparkline import SparklineCache

router = APIRouter(include_in_schema=False)

_AT_ONCE_MAX = 500  # jobs of one form
_LISTS_MAX = 32  # parts of the list that are kept, some 100 kB each
_SHARED_SECONDS = 10.0  # what is counted by the clock, such as cost, is no older
_sparklines = SparklineCache()
Read = tuple[JobsPage, Markup]  # a page of jobs, and their rows
# What the columns sort by, where they do.
COLUMNS = (
    ("Job", "name"),
    ("Phase", "phase"),
    ("Progress", None),
    ("Loss", None),
    ("GPUs", None),
    ("Owner", "owner"),
    ("Cost", None),
    ("Submitted", "newest"),
)
Text = Annotated[str, Query(max_length=255, pattern=r"^[^\x00]*$")]


@router.get("/jobs")
async def list_jobs(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    q: Text = "",
    phase: Text = "",
    project: Text = "",
    owner: Text = "",
    sort: Text = "newest",
    p: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
) -> Response:
    """Show the list of jobs. Its address holds everything about the list, so that it can be shared."""
    order = sort if sort in ORDERS else "newest"
    chosen = JobSelection(
        search=q.strip(),
        phases=(phase,) if phase and phase != "live" else (),
        project=project or None,
        owner=owner or None,
        live=True if phase == "live" else None,
        order=order,
        page=p,
    )
    asked = {"q": q, "phase": phase, "project": project, "owner": owner, "sort": order if order != "newest" else ""}
    listing, rows = await _read(request, services, visitor, chosen, asked)
    phases = [*Phase, *sorted(set(listing.by_phase) - set(Phase))]
    return page(
        request,
        "jobs.html",
        visitor,
        current="jobs",
        jobs=listing.items,
        rows=rows,
        total=listing.total,
        by_phase=[(name, listing.by_phase[name]) for name in phases if listing.by_phase.get(name)],
        everything=sum(listing.by_phase.values()),
        live=sum(count for name, count in listing.by_phase.items() if name not in _ENDED),
        asked=asked,
        columns=COLUMNS,
        page_number=p,
        pages=max(1, -(-listing.total // JOBS_PER_PAGE)),
        first=(p - 1) * JOBS_PER_PAGE + 1,
    )


async def _read(
    request: Request, services: Services, visitor: Principal, chosen: JobSelection, asked: dict[str, str]
) -> Read:
    """Return the list's content, read once for all viewers of the same part between two changes."""
    news: NewsBoard = request.app.state.news
    version = (int(time.time() / _SHARED_SECONDS), *await news.newest(services, ANY_JOB))
    shared: dict[Any, tuple[tuple[int, ...], asyncio.Task[Read]]] = request.app.state.lists
    key = (visitor.visible_projects, chosen)
    cached = shared.get(key)
    if cached is None or cached[0] != version or (cached[1].done() and not _has_result(cached[1])):
        cached = shared[key] = (
            version,
            asyncio.create_task(_read_now(services, visitor, chosen, {**asked, "q": chosen.search})),
        )
        while len(shared) > _LISTS_MAX:
            shared.pop(next(iter(shared)))
    return await asyncio.shield(cached[1])


def _has_result(task: asyncio.Task[Read]) -> bool:
    return not task.cancelled() and task.exception() is None


async def _read_now(services: Services, visitor: Principal, chosen: JobSelection, asked: dict[str, str]) -> Read:
    page = await api.list_jobs(services, visitor, chosen)
    sparks = await run_in_threadpool(_sparklines.of, services.settings.layout, [job["id"] for job in page.items])
    return page, render("jobs_rows.html", jobs=page.items, sparks=sparks, asked=asked)


_ENDED = frozenset(phase for phase in Phase if phase.terminal)


@router.post("/jobs/act")
async def act_on_jobs(services: ServicesDependency, form: Posted) -> Response:
    """Cancel, suspend or resume each of the chosen jobs; what one of them refuses keeps no other from it."""
    verb, chosen = form.one("verb"), list(dict.fromkeys(form.all("job")))[:_AT_ONCE_MAX]
    onward = local_path(form.one("next"))
    if verb not in api.VERBS:
        raise ApiError("not_found", f"There is no action {verb[:40]!r}.")
    if not chosen:
        return go_on(onward, [PageNote(False, "No job was chosen: tick the boxes first.")])
    done, refused = 0, []
    for job_id in chosen:
        try:
            await api.act(services, form.caller, job_id, verb)
            done += 1
        except ApiError as error:
            refused.append(PageNote(False, error.detail))
    done_notes = [PageNote(True, f"Asked {done} of {len(chosen)} to {verb}.")] if done else []
    return go_on(onward, [*done_notes, *refused])
