"""Facade of the API for the pages. No other module of the pages imports the API.

A page calls the API's services with the same caller as a program would. Where a route composes a reply, the route is
called, because it is a function.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request, Response
from pydantic import BaseModel
from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.app import create_app as create_api
from muster.api.core import drafting
from muster.api.core.access import checked, find_job
from muster.api.core.access import may_act as may_act_in
from muster.api.core.attempts.routes import list_attempts
from muster.api.core.callers import Principal, Scope, bearer
from muster.api.core.checkpoints.routes import get_checkpoint, list_checkpoints, mark_commit
from muster.api.core.checkpoints.verifying import verify_commit
from muster.api.core.cluster.cluster import JobCluster
from muster.api.core.database.tables import JobRow, MirrorRow, SweepRow, TrialRow
from muster.api.core.errors import ApiError
from muster.api.core.evaluation_rows import of_checkpoints
from muster.api.core.events import repository as event_rows
from muster.api.core.events.routes import event_of
from muster.api.core.fleet.routes import overview
from muster.api.core.http import sse
from muster.api.core.http.body import parsed
from muster.api.core.hub import ANY_JOB
from muster.api.core.jobs import ordering, removal, repository, service, tagging
from muster.api.core.jobs.ordering import JobOrder
from muster.api.core.jobs.repository import JobFilter
from muster.api.core.jobs.schemas import cost_document, job_document, job_summary
from muster.api.core.logs.files import PAGE_BYTES_MAX, JobLogs, LogPage, page, reading, tail_offset
from muster.api.core.logs.routes import read_logs
from muster.api.core.metrics.curves import CurveQuery
from muster.api.core.metrics.service import curves
from muster.api.core.metrics.steps import Axis
from muster.api.core.projects import visible as visible_projects
from muster.api.core.roles import Role
from muster.api.core.services import Services, ServicesDependency
from muster.api.core.settings import ApiSettings
from muster.api.core.submission.clone import editable
from muster.api.core.submission.clone import free_name as free_name_like
from muster.api.core.waits.estimates import start_seconds
from muster.api.core.why.routes import explain_job
from muster.api.data.exports.routes import fetch_export
from muster.api.data.inspections.routes import get_data_report
from muster.api.data.samples.routes import list_samples
from muster.api.openai.chat.service import must_answer
from muster.api.sweeps import routes as sweep_routes
from muster.api.tenants.authentication import COOKIE, CallerAuthentication, form_token
from muster.api.tenants.projects import routes as project_routes
from muster.api.tenants.projects.service import ProjectRequest
from muster.api.tenants.sessions import service as sessions
from muster.api.tenants.signin.code_flow import FLOW_SECONDS, CodeFlow
from muster.api.tenants.signin.code_flow import begin as begin_flow
from muster.api.tenants.tokens import routes as token_routes
from muster.api.tenants.tokens.schemas import RotateRequest, TokenRequest
from muster.api.tenants.usage import repository as usage_rows
from muster.api.webhooks import routes as webhook_routes
from muster.documents.document import Document
from muster.plan.usage import usage
from muster.words.annotations import JobAnnotations
from muster.words.months import month_of, month_range
from muster.words.redaction import redact_spec, without_env_values
from muster.words.webhooks import WebhookRequest

__all__ = [
    "ANY_JOB",
    "COOKIE",
    "FLOW_SECONDS",
    "PAGE_BYTES_MAX",
    "ApiError",
    "ApiSettings",
    "Axis",
    "CallerAuthentication",
    "CodeFlow",
    "CurveQuery",
    "JobAnnotations",
    "JobCluster",
    "JobLogs",
    "JobOrder",
    "JobRow",
    "LogPage",
    "Principal",
    "Role",
    "RotateRequest",
    "Scope",
    "Services",
    "ServicesDependency",
    "bearer",
    "begin_flow",
    "create_api",
    "curves",
    "drafting",
    "editable",
    "fetch_export",
    "form_token",
    "ordering",
    "overview",
    "page",
    "project_routes",
    "read_logs",
    "reading",
    "sessions",
    "sse",
    "tail_offset",
    "token_routes",
    "verify_commit",
    "webhook_routes",
]

JOBS_PER_PAGE = 50
EVENTS_PER_PAGE = 200
VERBS = {"cancel": service.cancel, "suspend": service.suspend, "resume": service.resume}


@dataclass(frozen=True)
class JobSelection:
    """Selection of jobs: filters, order, and the rows of the page."""

    search: str = ""
    phases: tuple[str, ...] = ()
    project: str | None = None
    owner: str | None = None
    live: bool | None = None
    tag: str | None = None
    sweep: str | None = None
    order: JobOrder = field(default_factory=JobOrder)
    offset: int = 0
    limit: int = JOBS_PER_PAGE


@dataclass(frozen=True)
class JobTrial:
    """The sweep that a job is a trial of, and the trial's number."""

    sweep: str
    name: str
    number: int


