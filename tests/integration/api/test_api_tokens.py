"""Who may ask, and for what."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update
from tests.integration.api.platform import Platform, document, platform, until

from muster.api.core.database.tables import TokenRow
from muster.words.times import epoch_seconds


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
async def guarded(tmp_path: Path, database_url: str) -> AsyncIterator[tuple[Platform, dict[str, str]]]:
    """With authentication, and the first admin token as it was written at first start."""
    async with platform(tmp_path / "state", database_url=database_url, auth=True) as here:
        yield here, bearer((tmp_path / "state" / "admin-token").read_text().strip())


async def make(here: Platform, admin: dict[str, str], *scopes: str) -> Any:
    reply = await here.client.post("/api/v1/tokens", json={"name": "ci", "scopes": list(scopes)}, headers=admin)
    assert reply.status_code == 201, reply.text
    return reply.json()


@pytest.mark.both_databases
async def test_without_a_token_nothing_opens(guarded: tuple[Platform, dict[str, str]]) -> None:
    here, admin = guarded
    wrong = (
        {},
        bearer("muster_" + "x" * 43),
        bearer("other"),
        {"authorization": "Basic dTpw"},
        {"authorization": "Bearer"},
    )
    for headers in wrong:
        for method, path in (("GET", "/jobs"), ("POST", "/jobs"), ("GET", "/jobs/x/logs"), ("GET", "/tokens")):
            reply = await here.client.request(method, f"/api/v1{path}", headers=headers)
            assert (reply.status_code, reply.json()["code"]) == (401, "unauthorized")
            assert reply.headers["www-authenticate"].startswith("Bearer")
    assert (await here.client.get("/api/v1/jobs", headers=admin)).status_code == 200
    await here.ready()
    for open_path in ("/healthz", "/readyz", "/metrics", "/api/v1/openapi.json", "/api/v1/problems/unauthorized"):
        assert (await here.client.get(open_path)).status_code == 200, open_path


async def test_what_projects_spend_is_not_for_everybody(guarded: tuple[Platform, dict[str, str]]) -> None:
    here, admin = guarded
    confined = await make(here, admin, "read")
    wide = await here.client.post(
        "/api/v1/tokens", json={"name": "metrics", "scopes": ["read"], "allProjects": True}, headers=admin
    )

    async def page(**headers: str) -> str:
        reply = await here.client.get("/metrics", headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.text

    async def counted() -> bool:
        return 'muster_api_project_cost{project="default"}' in await page(**bearer(wide.json()["token"]))

    await until(counted, "what projects spend to be counted")
    for headers in ({}, bearer(confined["token"])):
        shown = await page(**headers)
        assert "muster_api_requests_total" in shown
        assert "muster_api_project" not in shown
    assert (await here.client.get("/metrics", headers=bearer("muster_" + "x" * 43))).status_code == 401


async def test_answers_are_kept_by_no_cache(guarded: tuple[Platform, dict[str, str]]) -> None:
    here, admin = guarded
    for method, path in (
        ("GET", "/api/v1/jobs"),
        ("POST", "/api/v1/tokens"),
        ("GET", "/v1/files"),
        ("GET", "/api/v1/x"),
    ):
        for headers in (admin, {}):
            reply = await here.client.request(method, path, headers=headers, json={"name": "ci", "scopes": ["read"]})
            found = (reply.headers["cache-control"], reply.headers["x-content-type-options"])
            assert found == ("no-store", "nosniff"), (path, reply.status_code)


async def test_scopes_include_those_before_them(guarded: tuple[Platform, dict[str, str]]) -> None:
    here, admin = guarded
    answers = {}
    for scope in ("read", "write", "admin"):
        headers = bearer((await make(here, admin, scope))["token"])
        submitted = await here.client.post("/api/v1/jobs", json=document(f"by-{scope}"), headers=headers)
        listed = await here.client.get("/api/v1/jobs", headers=headers)
        tokens = await here.client.get("/api/v1/tokens", headers=headers)
        answers[scope] = (listed.status_code, submitted.status_code, tokens.status_code)
    assert answers == {"read": (200, 403, 403), "write": (200, 201, 403), "admin": (200, 201, 200)}


@pytest.mark.both_databases
async def test_a_token_is_shown_once_and_stored_as_a_hash(guarded: tuple[Platform, dict[str, str]]) -> None:
    here, admin = guarded
    made = await make(here, admin, "write")
    assert made["token"].startswith("muster_")
    assert len(made["token"]) >= 50
    listed = (await here.client.get("/api/v1/tokens", headers=admin)).text
    assert made["token"] not in listed
    assert {item["name"] for item in json.loads(listed)["items"]} == {"first start", "ci"}
    async with here.services.database.read() as session:
        stored = str((await session.execute(text("SELECT * FROM tokens"))).all())
    assert made["token"] not in stored


@pytest.mark.both_databases
async def test_a_revoked_or_expired_token_opens_nothing(guarded: tuple[Platform, dict[str, str]]) -> None:
    here, admin = guarded
    made = await make(here, admin, "read")
    headers = bearer(made["token"])
    assert (await here.client.get("/api/v1/jobs", headers=headers)).status_code == 200
    assert (await here.client.delete(f"/api/v1/tokens/{made['id']}", headers=admin)).status_code == 204
    assert (await here.client.get("/api/v1/jobs", headers=headers)).status_code == 401
    again = await here.client.delete(f"/api/v1/tokens/{made['id']}", headers=admin)
    assert (again.status_code, again.json()["code"]) == (404, "token_not_found")
    brief = await make(here, admin, "read")
    async with here.services.database.write() as session:
        await session.execute(update(TokenRow).where(TokenRow.id == brief["id"]).values(expires_at=time.time() - 1))
    assert (await here.client.get("/api/v1/jobs", headers=bearer(brief["token"]))).status_code == 401


async def test_a_bad_token_request_is_named(guarded: tuple[Platform, dict[str, str]]) -> None:
    here, admin = guarded
    for wanted, detail in (
        ({}, "name: is required"),
        ({"name": "x", "scopes": ["root"]}, "scopes[0]: must be 'read', 'write' or 'admin', not text ('root')"),
        ({"name": "x", "scopes": []}, "scopes: must have at least 1 item, not 0"),
        ({"name": "x", "expiresInDays": 0}, "expiresInDays: must be greater than 0, not 0"),
        ({"name": "x", "expires_in_days": 3}, "expires_in_days: unknown key. Did you mean 'expiresInDays'?"),
        ({"name": "x", "scope": ["read"]}, "scope: unknown key. Did you mean 'scopes'?"),
        ({"name": "x", "colour": "red"}, "colour: unknown key"),
    ):
        reply = await here.client.post("/api/v1/tokens", json=wanted, headers=admin)
        problem = reply.json()
        assert (reply.status_code, problem["title"]) == (422, "The token is not valid"), reply.text
        assert problem["detail"] == f"The token can't be made: {detail}"
        assert problem["errors"][0]["path"] == detail.partition(":")[0]


async def test_idempotency_keys_of_different_callers_do_not_meet(guarded: tuple[Platform, dict[str, str]]) -> None:
    here, admin = guarded
    other = bearer((await make(here, admin, "write"))["token"])
    key = {"Idempotency-Key": "same"}
    one = await here.client.post("/api/v1/jobs", json=document("one"), headers={**admin, **key})
    two = await here.client.post("/api/v1/jobs", json=document("two"), headers={**other, **key})
    assert (one.status_code, two.status_code) == (201, 201)


async def test_the_first_token_is_private_and_made_once(tmp_path: Path, database_url: str) -> None:
    path = tmp_path / "state" / "admin-token"
    for _ in range(2):
        async with platform(tmp_path / "state", database_url=database_url, auth=True) as here:
            token = path.read_text().strip()
            assert (await here.client.get("/api/v1/tokens", headers=bearer(token))).status_code == 200
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_the_user_of_a_machine_always_has_a_token(tmp_path: Path, database_url: str) -> None:
    """Lost or revoked, it is made anew; another person's tokens stay as they are."""
    path = tmp_path / "state" / "admin-token"
    tokens = set()
    for loss in ("nothing", "the file", "revoked"):
        async with platform(tmp_path / "state", database_url=database_url, auth=True) as here:
            admin = bearer(path.read_text().strip())
            tokens.add(path.read_text())
            listed = (await here.client.get("/api/v1/tokens", headers=admin)).json()["items"]
            if loss == "the file":
                path.unlink()
            if loss == "revoked":
                for token in listed:
                    await here.client.delete(f"/api/v1/tokens/{token['id']}", headers=admin)
    async with platform(tmp_path / "state", database_url=database_url, auth=True) as here:
        assert (await here.client.get("/api/v1/jobs", headers=admin)).status_code == 401
        admin = bearer(path.read_text().strip())
        assert len((await here.client.get("/api/v1/tokens", headers=admin)).json()["items"]) == 1
    assert len(tokens | {path.read_text()}) == 3


