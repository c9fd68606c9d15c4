"""Sign-in by a real OpenID Connect provider that runs beside the tests."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from joserfc import jwk
from pydantic import ValidationError
from tests.integration.api.people import People, bearer
from tests.integration.api.platform import Platform, document, platform, served, until
from tests.oidc_provider import CLIENT, Provider, oidc_provider

from muster.api.core.settings import ApiSettings
from muster.api.data.files.arrivals import FilePlaces
from muster.api.tenants.authentication import CallerAuthentication
from muster.api.tenants.signin.provider import LEEWAY_SECONDS, REFETCH_SECONDS, ProviderUnreachable, SignInRefused
from muster.api.tenants.signin.provider import IdentityProvider as Keys
from muster.cli import login, signing_in
from muster.cli.errors import CliError
from muster.client import address, signed_in
from muster.client.connection import Connection
from muster.client.errors import NotAllowed

HOUR = 3_600.0
ROLES = {"ml": {"nlp": "member", "cv": "viewer"}, "leads": {"nlp": "maintainer"}, "platform": "admin"}
OTHER = jwk.RSAKey.generate_key(2048, {"kid": "other", "use": "sig"})
SHARED = jwk.OctKey.import_key("a secret that both would know, of more than 32 bytes")


@pytest.fixture(scope="module")
def started() -> Iterator[Provider]:
    with oidc_provider() as provider:
        yield provider


@pytest.fixture
def provider(started: Provider) -> Provider:
    started.claims = {"sub": "s-1", "preferred_username": "ann", "groups": ["ml"]}
    started.lifetime, started.approves, started.pending = 3600, True, 0
    started.asked.clear()
    return started


def settings(provider: Provider, **more: Any) -> dict[str, Any]:
    return {"oidc_issuer": provider.issuer, "oidc_client_id": CLIENT, "oidc_roles": ROLES, **more}


class Ticks:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def keys(provider: Provider, ticks: Callable[[], float] = time.monotonic) -> Keys:
    return Keys(ApiSettings(**settings(provider)), ticks=ticks)


REFUSED: dict[str, tuple[Callable[[Provider], str], str]] = {
    "another audience": (lambda p: p.token(aud="grafana"), "for somebody else"),
    "no audience": (lambda p: p.token(aud=None), "does not say its aud"),
    "several audiences": (lambda p: p.token(aud=[CLIENT, "grafana"], azp="grafana"), "was not given to us"),
    "another issuer": (lambda p: p.token(iss="https://evil.example.com"), "another issuer"),
    "no subject": (lambda p: p.token(sub=None), "does not say its sub"),
    "no expiry": (lambda p: p.token(exp=None), "does not say its exp"),
    "an expiry in words": (lambda p: p.token(exp="soon"), "no numbers"),
    "expired": (lambda p: p.token(exp=int(time.time() - LEEWAY_SECONDS - 1)), "has expired"),
    "not valid yet": (lambda p: p.token(nbf=int(time.time() + LEEWAY_SECONDS + 60)), "not valid yet"),
    "made in the future": (lambda p: p.token(iat=int(time.time() + LEEWAY_SECONDS + 60)), "not valid yet"),
    "an unknown key": (lambda p: p.token(key=OTHER), "not one of the provider's"),
    "an unknown key under a known id": (
        lambda p: p.token(key=OTHER, header={"kid": p.keys[0].as_dict()["kid"]}), "signature is not the provider's",
    ),
    "a shared secret": (lambda p: p.token(key=SHARED, algorithm="HS256"), "'HS256'"),
    "another algorithm of the key": (
        lambda p: p.token(key=as_ps(p), algorithm="PS256"), "signature is not the provider's",
    ),
    "no signature": (lambda p: f"{unsigned(p)}.", "'none'"),
    "another signature": (lambda p: p.token()[:-8] + "AAAAAAAA", "signature is not the provider's"),
    "another body": (lambda p: swapped(p.token(), p.token(sub="s-2")), "signature is not the provider's"),
    "no token": (lambda p: "a.b.c", "no JSON Web Token"),
}  # fmt: skip


def as_ps(provider: Provider) -> jwk.RSAKey:
    """The provider's own key, put to a use that it does not publish."""
    return jwk.RSAKey.import_key(provider.keys[0].as_dict(private=True) | {"alg": "PS256"})


def unsigned(provider: Provider) -> str:
    import base64

    header = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    return f"{header}.{provider.token().split('.')[1]}"


def swapped(one: str, other: str) -> str:
    head, _, signature = one.split(".")
    return f"{head}.{other.split('.')[1]}.{signature}"


