"""Sign-in in the browser by a real OpenID Connect provider beside the tests; every refusal says what to do."""

from __future__ import annotations

import html
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx2
import pytest
from tests.integration.api.people import bearer
from tests.integration.api.platform import BASE, Platform, platform
from tests.integration.web.pages import HTML, Browser
from tests.oidc_provider import CLIENT, Provider, oidc_provider
from tests.polling import WAIT_SECONDS_MAX

from muster.api.tenants.signin.code_flow import FLOW_SECONDS
from muster.web.app import create_app

ROLES = {"ml": {"nlp": "member"}, "platform": "admin"}


@pytest.fixture(scope="module")
def started() -> Iterator[Provider]:
    with oidc_provider() as provider:
        yield provider


@pytest.fixture
def provider(started: Provider) -> Provider:
    started.claims = {"sub": "s-1", "preferred_username": "ann", "groups": ["ml"]}
    started.lifetime, started.approves = 3600, True
    started.asked.clear()
    return started


def settings(provider: Provider) -> dict[str, Any]:
    return {"auth": True, "oidc_issuer": provider.issuer, "oidc_client_id": CLIENT, "oidc_roles": ROLES}


@pytest.fixture
async def here(tmp_path: Path, provider: Provider) -> AsyncIterator[Platform]:
    """With a project nlp."""
    async with platform(tmp_path / "state", make=create_app, **settings(provider)) as running:
        running.headers = bearer(running.state.admin_token.read_text().strip())
        made = await running.client.put("/api/v1/projects/nlp", json={}, headers=running.headers)
        assert made.status_code == 201
        yield running


@dataclass
class Visit:
    """A browser's way to the provider and back."""

    client: httpx2.AsyncClient

    async def leave(self, onward: str = "/jobs?phase=Running") -> str:
        """Go to the provider; its address with what is asked of it."""
        reply = await self.client.get("/sign-in/provider", params={"next": onward}, headers=HTML)
        assert reply.status_code == 303, reply.text
        return reply.headers["location"]

    async def meet(self, address: str) -> str:
        """Sign in there; the address to which the provider sends one back."""
        async with httpx2.AsyncClient(timeout=WAIT_SECONDS_MAX) as other:
            reply = await other.get(address)
        assert reply.status_code == 302, reply.text
        assert reply.headers["location"].startswith(f"{BASE}/sign-in/callback?")
        return reply.headers["location"]

    async def land(self, address: str) -> httpx2.Response:
        return await self.client.get(address, headers=HTML)

    async def sign_in(self, onward: str = "/jobs") -> httpx2.Response:
        return await self.land(await self.meet(await self.leave(onward)))


def fault(page: httpx2.Response) -> str:
    found = re.search(r'id="fault">(.*?)</p>', page.text, re.DOTALL)
    return html.unescape(found[1]) if found else ""


def sessions(client: httpx2.AsyncClient) -> list[str]:
    return [name for name in client.cookies if name == "muster_session"]


async def test_one_signs_in_at_the_provider_and_goes_where_one_wanted(here: Platform, provider: Provider) -> None:
    browser, visit = Browser(here.client), Visit(here.client)
    shown = await browser.get("/sign-in?next=/jobs%3Fphase%3DRunning")
    assert 'href="/sign-in/provider?next=%2Fjobs%3Fphase%3DRunning"' in shown.text
    address = await visit.leave()
    asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
    assert address.startswith(f"{provider.issuer}/authorize?")
    assert (asked["redirect_uri"], asked["code_challenge_method"]) == (f"{BASE}/sign-in/callback", "S256")
    assert (asked["client_id"], asked["scope"]) == (CLIENT, "openid profile email")
    assert min(len(asked[name]) for name in ("state", "nonce", "code_challenge")) >= 43
    reply = await visit.land(await visit.meet(address))
    assert (reply.status_code, reply.headers["location"]) == (303, "/jobs?phase=Running"), fault(reply)
    (cookie,) = [each for each in reply.headers.get_list("set-cookie") if each.startswith("muster_session=")]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    page = await browser.get("/jobs")
    assert (page.status_code, '>ann<span class="visually-hidden">' in page.text) == (200, True)
    kept = dict(here.client.cookies)
    assert (await browser.post("/sign-out")).status_code == 303
    assert (await browser.get("/jobs")).status_code == 303
    here.client.cookies.update(kept)  # somebody who kept the cookie
    assert (await browser.get("/jobs")).status_code == 303
    for onward in ("https://evil.example", "//evil.example", "/\\evil.example", "/\t/evil.example", "evil"):
        here.client.cookies.clear()
        reply = await visit.sign_in(onward)
        assert (reply.status_code, reply.headers["location"]) == (303, "/jobs"), onward


REFUSED: tuple[tuple[dict[str, Any], int, str], ...] = (
    ({"aud": "grafana"}, 401, "it is for somebody else (aud). Sign in again."),
    ({"iss": "https://evil.example"}, 401, "it is of another issuer (iss). Sign in again."),
    ({"nonce": "another"}, 401, "it answers another sign-in (nonce). Sign in again."),
    ({"nonce": None}, 401, "it answers another sign-in (nonce). Sign in again."),
    ({"exp": 1}, 401, "the sign-in has expired. Sign in again."),
    ({"groups": ["guests"]}, 403, "your groups (guests) open no project here. Ask an admin to add you"),
    ({"groups": []}, 403, "you are in no group, so no project opens here"),
    ({"preferred_username": "admin", "sub": "s-9"}, 401, "`muster people set admin --subject s-9`"),
)


