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


WIDTHS = (390, 820, 1280, 1440, 1920)
FRAMES_TO_SETTLE = 300  # five seconds where nothing else runs
# What is wider than the window; what is cut; and short words that are broken, which a column that is too narrow does.
FAULTS = """() => {
    const found = [], root = document.documentElement, pen = document.createElement('canvas').getContext('2d');
    if (root.scrollWidth > root.clientWidth) found.push(`the page is ${root.scrollWidth} wide`);
    for (const each of document.querySelectorAll('button, .button, .badge, .tabs a, nav a, label'))
        if (each.checkVisibility() && each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 1)
            found.push(`cut: ${each.textContent.trim().slice(0, 60)}`);
    for (const each of document.querySelectorAll('select')) {
        pen.font = getComputedStyle(each).font;
        const words = each.selectedOptions[0]?.textContent.trim() ?? '', room = each.clientWidth - 28;
        if (each.checkVisibility() && words.length <= 24 && pen.measureText(words).width > room)
            found.push(`cut: ${words}`);
    }
    const texts = document.createTreeWalker(document.getElementById('main') ?? document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const text = texts.currentNode, range = document.createRange();
        const holder = text.parentElement.closest('button, .button, .badge, th, td, dt, label, h1, h2, h3');
        if (!holder?.checkVisibility()) continue;
        for (const word of text.data.matchAll(/[\\p{L}\\p{N}]{2,14}(?![^\\s])/gu)) {
            if (word.index && /\\S/.test(text.data[word.index - 1])) continue;
            range.setStart(text, word.index);
            range.setEnd(text, word.index + word[0].length);
            const lines = new Set([...range.getClientRects()].map((each) => Math.round(each.top)));
            if (lines.size > 1) found.push(`broken: ${word[0]}`);
        }
    }
    return found;
}"""


async def must_look_well(watched: Watched, place: object = None, widths: tuple[int, ...] = ()) -> None:
    """Nothing serious by axe; and in this window and in those of `widths` nothing wider than it, cut or broken."""
    await watched.page.evaluate("document.fonts.ready.then(() => true)")  # another font has other widths
    found = (await Axe().run(watched.page)).response["violations"]
    serious = [(each["id"], each["nodes"][0]["target"]) for each in found if each["impact"] in ("serious", "critical")]
    assert serious == [], place
    assert (faults := await watched.page.evaluate(FAULTS)) == [], (place, faults)
    for width in widths:
        await watched.page.set_viewport_size({"width": width, "height": 900})
        assert await _settled_faults(watched.page) == [], (place, width)


async def _settled_faults(page: Page) -> list[str]:
    """Return the faults that stay: what is drawn anew after the window has changed, such as a chart, takes a moment."""
    for _ in range(FRAMES_TO_SETTLE):
        if (faults := await page.evaluate(FAULTS)) == []:
            break
        await page.evaluate("new Promise((drawn) => requestAnimationFrame(() => drawn(true)))")
    return list(faults)
