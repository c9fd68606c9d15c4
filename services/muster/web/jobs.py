"""`/jobs`: all jobs that one may see, as a table: filtered, searched, sorted, grouped, with columns to choose; and what
is done with several at once. The address holds all of it, so that a link shows the same."""

from __future__ import annotations

import asyncio
import csv
import io
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool

from muster.web import api, job_columns
from muster.web.api import (
    ANY_JOB,
    JOBS_PER_PAGE,
    ApiError,
    JobOrder,
    JobSelection,
    JobsPage,
    Principal,
    Services,
    ServicesDependency,
)
from muster.web.comparing import settings
from muster.web.job_columns import JobColumn
from muster.web.news import NewsBoard
from muster.web.notes import PageNote, go_on
from muster.web.rendering import page, query, render
from muster.web.session import Posted, SentForm, SubmittedForm, Visitor, local_path, must_write
from muster.web.sparkline import SparklineCache
from muster.words.status import Phase

router = APIRouter(include_in_schema=False)

PICKED_MAX = 200  # jobs that are ticked
_AT_ONCE_MAX = 500  # jobs of one form
_DELETED_AT_ONCE = 8  # each waits until the cluster has let go of it
_LISTS_MAX = 32  # parts of the list that are kept, some 100 kB each
_SHARED_SECONDS = 10.0  # what is counted by the clock, such as cost, is no older
_EXPORTED_AT_ONCE = 500  # rows
_SUGGESTIONS_MAX = 80
_sparklines = SparklineCache()
# Orders of older links.
_ALIASES = {"newest": "-submitted", "oldest": "submitted", "priority": "-priority", "finished": "-finished"}
# The charts of ticked jobs: a name of a curve, and its title.
CHARTS = {
    "loss": "Loss",
    "evaluation": "Evaluation loss",
    "gradNorm": "Gradient norm",
    "lr": "Learning rate",
    "tokensPerSecond": "Tokens per second",
    "mfu": "MFU",
    "memoryBytes": "Memory",
    "stepSeconds": "Step time",
    "dataWaitSeconds": "Wait for data",
}
GROUPS = {"": "No groups", "sweep": "Sweep", "model": "Model", "owner": "Owner", "project": "Project"}
Text = Annotated[str, Query(max_length=255, pattern=r"^[^\x00]*$")]


@dataclass(frozen=True)
class ListView:
    """The list as its address tells it. `columns` are empty for those of everybody."""

    chosen: JobSelection
    columns: tuple[str, ...]
    asked: dict[str, str]

    @property
    def table_columns(self) -> tuple[JobColumn, ...]:
        return tuple(job_columns.column(key) for key in self.columns or job_columns.DEFAULT)


def list_view(
    q: Text = "",
    phase: Text = "",
    project: Text = "",
    owner: Text = "",
    tag: Text = "",
    sweep: Text = "",
    sort: Text = "",
    group: Text = "",
    columns: Annotated[list[str] | None, Query(max_length=100)] = None,
) -> ListView:
    """Return the view of these query parameters; what none of them knows is left out. `columns` are repeated, or have
    commas between them."""
    order = order_of(sort, group)
    chosen = JobSelection(
        search=q.strip(),
        phases=(phase,) if phase and phase != "live" else (),
        project=project or None,
        owner=owner or None,
        live=True if phase == "live" else None,
        tag=tag or None,
        sweep=sweep or None,
        order=order,
        limit=JOBS_PER_PAGE,
    )
    keys = job_columns.column_keys(key for given in columns or () for key in given.split(","))
    own = () if set(keys) == set(job_columns.DEFAULT) else keys
    asked = {
        "q": q,
        "phase": phase,
        "project": project,
        "owner": owner,
        "tag": tag,
        "sweep": sweep,
        "sort": ("-" if order.descending else "") + order.key,
        "group": order.group,
        "columns": ",".join(own),
    }
    return ListView(chosen, own, asked)


View = Annotated[ListView, Depends(list_view)]


def order_of(sort: str, group: str) -> JobOrder:
    """`loss`, `-loss`, `training.optimizer.lr`; what can't be sorted by is the order of the list without a choice."""
    sort = _ALIASES.get(sort, sort)
    key = sort.removeprefix("-").removeprefix("spec.")
    names_order = key in api.ordering.COLUMNS or bool(job_columns.column_keys([key]))
    key = key if names_order and api.ordering.is_sortable(key) else ""
    return JobOrder(key, bool(key) and sort.startswith("-"), group if group in api.ordering.GROUPS else "")


def next_order(column: JobColumn, asked: Mapping[str, str]) -> str:
    """Return the order that a click on the column's head leads to: its own, the reverse, none."""
    first, second = (f"-{column.key}", column.key) if column.falls else (column.key, f"-{column.key}")
    return {first: second, second: ""}.get(asked["sort"], first)


@dataclass(frozen=True)
class ListPart:
    """A page of the list as everybody who sees the same jobs sees it: the page, its rows, and settings to choose as
    columns."""

    page: JobsPage
    rows: Markup
    suggestions: tuple[str, ...]