async def test_what_is_not_the_providers_for_us_and_of_now_is_refused(provider: Provider) -> None:
    verifier = keys(provider)
    told = {}
    for name, (make, words) in REFUSED.items():
        try:
            await verifier.verify(make(provider))
        except SignInRefused as refused:
            if words not in str(refused):
                told[name] = str(refused)
        else:
            told[name] = "was taken"
    assert told == {}
    assert (await verifier.verify(provider.token())).subject == "s-1"
    late = provider.token(exp=int(time.time() - LEEWAY_SECONDS + 10), aud=[CLIENT])
    assert (await verifier.verify(late)).name == "ann", "clocks may differ by that much"
    assert provider.asked["/keys"] == 1


async def test_keys_rotate_and_unknown_ones_are_asked_for_once_in_a_while(provider: Provider) -> None:
    ticks = Ticks()
    verifier = keys(provider, ticks)
    before = provider.token()
    await verifier.verify(before)
    provider.rotate()
    after = provider.token()
    for _ in range(3):
        with pytest.raises(SignInRefused, match="not one of the provider's"):
            await verifier.verify(after)
    assert provider.asked["/keys"] == 1, "whoever names keys at random does not make us ask"
    ticks.now += REFETCH_SECONDS
    assert (await verifier.verify(after)).subject == "s-1"
    with pytest.raises(SignInRefused, match="not one of the provider's"):
        await verifier.verify(before)
    assert provider.asked["/keys"] == 2


async def test_many_at_once_ask_once(provider: Provider) -> None:
    verifier, token = keys(provider), provider.token()
    await asyncio.gather(*(verifier.verify(token) for _ in range(20)))
    assert provider.asked["/keys"] == 1


async def test_while_the_provider_is_away_known_keys_count() -> None:
    ticks = Ticks()
    with oidc_provider() as provider:
        verifier, nobody = keys(provider, ticks), keys(provider, ticks)
        token = provider.token()
        await verifier.verify(token)
    ticks.now += 7_200
    assert (await verifier.verify(token)).subject == "s-1"
    for _ in range(2):
        with pytest.raises(ProviderUnreachable):
            await nobody.verify(token)


async def test_muster_login_may_be_a_client_of_its_own(provider: Provider) -> None:
    verifier = Keys(ApiSettings(**settings(provider, oidc_login_client_id="muster-login")))
    for taken in (
        provider.token(),
        provider.token(aud="muster-login"),
        provider.token(aud=["muster-login", "x"], azp="muster-login"),
    ):
        assert (await verifier.verify(taken)).subject == "s-1"
    for refused in (provider.token(aud="grafana"), provider.token(aud=["muster-login", "grafana"], azp="grafana")):
        with pytest.raises(SignInRefused):
            await verifier.verify(refused)


async def test_a_provider_that_calls_itself_otherwise_is_none(provider: Provider) -> None:
    wrong = ApiSettings(**settings(provider, oidc_issuer=provider.issuer.replace("127.0.0.1", "localhost")))
    with pytest.raises(ProviderUnreachable, match="calls itself"):
        await Keys(wrong).verify(provider.token())


@pytest.mark.parametrize(
    "wrong",
    [
        {"oidc_issuer": "http://id.example.com", "oidc_client_id": "muster"},
        {"oidc_issuer": "https://id.example.com"},
        {"oidc_login_client_id": "muster-login"},
        {"oidc_roles": {"ml": {"nlp": "admin"}}},
    ],
)
def test_settings_that_would_let_others_in_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ApiSettings(**wrong)


@pytest.fixture
async def here(tmp_path: Path, database_url: str, provider: Provider) -> AsyncIterator[Platform]:
    """With the projects nlp and cv, and an admin's token."""
    async with platform(tmp_path / "state", auth=True, database_url=database_url, **settings(provider)) as running:
        running.headers = bearer(running.state.admin_token.read_text().strip())
        for project in ("nlp", "cv", "asr"):
            made = await running.client.put(f"/api/v1/projects/{project}", json={}, headers=running.headers)
            assert made.status_code == 201
        yield running


async def me(here: Platform, token: str) -> Any:
    return (await here.client.get("/api/v1/me", headers=bearer(token))).json()


