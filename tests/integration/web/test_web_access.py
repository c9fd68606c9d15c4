"""Every page and form for every role, in one's own and in another project: the list is that of the app's own routes.

What one may not see is answered as what is not there (404), what one sees and may not do by 403; the API's routes are
held to the same by tests/integration/api/test_api_access.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.routing import iter_route_contexts
from tests.integration.api.people import PROJECTS, People, settle, token_of
from tests.integration.api.platform import BASE, Platform, frames, platform, served
from tests.integration.api.rights import (
    ACTS,
    ANYBODY,
    MAINTAINS,
    MAINTAINS_UNSEEN,
    NOBODY,
    OPEN,
    RULES_ALL,
    SEES,
    SUBMITS,
    WHO,
    F,
    H,
    M,
    expected,
    person_of,
)
from tests.integration.web.pages import Browser, notes, write_log
from tests.polling import WAIT_SECONDS_MAX

from muster.api.core.http import documents
from muster.api.core.settings import ApiSettings
from muster.web import live
from muster.web.app import create_app

_HOOKS = "/settings/projects/{project}/webhooks"
RIGHTS: dict[tuple[str, str], dict[str, str] | None] = {
    ("GET", "/"): OPEN,
    ("GET", "/docs"): OPEN,
    ("GET", "/docs/{path:path}"): OPEN,
    ("GET", "/llms.txt"): OPEN,
    ("GET", "/api/v1/docs"): OPEN,
    ("GET", "/api/v1/openapi.json"): OPEN,
    ("GET", "/static/{version}/{name:path}"): OPEN,
    ("GET", "/favicon.ico"): OPEN,
    ("GET", "/sign-in"): OPEN,
    ("POST", "/sign-in"): OPEN,
    ("POST", "/sign-out"): OPEN,
    ("GET", "/sign-in/provider"): OPEN,
    ("GET", "/sign-in/callback"): OPEN,
    ("GET", "/live"): SEES,
    ("GET", "/jobs"): ANYBODY,
    ("GET", "/jobs.csv"): ANYBODY,
    ("GET", "/jobs/curves"): ANYBODY,
    ("POST", "/jobs/act"): ACTS,
    ("POST", "/jobs/delete"): ACTS,
    ("GET", "/sweeps"): ANYBODY,
    ("GET", "/sweeps/{sweep_id}"): SEES,
    ("POST", "/sweeps/{sweep_id}/stop"): ACTS,
    ("POST", "/sweeps/{sweep_id}/cancel"): ACTS,
    ("GET", "/submit"): ANYBODY,
    ("POST", "/submit"): SUBMITS,
    ("GET", "/settings"): ANYBODY,
    ("POST", "/settings/tokens"): SEES,  # a token of one's own
    ("POST", "/settings/tokens/{token_id}/rotate"): MAINTAINS_UNSEEN,
    ("POST", "/settings/tokens/{token_id}/revoke"): MAINTAINS_UNSEEN,
    ("POST", "/settings/projects"): RULES_ALL,
    ("POST", "/settings/projects/{project}/members"): MAINTAINS,
    ("POST", "/settings/projects/{project}/members/{person}/remove"): MAINTAINS,
    ("GET", _HOOKS): MAINTAINS,
    ("POST", _HOOKS): MAINTAINS,
    ("POST", f"{_HOOKS}/{{name}}/test"): MAINTAINS,
    ("POST", f"{_HOOKS}/{{name}}/delete"): MAINTAINS,
    ("POST", f"{_HOOKS}/{{name}}/deliveries/{{message_id}}/replay"): MAINTAINS,
    ("GET", "/compare"): ANYBODY,  # and is told that a job of another project is not there
    ("GET", "/fleet"): ANYBODY,
    ("GET", "/jobs/{job_id}"): SEES,
    ("GET", "/jobs/{job_id}/curves"): SEES,
    ("GET", "/jobs/{job_id}/events"): SEES,
    ("GET", "/jobs/{job_id}/checkpoints"): SEES,
    ("GET", "/jobs/{job_id}/checkpoints/{step}"): SEES,
    ("GET", "/jobs/{job_id}/checkpoints/{step}/export"): SEES,
    ("POST", "/jobs/{job_id}/checkpoints/{step}/{verb}"): ACTS,
    ("GET", "/jobs/{job_id}/chat"): SEES,
    ("GET", "/jobs/{job_id}/data"): SEES,
    ("GET", "/jobs/{job_id}/samples"): SEES,
    ("GET", "/jobs/{job_id}/config"): SEES,
    ("GET", "/jobs/{job_id}/clone"): SEES,  # where a new job is written
    ("GET", "/jobs/{job_id}/logs"): SEES,
    ("GET", "/jobs/{job_id}/logs/lines"): SEES,
    ("GET", "/jobs/{job_id}/logs/download"): SEES,
    ("POST", "/jobs/{job_id}/{verb}"): ACTS,
}


@dataclass(frozen=True)
class Session:
    """What a browser keeps that signed in: its cookies, and what its pages' forms carry."""

    cookies: dict[str, str] = field(default_factory=dict)
    form_token: str = ""


