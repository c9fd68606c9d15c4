"""`/settings`: tokens, made, rotated and revoked; projects, made, with members, quotas and what was used."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from muster.web import api
from muster.web.api import ApiError, Principal, Role, Scope, Services, ServicesDependency
from muster.web.notes import PageNote, go_on
from muster.web.rendering import page
from muster.web.session import Posted, Visitor
from muster.words.names import JOB_NAME, PERSON_NAME

router = APIRouter(prefix="/settings", include_in_schema=False)

HERE = "/settings"
ROLES = tuple(role for role in Role if role != Role.ADMIN)  # which a project gives
Id = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[^\x00:]*$")]
# What a quota limits, in words, by its keys in the project's document.
_LIMITS = (
    ("gpus", "GPUs at a time"),
    ("gangs", "gangs at a time"),
    ("processes", "processes at a time"),
    ("queuedJobs", "jobs in the queue"),
    ("gpuHoursPerMonth", "GPU-hours a month"),
    ("moneyPerMonth", "a month"),
)
_NOT_OFFERED = ("forbidden", "project_not_found", "token_not_found", "webhook_not_found", "delivery_not_found")


@router.get("")
async def show_settings(request: Request, services: ServicesDependency, visitor: Visitor) -> Response:
    return await _show(request, services, visitor)


async def _show(
    request: Request,
    services: Services,
    visitor: Principal,
    made: dict[str, Any] | None = None,
    refused: ApiError | None = None,
) -> Response:
    """`made` is a token that has just been made: nothing keeps it, so no other page can show it."""
    manages = visitor.may(Scope.ADMIN)
    tokens = await api.tokens(services, visitor) if manages else []
    projects = await api.project_list(services, visitor)
    may_choose = {each["name"]: manages and _maintains(visitor, each["name"]) for each in projects}
    return page(
        request,
        "settings.html",
        visitor,
        refused.status if refused is not None else 200,
        current="settings",
        made=made,
        fault=refused.detail if refused is not None else "",
        manages=manages,
        rules=visitor.rules,
        own=[token for token in tokens if token["person"] == visitor.person],
        others=[token for token in tokens if token["person"] != visitor.person],
        projects=[
            (project, limits_of(project["limits"]["quota"], project["spent"]["currency"])) for project in projects
        ],
        scopes=tuple(Scope),
        roles=ROLES,
        may_choose=may_choose,
        webhooks={name: await api.webhooks(services, visitor, name) for name, may in may_choose.items() if may},
    )


def limits_of(quota: dict[str, Any], currency: str) -> str:
    """Return the quotas of the project and of each person in it; empty if nothing is limited."""

    def limits_text(limits: dict[str, Any]) -> str:
        given = [(key, limits[key], words) for key, words in _LIMITS if limits.get(key) is not None]
        return ", ".join(
            f"{value:,g} {currency if key == 'moneyPerMonth' else ''} {words}".replace("  ", " ")
            for key, value, words in given
        )

    whole, person = limits_text(quota), limits_text(quota.get("person") or {})
    return "; ".join(filter(None, (whole, f"each person: {person}" if person else "")))


def _maintains(visitor: Principal, project: str) -> bool:
    role = visitor.role_in(project)
    return role is not None and role.covers(Role.MAINTAINER)


def must_manage(caller: Principal) -> None:
    """Raises ApiError forbidden for a session of a token that may not manage."""
    if not caller.may(Scope.ADMIN):
        detail = "This needs a token with the scope admin, which manages what its person may; yours has less."
        raise ApiError("forbidden", detail)


@router.post("/tokens")
async def make_token(request: Request, services: ServicesDependency, form: Posted) -> Response:
    """The answer is the only page that shows the token."""
    must_manage(form.caller)
    days, project = form.one("days").strip(), form.one("project")
    body: dict[str, Any] = {"name": form.one("name").strip(), "scopes": [form.one("scope")]}
    body |= {"allProjects": True} if not project else {"project": project}
    if days:
        body["expiresInDays"] = int(days) if days.isascii() and days.isdigit() else days
    try:
        made = api.document_of(await api.token_routes.made(services, form.caller, api.token_request(body)))
    except ApiError as refused:
        if refused.status >= 500:
            raise
        return await _show(request, services, form.caller, refused=refused)
    return await _show(request, services, form.caller, made)


@router.post("/tokens/{token_id}/rotate")
async def rotate_token(request: Request, services: ServicesDependency, form: Posted, token_id: Id) -> Response:
    """The old one is taken for a day too, so that whatever holds it can be given the new one."""
    must_manage(form.caller)
    made = await api.token_routes.rotated(services, form.caller, token_id, api.RotateRequest(overlap_hours=24))
    return await _show(request, services, form.caller, api.document_of(made))


@router.post("/tokens/{token_id}/revoke")
async def revoke_token(services: ServicesDependency, form: Posted, token_id: Id) -> Response:
    must_manage(form.caller)
    return await done(api.token_routes.revoke_token(services, form.caller, token_id), "It opens nothing any more.")


@router.post("/projects")
async def make_project(services: ServicesDependency, form: Posted) -> Response:
    """Create a project. An existing one is left as it is, because its limits would be replaced by none."""
    must_manage(form.caller)
    name, namespace = form.one("name").strip(), form.one("namespace").strip()
    if not JOB_NAME.fullmatch(name):
        return go_on(
            HERE,
            [PageNote(False, "A name has 48 lower-case letters, digits and '-' at most, and begins with a letter.")],
        )

    async def make() -> None:
        body = api.project_request({"namespace": namespace} if namespace else {})
        await api.project_routes.put(services, form.caller, name, body, only_new=True)

    return await done(make(), f"Project {name} is there; give somebody a role in it.")


@router.post("/projects/{project}/members")
async def give_role(services: ServicesDependency, form: Posted, project: Id) -> Response:
    must_manage(form.caller)
    person, role = form.one("person").strip(), form.one("role")
    if role not in ROLES or not re.fullmatch(PERSON_NAME, person):
        words = "Give a name of lower-case letters, digits, '.', '_' and '-', and a role."
        return go_on(HERE, [PageNote(False, words)])
    given = api.project_routes.give_role(services, form.caller, project, person, Role(role))
    return await done(given, f"{person} is a {role} of {project}.")


@router.post("/projects/{project}/members/{person}/remove")
async def remove_member(services: ServicesDependency, form: Posted, project: Id, person: Id) -> Response:
    must_manage(form.caller)
    removed = api.project_routes.delete_member(services, form.caller, project, person)
    return await done(removed, f"{person} sees nothing of {project} any more.")


async def done(work: Awaitable[object], words: str, onward: str = HERE) -> Response:
    """Back to the page, with what was done or what was wrong in the form.

    Raises ApiError for what the page does not offer to who sent it: what they may not do, or may not see.
    """
    try:
        await work
    except ApiError as refused:
        if refused.status >= 500 or refused.code in _NOT_OFFERED:
            raise
        return go_on(onward, [PageNote(False, refused.detail)])
    return go_on(onward, [PageNote(True, words)])
