"""Facts about a submission's surroundings: all that its steps need to know, read once before the first of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.access import project_not_found, project_role
from muster.api.core.callers import Principal
from muster.api.core.cluster_objects import objects_named
from muster.api.core.database.recent import RecentAnswers
from muster.api.core.database.tables import FileRow, JobRow, ProjectRow, SecretRow
from muster.api.core.jobs import repository
from muster.api.core.jobs.repository import folder_of
from muster.api.core.limits import ProjectLimits
from muster.api.core.projects import DEFAULT_NAMESPACE, namespace_of
from muster.api.core.roles import Role
from muster.api.core.services import Services
from muster.api.core.settings import ApiSettings
from muster.local.sandbox import commits_of
from muster.recipe.document import Submission
from muster.recipe.job_inputs import files_named
from muster.storage.errors import StoreError
from muster.words.address import parse_address
from muster.words.model_sources import FromCommit
from muster.words.names import Label


@dataclass(frozen=True)
class SubmissionProject:
    """The project that a submission's label names, else the caller's own, with what it says of its jobs. `holder` is
    the project whose the namespace is that the submission names, or that such a project's jobs have."""

    row: ProjectRow
    limits: ProjectLimits
    holder: str | None


@dataclass(frozen=True)
class NamedFile:
    """A field that names an uploaded file; `row` is None where the project has none of that id."""

    path: str
    file_id: str
    row: FileRow | None


@dataclass(frozen=True)
class CommitOrigin:
    """The jobs that a field that names a commit can mean. `newest` is None where there is none, and `folder` that
    job's, if it holds the commit; `older` is another job of the same name that does.

    `step` is the commit's, whether the field says a number, `best` or `last`. `hidden` says that the folder that the
    field names is of a job that the project does not see, and `foreign` that it is not a folder of the job that the
    field names as well.
    """

    newest: JobRow | None = None
    folder: str | None = None
    step: int = 0
    older: str | None = None
    hidden: bool = False
    foreign: bool = False


@dataclass(frozen=True)
class SubmissionFacts:
    caller: Principal
    settings: ApiSettings
    project: ProjectRow
    limits: ProjectLimits
    namespace_holder: str | None
    secret_keys: Mapping[str, list[str]] = field(default_factory=dict)  # of the project's secrets, by their names
    files: tuple[NamedFile, ...] = ()
    origins: Mapping[str, CommitOrigin] = field(default_factory=dict)  # by the paths of `input_commits`
    evaluated: tuple[JobRow, ...] = ()  # the jobs that `program.after` can mean, newest first

    @property
    def in_containers(self) -> bool:
        """Return whether workers run in containers; else they are processes of this machine."""
        return self.settings.cluster != "local"


async def read_facts(
    services: Services, projects: RecentAnswers[SubmissionProject], caller: Principal, submission: Submission
) -> SubmissionFacts:
    """Read the rows in one session, and then the folders of commits that the job names. A job that names nothing beside
    its project, which a burst of submissions shares, asks the database nothing.

    Raises ApiError project_not_found, or forbidden where the caller may not submit to the project.
    """
    spec, layout = submission.spec, services.settings.layout
    project = await _project(services, projects, caller, submission)
    facts = SubmissionFacts(caller, services.settings, project.row, project.limits, project.holder)
    named, commits = files_named(spec), spec.input_commits()
    uses_secrets = any(use.kind == "secrets" for use in objects_named(spec.runtime))
    after = spec.program.after if spec.program is not None else None
    if not (named or commits or uses_secrets or after is not None):
        return facts
    namespace = submission.namespace or namespace_of(project.row)
    # In threads: to follow links may take as long as a file system does.
    uids = {
        path: await asyncio.to_thread(commits_of, source.uri, layout) for path, source in commits.items() if source.uri
    }
    async with services.database.read() as session:
        keys = await _secret_keys(session, project.row.name) if uses_secrets else {}
        files = await _files(session, project.row.name, named)
        evaluated = await repository.named(session, project.row.name, namespace, after.job) if after is not None else []
        candidates = {
            path: await repository.named(session, project.row.name, namespace, source.job)
            for path, source in commits.items()
            if source.job is not None
        }
        for path, jobs in candidates.items():
            if (folder := commits[path].uri) is not None:
                # The job of the folder may be too old to be among those of its name.
                of_folder = await repository.named(session, project.row.name, "", parse_address(folder).name)
                jobs += [row for row in of_folder if commits[path].job in (row.id, row.name)]
        hidden = {
            path: uid is not None and not await repository.named(session, project.row.name, "", uid)
            for path, uid in uids.items()
        }
    origins = {path: CommitOrigin(hidden=each) for path, each in hidden.items()}
    for path, jobs in candidates.items():
        if commits[path].uri is None:
            origins[path] = await _origin(services, jobs, commits[path])
        elif jobs and not hidden[path]:
            origins[path] = await _origin_in_folder(services, jobs, commits[path])
    return replace(facts, secret_keys=keys, files=files, origins=origins, evaluated=tuple(evaluated))


