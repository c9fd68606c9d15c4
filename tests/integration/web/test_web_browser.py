"""The pages in a real Chromium: live, by keyboard, in light and dark, narrow and wide, under their own policy."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

from playwright.async_api import Page, expect
from tests.integration.api.people import settle
from tests.integration.api.platform import Platform, served
from tests.integration.web.pages import lived
from tests.integration.web.test_web_sweeps import swept
from tests.integration.web.watching import IN_CHROMIUM, WIDTHS, chromium, looking, must_look_well

from muster.api.openai.chat.pool import WorkerPool
from muster.api.openai.chat.worker import ModelPlace, ModelWorker
from muster.web.app import create_app
from muster.words.names import LOG
from muster.words.status import Phase

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x1b[31m'\"&"
SETTINGS = "training.data.train[0].source,training.optimizer.lr,training.model.preset,data,note,submitted,cost"
PATHS = ("", "/logs", "/events", "/checkpoints", "/checkpoints/120", "/chat", "/data", "/samples", "/config")

pytestmark = IN_CHROMIUM


async def test_every_page_in_light_and_dark_narrow_and_wide(tmp_path: Path) -> None:
    """Nothing serious by axe, nothing wider than the window, no error, no violation, no other host; nothing hostile
    runs."""
    async with served(tmp_path / "state", make=create_app) as (here, _), chromium() as browser:
        uid = await lived(here, message=HOSTILE + "y" * 1_000_000)
        other = await lived(here, "other-sft")
        sweep = (await swept(here))["id"]
        paths = (
            "/jobs",
            "/fleet",
            "/sweeps",
            f"/sweeps/{sweep}",
            f"/compare?jobs={uid},{other}",
            *(f"/jobs/{uid}{path}" for path in PATHS),
        )
        for scheme, width in (("light", 360), ("dark", 1920)):
            options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
            async with looking(browser, here, **options) as watched:
                for path in paths:
                    reply = await watched.page.goto(path)
                    assert reply is not None
                    assert reply.status == 200
                    await expect(watched.page.locator("[data-theme-toggle]")).to_have_attribute("data-shown", "")
                    await must_look_well(watched, (path, scheme, width), WIDTHS if scheme == "light" else ())
                    assert "owned" not in await watched.page.title()
        async with looking(browser, here) as watched:
            for address in (f"/jobs?picked={uid},{other}", f"/jobs?group=model&columns=phase,because,{SETTINGS}"):
                await watched.page.goto(address)
                if "picked" in address:
                    await expect(watched.page.locator("#picked canvas")).to_be_visible()
                await must_look_well(watched, address, WIDTHS)


async def test_ticked_jobs_draw_their_curves_and_a_link_shows_the_same(tmp_path: Path) -> None:
    async with served(tmp_path / "state", make=create_app) as (here, _), chromium() as browser:
        uid, other = await lived(here), await lived(here, "other-sft")
        async with looking(browser, here) as watched:
            page = watched.page
            await page.goto("/jobs")
            assert await page.locator("script[src*=uplot]").count() == 0, "a list without ticks needs no charts"
            await page.get_by_label("Choose llama-sft").check()
            await expect(page.locator("#picked-title")).to_have_text("llama-sft")
            await page.get_by_label("Choose other-sft").check()
            await expect(page.locator("#picked-title")).to_have_text("2 jobs")
            await expect(page.locator("#picked figcaption strong")).to_have_text("Loss")
            await page.get_by_label("Chart").select_option("Learning rate")
            await expect(page.locator("[data-chosen-count]")).to_have_text("2 chosen:")
            await page.get_by_role("link", name="Phase", exact=True).click()
            await expect(page.locator("th[aria-sort] a")).to_have_text("Phase")
            await expect(page).to_have_url(re.compile(f"picked={uid},{other}"))
            link = page.url
            await page.goto("about:blank")
            await page.goto(link)
            await expect(page.locator("#picked-title")).to_have_text("2 jobs")
            await expect(page.get_by_label("Chart")).to_have_value("lr")
            await expect(page.get_by_label("Choose other-sft")).to_be_checked()
            here.operate(uid, because="something else")
            await page.get_by_role("button", name="Compare").click()
            await expect(page.locator("#jobs")).to_have_value("other-sft, llama-sft")
            await page.go_back()
            await page.get_by_role("button", name="Untick all").click()
            await expect(page.locator("#picked")).to_be_hidden()
            await expect(page).not_to_have_url(re.compile("picked"))


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
            await expect(page.locator(".notice.good")).to_contain_text("Cancellation was asked for")


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
            await two_checkpoints_are_asked(here, page, people.jobs["nlp"])
            await page.goto("/jobs")
            await page.keyboard.press("Tab")
            assert await page.evaluate("document.activeElement.className") == "skip"
            await page.locator("#q").focus()
            # At once: on a slow machine a pause between two keys is a search of its own, to which Back would lead.
            await page.keyboard.insert_text("nothing like it")
            await expect(page.locator(".empty h2")).to_have_text("No matching jobs")
            await expect(page).to_have_url(re.compile("q=nothing"))
            assert await page.evaluate("document.activeElement.id") == "q"
            await page.go_back()
            await expect(page.locator("table.jobs")).to_be_visible()
            await page.locator("input[name=job]").first.focus()
            await page.keyboard.press("Space")
            await expect(page.locator("[data-chosen-count]")).to_have_text("1 chosen:")
            await page.get_by_role("button", name="Suspend").focus()
            await page.keyboard.press("Enter")
            await expect(page.locator(".notice")).to_have_text("Asked 1 of 1 to suspend.")


class Parrot:
    """A worker that loads no model and says its step and what it was asked, in pieces, the last once it may."""

    def __init__(self, place: ModelPlace, may_end: asyncio.Event) -> None:
        self.place, self.turn, self.may_end = place, asyncio.Lock(), may_end
        self.waiting, self.used_at, self.alive = 0, 0.0, True

    async def ask(self, question: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        for piece in (f"step {self.place.step} ", "says ", question["prompt"]):
            yield {"text": piece}
        await self.may_end.wait()
        yield {"done": {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 3}}

    async def end(self) -> None:
        self.alive = False


async def two_checkpoints_are_asked(here: Platform, page: Page, job: str) -> None:
    """Side by side, by the session of the browser, on a server that holds one model at a time."""

    async def start(place: ModelPlace) -> ModelWorker:
        return cast(ModelWorker, Parrot(place, may_end))

    may_end = asyncio.Event()

    here.services[WorkerPool]._start = start
    for step in (20, 40):
        here.commit(job, step)
    await page.goto(f"/jobs/{job}/chat?step=20")
    await page.locator("#chat-other").select_option("40")
    await page.locator("#chat-words").fill("<b>hello</b>")
    await page.keyboard.press("Enter")
    answers = page.locator(".turn-assistant")
    waits = "Waits for the other answer: this server holds one model at a time (MUSTER_API_CHAT_WORKERS)."
    await expect(answers).to_have_text(["step 20 says <b>hello</b>", waits])
    may_end.set()
    await expect(answers).to_have_text(["step 20 says <b>hello</b>", "step 40 says <b>hello</b>"])
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()


async def test_a_log_of_a_gigabyte_opens_at_its_end_and_is_searched(tmp_path: Path) -> None:
    """The file has a hole of 1 GiB: nobody waits for it to be written, and it is read as if somebody had."""
    async with served(tmp_path / "state", make=create_app) as (here, _), chromium() as browser:
        uid = await lived(here)
        with (here.state.worker(uid, 2, 0) / LOG).open("r+b") as file:
            file.seek(1 << 30)
            file.write(b"\n" + b"a line of no note\n" * 1_000 + b"the needle in the hay\n" + b"another line\n" * 1_000)
        async with looking(browser, here) as watched:
            page = watched.page
            await page.goto(f"/jobs/{uid}/logs")
            await expect(page.locator("#log")).to_contain_text("another line")
            await page.locator("#find").fill("NEEDLE")
            await page.keyboard.press("Enter")
            for _ in range(4):
                await page.get_by_role("link", name="Search on").click()
            await expect(page.locator("#log mark")).to_have_text("the needle in the hay")
            assert len(await page.locator("#log").inner_text()) < 300_000, "the browser holds a page of it"
            assert len(await page.content()) < 1_000_000
            await page.locator("[data-theme-toggle]").click()  # and answers