@router.get("/jobs")
async def list_jobs(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    view: View,
    picked: Annotated[str, Query(max_length=10_000, pattern=r"^[^\x00]*$")] = "",
    chart: Text = "",
    p: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
) -> Response:
    """Show the list of jobs."""
    view = replace(view, chosen=replace(view.chosen, offset=(p - 1) * JOBS_PER_PAGE))
    part = await _read(request, services, visitor, view)
    listing = part.page
    names = await api.names_of(services, visitor, _split(picked)) if picked else {}
    sweep = view.chosen.sweep
    phases = [*Phase, *sorted(set(listing.by_phase) - set(Phase))]
    return page(
        request,
        "jobs.html",
        visitor,
        current="jobs",
        jobs=listing.items,
        rows=part.rows,
        suggestions=part.suggestions,
        total=listing.total,
        by_phase=[(name, listing.by_phase[name]) for name in phases if listing.by_phase.get(name)],
        everything=sum(listing.by_phase.values()),
        live=sum(count for name, count in listing.by_phase.items() if name not in _ENDED),
        asked={
            **view.asked,
            "picked": ",".join(names),
            "chart": chart if chart in CHARTS and chart != "loss" else "",
        },
        narrowed=any(view.asked[key] for key in ("q", "phase", "project", "owner", "tag", "sweep")),
        sweep_name=(await api.sweep_name(services, visitor, sweep) or "deleted") if sweep else "",
        picked=names,
        columns=view.table_columns,
        chosen_columns=bool(view.columns),
        all_columns=tuple(job_columns.COLUMNS.values()),
        own_columns=", ".join(key for key in view.columns if key not in job_columns.COLUMNS),
        name_column=JobColumn(job_columns.NAME, "Job", lambda job: job["name"]),
        next_order=next_order,
        charts=CHARTS,
        groups=GROUPS,
        page_number=p,
        pages=max(1, -(-listing.total // JOBS_PER_PAGE)),
        first=(p - 1) * JOBS_PER_PAGE + 1,
    )


async def _read(request: Request, services: Services, visitor: Principal, view: ListView) -> ListPart:
    """Return the list's content, read once for all viewers of the same part between two changes."""
    news: NewsBoard = request.app.state.news
    version = (int(time.time() / _SHARED_SECONDS), *await news.newest(services, ANY_JOB))
    shared: dict[Any, tuple[tuple[int, ...], asyncio.Task[ListPart]]] = request.app.state.lists
    key = (visitor.visible_projects, view.chosen, view.columns)
    cached = shared.get(key)
    if cached is None or cached[0] != version or (cached[1].done() and not _has_result(cached[1])):
        cached = shared[key] = (version, asyncio.create_task(_read_now(services, visitor, view)))
        while len(shared) > _LISTS_MAX:
            shared.pop(next(iter(shared)))
    return await asyncio.shield(cached[1])


def _has_result(task: asyncio.Task[ListPart]) -> bool:
    return not task.cancelled() and task.exception() is None


async def _read_now(services: Services, visitor: Principal, view: ListView) -> ListPart:
    listing = await api.list_jobs(services, visitor, view.chosen)
    jobs = listing.items
    sparks = {}
    if any(column.key == "loss" for column in view.table_columns):
        sparks = await run_in_threadpool(_sparklines.of, services.settings.layout, [job["id"] for job in jobs])
    rows = render(
        "jobs_rows.html",
        groups=job_columns.groups(jobs, view.chosen.order.group, listing.by_group),
        columns=view.table_columns,
        sparks=sparks,
        asked={**view.asked, "q": view.chosen.search},
    )
    return ListPart(listing, rows, _suggestions(jobs))


def _suggestions(jobs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the settings in which these jobs differ and the metrics that they have, to choose as columns."""
    values: dict[str, set[str]] = {}
    metrics: dict[str, None] = {}
    for job in jobs:
        for path, value in settings({key: job["spec"].get(key) for key in ("training", "program", "gang")}):
            values.setdefault(path, set()).add(str(value))
        progress = job["status"].get("progress") or {}
        for kind, named in (
            ("values", progress.get("values")),
            ("evaluation", progress.get("evaluationValues")),
            ("results", job["status"].get("results")),
        ):
            metrics |= dict.fromkeys(f"{kind}.{name}" for name in named or ())
    paths = [path for path, different in values.items() if len(different) > 1]
    return job_columns.column_keys([*metrics, *paths][:_SUGGESTIONS_MAX])


_ENDED = frozenset(phase for phase in Phase if phase.terminal)


def _split(words: str) -> list[str]:
    return list(dict.fromkeys(word for word in words.split(",") if word))[:PICKED_MAX]


# --- The table as a file ----------------------------------------------------------------------------------------------


@router.get("/jobs.csv")
async def export_jobs(services: ServicesDependency, visitor: Visitor, view: View, picked: str = "") -> Response:
    """Return the table as a CSV file: all rows of the view, or the ticked ones."""
    if picked:
        return _csv(view, _once(await api.list_chosen(services, visitor, _split(picked))))
    return _csv(view, _all_lines(services, visitor, view.chosen))


async def _once(jobs: list[dict[str, Any]]) -> AsyncIterator[list[dict[str, Any]]]:
    yield jobs


async def _all_lines(
    services: Services, visitor: Principal, chosen: JobSelection
) -> AsyncIterator[list[dict[str, Any]]]:
    offset = 0
    while True:
        some = replace(chosen, offset=offset, limit=_EXPORTED_AT_ONCE)
        jobs = (await api.list_jobs(services, visitor, some)).items
        yield jobs
        offset += len(jobs)
        if len(jobs) < _EXPORTED_AT_ONCE:
            return


def _csv(view: ListView, parts: AsyncIterator[list[dict[str, Any]]]) -> Response:
    columns = view.table_columns

    async def lines() -> AsyncIterator[str]:
        yield _csv_lines([["name", "id", *(column.key for column in columns), "tags"]])
        async for jobs in parts:
            yield _csv_lines(
                [
                    [
                        *map(job_columns.csv_value, (job["name"], job["id"])),
                        *(job_columns.csv_value(column.value(job)) for column in columns),
                        " ".join(job["tags"]),
                    ]
                    for job in jobs
                ]
            )

    headers = {"Content-Disposition": 'attachment; filename="jobs.csv"', "Cache-Control": "no-store"}
    return StreamingResponse(lines(), media_type="text/csv; charset=utf-8", headers=headers)


def _csv_lines(rows: list[list[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue()


# --- Several jobs at once ---------------------------------------------------------------------------------------------


@router.post("/jobs/act")
async def act_on_jobs(request: Request, services: ServicesDependency, form: SentForm) -> Response:
    """Do something with each of the chosen jobs; what one of them refuses keeps no other from it."""
    verb, chosen = form.one("verb"), list(dict.fromkeys(form.all("job")))[:_AT_ONCE_MAX]
    onward = local_path(form.one("next"))
    if verb not in VERBS:
        raise ApiError("not_found", f"There is no action {verb[:40]!r}.")
    if not chosen:
        return go_on(onward, [PageNote(False, "No job was chosen: tick the boxes first.")])
    if verb == "compare":
        return RedirectResponse(f"/compare{query({'jobs': ','.join(chosen)})}", status_code=303)
    if verb == "export":
        return _csv(list_view(columns=form.all("columns")), _once(await api.list_chosen(services, form.caller, chosen)))
    must_write(form.caller)
    if verb == "delete":
        jobs = await api.list_chosen(services, form.caller, chosen)
        return page(request, "jobs_delete.html", form.caller, current="jobs", jobs=jobs, onward=onward, ended=_ENDED)
    if verb in api.VERBS:
        done, refused = await _each(chosen, lambda job_id: api.act(services, form.caller, job_id, verb))
        words = f"Asked {done} of {len(chosen)} to {verb}."
    else:
        try:
            change = _annotations(verb, form)
        except ApiError as error:
            return go_on(onward, [PageNote(False, error.detail)])
        done, refused = await _each(chosen, lambda job_id: api.annotate(services, form.caller, job_id, change))
        words = f"Changed {done} of {len(chosen)}."
    return go_on(onward, [*([PageNote(True, words)] if done else []), *refused])


VERBS = frozenset((*api.VERBS, "compare", "export", "delete", "tag", "untag", "note"))


async def _each(chosen: Sequence[str], act: Callable[[str], Awaitable[None]]) -> tuple[int, list[PageNote]]:
    """Return the number of jobs that the act was done with, and what the others refused."""
    done, refused = 0, []
    for job_id in chosen:
        try:
            await act(job_id)
            done += 1
        except ApiError as error:
            refused.append(PageNote(False, error.detail))
    return done, refused


def _annotations(verb: str, form: SubmittedForm) -> api.JobAnnotations:
    """Raises ApiError invalid_annotations."""
    if verb == "note":
        return api.annotations_of({"note": form.one("note")})
    tags = [tag for tag in re.split(r"[,\s]+", form.one("tags")) if tag]
    if not tags:
        raise ApiError("invalid_annotations", "No tag was given: write one, or several with blanks between them.")
    return api.annotations_of({"addTags" if verb == "tag" else "removeTags": tags})


@router.post("/jobs/delete")
async def delete_jobs(services: ServicesDependency, form: Posted) -> Response:
    """Delete the jobs of the page that asked whether to."""
    chosen = list(dict.fromkeys(form.all("job")))[:_AT_ONCE_MAX]
    with_checkpoints = form.one("checkpoints") == "yes"
    turns = asyncio.Semaphore(_DELETED_AT_ONCE)

    async def delete(job_id: str) -> PageNote | None:
        async with turns:
            try:
                await api.remove(services, form.caller, job_id, with_checkpoints)
            except ApiError as error:
                return PageNote(False, error.detail)
        return None

    refused = [note for note in await asyncio.gather(*map(delete, chosen)) if note]
    done = len(chosen) - len(refused)
    notes = [PageNote(True, f"Deleted {done} of {len(chosen)}.")] if done else []
    return go_on(local_path(form.one("next")), [*notes, *refused])