async def _project(
    services: Services, projects: RecentAnswers[SubmissionProject], caller: Principal, submission: Submission
) -> SubmissionProject:
    project_name = submission.labels.get(Label.PROJECT) or caller.home
    project_role(caller, project_name, Role.MEMBER)
    named = submission.namespace or DEFAULT_NAMESPACE
    if (recent := projects.get((project_name, named))) is not None:
        return recent
    changes = projects.changes
    either = or_(ProjectRow.name == project_name, ProjectRow.namespace == named)
    async with services.database.read() as session:
        rows = (await session.scalars(select(ProjectRow).where(either))).all()
    project = next((row for row in rows if row.name == project_name), None)
    if project is None:
        raise project_not_found(project_name)
    holder = next((row.name for row in rows if row.namespace == named), None)
    read = SubmissionProject(project, ProjectLimits.model_validate(project.limits), holder)
    projects.keep((project_name, named), read, changes)
    return read


async def _secret_keys(session: AsyncSession, project: str) -> dict[str, list[str]]:
    query = select(SecretRow).where(SecretRow.project == project).order_by(SecretRow.name)
    return {row.name: row.keys["keys"] for row in await session.scalars(query)}


async def _files(session: AsyncSession, project: str, named: tuple[tuple[str, str], ...]) -> tuple[NamedFile, ...]:
    """Files of another project are not there."""
    if not named:
        return ()
    query = select(FileRow).where(FileRow.id.in_({file_id for _, file_id in named}), FileRow.project == project)
    rows = {row.id: row for row in await session.scalars(query)}
    return tuple(NamedFile(path, file_id, rows.get(file_id)) for path, file_id in named)


async def _origin(services: Services, candidates: list[JobRow], source: FromCommit) -> CommitOrigin:
    """A name means the newest job of that name, as everywhere. An older one that has the commit is never taken instead
    of it, but offered by its id."""
    if not candidates:
        return CommitOrigin()
    newest, *older = candidates
    if (origin := await _origin_of(services, newest, source.step)).folder is not None:
        return origin
    for row in older:
        if (await _origin_of(services, row, source.step)).folder is not None:
            return replace(origin, older=row.id)
    return origin


async def _origin_in_folder(services: Services, candidates: list[JobRow], source: FromCommit) -> CommitOrigin:
    """The field names a job's folder as well: a submission of what an earlier one became, such as a clone."""
    assert source.uri is not None, "it names a folder"
    folder = parse_address(source.uri)
    row = next((row for row in candidates if folder_of(row) == folder), None)
    return CommitOrigin(candidates[0], foreign=True) if row is None else await _origin_of(services, row, source.step)


async def _origin_of(services: Services, row: JobRow, asked_step: int | str) -> CommitOrigin:
    folder = folder_of(row)
    if folder is None:
        return CommitOrigin(row)
    try:
        commits = await services.folders.run(folder, services.commits.read, folder)
    except StoreError:  # we may not look into it: the operator has seen what is in there
        seen = row.status.get("checkpoint")
        if seen is None or (isinstance(asked_step, int) and asked_step > int(seen["step"])):
            return CommitOrigin(row)
        best = seen.get("bestStep")
        return CommitOrigin(
            row, str(folder), _numbered(asked_step, int(seen["step"]), None if best is None else int(best))
        )
    steps = [commit.step for commit in commits]
    if not steps or (isinstance(asked_step, int) and asked_step not in steps):
        return CommitOrigin(row)
    best = next((commit.step for commit in commits if commit.best), None)
    return CommitOrigin(row, str(folder), _numbered(asked_step, steps[-1], best))


def _numbered(asked_step: int | str, last: int, best: int | None) -> int:
    """The number of the step, where `best` means the newest if none was judged: as the trainer reads the words."""
    if isinstance(asked_step, int):
        return asked_step
    return best if asked_step == "best" and best is not None else last
