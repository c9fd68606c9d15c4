"""Every route, every role, one's own and another project: the routes are those of the OpenAPI document."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.integration.api.openai_house import chat_file, models_file
from tests.integration.api.people import People, bearer, settle, sweep_document
from tests.integration.api.platform import document, platform
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

from muster.api.app import create_app
from muster.api.core.callers import Scope
from muster.api.core.settings import ApiSettings

RIGHTS: dict[str, dict[str, str] | None] = {
    "check_health": OPEN,
    "check_readiness": OPEN,
    "scrape_metrics": OPEN,
    "explain_problem": OPEN,
    "get_sign_in": OPEN,
    "get_me": ANYBODY,
    "list_jobs": ANYBODY,
    "submit_job": SUBMITS,
    "estimate_job": SUBMITS,
    "inspect_job_data": SUBMITS,
    "get_job": SEES,
    "annotate_job": ACTS,
    "cancel_job": ACTS,
    "delete_job": ACTS,
    "suspend_job": ACTS,
    "resume_job": ACTS,
    "clone_job": SUBMITS,
    "list_attempts": SEES,
    "list_events": SEES,
    "get_data_report": SEES,
    "list_samples": SEES,
    "list_profiles": SEES,
    "request_profile": ACTS,
    "fetch_profile": SEES,
    "list_checkpoints": SEES,
    "get_checkpoint": SEES,
    "pin_checkpoint": ACTS,
    "unpin_checkpoint": ACTS,
    "fetch_export": SEES,
    "make_export": ACTS,
    "describe_uploads": ANYBODY,
    "upload_file": SUBMITS,
    "list_files": ANYBODY,
    "get_file": SEES,
    "head_file": SEES,
    "read_file": SEES,
    "send_file": ACTS,
    "delete_file": ACTS,
    "create_sweep": SUBMITS,
    "list_sweeps": ANYBODY,
    "get_sweep": SEES,
    "cancel_sweep": ACTS,
    "read_metrics": SEES,
    "read_curves": SEES,
    "read_logs": SEES,
    "explain_job": SEES,
    "read_queues": ANYBODY,
    "read_nodes": ANYBODY,
    "list_projects": ANYBODY,
    "get_project": SEES,
    "put_project": RULES_ALL,
    "delete_project": RULES_ALL,
    "read_usage": SEES,
    "list_members": SEES,
    "put_member": MAINTAINS,
    "delete_member": MAINTAINS,
    "list_secrets": SEES,
    "put_secret": MAINTAINS,
    "delete_secret": MAINTAINS,
    "make_webhook": MAINTAINS,
    "list_webhooks": MAINTAINS,
    "get_webhook": MAINTAINS,
    "change_webhook": MAINTAINS,
    "delete_webhook": MAINTAINS,
    "rotate_webhook": MAINTAINS,
    "test_webhook": MAINTAINS,
    "list_deliveries": MAINTAINS,
    "replay_delivery": MAINTAINS,
    "list_people": RULES_ALL,
    "put_person": RULES_ALL,
    "read_audit": ANYBODY,  # of the projects that they maintain
    "make_token": SEES,  # of their own
    "list_tokens": ANYBODY,
    "rotate_token": MAINTAINS_UNSEEN,
    "revoke_token": MAINTAINS_UNSEEN,
    "create_fine_tuning_job": SUBMITS,
    "list_fine_tuning_jobs": ANYBODY,
    "get_fine_tuning_job": SEES,
    "cancel_fine_tuning_job": ACTS,
    "pause_fine_tuning_job": ACTS,
    "resume_fine_tuning_job": ACTS,
    "list_fine_tuning_events": SEES,
    "list_fine_tuning_checkpoints": SEES,
    "create_openai_file": SUBMITS,
    "list_openai_files": ANYBODY,
    "get_openai_file": SEES,
    "read_openai_file": SEES,
    "delete_openai_file": ACTS,
    "create_upload": SUBMITS,
    "create_upload_part": ACTS,
    "complete_upload": ACTS,
    "cancel_upload": ACTS,
    "list_models": ANYBODY,
    "get_model": SEES,
    "make_chat_completion": SEES,
    "make_completion": SEES,
}
_HIDDEN = (
    "job_not_found",
    "model_not_found",
    "project_not_found",
    "token_not_found",
    "file_not_found",
    "sweep_not_found",
)

# Where that does not follow from whose the route is.
_SCOPES = dict.fromkeys(("make_token", "list_tokens", "read_audit"), Scope.ADMIN)


def operations() -> dict[str, tuple[str, str]]:
    """Method and path by operation id."""
    paths = create_app(ApiSettings(state=Path("unused"))).openapi()["paths"]
    return {
        operation["operationId"]: (method.upper(), path)
        for path, methods in paths.items()
        for method, operation in methods.items()
    }


def outcome(reply: httpx2.Response) -> str:
    has_code = reply.content and "problem" in reply.headers.get("content-type", "")
    code = reply.json()["code"] if has_code else ""
    if reply.status_code == 404 and (code in _HIDDEN or not reply.content):  # a HEAD is answered without one
        return H
    assert reply.status_code != 500, reply.text  # 503 is what a route says that has nothing behind it here
    return {401: NOBODY, 403: F}.get(reply.status_code, M)


def test_every_route_says_who_may_use_it() -> None:
    assert set(RIGHTS) == set(operations())


@asynccontextmanager
async def _settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[People, str]]:
    """Two projects with people in every role, and one of everything in each; and a file to train on."""
    monkeypatch.setattr("muster.api.data.exports.routes.available", lambda: False)  # a model takes seconds to make
    options = {"auth": True, "base_models_file": models_file(tmp_path), "chat_workers": 0}
    async with platform(tmp_path / "state", **options) as here:
        people = await settle(here, tmp_path / "state")
        training_file = chat_file(tmp_path, examples=1)
        for project in ("nlp", "cv"):
            people.fine_tunes[project] = await _fine_tune(people, project, training_file)
            await people.sweep(project)
        await people.give("nlp", "robot", "member")
        await people.give("cv", "robot", "member")
        await people.ask("admin", "PUT", "/people/robot", json={"kind": "service"})
        yield people, training_file


async def test_every_route_for_every_role_in_both_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with _settled(tmp_path, monkeypatch) as (people, training_file):
        wrong = {}
        for operation, (method, path) in operations().items():
            rights = RIGHTS[operation]
            for project, who in itertools.product(("nlp", "cv"), (None, *WHO)):
                person = None if who is None else person_of(who, project)
                body = _body(operation, project, people.fine_tunes[project], training_file)
                reply = await _ask(people, operation, method, path, project, person, body)
                if outcome(reply) != expected(rights, who):
                    wrong[operation, project, who] = (expected(rights, who), reply.status_code, reply.text[:200])
                if who == "outsider":
                    assert f"{project}-job" not in reply.text, (operation, "tells another project of its job")
                    assert f"{project}-owner" not in reply.text, (operation, "tells another project of its people")
        assert wrong == {}


async def test_every_route_for_every_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their role, what a token was not made for it may not do."""
    async with _settled(tmp_path, monkeypatch) as (people, training_file):
        for person, scope in itertools.product(("nlp-maintainer", "admin"), Scope):
            token = await people.token(person, "nlp" if person != "admin" else None, scope)
            people.headers[f"{scope} of {person}"] = bearer(token["token"])
        wrong = {}
        for operation, (method, path) in operations().items():
            needed, rights = _scope(operation), RIGHTS[operation]
            person = "admin" if rights is RULES_ALL else "nlp-maintainer"
            for given in Scope:
                body = _body(operation, "nlp", people.fine_tunes["nlp"], training_file)
                reply = await _ask(people, operation, method, path, "nlp", f"{given} of {person}", body)
                is_enough = needed is None or list(Scope).index(given) >= list(Scope).index(needed)
                if outcome(reply) != (M if is_enough else F):
                    wrong[operation, given] = (needed, reply.status_code, reply.text[:200])
        assert wrong == {}


