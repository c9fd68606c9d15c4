"""Of every page in a real Chromium: it can be read without JavaScript and used by keyboard; clocks may differ; somebody
who asked for it is notified."""

from __future__ import annotations

import re
import time
from pathlib import Path

from playwright.async_api import Page, expect
from tests.integration.api.platform import Platform, served
from tests.integration.web.pages import lived
from tests.integration.web.watching import IN_CHROMIUM, chromium, looking

from muster.web.app import create_app
from muster.words.status import Phase

pytestmark = IN_CHROMIUM

# What each page must say to somebody without scripts.
PAGES = {
    "/jobs": "llama-sft",
    "/submit?example=pretrain-stdlib": "It would be queued",
    "/sweeps": "No sweep yet",
    "/fleet": "Who waits for what",
    "/settings": "Members",
    "/settings/projects/default/webhooks": "Make a webhook",
    "/compare?jobs={uid},{other}": "What they differ in",
    "/jobs/{uid}": "Where the time went",
    "/jobs/{uid}/logs": "step 124 of 200",
    "/jobs/{uid}/events": "attempt.failed",
    "/jobs/{uid}/checkpoints": "Checkpoints",
    "/jobs/{uid}/checkpoints/120": "Checkpoint of step 120",
    "/jobs/{uid}/chat": "In a terminal: muster generate llama-sft",
    "/jobs/{uid}/data": "Data",
    "/jobs/{uid}/samples": "evaluation.generate",
    "/jobs/{uid}/config": "tokensPerStep: 16384",
}
# Everything that somebody who has no mouse must come to. Of radio buttons one alone is on the way; what is in a closed
# <details> is not.
REACHABLE = """() => [...document.querySelectorAll(
    'a[href], button:not(:disabled), input:not(:disabled, [type=hidden]), select, textarea, summary, [tabindex="0"]')]
    .filter(each => each.checkVisibility() && !(each.type === 'radio' && !each.checked))
    .map((each, index) => { each.dataset.way = index; return index; })"""


async def places(here: Platform) -> dict[str, str]:
    uid, other = await lived(here), await lived(here, "other-sft")
    return {path.format(uid=uid, other=other): words for path, words in PAGES.items()}


async def test_every_page_is_read_without_javascript(tmp_path: Path) -> None:
    async with served(tmp_path / "state", make=create_app) as (here, _), chromium() as browser:
        addresses = await places(here)
        async with looking(browser, here, java_script_enabled=False) as watched:
            page = watched.page
            for address, words in addresses.items():
                await page.goto(address)
                await expect(page.locator("main"), address).to_contain_text(words)
                for times in await page.locator("time:visible").all_inner_texts():
                    assert times.endswith("UTC"), address
            await page.goto(next(iter(addresses)))
            await page.locator("input[name=job]").first.check()
            await page.get_by_role("button", name="Suspend").click()
            await expect(page.locator(".notice")).to_have_text("Asked 1 of 1 to suspend.")


async def test_every_page_is_used_by_keyboard(tmp_path: Path) -> None:
    """Tab comes to everything that can be pressed or filled in, sees where it is, and is held nowhere."""
    async with served(tmp_path / "state", make=create_app) as (here, _), chromium() as browser:
        addresses = await places(here)
        async with looking(browser, here) as watched:
            for address in addresses:
                await watched.page.goto(address)
                await expect(watched.page.locator("[data-theme-toggle]")).to_have_attribute("data-shown", "")
                await must_be_reached(watched.page, address)


async def must_be_reached(page: Page, address: str) -> None:
    await page.evaluate("document.activeElement?.blur?.()")
    wanted = set(await page.evaluate(REACHABLE))
    reached, unseen = set(), []
    for _ in range(len(wanted) + 20):
        await page.keyboard.press("Tab")
        way, outline = await page.evaluate(
            """() => { const at = document.activeElement, style = getComputedStyle(at);
            return [at.dataset.way ?? '', style.outlineStyle !== 'none' || at.closest('.drop') !== null]; }"""
        )
        if way:
            reached.add(int(way))
            if not outline:
                unseen.append(way)
    missed = [
        await page.evaluate(f"document.querySelector('[data-way=\"{way}\"]')?.outerHTML.slice(0, 120)")
        for way in sorted(wanted - reached)
    ]
    # A live page may have drawn a part anew meanwhile: what is not there any more is nobody's way.
    assert [each for each in missed if each] == [], address
    assert unseen == [], address


async def test_ages_are_told_by_the_servers_clock(tmp_path: Path) -> None:
    async with served(tmp_path / "state", make=create_app) as (here, _), chromium() as browser:
        await here.submit("fresh")
        for hours in (-5, 0, 5):
            async with looking(browser, here) as watched:
                await watched.page.clock.set_fixed_time(time.time() + hours * 3_600)
                await watched.page.goto("/jobs")
                await expect(watched.page.locator("tbody time")).to_have_text(re.compile("sec|now|min"))
                await expect(watched.page.locator("tbody time")).not_to_have_text(re.compile("hr|hour|^in "))


async def test_somebody_who_asked_is_notified_of_an_end(tmp_path: Path) -> None:
    stub = """window.told = []; window.Notification = class {
        constructor(title, more) { told.push([title, more.body]); } close() {} static permission = 'default';
        static async requestPermission() { return Notification.permission = 'granted'; } };"""
    async with served(tmp_path / "state", make=create_app) as (here, _), chromium() as browser:
        uids = [await lived(here, name) for name in ("first", "second")]
        async with looking(browser, here) as watched:
            page = watched.page
            await page.add_init_script(stub)
            await page.goto("/jobs")
            bell = page.locator("[data-notify]")
            await expect(bell).to_have_attribute("aria-pressed", "false")
            here.operate(uids[0], phase=Phase.SUSPENDED, because="paused", since=time.time())
            await expect(page.locator(f"#job-{uids[0]} .badge")).to_contain_text("Suspended")
            assert await page.evaluate("told") == [], "nobody asked"
            await bell.click()
            await expect(bell).to_have_attribute("aria-pressed", "true")
            here.operate(
                uids[1], phase=Phase.FAILED, because="out of budget", since=time.time(), finished_at=time.time()
            )
            await expect(page.locator(f"#job-{uids[1]} .badge")).to_contain_text("Failed")
            assert await page.evaluate("told") == [["second has failed", "out of budget"]]
