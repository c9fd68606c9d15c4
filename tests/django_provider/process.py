"""The provider's process as tests start it, rotate its key and stand before its pages."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import httpx2
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.django_provider.__main__ import PASSWORD
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.ports import free_port

CLIENT = "muster"
SCOPES = ("openid", "profile", "email", "groups")


class DjangoProvider:
    """`keys` are PEM documents: the first one signs, the others are published beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"http://127.0.0.1:{self._port}"
        self.issuer = f"{self.address}/o"
        self.keys = [new_key()]

    def start(self) -> None:
        (self._folder / "keys.json").write_text(json.dumps(self.keys))
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.django_provider.settings",
            "OAUTHLIB_INSECURE_TRANSPORT": "1",  # http on loopback
            "PROVIDER_ADDRESS": self.address,
            "PROVIDER_FOLDER": str(self._folder),
        }
        command = [sys.executable, "-m", "tests.django_provider", str(self._port)]
        root = Path(__file__).parents[2]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, cwd=root, stdout=log, stderr=log)
        eventually(self._answers, "the provider's discovery document")

    def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def rotate(self, *, keep: bool) -> None:
        """Start again with a new key; the old one stays published where `keep` says so."""
        self.stop()
        self.keys = [new_key(), *(self.keys if keep else [])]
        self.start()

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the provider has ended: {(self._folder / 'log').read_text()[-2_000:]}")
        try:
            return httpx2.get(f"{self.issuer}/.well-known/openid-configuration").is_success
        except httpx2.TransportError:
            return False


@contextlib.contextmanager
def django_provider(folder: Path) -> Iterator[DjangoProvider]:
    provider = DjangoProvider(folder)
    provider.start()
    try:
        yield provider
    finally:
        provider.stop()


def new_key() -> str:
    key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(*pem).decode()


class Form(HTMLParser):
    """The form of a page: its hidden and filled fields, and where it is sent."""

    def __init__(self, page: httpx2.Response) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self.action = str(page.url)
        self.feed(page.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        of = dict(attributes)
        if tag == "form" and of.get("action"):
            self.action = urljoin(self.action, of["action"])
        elif tag == "input" and of.get("name") and of.get("type") != "submit":
            self.fields[str(of["name"])] = of.get("value") or ""


class Person:
    """Somebody with a browser that keeps cookies, follows redirects and runs no script."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.browser = httpx2.AsyncClient(follow_redirects=True, timeout=WAIT_SECONDS_MAX)

    async def submit(self, page: httpx2.Response, **filled: str) -> httpx2.Response:
        form = Form(page)
        return await self.browser.post(form.action, data=form.fields | filled)

    async def open(self, address: str) -> httpx2.Response:
        """The page there, past the provider's own page for signing in where that comes first."""
        page = await self.browser.get(address, headers={"accept": "text/html"})
        if page.url.path == "/accounts/login/":
            page = await self.submit(page, username=self.name, password=PASSWORD)
        return page

    async def sign_in(self, platform: str) -> httpx2.Response:
        """By the button of the pages and the provider's page for consent; where one lands in the end."""
        consent = await self.open(f"{platform}/sign-in/provider?next=/jobs")
        assert "Authorize" in consent.text, consent.text[:2_000]
        return await self.submit(consent, allow="Authorize")

    async def enter_code(self, address: str, code: str, action: str) -> httpx2.Response:
        """Type the code into the provider's page, and `accept` or `deny` what it asks."""
        confirm = await self.submit(await self.open(address), user_code=code)
        assert "requests access" in confirm.text, confirm.text[:2_000]
        return await self.submit(confirm, action=action)