def _scope(operation: str) -> Scope | None:
    """Which scope a route asks for, by whose it is: who rules needs more than who reads."""
    by_rights = (
        (Scope.READ, (ANYBODY, SEES)),
        (Scope.WRITE, (SUBMITS, ACTS)),
        (Scope.ADMIN, (MAINTAINS, MAINTAINS_UNSEEN, RULES_ALL)),
    )
    rights = RIGHTS[operation]
    return _SCOPES.get(operation) or next((scope for scope, rules in by_rights if rights in rules), None)


async def _ask(
    people: People, operation: str, method: str, path: str, project: str, person: str | None, body: Any
) -> httpx2.Response:
    """The request of that person about the project's job, a token of its service account, or its member zoe."""
    decides = person is not None and person.endswith(("maintainer", "admin"))  # the others change nothing
    if "{token_id}" in path and (decides or project not in people.tokens):
        people.tokens[project] = (await people.token("robot", project))["id"]
    if ("{file_id}" in path or "{upload_id}" in path) and (decides or project not in people.files):
        people.files[project] = await people.upload(f"{project}-owner", project)
    if operation == "delete_member" and decides:
        await people.give(project, "zoe", "viewer")
    named = {
        "job_id": people.jobs[project],
        "step": "20",
        "project": project,
        "person": "zoe",
        "token_id": people.tokens.get(project, ""),
        "file_id": people.files.get(project, ""),
        "upload_id": people.files.get(project, "").replace("file-", "upload_"),
        "sweep_id": people.sweeps[project],
        "code": "internal",
        "name": "hf-token",
        "message_id": "msg_1",
        "profile": "attempt-1-step-00000021",
        "file": "rank-0.trace.json.gz",
        "fine_tuning_job_id": people.fine_tunes[project],
        "model": _model(project, people.fine_tunes[project]),
    }
    for name, value in named.items():
        path = path.replace(f"{{{name}}}", value)
    headers = people.headers[person] if person else {}
    if operation in ("head_file", "send_file"):
        headers = headers | {"tus-resumable": "1.0.0"}
    if operation == "upload_file":
        path += f"?name=a.txt&purpose=user_data&project={project}"
    if operation in ("create_fine_tuning_job", "create_openai_file", "create_upload"):
        headers = {**headers, "OpenAI-Project": project}
    if operation in ("create_openai_file", "create_upload_part"):
        field = "data" if operation == "create_upload_part" else "file"
        form: Any = {"data": {"purpose": "user_data"} if field == "file" else {}, "files": {field: ("a.txt", b"words")}}
        return await people.here.client.request(method, path, headers=headers, **form)
    return await people.here.client.request(method, path, headers=headers, json=body)


