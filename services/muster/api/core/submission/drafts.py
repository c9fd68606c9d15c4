"""Conversion of a document to a job that can be stored: it is parsed, defaults are filled in, and `from.job` becomes a
folder."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import or_, select

from muster.api.core.access import project_not_found, project_role
from muster.api.core.callers import Principal
from muster.api.core.database.tables import JobRow, ProjectRow
from muster.api.core.errors import ApiError
from muster.api.core.jobs import repository
from muster.api.core.services import Services
from muster.api.data.files import references
from muster.api.tenants.secrets import service as secrets
from muster.contract.address import Address, AddressError, job_folder, parse_address
from muster.contract.base import InvalidDocument, Problem
from muster.contract.cluster_objects import (
    namespace_problem,
    node_volume_problems,
    object_problems,
    objects_named,
)
from muster.contract.environment import steers_processes
from muster.contract.job_inputs import input_commits, with_input_folder
from muster.contract.layout import State
from muster.contract.model_config import FromCommit
from muster.contract.names import DEFAULT_PROJECT, FILE_ID, Label
from muster.contract.oddities import oddities_of
from muster.contract.program import ARCHIVES
from muster.contract.projects import ProjectLimits, Role, limit_problems, with_defaults
from muster.contract.redaction import redact, redact_values, secrets_in
from muster.contract.spec import JobSpec, Submission, parse_job
from muster.documents.document import Document
from muster.local.sandbox import commits_of, state_problems
from muster.storage.errors import StoreError

_FROM = "spec.training.model.from"


@dataclass(frozen=True)
class Draft:
    """A submission with every default filled in. `faults` say why it would be refused; without any it can be stored.
    `files` are the addresses of the uploaded files that it names, by their ids. `queue_limited` says that its project
    bounds how many jobs may be queued."""

    name: str
    namespace: str
    project: str
    labels: dict[str, str]
    spec: JobSpec
    faults: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    queue_limited: bool = False


@dataclass(frozen=True)
class Placed:
    """The project that a submission's label names, else the caller's own, with what it says of its jobs. `holder` is
    the project whose the namespace is that the submission names, or that such a project's jobs have."""

    project: ProjectRow
    limits: ProjectLimits
    holder: str | None


def parse_submission(document: Document) -> Submission:
    """Raises ApiError invalid_job with its faults and their places; no value of `runtime.env` is repeated in one."""
    try:
        return parse_job(document.data)
    except InvalidDocument as invalid:
        told = tuple(document.located(fault) for fault in invalid.problems)
        raise invalid_job(_without_secrets(told, secrets_in(document.data)), invalid.count) from None


def invalid_job(faults: tuple[Problem, ...], count: int = 0) -> ApiError:
    """The refusal of a job. `count` is how many faults there are in all, if not all of them are listed."""
    first, more = faults[0], len(faults) - 1
    rest = f" ({more} more in `errors`)" if more else ""
    if count > len(faults):
        rest = f" ({count - 1:,} more, of which `errors` names {more})"
    return ApiError("invalid_job", f"The job is not valid: {first}{rest}", errors=faults)


async def draft(services: Services, caller: Principal, submission: Submission) -> Draft:
    """Fill in what depends on the platform and the project. Reads the database, and commit files where it must; writes
    nothing.

    Raises ApiError project_not_found, or forbidden where the caller may not submit to the project.
    """
    placed = await _placed(services, caller, submission)
    project = placed.project
    labels = {key: value for key, value in submission.labels.items() if key not in (Label.PROJECT, Label.OWNER)}
    limits = placed.limits
    submission = submission.model_copy(update={"spec": with_defaults(submission.spec, limits)})
    namespace = submission.namespace or secrets.namespace_of(project)
    spec, default_checkpoint_uri = submission.spec, services.settings.default_checkpoint_uri
    if spec.checkpoint.uri is None and default_checkpoint_uri is not None:
        spec = _with(spec, checkpoint=_with(spec.checkpoint, uri=default_checkpoint_uri))
    containers = services.settings.cluster != "local"
    # In threads, here and below: they look up every path that the job names. A sweep does so for each trial.
    outside = () if containers else await asyncio.to_thread(_outside_of_containers, spec, services.settings.layout)
    faults = (*outside, *_namespace_problems(services, placed, namespace), *_source_problems(spec))
    if containers and not services.settings.host_paths:
        faults += node_volume_problems(spec.runtime)
    faults += await asyncio.to_thread(limit_problems, submission.spec, limits, project.name)
    files, missing = await references.resolve(services, project.name, spec)
    faults += missing
    known = await _secrets_of(services, project.name, spec)
    own = tuple(known) if namespace == secrets.namespace_of(project) or not containers else ()
    faults += object_problems(submission.spec, limits, project.name, own, strict=containers)
    faults += tuple(secrets.problems(spec, project.name, known, containers))
    for path, source in input_commits(spec).items():
        faults += await _commits_of_others(services, project.name, path, source)
        if source.job is None or source.uri is not None:
            continue
        found = await _resolve(services, project.name, namespace, source.job, source)
        if isinstance(found, Problem):
            faults = (*faults, replace(found, path=found.path.replace("training.model.from", path)))
        else:
            spec = with_input_folder(spec, path, found)
    warnings = await asyncio.to_thread(_warnings, spec)
    limited = limits.quota.bounds_queue
    return Draft(submission.name, namespace, project.name, labels, spec, faults, warnings, files, limited)