async def test_a_person_is_made_at_the_first_sign_in_and_has_the_roles_of_their_groups(
    here: Platform, provider: Provider
) -> None:
    found = await asyncio.gather(*(me(here, provider.token()) for _ in range(4)))
    assert [(one["person"], one["admin"], one["roles"]) for one in found] == [
        ("ann", False, {"nlp": "member", "cv": "viewer"})
    ] * 4
    await here.client.put("/api/v1/projects/cv/members/ann", json={"role": "maintainer"}, headers=here.headers)
    lead = await me(here, provider.token(groups=["ml", "leads", "unknown"]))
    assert lead["roles"] == {"nlp": "maintainer", "cv": "maintainer"}, "the most of what group and membership give"
    nobody = provider.token(sub="s-2", preferred_username="Bob@example.com", groups=["unknown"])
    assert ((await me(here, nobody))["person"], (await me(here, nobody))["roles"]) == ("bob", {})
    hidden = await here.client.get("/api/v1/projects/nlp", headers=bearer(nobody))
    assert hidden.json()["code"] == "project_not_found", "a group that maps to nothing opens nothing"
    chief = provider.token(sub="s-3", preferred_username="eve", groups=["platform"])
    assert (await here.client.get("/api/v1/people", headers=bearer(chief))).status_code == 200
    job = {"metadata": {"name": "mine", "labels": {"muster.dev/project": "asr"}}}
    assert (await here.client.post("/api/v1/jobs", json=job, headers=bearer(provider.token()))).status_code >= 400


@pytest.mark.both_databases
async def test_a_name_that_somebody_has_is_not_given_away(here: Platform, provider: Provider) -> None:
    posing = provider.token(preferred_username="admin", sub="s-9")
    refused = await here.client.get("/api/v1/me", headers=bearer(posing))
    assert (refused.status_code, "`muster people set admin --subject s-9`" in refused.json()["detail"]) == (401, True)
    await here.client.put("/api/v1/people/carl", json={}, headers=here.headers)
    carl = provider.token(preferred_username="carl", sub="s-4")
    assert (await here.client.get("/api/v1/me", headers=bearer(carl))).status_code == 401
    put = await here.client.put("/api/v1/people/carl", json={"subject": "s-4"}, headers=here.headers)
    assert (put.status_code, (await me(here, carl))["person"]) == (200, "carl")
    taken = await here.client.put("/api/v1/people/dora", json={"subject": "s-4"}, headers=here.headers)
    assert (taken.status_code, taken.json()["code"]) == (422, "invalid_person")
    await here.client.put("/api/v1/people/carl", json={"disabled": True}, headers=here.headers)
    gone = await here.client.get("/api/v1/me", headers=bearer(carl))
    assert (gone.status_code, "is disabled" in gone.json()["detail"]) == (401, True)
    odd = await here.client.get("/api/v1/me", headers=bearer(provider.token(preferred_username="änn", sub="s-5")))
    assert (odd.status_code, "MUSTER_API_OIDC_PERSON_CLAIM" in odd.json()["detail"]) == (401, True)


async def test_refusals_say_why_and_tokens_of_ours_go_on(here: Platform, provider: Provider) -> None:
    token = provider.token(aud="grafana")
    refused = await here.client.get("/api/v1/me", headers=bearer(token))
    assert (refused.status_code, token in refused.text) == (401, False)
    assert "for somebody else (aud)" in refused.json()["detail"]
    assert (await here.client.get("/api/v1/me", headers=here.headers)).json()["person"] == "admin"
    assert (await here.client.get("/api/v1/sign-in")).json()["issuer"] == provider.issuer


