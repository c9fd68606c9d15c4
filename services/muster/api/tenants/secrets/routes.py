"""`/projects/{project}/secrets`: listed for all who see the project, written by its maintainers, read by nobody."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request, Response
from pydantic import AfterValidator, Field

from muster.api.core.access import project_not_found, project_role
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Caller, Scope, needs
from muster.api.core.database.tables import ProjectRow
from muster.api.core.errors import ApiError
from muster.api.core.http.body import read_body
from muster.api.core.http.openapi import body, example_reply, problems
from muster.api.core.http.path_parts import ProjectName
from muster.api.core.http.reply import Reply, reply_of
from muster.api.core.roles import Role
from muster.api.core.services import ServicesDependency
from muster.api.tenants.secrets import service
from muster.documents.document import Document
from muster.words.address import refuse_metadata_url
from muster.words.base import DocumentProblem, InvalidDocument, Spec, Time, parse
from muster.words.names import JOB_NAME
from muster.words.times import rfc3339

reads, manages = Depends(needs(Scope.READ)), Depends(needs(Scope.ADMIN))
router = APIRouter(prefix="/projects/{project}/secrets", tags=["secrets"])

SecretName = Annotated[
    str, Path(max_length=48, pattern=f"^{JOB_NAME.pattern}$", description="The secret's name in its project.")
]


VALUE_LENGTH_MAX = 65_536  # Linux takes no variable longer than 128 KiB, and a cluster no Secret larger than 1 MiB
KEYS_MAX = 64


def _usable(value: str) -> str:
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError("must be text without NUL and halves of characters, which no variable can hold")
    refuse_metadata_url(value)
    return value


Key = Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
Value = Annotated[str, Field(min_length=1, max_length=VALUE_LENGTH_MAX), AfterValidator(_usable)]


class SecretRequest(Spec):
    """A secret as it is to be: all of its entries. They are shown to nobody."""

    data: Annotated[dict[Key, Value], Field(min_length=1, max_length=KEYS_MAX)]
    """The value of each entry by its key."""


class Secret(Reply):
    """A secret without its values. `changed_by` is who set it last."""

    name: str
    keys: list[str]
    created_at: Time
    changed_at: Time
    changed_by: str


class SecretList(Reply):
    items: list[Secret]


_EXAMPLE: dict[str, Any] = {
    "name": "hf-token",
    "keys": ["value"],
    "createdAt": rfc3339(1_795_000_000.0),
    "changedAt": rfc3339(1_795_000_000.0),
    "changedBy": "ann",
}
_WORDS = f"must map keys (letters, digits, '-', '_' and '.') to texts of 1 to {VALUE_LENGTH_MAX:,} characters"


@router.get(
    "",
    dependencies=[reads],
    summary="List a project's secrets",
    responses={200: example_reply({"items": [_EXAMPLE]}, "Names and keys, by name"), **problems("project_not_found")},
)
async def list_secrets(services: ServicesDependency, caller: Caller, project: ProjectName) -> SecretList:
    """Returns the secrets that the project's jobs may name, with who set them and when. Their values are never
    returned."""
    project_role(caller, project, Role.VIEWER)
    async with services.database.read() as session:
        if await session.get(ProjectRow, project) is None:
            raise project_not_found(project)
        rows = await service.list_all(session, project)
    return SecretList(items=[reply_of(Secret, row, keys=row.keys["keys"]) for row in rows])


@router.put(
    "/{name}",
    dependencies=[manages],
    summary="Set a secret",
    responses={
        200: example_reply(_EXAMPLE, "Changed"),
        201: {**example_reply(_EXAMPLE, "Made"), "model": Secret},
        **problems(
            "project_not_found", "invalid_secret", "invalid_document", "unsupported_media_type", "body_too_large",
            "secrets_unavailable",
        ),
    },
    openapi_extra=body(SecretRequest, {"data": {"value": "hf_…"}}),
)  # fmt: skip
async def put_secret(
    request: Request,
    response: Response,
    services: ServicesDependency,
    caller: Caller,
    project: ProjectName,
    name: SecretName,
) -> Secret:
    """Sets a secret and replaces all of its entries. Workers that start from now on get the new entries; running
    workers keep the old ones. The jobs of all maintainers and members of the project can read the secret. Requires the
    maintainer role."""
    project_role(caller, project, Role.MAINTAINER)
    new_secret = await _read(request)
    async with services.database.write() as session:
        row, before = await service.put(session, services.cluster, caller.person, project, name, new_secret.data)
        was = {"keys": before} if before is not None else None
        record(session, caller, AuditedAct("secret.set", name, project, was, {"keys": row.keys["keys"]}))
    response.status_code = 201 if before is None else 200
    return reply_of(Secret, row, keys=row.keys["keys"])


@router.delete(
    "/{name}",
    status_code=204,
    response_class=Response,
    dependencies=[manages],
    summary="Delete a secret",
    responses={
        204: {"description": "It is gone; workers that run keep what they have"},
        **problems("project_not_found", "secret_not_found", "secrets_unavailable"),
    },
)
async def delete_secret(
    services: ServicesDependency, caller: Caller, project: ProjectName, name: SecretName
) -> Response:
    """Deletes a secret. A job that names it can't start any more, and reports that. Requires the maintainer role."""
    project_role(caller, project, Role.MAINTAINER)
    async with services.database.write() as session:
        keys = await service.remove(session, services.cluster, project, name)
        if keys is None:
            raise ApiError("secret_not_found", f"Project {project!r} has no secret {name!r}.")
        record(session, caller, AuditedAct("secret.deleted", name, project, {"keys": keys}))
    return Response(status_code=204)


async def _read(request: Request) -> SecretRequest:
    """The body. No refusal of it repeats anything that may be of a value."""
    try:
        return await read_body(request, _checked)
    except ApiError as error:
        if error.code != "invalid_document":
            raise
        raise ApiError(error.code, "The body is no JSON or YAML document; none of it is repeated here.") from None


def _checked(document: Document) -> SecretRequest:
    try:
        return parse(SecretRequest, document.data)
    except InvalidDocument:
        fault = DocumentProblem("data", _WORDS)
        raise ApiError("invalid_secret", f"The secret can't be kept: {fault}.", errors=(fault,)) from None
