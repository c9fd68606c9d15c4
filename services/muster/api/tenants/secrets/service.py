"""Secrets in the database, which knows their names and keys, and in the cluster, which keeps their values."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.access import project_not_found
from muster.api.core.cluster.cluster import JobCluster, SecretName, SecretRefused
from muster.api.core.cluster_objects import object_problems
from muster.api.core.database.tables import ProjectRow, SecretRow
from muster.api.core.errors import ApiError
from muster.api.core.projects import namespace_of
from muster.api.core.submission.drafts import SubmissionDraft
from muster.api.core.submission.facts import SubmissionFacts
from muster.recipe.document import JobSpec
from muster.words.base import DocumentProblem
from muster.words.environment import SecretUse, secret_uses, steers_processes, variables_of


async def list_all(session: AsyncSession, project: str) -> list[SecretRow]:
    query = select(SecretRow).where(SecretRow.project == project).order_by(SecretRow.name)
    return list((await session.scalars(query)).all())


async def put(
    session: AsyncSession, cluster: JobCluster, person: str, project: str, name: str, data: Mapping[str, str]
) -> tuple[SecretRow, list[str] | None]:
    """The row as it is now, and the keys before; None for a new one. The cluster has it when this returns.

    Raises ApiError project_not_found, secrets_unavailable.
    """
    owner = await session.get(ProjectRow, project, with_for_update=True)  # of two at once, one comes after the other
    if owner is None:
        raise project_not_found(project)
    row, now = await session.get(SecretRow, (project, name)), time.time()
    before = list(row.keys["keys"]) if row is not None else None
    if row is None:
        row = SecretRow(project=project, name=name, created_at=now)
        session.add(row)
    row.keys, row.changed_at, row.changed_by = {"keys": sorted(data)}, now, person
    await session.flush()
    with _as_api_errors():
        await cluster.write_secret(SecretName(project, namespace_of(owner), name), data)
    return row, before


async def remove(session: AsyncSession, cluster: JobCluster, project: str, name: str) -> list[str] | None:
    """The keys that it had; None where there is no such secret. Raises ApiError project_not_found and others."""
    owner = await session.get(ProjectRow, project, with_for_update=True)
    if owner is None:
        raise project_not_found(project)
    row = await session.get(SecretRow, (project, name))
    if row is None:
        return None
    await session.delete(row)
    await session.flush()
    with _as_api_errors():
        await cluster.delete_secret(SecretName(project, namespace_of(owner), name))
    return list(row.keys["keys"])


async def remove_all(session: AsyncSession, cluster: JobCluster, project: str) -> None:
    for row in await list_all(session, project):
        await remove(session, cluster, project, row.name)


def secret_references(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    """Check the secrets and other objects that the job names: a step of its submission."""
    own = tuple(facts.secret_keys) if draft.namespace == namespace_of(facts.project) or not facts.in_containers else ()
    strict = facts.in_containers
    draft = draft.with_faults(*object_problems(draft.spec, facts.limits, draft.project, own, strict=strict))
    return draft.with_faults(*_problems(draft.spec, draft.project, facts.secret_keys, facts.in_containers))


def _problems(
    spec: JobSpec, project: str, by_name: Mapping[str, list[str]], containers: bool
) -> Iterator[DocumentProblem]:
    """Yield the problems of the job's references to secrets. `by_name` has the keys of the project's secrets by name.

    In `containers`, a job may also name Secrets that somebody else created in its namespace and its project lists
    (muster.api.core.cluster_objects). They can't be checked here. It may also set any variable that decides what its
    processes load.
    """
    for use in secret_uses(spec.runtime.env, spec.runtime.env_from):
        keys = by_name.get(use.secret)
        if keys is None:
            if not use.optional and not containers:
                yield DocumentProblem(f"{use.path}.name", _missing(use, project, sorted(by_name)))
        elif use.key is not None and use.key not in keys:
            if not use.optional:
                words = f"secret {use.secret!r} has no entry {use.key!r}; it has {', '.join(keys)}"
                yield DocumentProblem(f"{use.path}.key", words)
        elif not containers:
            for variable in filter(steers_processes, variables_of(use, keys)):
                words = f"{variable} decides what a process of this machine loads, and can't come from a secret either"
                yield DocumentProblem(use.path, words)


def _missing(use: SecretUse, project: str, keys: list[str]) -> str:
    there = f"there are {', '.join(keys[:20])}" if keys else "it has none"
    return f"project {project!r} has no secret {use.secret!r} ({there}); set it by `muster secrets set {use.secret}`"


@contextlib.contextmanager
def _as_api_errors() -> Iterator[None]:
    """Say as an ApiError what the cluster refuses, without anything of the values."""
    try:
        yield
    except SecretRefused as refused:
        raise ApiError("secrets_unavailable", f"Nothing was changed: {refused}.") from None
    except OSError:
        detail = "The cluster does not answer, so nothing was changed. Retry in a moment."
        raise ApiError("secrets_unavailable", detail, headers={"Retry-After": "2"}) from None