async def _placed(services: Services, caller: Principal, submission: Submission) -> Placed:
    """Raises ApiError project_not_found, or forbidden where the caller may not submit to the project."""
    wanted = submission.labels.get(Label.PROJECT) or caller.home
    project_role(caller, wanted, Role.MEMBER)
    named = submission.namespace or secrets.DEFAULT_NAMESPACE
    if (known := services.projects.get((wanted, named))) is not None:
        return known
    changes = services.projects.changes
    either = or_(ProjectRow.name == wanted, ProjectRow.namespace == named)
    async with services.database.read() as session:
        rows = (await session.scalars(select(ProjectRow).where(either))).all()
    project = next((row for row in rows if row.name == wanted), None)
    if project is None:
        raise project_not_found(wanted)
    holder = next((row.name for row in rows if row.namespace == named), None)
    found = Placed(project, ProjectLimits.model_validate(project.limits), holder)
    services.projects.keep((wanted, named), found, changes)
    return found


def _namespace_problems(services: Services, placed: Placed, namespace: str) -> tuple[Problem, ...]:
    """A project with a namespace has no other; `default` has those that an admin lists, and that are nobody else's.

    On one machine a namespace is only a part of a job's name, so `default` has all that are nobody else's, unless an
    admin lists some.
    """
    project, settings = placed.project, services.settings
    if settings.is_system_namespace(namespace):
        words = f"namespace {namespace!r} is the platform's or Kubernetes' own, and never a job's; name another"
        return (Problem("metadata.namespace", words),)
    if project.namespace is None:
        free = settings.cluster == "local" and placed.limits.namespaces is None and placed.holder is None
        problem = None if free else namespace_problem(namespace, placed.limits, placed.holder)
        return (problem,) if problem else ()
    if project.namespace == namespace:
        return ()
    own = f"has the namespace {project.namespace!r} alone"
    words = f"project {project.name!r} {own}; leave it out, or name its project by the label {Label.PROJECT}"
    return (Problem("metadata.namespace", words),)


async def _secrets_of(services: Services, project: str, spec: JobSpec) -> dict[str, list[str]]:
    """The keys of the project's secrets by name; nothing is read for a job that names none."""
    if not any(use.kind == "secrets" for use in objects_named(spec.runtime)):
        return {}
    async with services.database.read() as session:
        return {row.name: row.keys["keys"] for row in await secrets.list_all(session, project)}


def _source_problems(spec: JobSpec) -> tuple[Problem, ...]:
    """Refuse a program's source that no worker can unpack: most of all a folder, which is the submitter's own."""
    source = spec.program.source if spec.program is not None else None
    if source is None or FILE_ID.fullmatch(source):
        return ()
    address = parse_address(source)
    if address.is_absolute and address.path.endswith(ARCHIVES):
        return ()
    words = f"must be an uploaded file's id or an archive's address (.tar.gz), not {source[:200]!r}"
    return (Problem("spec.program.source", f"{words}; `muster submit` uploads a folder by itself"),)


def _outside_of_containers(spec: JobSpec, layout: State) -> tuple[Problem, ...]:
    """Return the problems of settings that have another meaning, or none, or belong to the platform, where workers are
    processes of this machine."""
    found = []
    for index, variable in enumerate(spec.runtime.env):
        at = f"spec.runtime.env[{index}]"
        if steers_processes(variable.name):
            words = f"{variable.name} decides what a process of this machine loads, and may only be set where workers"
            found.append(Problem(f"{at}.name", f"{words} run in containers; leave it out"))
        if variable.value_from and variable.value_from.config_map_key_ref:
            words = "there are no ConfigMaps on this machine; give a value, or a secretKeyRef"
            found.append(Problem(f"{at}.valueFrom.configMapKeyRef", words))
    return (*found, *state_problems(spec, layout))