async def test_the_state_of_a_machine_is_its_users_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with platform(state, auth=True, database_url=f"sqlite:///{state}/muster.db"):  # which it makes itself
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in state.glob("*.db*") if file.suffix != ".migrate"} == {
            0o600
        }


@pytest.mark.both_databases
async def test_a_given_first_token_opens_too(tmp_path: Path, database_url: str) -> None:
    token = "muster_" + "a1" * 20
    for _ in range(2):
        async with platform(tmp_path / "state", database_url=database_url, auth=True, bootstrap_token=token) as here:
            assert (await here.client.get("/api/v1/tokens", headers=bearer(token))).status_code == 200
    assert not (tmp_path / "state" / "admin-token").exists()


@pytest.mark.both_databases
async def test_the_use_of_a_token_is_noted_later(guarded: tuple[Platform, dict[str, str]]) -> None:
    here, admin = guarded
    housekeeping = next(work for work in here.services.background.works if work.name == "housekeeping")
    step = housekeeping.step
    await here.no_more_housekeeping()  # no other round than ours has it to note
    await here.client.get("/api/v1/jobs", headers=admin)
    await step()
    (token,) = (await here.client.get("/api/v1/tokens", headers=admin)).json()["items"]
    assert abs(epoch_seconds(token["lastUsedAt"]) - time.time()) < 60