def routes() -> set[tuple[str, str]]:
    """Method and path of everything that answers and is not in the OpenAPI document."""
    app = create_app(ApiSettings(state=Path("unused")))
    return {
        (method, str(route.path))
        for route in iter_route_contexts(app.routes)
        if not route.include_in_schema
        for method in (route.methods or {"ANY"}) - {"HEAD"}
    }


def test_every_page_says_who_may_use_it() -> None:
    assert set(RIGHTS) == routes()


@pytest.fixture
async def people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[People]:
    monkeypatch.setattr(live, "REST_SECONDS", 0.0)
    monkeypatch.setattr(documents, "SITE", tmp_path / "site")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "llms.txt").write_text("# Muster\n")
    state = tmp_path / "state"
    async with platform(
        state, make=create_app, auth=True, stream_seconds_max=0.05, webhook_networks=["127.0.0.0/8"]
    ) as here:
        found = await settle(here, state)
        for project in PROJECTS:
            write_log(here.state.worker(found.jobs[project], 1, 0), range(1, 3), "some words")
            await here.client.get(f"/api/v1/jobs/{found.jobs[project]}", headers=found.admin)
            here.commit(found.jobs[project], 20)
            await found.give(project, "robot", "member")
            await found.sweep(project)
        await found.ask("admin", "PUT", "/people/robot", json={"kind": "service"})
        yield found


async def test_every_page_for_every_role_in_both_projects(people: People) -> None:
    sessions = {who: await _session(people, who) for who in people.headers}
    wrong = {}
    for (method, path), rights in RIGHTS.items():
        for project, who in itertools.product(PROJECTS, (None, *(WHO if rights is not None else ()))):
            person = person_of(who, project) if who is not None else None
            session = sessions[person] if person else Session()
            async with _client(people.here, session.cookies) as client:
                got, reply = await _ask(people, client, session, method, path, project, person)
            if got != expected(rights, who):
                wrong[method, path, project, who] = (expected(rights, who), got, reply.status_code, reply.text[-400:])
            if who in (None, "outsider"):
                assert f"{project}-job" not in reply.text, (path, "tells another project of its job")
                assert f"{project}-owner" not in reply.text, (path, "tells another project of its people")
    assert wrong == {}


def _client(here: Platform, cookies: dict[str, str]) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=here.app)
    return httpx2.AsyncClient(transport=transport, base_url=BASE, timeout=30, cookies=cookies)


async def _session(people: People, person: str) -> Session:
    async with _client(people.here, {}) as client:
        await Browser(client).sign_in(token_of(people, person))
        return Session(dict(client.cookies), await Browser(client).form_token("/settings"))


async def _ask(
    people: People,
    client: httpx2.AsyncClient,
    session: Session,
    method: str,
    path: str,
    project: str,
    person: str | None,
) -> tuple[str, httpx2.Response]:
    """What that person is answered about the project's job, a token of its service account, or its member zoe."""
    browser, job = Browser(client), people.jobs[project]
    manages = person is not None and person.endswith(("maintainer", "admin"))  # the others change nothing
    if "{token_id}" in path and (manages or project not in people.tokens):
        people.tokens[project] = (await people.token("robot", project))["id"]
    if path.endswith(("/members", "/remove")):
        await people.give(project, "zoe", "viewer")
    message = await _told(people, project) if path.startswith(f"{_HOOKS}/") else ""
    named = {
        "{message_id}": message,
        "{name}": "hook",
        "{job_id}": job,
        "{sweep_id}": people.sweeps[project],
        "{step}": "20",
        "{verb}": "pin" if "checkpoints" in path else "suspend",
        "{project}": project,
        "{person}": "zoe",
        "{token_id}": people.tokens.get(project, ""),
        "{version}": "now",
        "{name:path}": "muster.css",
        "{path:path}": "llms.txt",
    }
    place = path
    for name, value in named.items():
        place = place.replace(name, value)
    place += {"/live": f"?job={job}", "/compare": f"?jobs={job}", "/jobs/curves": f"?jobs={job}"}.get(path, "")
    if method == "GET":
        reply = await browser.get(place)
    else:
        fields = _fields(people, path, project) if person else {"token": token_of(people, f"{project}-viewer")}
        reply = await browser.post(place, {"form_token": session.form_token, **fields})
    return await _outcome(browser, path, reply), reply