@dataclass(frozen=True)
class JobsPage:
    """A page of jobs, and how many there are: `total` of these phases, `by_phase` of all, and `by_group` of these by
    the value that they are grouped by."""

    items: list[dict[str, Any]]
    total: int
    by_phase: dict[str, int]
    by_group: dict[str, int]


async def list_jobs(services: Services, caller: Principal, chosen: JobSelection) -> JobsPage:
    """Return the lines of the list."""
    everything = JobFilter(
        project=chosen.project,
        owner=chosen.owner,
        visible=caller.visible_projects,
        search=chosen.search,
        tag=chosen.tag,
        sweep=chosen.sweep,
    )
    some = replace(everything, phases=chosen.phases, live=chosen.live)
    async with services.database.read() as session:
        by_phase = await repository.count_by_phase(session, everything)
        total = sum((await repository.count_by_phase(session, some)).values()) if some != everything else None
        ordered = await repository.ordered(session, some, chosen.order, chosen.offset, chosen.limit)
        by_group = await repository.count_by_group(session, some, chosen.order) if chosen.order.group else {}
        trials = await _trials_of(session, [row.id for row, _ in ordered])
    starts = await start_seconds(services, [row for row, _ in ordered])
    lines = [
        {**_line(services, row, starts.get(row.id)), "group": group, "trial": trials.get(row.id)}
        for row, group in ordered
    ]
    return JobsPage(lines, sum(by_phase.values()) if total is None else total, by_phase, by_group)