async def test_who_is_refused_reads_why(here: Platform, provider: Provider) -> None:
    own, visit = dict(provider.claims), Visit(here.client)
    for claims, status, words in REFUSED:
        provider.claims = own | claims
        reply = await visit.sign_in()
        assert (reply.status_code, words in fault(reply)) == (status, True), fault(reply)
        assert sessions(here.client) == []
        assert 'href="/sign-in/provider?next=%2Fjobs"' in reply.text  # the next step is there to be pressed
    provider.claims, provider.approves = own, False
    back = await visit.meet(await visit.leave())
    hostile = await visit.land(re.sub("error_description=[^&]*", "error_description=%3Cscript%3Ealert(1)", back))
    assert (hostile.status_code, "did not sign you in (access_denied" in fault(hostile)) == (401, True), fault(hostile)
    assert "<script>alert" not in hostile.text
    assert sessions(here.client) == []


async def test_keys_that_rotated_a_moment_ago_are_asked_for_at_once(here: Platform, provider: Provider) -> None:
    """A person who signs in right after somebody else has nothing to do with how often unknown keys are asked for."""
    assert (await Visit(here.client).sign_in()).status_code == 303
    provider.rotate()
    here.client.cookies.clear()
    assert (await Visit(here.client).sign_in()).status_code == 303
    assert provider.asked["/keys"] == 2


async def test_what_was_not_begun_here_opens_nothing(
    here: Platform, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit = Visit(here.client)
    back = await visit.meet(await visit.leave())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=here.app), base_url=BASE) as other_browser:
        stranger = await Visit(other_browser).land(back)
        assert (stranger.status_code, "was not begun in this browser" in fault(stranger)) == (400, True)
    forged = await visit.land(re.sub("state=[^&]+", "state=guessed", back))
    assert (forged.status_code, "was not begun in this browser" in fault(forged)) == (400, True)
    other = await visit.land(f"{back}&iss=https://evil.example")
    assert (other.status_code, "of 'https://evil.example' and not of" in fault(other)) == (401, True)
    assert (await visit.land(back)).status_code == 400, "the refusal ended it"
    assert sessions(here.client) == []

    first, second = await visit.meet(await visit.leave()), await visit.meet(await visit.leave())
    code, state = (parse_qs(urlsplit(address).query)[name][0] for address, name in ((first, "code"), (second, "state")))
    # A code of another sign-in lacks the proof of its key.
    mixed = await visit.land(f"{BASE}/sign-in/callback?{urlencode({'code': code, 'state': state})}")
    assert (mixed.status_code, "the provider takes its code no more" in fault(mixed)) == (401, True), fault(mixed)
    assert sessions(here.client) == []
    assert (await visit.land(first)).status_code == 303, "a second tab that was begun meanwhile did no harm"
    assert (await visit.land(first)).status_code == 400, "it is good once"

    here.client.cookies.clear()
    begun = time.time()
    monkeypatch.setattr("muster.api.tenants.signin.code_flow.time.time", lambda: begun - FLOW_SECONDS - 1)
    address = await visit.leave()
    monkeypatch.undo()
    old = await visit.land(await visit.meet(address))
    assert (old.status_code, "more than 10 minutes ago" in fault(old)) == (400, True)
    assert sessions(here.client) == []


async def test_behind_a_proxy_one_comes_back_where_the_settings_say(tmp_path: Path, provider: Provider) -> None:
    more = settings(provider) | {"public_url": "https://muster.example.com/"}
    async with platform(tmp_path / "state", make=create_app, **more) as here:
        reply = await here.client.get("/sign-in/provider", headers=HTML)
        query = parse_qs(urlsplit(reply.headers["location"]).query)
        assert query["redirect_uri"] == ["https://muster.example.com/sign-in/callback"]
        assert "Secure" in reply.headers["set-cookie"]


@pytest.mark.long
async def test_a_provider_that_is_away_is_said_and_tokens_go_on(tmp_path: Path) -> None:
    with oidc_provider() as provider:
        away = settings(provider)
    async with platform(tmp_path / "state", make=create_app, **away) as here:
        reply = await here.client.get("/sign-in/provider?next=/jobs", headers=HTML)
        assert (reply.status_code, "Tokens go on." in fault(reply)) == (503, True)
        await Browser(here.client).sign_in(here.state.admin_token.read_text().strip())


@pytest.mark.long
async def test_without_a_provider_there_is_no_way_to_one(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", make=create_app, auth=True) as here:
        assert "/sign-in/provider" not in (await here.client.get("/sign-in", headers=HTML)).text
        assert (await here.client.get("/sign-in/provider", headers=HTML)).status_code == 404
        assert (await here.client.get("/sign-in/callback?code=a&state=b", headers=HTML)).status_code == 400
