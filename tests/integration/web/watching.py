"""A real Chromium for asynchronous tests, watched: no page may write an error, break its policy or ask another host."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright, expect
from tests.integration.api.platform import Platform
from tests.polling import WAIT_SECONDS_MAX

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
IN_CHROMIUM = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]
WAIT_MILLISECONDS_MAX = int(WAIT_SECONDS_MAX * 1_000)
expect.set_options(timeout=WAIT_MILLISECONDS_MAX)


@dataclass
class Watched:
    """A page, and what no page may do: write an error to the console, break its policy, ask another host.

    `forgiven` are beginnings of what the browser itself writes of refusals that the test means to happen; `hosts` are
    those that may be asked.
    """

    page: Page
    hosts: tuple[str, ...]
    forgiven: tuple[str, ...] = ()
    faults: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("request", self._asked)

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(self.forgiven):
            self.faults.append(f"{message.type}: {message.text}")

    def _asked(self, request: Request) -> None:
        if urlsplit(request.url).netloc not in self.hosts:
            self.faults.append(f"asks {request.url}")


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@asynccontextmanager
async def looking(
    browser: Browser, here: Platform | str, forgiven: tuple[str, ...] = (), hosts: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[Watched]:
    """A fresh browser's page on that platform, or at that address; `options` are Playwright's for a context."""
    url = here if isinstance(here, str) else str(here.client.base_url)
    context = await browser.new_context(base_url=url, **options)
    context.set_default_timeout(WAIT_MILLISECONDS_MAX)
    page = await context.new_page()
    watched = Watched(page, (urlsplit(url).netloc, "", *hosts), forgiven)
    watched.watch(page)
    yield watched
    assert watched.faults == []
    await context.close()


async def must_look_well(watched: Watched, place: object = None) -> None:
    """Nothing serious by axe, and nothing wider than the window."""
    found = (await Axe().run(watched.page)).response["violations"]
    serious = [(each["id"], each["nodes"][0]["target"]) for each in found if each["impact"] in ("serious", "critical")]
    assert serious == [], place
    over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert await watched.page.evaluate(over) <= 0, place