async def _told(people: People, project: str) -> str:
    """A webhook of the project that nobody listens to, as new; the id of a message to it."""
    place = f"/projects/{project}/webhooks"
    await people.ask("admin", "DELETE", f"{place}/hook")
    made = await people.ask("admin", "POST", place, json={"name": "hook", "url": "http://127.0.0.1:9/"})
    assert made.status_code == 201, made.text
    return str((await people.ask("admin", "POST", f"{place}/hook:test")).json()["id"])


def _fields(people: People, path: str, project: str) -> dict[str, Any]:
    """What our own pages would send from there."""
    text = f"metadata: {{name: try-{next(_counter)}, labels: {{muster.dev/project: {project}}}}}\nspec: {_SPEC}\n"
    fields: dict[str, dict[str, Any]] = {
        "/jobs/act": {"verb": "suspend", "job": people.jobs[project], "next": "/jobs"},
        "/jobs/delete": {"job": people.jobs[project], "next": "/jobs"},
        "/sweeps/{sweep_id}/stop": {"trial": "1"},
        "/submit": {"verb": "submit", "document": text, "key": f"key-{next(_counter)}"},
        "/settings/tokens": {"name": "mine", "scope": "read", "project": project, "days": "1"},
        "/settings/projects": {"name": f"new-{next(_counter)}"},
        _HOOKS: {"name": f"hook-{next(_counter)}", "url": "http://127.0.0.1:9/", "kinds": "job.failed"},
        "/settings/projects/{project}/members": {"person": "zoe", "role": "member"},
    }
    return fields.get(path, {})


_counter = itertools.count()
_SPEC = (
    "{training: {model: {preset: muster-1m}, data: {train: [{source: 'builtin://python-stdlib'}], sequenceLength: 256},"
    " batch: {tokensPerStep: 16384, microBatch: 8}, length: {steps: 200}}, gang: {nodes: 1}}"
)


async def _outcome(browser: Browser, path: str, reply: httpx2.Response) -> str:
    onward = reply.headers.get("location", "")
    assert reply.status_code != 500, reply.text
    if reply.status_code == 401 or (reply.status_code == 303 and onward.startswith("/sign-in?")):
        return NOBODY
    if (
        path in ("/jobs/act", "/jobs/delete") and reply.status_code == 303
    ):  # of several jobs each says what became of it
        return await _outcome_of_several(browser, onward)
    if reply.status_code == 404 and path != "/sign-in/provider":  # no provider, and its page says so
        return H
    return F if reply.status_code == 403 else M


async def _outcome_of_several(browser: Browser, onward: str) -> str:
    told = " ".join(notes(await browser.get(onward)))
    return H if "no job" in told else F if "a maintainer may do that" in told else M


async def test_an_open_page_hears_no_more_of_a_job_that_its_reader_may_not_see(tmp_path: Path) -> None:
    async with served(tmp_path / "state", make=create_app, auth=True) as (here, _):
        people = await settle(here, tmp_path / "state")
        job = people.jobs["nlp"]
        await Browser(here.client).sign_in(token_of(people, "nlp-viewer"))
        async with here.client.stream("GET", "/live", params={"job": job}) as reply, asyncio.timeout(WAIT_SECONDS_MAX):
            told = frames(reply)
            assert (await anext(told)).event == "changed"
            await people.ask("admin", "DELETE", "/projects/nlp/members/nlp-viewer")
            rest = [frame.event async for frame in told]
        assert rest[-1] == "changed", "the page looks once more, and finds that the job is not there"
        assert (await here.client.get(f"/live?job={job}")).status_code == 404
        assert (await here.client.get("/jobs", headers={"accept": "text/html"})).status_code == 200, "still signed in"