async def _commits_of_others(services: Services, project: str, path: str, source: FromCommit) -> tuple[Problem, ...]:
    """Refuse the folder of a job that people of the project do not see, where the platform keeps the commits itself.
    `path` is that of the field, as of `input_commits`."""
    if source.uri is None:
        return ()
    if (uid := await asyncio.to_thread(commits_of, source.uri, services.settings.layout)) is None:
        return ()
    async with services.database.read() as session:
        if await repository.named(session, project, "", uid):
            return ()
    words = f"is the folder of no job of project {project!r}; name the job by `job`"
    return (Problem(f"spec.{path}.uri", words),)


async def _resolve(
    services: Services, project: str, namespace: str, reference: str, source: FromCommit
) -> str | Problem:
    """The folder of the job that `reference` means, if it has the commit; else what is wrong.

    A name means the newest job of that name, as everywhere. An older one that has the commit is never taken instead of
    it, but offered by its id.
    """
    async with services.database.read() as session:
        candidates = await repository.named(session, project, namespace, reference)
    if not candidates:
        where = f"namespace {namespace!r}" + (f" of project {project!r}" if project != DEFAULT_PROJECT else "")
        return Problem(f"{_FROM}.job", f"there is no job {reference!r} in {where}")
    newest, *older = candidates
    if (folder := await _folder_with(services, newest, source.step)) is not None:
        return str(folder)
    offer = ""
    for row in older:
        if await _folder_with(services, row, source.step) is not None:
            offer = f"; an older job of that name has it: name that one by its id, {row.id}"
            break
    if isinstance(source.step, int):
        message = (
            f"job {reference!r} ({newest.id}) has no checkpoint of step {source.step}"
            f"{offer or '; `muster checkpoints ls` lists them'}"
        )
        return Problem(f"{_FROM}.step", message)
    wait = "; wait for its first checkpoint (event checkpoint.committed)"
    message = f"job {reference!r} ({newest.id}) has no checkpoint yet{offer or wait}"
    return Problem(f"{_FROM}.job", message)


def folder_of(row: JobRow) -> Address | None:
    """Return the job's checkpoint folder, or None if its spec names none (it was not submitted through this API)."""
    base = (row.spec.get("checkpoint") or {}).get("uri")
    try:
        return job_folder(str(base), row.id) if base else None
    except AddressError:  # accepted by an older Muster
        return None


async def _folder_with(services: Services, row: JobRow, step: int | str) -> Address | None:
    folder = folder_of(row)
    return folder if folder is not None and await _has_commit(services, folder, row, step) else None


async def _has_commit(services: Services, folder: Address, row: JobRow, step: int | str) -> bool:
    try:
        steps = [commit.step for commit in await services.folders.run(folder, services.commits.read, folder)]
    except StoreError:  # we may not look into it: the operator has seen what is in there
        seen = row.status.get("checkpoint")
        return seen is not None and (not isinstance(step, int) or step <= int(seen["step"]))
    return step in steps if isinstance(step, int) else bool(steps)


def _with(model: Any, /, **changes: Any) -> Any:
    return model.model_copy(update=changes)


def _without_secrets(faults: tuple[Problem, ...], secrets: frozenset[str]) -> tuple[Problem, ...]:
    return tuple(
        replace(f, path=redact_values(f.path, secrets), message=redact_values(f.message, secrets))
        if f.path.startswith("spec.runtime")
        else replace(f, message=redact(f.message))
        for f in faults
    )


def _warnings(spec: JobSpec) -> tuple[Problem, ...]:
    """Return the warnings about settings that are valid but seldom intended, or that look wrong from this machine."""
    if spec.training is None:
        return ()
    odd = tuple(Problem(f"spec.training.{path}", words) for path, words in oddities_of(spec.training))
    sources = ((f"spec.training.{path}.source", source.source) for path, source in spec.training.sources())
    return (*odd, *(warning for path, source in sources if (warning := _source_warning(path, source))))


def _source_warning(path: str, source: str) -> Problem | None:
    if FILE_ID.fullmatch(source) or ("://" in source and not source.startswith("file:")):
        return None
    address = parse_address(source)
    if address.scheme != "file" or any(letter in address.path for letter in "*?["):
        return None
    if not address.is_absolute:
        return Problem(path, "is a relative path: a worker does not share your working directory; give an absolute one")
    try:
        if not address.local.exists():
            there = f"there is no {address.path[:300]!r} on the API's machine"
            return Problem(path, f"{there}; the workers need it on theirs")
    except (OSError, AddressError):
        return Problem(path, "can't be looked up on the API's machine")
    return None