def pass_time(here: Platform, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Put this process's clock forward, also where it has been taken already, and nothing of a second ago counts."""
    real = time.time
    authentication = here.services[CallerAuthentication]
    assert authentication.sign_in is not None
    for owner, name in ((time, "time"), (authentication.sign_in._provider, "_clock")):
        monkeypatch.setattr(owner, name, lambda: real() + seconds)
    authentication.callers.forget()


async def test_a_stream_ends_with_its_sign_in_and_says_so(
    tmp_path: Path, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    async with served(state, auth=True, **settings(provider)) as (here, _):
        here.headers = bearer(here.state.admin_token.read_text().strip())
        await here.client.put("/api/v1/projects/nlp", json={}, headers=here.headers)
        body = document("ours")
        body["metadata"]["labels"] = {"muster.dev/project": "nlp"}
        job = (await here.client.post("/api/v1/jobs", json=body, headers=here.headers)).json()["id"]
        token = provider.token(exp=int(time.time() + HOUR))
        path = f"/api/v1/jobs/{job}/events?follow=true"
        async with here.client.stream("GET", path, headers=bearer(token)) as reply:
            assert reply.status_code == 200
            pass_time(here, monkeypatch, 2 * HOUR)
            async for _ in reply.aiter_lines():
                pass
        again = await here.client.get(path, headers=bearer(token))
        assert (again.status_code, "the sign-in has expired" in again.json()["detail"]) == (401, True)


async def test_an_upload_goes_on_with_a_new_sign_in_where_the_old_one_ended(
    tmp_path: Path, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was being sent when the time was up still arrives; the rest is refused, and nothing that came is lost."""
    state = tmp_path / "state"
    async with served(state, auth=True, **settings(provider)) as (here, _):
        admin = bearer(here.state.admin_token.read_text().strip())
        await here.client.put("/api/v1/projects/nlp", json={}, headers=admin)
        brief = bearer(provider.token(exp=int(time.time() + HOUR)))
        later = bearer(provider.token(exp=int(time.time() + 9 * HOUR)))
        people = People(here, admin, headers={"brief": brief, "later": later})
        file_id = await people.upload("brief", "nlp")
        path = f"/api/v1/files/{file_id}"

        async def judged() -> bool:
            return file_id in here.services[FilePlaces].staging._writing

        async def ended() -> bool:
            return (await people.ask("brief", "GET", "/me")).status_code == 401

        async def slowly() -> AsyncIterator[bytes]:
            yield b"0123"
            await until(judged, "the request to be judged")
            pass_time(here, monkeypatch, 2 * HOUR)
            await until(ended, "the end of the sign-in")
            yield b"45"

        async def send(who: str, offset: int, data: bytes | AsyncIterator[bytes]) -> int:
            sent = {"tus-resumable": "1.0.0", "upload-offset": str(offset)}
            sent["content-type"] = "application/offset+octet-stream"
            reply = await here.client.patch(path, content=data, headers=sent | people.headers[who])
            return reply.status_code

        assert await send("brief", 0, slowly()) == 204
        assert await send("brief", 6, b"6789") == 401
        found = await here.client.head(path, headers={"tus-resumable": "1.0.0", **people.headers["later"]})
        assert (found.status_code, found.headers["upload-offset"]) == (200, "6")
        assert await send("later", 6, b"6789") == 204

        async def whole() -> bool:  # once it was put together
            reply = await here.client.get(f"{path}/content", headers=people.headers["later"])
            return reply.content == b"0123456789"

        await until(whole, "the whole file")


# -- muster login -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def server(tmp_path: Path, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The address of an API; the commands' files are the test's own."""
    for name in ("MUSTER_TOKEN", "MUSTER_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MUSTER_STATE", str(tmp_path / "none"))
    async with served(tmp_path / "state", auth=True, **settings(provider)) as (here, _):
        yield str(here.client.base_url).rstrip("/")


def whoami(server: str) -> str:
    with Connection(address.find_server(server)) as client:
        return str(client.get("me")["person"])


def sign_in(server: str, **options: Any) -> None:
    login.login(**{"browser": False, "server": server, "json": False, **options})


async def test_one_signs_in_by_a_code_and_stays_so(
    server: str, provider: Provider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provider.pending, provider.lifetime = 2, int(-LEEWAY_SECONDS) + 45
    await asyncio.to_thread(sign_in, server)
    said = capsys.readouterr().err
    assert "enter the code" in said
    assert "as ann: viewer of cv, member of nlp" in said
    (file,) = (tmp_path / "config" / "muster").glob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first = file.read_text()
    assert await asyncio.to_thread(whoami, server) == "ann"
    assert file.read_text() != first, "it was renewed, for it was to expire within a minute"
    provider.refreshes.clear()
    with pytest.raises(NotAllowed) as expired:
        await asyncio.to_thread(whoami, server)
    assert (expired.value.next_step, "has expired" in expired.value.what) == ("`muster login` begins anew", True)
    provider.lifetime = 3600
    await asyncio.to_thread(sign_in, server)
    assert await asyncio.to_thread(whoami, server) == "ann"
    login.logout(server=server, json=False)
    assert signed_in.token_for(server) is None


async def test_whoever_says_no_is_not_signed_in(server: str, provider: Provider, tmp_path: Path) -> None:
    provider.approves = False
    with pytest.raises(CliError, match="did not come about"):
        await asyncio.to_thread(sign_in, server)
    assert not list((tmp_path / "config").rglob("*.json"))


async def test_one_signs_in_in_the_browser_with_a_proof_of_the_key(
    server: str, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, list[str]]] = []

    def browse(url: str) -> bool:
        query = parse_qs(urlsplit(url).query)
        seen.append(query)
        stray = httpx2.get(f"{query['redirect_uri'][0]}?code=theirs&state=guessed")
        assert stray.status_code == 200
        httpx2.get(url, follow_redirects=True)
        return True

    import threading

    monkeypatch.setattr(
        signing_in.webbrowser, "open", lambda url: threading.Thread(target=browse, args=(url,), daemon=True).start()
    )
    await asyncio.to_thread(sign_in, server, browser=True)
    assert seen[0]["code_challenge_method"] == ["S256"]
    assert await asyncio.to_thread(whoami, server) == "ann"