async def list_chosen(services: Services, caller: Principal, job_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the lines of these jobs, in this order, without those that are not there or not for the caller to see."""
    async with services.database.read() as session:
        rows = {row.id: row for row in await repository.those_of(session, job_ids, caller.visible_projects)}
        trials = await _trials_of(session, list(rows))
    return [
        {**_line(services, rows[job_id]), "group": "", "trial": trials.get(job_id)}
        for job_id in dict.fromkeys(job_ids)
        if job_id in rows
    ]


async def names_of(services: Services, caller: Principal, job_ids: Sequence[str]) -> dict[str, str]:
    """Return the names of those of these jobs that the caller may see, by their ids, in this order."""
    async with services.database.read() as session:
        rows = {row.id: row for row in await repository.those_of(session, job_ids, caller.visible_projects)}
    return {job_id: rows[job_id].name for job_id in job_ids if job_id in rows}


async def sweep_name(services: Services, caller: Principal, sweep_id: str) -> str | None:
    """Return the name of a sweep; None for one that is not there, or not for the caller to see."""
    query = select(SweepRow.name).where(SweepRow.id == sweep_id)
    if caller.visible_projects is not None:
        query = query.where(SweepRow.project.in_(caller.visible_projects))
    async with services.database.read() as session:
        return (await session.scalars(query)).one_or_none()


async def _trials_of(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, JobTrial]:
    query = select(TrialRow.job_id, TrialRow.sweep_id, SweepRow.name, TrialRow.number)
    trials = await session.execute(
        query.join(SweepRow, SweepRow.id == TrialRow.sweep_id).where(TrialRow.job_id.in_(job_ids))
    )
    return {str(job_id): JobTrial(sweep, name, number) for job_id, sweep, name, number in trials}


def _line(services: Services, row: JobRow, starts_in: float | None = None) -> dict[str, Any]:
    """A line of the list. Everybody who may see the job may see all of it: it has no values of variables."""
    gang, workers_held = row.spec.get("gang") or {}, row.status.get("gang") or {}
    nodes = gang.get("nodes")
    smallest = nodes.get("min", 1) if isinstance(nodes, dict) else nodes or 1
    workers = workers_held.get("wanted") or smallest
    return {
        **job_summary(row, starts_in),
        "gpus": workers * gang.get("gpusPerNode", 0),
        "workers": workers,
        "cost": cost_document(row.status, row.status.get("attempts") or (), services.prices),
        "spec": redact_spec(without_env_values(row.spec)),
        "status": row.status,
    }


async def find(services: Services, caller: Principal, job_id: str) -> JobRow:
    """Raises ApiError job_not_found, also for one that the caller may not see."""
    return await find_job(services, caller, job_id)


async def find_named(services: Services, caller: Principal, near: JobRow, name: str) -> JobRow:
    """The newest job of that name or id in the project and namespace of another. Raises ApiError job_not_found."""
    async with services.database.read() as session:
        rows = await repository.named(session, near.project, near.namespace, name, limit=1)
    return checked(caller, rows[0] if rows else None, name)


async def find_visible(services: Services, caller: Principal, name: str) -> JobRow:
    """The job of that id, else the newest of that name that the caller may see. Raises ApiError job_not_found."""
    some = JobFilter(visible=caller.visible_projects, name=name)
    async with services.database.read() as session:
        row = await repository.newest(session, some)
    return row or await find_job(services, caller, name)


async def recent_jobs(
    services: Services, caller: Principal, since: float, limit: int = 5_000
) -> list[tuple[str, str, dict[str, Any]]]:
    """Id, name and status of the jobs that live or ended since then, the newest of those that the caller may see."""
    query = select(JobRow.id, JobRow.name, JobRow.status).where(or_(JobRow.live.is_(True), JobRow.finished_at > since))
    if caller.visible_projects is not None:
        query = query.where(JobRow.project.in_(caller.visible_projects))
    async with services.database.read() as session:
        rows = await session.execute(query.order_by(JobRow.seq.desc()).limit(limit))
    return [(row[0], row[1], row[2]) for row in rows]


async def spending(services: Services, caller: Principal, projects: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return each project's usage of this month, by its name."""
    since, until = month_range(month_of(time.time()))
    async with services.database.read() as session:
        by_project = {name: await usage_rows.held_by(session, name, since, until) for name in projects}
    now = time.time()
    made = {name: usage(each, services.prices, since, until, now) for name, each in by_project.items()}
    return {
        name: {**each.total.model_dump(mode="json", by_alias=True), "currency": each.currency}
        for name, each in made.items()
    }


def document(services: Services, caller: Principal, row: JobRow) -> dict[str, Any]:
    """The job as the API shows it to this caller."""
    return job_document(row, services.prices, caller.person)


def may_act(caller: Principal, row: JobRow) -> bool:
    """Return whether to offer actions on the job. The service that carries them out decides."""
    with contextlib.suppress(ApiError):
        return checked(caller, row, row.id, act=True) is row and caller.may(Scope.WRITE)
    return False


async def attempts(services: Services, caller: Principal, job_id: str) -> dict[str, Any]:
    return document_of(await list_attempts(services, caller, job_id))


async def why(services: Services, caller: Principal, job_id: str) -> dict[str, Any]:
    return document_of(await explain_job(services, caller, job_id))


async def commits(services: Services, caller: Principal, job_id: str) -> dict[str, Any]:
    return document_of(await list_checkpoints(services, caller, job_id))


async def results(services: Services, row: JobRow) -> dict[str, float]:
    """The numbers that the job's program left, or those of the newest evaluation of the job's checkpoints, by name."""
    if own := row.status.get("results"):
        return dict(own)
    async with services.database.read() as session:
        evaluations = await of_checkpoints(session, row.id)
    newest: dict[str, float] = {}
    for run, _ in sorted(evaluations, key=lambda each: each[0].step):
        newest |= run.results
    return newest


async def commit(services: Services, caller: Principal, job_id: str, step: str) -> dict[str, Any]:
    return document_of(await get_checkpoint(services, caller, job_id, step))


async def mark(services: Services, caller: Principal, job_id: str, step: int, pinned: bool) -> None:
    await mark_commit(services, caller, job_id, step, pinned)


async def data_report(services: Services, caller: Principal, job_id: str) -> dict[str, Any]:
    """Raises ApiError data_report_not_found while there is none."""
    return document_of(await get_data_report(services, caller, job_id))


async def samples(services: Services, caller: Principal, job_id: str, limit: int) -> dict[str, Any]:
    return document_of(await list_samples(services, caller, job_id, limit))


def chat_fault(services: Services) -> str:
    """Return why this server answers no prompts, or an empty text if it does."""
    try:
        must_answer(services)
    except ApiError as error:
        return error.detail
    return ""


async def act(services: Services, caller: Principal, job_id: str, verb: str) -> None:
    """Cancel, suspend or resume. Raises ApiError as the API's routes do, and KeyError for another verb."""
    await VERBS[verb](services, caller, job_id)


async def sweeps(services: Services, caller: Principal, cursor: str | None) -> dict[str, Any]:
    """A page of the sweeps, newest first, and the cursor of the next one."""
    return document_of(await sweep_routes.list_sweeps(services, caller, JOBS_PER_PAGE, cursor))


async def sweep(services: Services, caller: Principal, name: str) -> dict[str, Any]:
    """The sweep of that id, else the newest of that name. Raises ApiError sweep_not_found."""
    named = document_of(await sweep_routes.list_sweeps(services, caller, 1, None, None, name))["items"]
    return document_of(await sweep_routes.get_sweep(services, caller, named[0]["id"] if named else name))


async def cancel_sweep(services: Services, caller: Principal, sweep_id: str) -> None:
    await sweep_routes.cancel_sweep(services, caller, sweep_id)


def may_act_on_sweep(caller: Principal, document: dict[str, Any]) -> bool:
    """Return whether to offer actions on the sweep and its trials. The services that carry them out decide."""
    return may_act_in(caller, document["project"], document["owner"]) and caller.may(Scope.WRITE)


async def remove(services: Services, caller: Principal, job_id: str, with_checkpoints: bool) -> None:
    """Delete an ended job's record and logs. Raises ApiError as the API's route does."""
    await removal.remove(services, caller, job_id, with_checkpoints)


async def annotate(services: Services, caller: Principal, job_id: str, change: JobAnnotations) -> None:
    """Change the job's tags and note. Raises ApiError as the API's route does."""
    await tagging.annotate(services, caller, job_id, change)


def annotations_of(given: dict[str, Any]) -> JobAnnotations:
    """Raises ApiError invalid_annotations, naming every fault."""
    return parsed(JobAnnotations, "invalid_annotations", tagging.WRONG)(Document(given))


async def free_name(services: Services, row: JobRow) -> str:
    async with services.database.read() as session:
        return await free_name_like(session, row)


async def project_names(services: Services, caller: Principal) -> list[str]:
    """Return the names of the projects that the caller may submit to."""
    async with services.database.read() as session:
        rows = await visible_projects(session, caller)
    return [row.name for row in rows if (role := caller.role_in(row.name)) is not None and role.covers(Role.MEMBER)]


async def project_list(services: Services, caller: Principal) -> list[dict[str, Any]]:
    """The projects that the caller may see, each with its members and what it used this month."""
    listed: list[dict[str, Any]] = document_of(await project_routes.list_projects(services, caller))["items"]
    spent = await spending(services, caller, [each["name"] for each in listed])
    for each in listed:
        each["members"] = document_of(await project_routes.list_members(services, caller, each["name"]))["items"]
        each["spent"] = spent[each["name"]]
    return listed


async def webhooks(services: Services, caller: Principal, project: str) -> list[dict[str, Any]]:
    """Return the webhooks of a project that the caller maintains, without secrets, each with its `host`: the rest of an
    address is a password to some services."""
    items = document_of(await webhook_routes.list_webhooks(services, caller, project))["items"]
    return [{**each, "host": urlsplit(each["url"]).netloc.rpartition("@")[2]} for each in items]


async def deliveries(services: Services, caller: Principal, project: str, name: str, limit: int) -> dict[str, Any]:
    """The newest messages to a webhook, each with what was answered."""
    return document_of(await webhook_routes.list_deliveries(services, caller, project, name, None, limit, None))


def webhook_request(given: dict[str, Any]) -> WebhookRequest:
    """Raises ApiError invalid_webhook, naming every fault."""
    return parsed(WebhookRequest, "invalid_webhook", webhook_routes.WRONG)(Document(given))


def project_request(given: dict[str, Any]) -> ProjectRequest:
    """Raises ApiError invalid_project, naming every fault."""
    return parsed(ProjectRequest, "invalid_project", "The project is not valid")(Document(given))


async def tokens(services: Services, caller: Principal) -> list[dict[str, Any]]:
    """Return the tokens that the caller may see, without their secret values."""
    items: list[dict[str, Any]] = document_of(await token_routes.list_tokens(services, caller))["items"]
    return items


def token_request(given: dict[str, Any]) -> TokenRequest:
    """Raises ApiError invalid_token, naming every fault."""
    return parsed(TokenRequest, "invalid_token", "The token can't be made")(Document(given))


async def events(
    services: Services, job_id: str, after: int, limit: int = EVENTS_PER_PAGE, kinds: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the events, oldest first, of a job that the caller is known to see."""
    async with services.database.read() as session:
        rows = await event_rows.after(session, job_id, after, limit, kinds)
    return [event_of(row).model_dump(mode="json", by_alias=True) for row in rows]


async def newest_events(
    services: Services, job_id: str, before: int | None, limit: int, kinds: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the events of these types before that number, newest first, of a job that the caller is known to see."""
    async with services.database.read() as session:
        rows = await event_rows.before(session, job_id, before, limit, kinds)
    return [event_of(row).model_dump(mode="json", by_alias=True) for row in rows]


async def fetch_log(services: Services, job_id: str, attempt: int | None, worker: int) -> JobLogs:
    """The job's log files, where a cluster has them after they were asked for."""
    await services.cluster.fetch_log(job_id, attempt, worker)
    return JobLogs(services.settings.layout, job_id)


async def as_now(services: Services, request: Request, caller: Principal) -> Principal | None:
    """A stream's reader as they are by now; None once they are signed out."""
    if services.settings.auth and COOKIE in request.cookies:
        return await of_session(services, request)
    return await services.authenticator.renewed(caller)


async def of_session(services: Services, request: Request) -> Principal | None:
    """The principal of the session that the request's cookie names; None where none is open."""
    return await services[CallerAuthentication].of_session(request)


async def versions_of(services: Services, job_ids: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return, by job, numbers of which one changes whenever the job, or any job for ANY_JOB, has news."""
    by_job: dict[str, tuple[int, ...]] = {}
    async with services.database.read() as session:
        if ANY_JOB in job_ids:
            newest = select(
                select(func.coalesce(func.sum(MirrorRow.version), 0)).scalar_subquery(),
                select(func.coalesce(func.max(JobRow.seq), 0)).scalar_subquery(),
                select(func.coalesce(func.max(JobRow.noted_at), 0.0) * 1e6).scalar_subquery(),
                select(func.count()).select_from(JobRow).scalar_subquery(),  # falls where a job is deleted
            )
            by_job[ANY_JOB] = tuple(int(number) for number in (await session.execute(newest)).one())
        if others := [job_id for job_id in job_ids if job_id != ANY_JOB]:
            versions = JobRow.status_version, JobRow.spec_version, JobRow.last_event
            for job_id, *numbers in await session.execute(select(JobRow.id, *versions).where(JobRow.id.in_(others))):
                by_job[job_id] = tuple(int(number) for number in numbers)
    return by_job


def document_of(answer: Response | BaseModel) -> dict[str, Any]:
    """The document that a route answers with."""
    if isinstance(answer, BaseModel):
        return answer.model_dump(mode="json", by_alias=True)
    document: dict[str, Any] = json.loads(bytes(answer.body))
    return document
