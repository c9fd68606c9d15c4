"""The pages in a real Chromium: live, by keyboard, in light and dark, narrow and wide, under their own policy."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright, expect
from tests.integration.api.people import settle
from tests.integration.api.platform import Platform, served
from tests.integration.web.pages import lived

from muster.contract.names import LOG
from muster.contract.status import Phase
from muster.web.app import create_app

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x1b[31m'\"&"
PATHS = ("", "/logs", "/events", "/checkpoints", "/checkpoints/120", "/samples", "/config", "/clone")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
    pytest.mark.timeout(300),
]


@dataclass
class Watched:
    """A page, and what no page may do: write an error to the console, break its policy, ask another host."""

    page: Page
    host: str
    faults: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("request", self._asked)

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")

    def _asked(self, request: Request) -> None:
        if urlsplit(request.url).netloc not in (self.host, ""):
            self.faults.append(f"asks {request.url}")


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@asynccontextmanager
async def looking(browser: Browser, here: Platform, **options: Any) -> AsyncIterator[Watched]:
    context = await browser.new_context(base_url=str(here.client.base_url), **options)
    page = await context.new_page()
    watched = Watched(page, urlsplit(str(here.client.base_url)).netloc)
    watched.watch()
    yield watched
    assert watched.faults == []
    await context.close()


async def test_every_page_in_light_and_dark_narrow_and_wide(tmp_path: Path) -> None:
    """Nothing serious by axe, nothing wider than the window, no error, no violation, no other host; nothing hostile
    runs."""
    async with served(tmp_path / "state", make=create_app) as (here, _), chromium() as browser:
        uid = await lived(here, message=HOSTILE + "y" * 1_000_000)
        for scheme, width in (("light", 360), ("dark", 1920)):
            options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
            async with looking(browser, here, **options) as watched:
                for path in ("/jobs", *(f"/jobs/{uid}{path}" for path in PATHS)):
                    reply = await watched.page.goto(path)
                    assert reply is not None
                    assert reply.status == 200
                    await expect(watched.page.locator("[data-copy]").first).to_have_attribute("data-shown", "")
                    found = (await Axe().run(watched.page)).response["violations"]
                    serious = [
                        (each["id"], each["nodes"][0]["target"])
                        for each in found
                        if each["impact"] in ("serious", "critical")
                    ]
                    assert serious == [], (path, scheme, width)
                    over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                    assert await watched.page.evaluate(over) <= 0, (path, width)
                    assert "owned" not in await watched.page.title()


async def test_a_recovery_shows_without_reloading_and_open_details_stay(tmp_path: Path) -> None:
    async with served(tmp_path / "state", make=create_app) as (here, _), chromium() as browser:
        uid = await lived(here)
        async with looking(browser, here) as watched:
            page = watched.page
            await page.goto(f"/jobs/{uid}")
            await page.evaluate("window.kept = true")
            await page.locator("#attempt-1 summary").click()
            await expect(page.locator("#attempt-1 .evidence")).to_be_visible()
            here.operate(uid, phase=Phase.RESTARTING, because="attempt 2 failed", since=time.time())
            await expect(page).to_have_title("Restarting · llama-sft · Muster")
            await expect(page.locator("h1 .badge")).to_contain_text("Restarting")
            assert await page.evaluate("window.kept")  # it was not loaded anew
            await expect(page.locator("#attempt-1 .evidence")).to_be_visible()
            await expect(page.locator("#said")).to_have_text("llama-sft is Restarting")
            await page.goto(f"/jobs/{uid}/logs")
            log = here.state.worker(uid, 2, 0) / LOG
            with log.open("a") as file:
                file.write("something new \x1b[31m<b>bold</b>\n")
            await expect(page.locator("#log")).to_contain_text("something new <b>bold</b>")
            page.on("dialog", lambda dialog: dialog.accept())
            await page.get_by_role("button", name="Cancel").click()
            await expect(page.locator(".notice")).to_contain_text("Cancellation was asked for")


async def test_one_works_by_keyboard_and_signs_in(tmp_path: Path) -> None:
    async with served(tmp_path / "state", make=create_app, auth=True) as (here, _), chromium() as browser:
        people = await settle(here, tmp_path / "state")
        token = people.headers["nlp-owner"]["authorization"].removeprefix("Bearer ")
        async with looking(browser, here) as watched:
            page = watched.page
            await page.goto(f"/jobs/{people.jobs['nlp']}")
            await page.keyboard.type(token)  # the field has the focus
            await page.keyboard.press("Enter")
            await expect(page.locator("h1")).to_contain_text("nlp-job")
            await page.goto("/jobs")
            await page.keyboard.press("Tab")
            assert await page.evaluate("document.activeElement.className") == "skip"
            await page.locator("#q").focus()
            await page.keyboard.type("nothing like it")
            await expect(page.locator(".empty h2")).to_have_text("No job is like that")
            assert "q=nothing" in page.url
            assert await page.evaluate("document.activeElement.id") == "q"
            await page.go_back()
            await expect(page.locator("table.jobs")).to_be_visible()
            await page.locator("input[name=job]").first.focus()
            await page.keyboard.press("Space")
            await expect(page.locator("[data-chosen-count]")).to_have_text("1 chosen:")
            await page.get_by_role("button", name="Suspend").focus()
            await page.keyboard.press("Enter")
            await expect(page.locator(".notice")).to_have_text("Asked 1 of 1 to suspend.")
