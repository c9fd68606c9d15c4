"""Sign-in by a provider that is not ours, django-oauth-toolkit in a process of its own, by its own pages: what of it
Muster reads otherwise than the provider that our other tests bring is seen here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.django_provider.process import CLIENT, SCOPES, DjangoProvider, Person, django_provider
from tests.integration.api.people import bearer
from tests.integration.api.platform import Platform, document, served, until
from tests.integration.web.test_web_provider import fault

from muster.web.app import create_app

pytestmark = pytest.mark.long  # about 20 s, a third of which are the provider's migrations and its two new starts

ROLES = {"ml": {"nlp": "member"}, "platform": "admin"}


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DjangoProvider]:
    with django_provider(tmp_path_factory.mktemp("provider")) as started:
        yield started


@contextlib.asynccontextmanager
async def muster(state: Path, provider: DjangoProvider, **more: Any) -> AsyncIterator[Platform]:
    """Muster on a port, with a project nlp and the provider's people."""
    settings = {
        "auth": True, "oidc_issuer": provider.issuer, "oidc_client_id": CLIENT, "oidc_roles": ROLES,
        "oidc_scopes": SCOPES,
    }  # fmt: skip
    async with served(state, make=create_app, **settings | more) as (here, _):
        here.headers = bearer(here.state.admin_token.read_text().strip())
        made = await here.client.put("/api/v1/projects/nlp", json={}, headers=here.headers)
        assert made.status_code == 201
        yield here


def address(here: Platform) -> str:
    return str(here.client.base_url).rstrip("/")


class Terminal:
    """`muster` as a person runs it, with a home of its own."""

    def __init__(self, home: Path, server: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
        self._environment = kept | {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "MUSTER_STATE": str(home / "none")}
        self._home, self._server = home, server

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "muster.cli", *words, "--server", self._server]
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*command, env=self._environment, stdout=pipe, stderr=pipe)

    async def run(self, *words: str) -> tuple[int | None, str, str]:
        process = await self.start(*words)
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    async def login(self, person: Person, action: str = "accept") -> tuple[int | None, str]:
        """`muster login`, whose code the person enters at the provider: how it ended, and what it said."""
        process = await self.start("login")
        shown = (await process.stderr.readuntil(b"enter the code ")).decode()
        code = (await process.stderr.readline()).decode().strip()
        decided = await person.enter_code(re.search(r"Open (\S+)", shown)[1], code, action)
        assert decided.is_success, decided.text
        _, rest = await process.communicate()
        return process.returncode, " ".join(rest.decode().split())

    def id_token(self) -> str:
        (kept,) = (self._home / "muster").glob("*.json")
        return json.loads(kept.read_text())["id_token"]


async def test_one_signs_in_by_its_pages_and_has_the_role_of_ones_group(
    tmp_path: Path, provider: DjangoProvider
) -> None:
    async with muster(tmp_path / "state", provider) as here:
        ann = Person("ann")
        landed = await ann.sign_in(address(here))
        assert (landed.status_code, landed.url.path) == (200, "/jobs"), fault(landed)
        assert '>ann<span class="visually-hidden">' in landed.text
        opened = await ann.browser.get(f"{address(here)}/settings", headers={"accept": "text/html"})
        assert (opened.status_code, "<dt>Your role</dt><dd>member</dd>" in opened.text) == (200, True)

        bob = await Person("bob").sign_in(address(here))
        assert (bob.status_code, bob.url.path) == (403, "/sign-in/callback")
        assert f"{provider.issuer} knows you as 'bob', but your groups (guests) open no project here" in fault(bob)


async def test_muster_login_by_a_code_that_is_entered_at_its_page(tmp_path: Path, provider: DjangoProvider) -> None:
    async with muster(tmp_path / "state", provider) as here:
        job = document("ours")
        job["metadata"]["labels"] = {"muster.dev/project": "nlp"}
        made = await here.client.post("/api/v1/jobs", json=job, headers=here.headers)
        assert made.status_code == 201
        terminal = Terminal(tmp_path / "home", address(here))
        code, said = await terminal.login(Person("ann"), "deny")
        assert (code, "the sign-in did not come about" in said) == (1, True), said
        code, said = await terminal.login(Person("ann"))
        assert (code, "as ann: member of nlp" in said) == (0, True), said
        code, shown, said = await terminal.run("get", made.json()["id"], "--json")
        assert code == 0, said
        assert json.loads(shown)["metadata"]["name"] == "ours"


async def test_pages_and_muster_login_may_be_two_clients(tmp_path: Path, provider: DjangoProvider) -> None:
    """As where a client has one grant: the one of `muster login` has the code for devices, and no redirect."""
    async with muster(tmp_path / "state", provider, oidc_login_client_id="muster-login") as here:
        terminal = Terminal(tmp_path / "home", address(here))
        code, said = await terminal.login(Person("ann"))
        assert (code, "as ann: member of nlp" in said) == (0, True), said
        me = (await here.client.get("/api/v1/me", headers=bearer(terminal.id_token()))).json()
        landed = await Person("ann").sign_in(address(here))
        assert (landed.url.path, '>ann<span class="visually-hidden">' in landed.text) == ("/jobs", True), fault(landed)
        assert me["person"] == "ann"


async def test_its_key_rotates_while_muster_runs(tmp_path: Path, provider: DjangoProvider) -> None:
    async with muster(tmp_path / "state", provider) as here:
        terminal = Terminal(tmp_path / "home", address(here))
        code, said = await terminal.login(Person("ann"))
        assert code == 0, said
        old = bearer(terminal.id_token())
        provider.rotate(keep=True)
        assert (await Person("ann").sign_in(address(here))).url.path == "/jobs"
        assert (await here.client.get("/api/v1/me", headers=old)).json()["person"] == "ann"
        provider.rotate(keep=False)
        assert (await Person("ann").sign_in(address(here))).url.path == "/jobs"

        async def refusals() -> list[str]:
            reply = await here.client.get("/api/v1/me", headers=old)
            return [] if reply.is_success else [f"{reply.status_code}: {reply.json()['detail']}"]

        # The API keeps a caller for a second, and a quick machine has done all of the above within it.
        (refusal,) = await until(refusals, "the API to forget the caller")
        assert refusal.startswith("401: ")
        assert "not one of the provider's" in refusal


async def test_what_it_does_not_know_of_us_is_named(tmp_path: Path, provider: DjangoProvider) -> None:
    """A setting that is wrong is told of with its name: the person who signs in can't mend it."""
    async with muster(tmp_path / "scope", provider, oidc_scopes=(*SCOPES, "roles")) as here:
        refused = await Person("ann").open(f"{address(here)}/sign-in/provider")
        assert (refused.status_code, "(invalid_scope" in fault(refused)) == (401, True), fault(refused)
        assert "MUSTER_API_OIDC_SCOPES" in fault(refused)
    async with muster(tmp_path / "issuer", provider, oidc_issuer=f"{provider.issuer}/") as here:
        for _ in range(2):  # the second one asks while the provider is not asked again
            refused = await Person("ann").open(f"{address(here)}/sign-in/provider")
            assert (refused.status_code, f"it calls itself '{provider.issuer}'" in fault(refused)) == (503, True)
        assert "MUSTER_API_OIDC_ISSUER" in fault(refused)
    async with muster(tmp_path / "client", provider, oidc_client_id="mustard") as here:
        code, _, said = await Terminal(tmp_path / "home", address(here)).run("login")
        words = " ".join(said.split())
        assert (code, "Invalid client_id" in words, "MUSTER_API_OIDC_" in words) == (1, True, True), said