def _model(project: str, fine_tune: str) -> str:
    return f"ft:tiny:{project}::{fine_tune.removeprefix('ftjob-')}:ckpt-step-20"


async def _fine_tune(people: People, project: str, training_file: str) -> str:
    asked = {"model": "tiny", "training_file": training_file}
    headers = {**people.headers[f"{project}-owner"], "OpenAI-Project": project}
    reply = await people.here.client.post("/v1/fine_tuning/jobs", json=asked, headers=headers)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


_counter = itertools.count()


def _body(operation: str, project: str, fine_tune: str, training_file: str) -> Any:
    job = document(f"try-{next(_counter)}")
    job["metadata"]["labels"] = {"muster.dev/project": project}
    bodies: dict[str, Any] = {
        "submit_job": job,
        "create_sweep": sweep_document(f"try-{next(_counter)}", project),
        "estimate_job": job,
        "inspect_job_data": job,
        "put_member": {"role": "viewer"},
        "put_project": {},
        "put_person": {},
        "put_secret": {"data": {"value": "x"}},
        "make_webhook": {"name": "hook", "url": "https://8.8.8.8/"},
        "change_webhook": {"enabled": False},
        "make_token": {"name": "mine", "project": project},
        "annotate_job": {"addTags": ["paper"]},
        "clone_job": {},
        "make_export": {},
        "request_profile": {},
        "upload_file": "some words",
        "rotate_token": {},
        "create_fine_tuning_job": {"model": "tiny", "training_file": training_file},
        "create_upload": {"filename": "a.txt", "bytes": 10, "mime_type": "text/plain", "purpose": "user_data"},
        "complete_upload": {"part_ids": ["part_0"]},
        "make_chat_completion": {"model": _model(project, fine_tune), "messages": [{"role": "user", "content": "hi"}]},
        "make_completion": {"model": _model(project, fine_tune), "prompt": "hi"},
    }
    return bodies.get(operation)


async def test_what_is_hidden_is_answered_as_what_is_not_there(tmp_path: Path) -> None:
    """The same status, code, headers and words but for the id that was asked for."""
    async with platform(tmp_path / "state", auth=True) as here:
        people = await settle(here, tmp_path / "state")
        hidden, missing = people.jobs["cv"], "00000000-0000-4000-8000-000000000000"
        token = (await people.token("cv-owner", "cv"))["id"]
        pairs = [
            *((method, path, hidden, missing) for method, path in (
                ("GET", "/jobs/{}"), ("GET", "/jobs/{}/logs"), ("GET", "/jobs/{}/events?follow=true"),
                ("POST", "/jobs/{}:cancel"), ("POST", "/jobs/{}:clone"), ("POST", "/jobs/{}/checkpoints/20:pin"),
            )),
            ("GET", "/projects/{}", "cv", "zz9"),
            ("GET", "/projects/{}/members", "cv", "zz9"),
            ("DELETE", "/tokens/{}", token, missing),
        ]  # fmt: skip
        for method, path, there, nowhere in pairs:
            answers = []
            for name in (there, nowhere):
                body: Any = {} if method == "POST" else None
                reply = await people.ask("nlp-maintainer", method, path.format(name), json=body)
                shown = {key: value for key, value in reply.json().items() if key != "requestId"}
                told = {key: value for key, value in reply.headers.items() if key not in ("x-request-id",)}
                told.pop("content-length")
                answers.append((reply.status_code, str(shown).replace(name, "X"), told))
            assert answers[0] == answers[1], path
            assert answers[0][0] == 404
