"""The page for submitting in a real Chromium: by the form and the keyboard, a fault at its line, a file, once only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Error, Page, Route, expect
from tests.integration.api.people import settle
from tests.integration.api.platform import served
from tests.integration.web.watching import IN_CHROMIUM, Watched, chromium, looking, must_look_well

from muster.web.app import create_app

pytestmark = IN_CHROMIUM
VALUE = "document.getElementById('document').value"


@asynccontextmanager
async def submitting(tmp_path: Path) -> AsyncIterator[Watched]:
    """The page, on a platform and in a browser of its own."""
    async with (
        served(tmp_path / "state", make=create_app) as (here, _),
        chromium() as browser,
        looking(browser, here) as watched,
    ):
        await watched.page.goto("/submit")
        yield watched


def holding(words: str) -> re.Pattern[str]:
    return re.compile(re.escape(words))


async def by_keyboard(page: Page) -> None:
    await page.locator("#kind-fine-tune").focus()
    await page.keyboard.press("ArrowRight")  # to pretrain
    for words in ("my-run", None, "", "builtin://python-stdlib"):  # name, shape, tokenizer, data
        await page.keyboard.press("Tab")
        if words:
            await page.keyboard.type(words)
    await page.locator("#sequence").fill("256")
    await page.locator("#preset").select_option("muster-1m")


async def test_submit_by_the_form_and_the_keyboard(tmp_path: Path) -> None:
    async with served(tmp_path / "state", make=create_app) as (here, _), chromium() as browser:
        for scheme, width in (("light", 360), ("dark", 1920)):
            options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
            async with looking(browser, here, **options) as watched:
                await watched.page.goto("/submit")
                await must_look_well(watched, (scheme, width))
                await by_keyboard(watched.page)
                await expect(watched.page.locator("#plan h2")).to_have_text("It would be queued")
                await expect(watched.page.locator("#plan")).to_contain_text("pretrain muster-1m")
                await must_look_well(watched, (scheme, width))
        async with looking(browser, here) as watched:
            page = watched.page
            await page.goto("/submit")
            await by_keyboard(page)
            await expect(page.locator("#document")).to_have_value(holding("preset: muster-1m"))
            await page.locator("#document").focus()
            await page.keyboard.press("Control+Home")
            await page.keyboard.type("speck: 1\n")
            await expect(page.locator(".gutter .bad")).to_have_text("1\n")
            await expect(page.locator(".mark")).to_contain_text("unknown key")
            await page.get_by_role("link", name="Line 1").focus()
            await page.keyboard.press("Enter")
            chosen = "document.getElementById('document').selectionEnd"
            assert await page.evaluate(chosen) == len("speck: 1")
            await page.reload()
            await expect(page.locator("#kept")).to_be_visible()
            await expect(page.locator("#document")).to_have_value(holding("speck: 1"))
            await expect(page.locator("#name")).to_have_value("my-run")
            await page.locator("#document").fill((await page.evaluate(VALUE)).removeprefix("speck: 1\n"))
            await expect(page.locator("#plan h2")).to_have_text("It would be queued")
            await page.locator("#submit").dblclick()
            await expect(page.locator("h1")).to_contain_text("my-run")
            first = page.url
            await page.go_back()
            await expect(page.locator("#document")).to_have_value(holding("name: my-run"))
            await page.locator("#submit").focus()
            await page.keyboard.press("Enter")
            await expect(page.locator(".notice")).to_contain_text("submitted before")
            assert page.url == first
            assert [job["name"] for job in (await here.get("/jobs"))["items"]] == ["my-run"]


async def test_a_file_is_uploaded_and_named_and_a_session_may_end(tmp_path: Path) -> None:
    """What is typed outlives the session: signed in again in another tab, one goes on."""
    data = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    async with served(tmp_path / "state", make=create_app, auth=True) as (here, _), chromium() as browser:
        people = await settle(here, tmp_path / "state")
        made = await people.token("nlp-member", None)
        # The session's end, which the browser may report at any time after it.
        refused = "Failed to load resource: the server responded with a status of 401"
        async with looking(browser, here, forgiven=(refused,)) as watched:
            page = watched.page
            await page.goto("/submit")
            await page.keyboard.type(made["token"])
            await page.keyboard.press("Enter")
            await expect(page.locator("h1")).to_have_text("Submit a job")
            await page.locator("#name").fill("tuned")
            await page.locator("#model").fill("hf://org/name")
            await page.locator("#file").set_input_files(data)
            await expect(page.locator("#uploads")).to_contain_text("1 samples · openai-chat")
            named = await page.locator("#data").input_value()
            assert named.startswith("file-")
            await expect(page.locator("#document")).to_have_value(holding(f"source: {named}"))
            gone = await here.client.delete(f"/api/v1/tokens/{made['id']}", headers=people.admin)
            assert gone.status_code == 204
            await page.locator("#document").press("Control+End")
            await page.keyboard.type("  priority: 3\n")
            await expect(page.locator("#ended")).to_be_visible()
            again = await page.context.new_page()
            await again.goto("/sign-in")
            token = people.headers["nlp-member"]["authorization"].removeprefix("Bearer ")
            await again.keyboard.type(token)
            await again.keyboard.press("Enter")
            await expect(again.locator("h1")).to_have_text("Jobs")
            await expect(page.locator("#ended")).to_be_hidden()
            await expect(page.locator("#document")).to_have_value(holding("priority: 3"))
            await page.locator("#check").click()
            await expect(page.locator("#plan")).to_contain_text("sft hf://org/name")


async def test_what_is_filled_in_before_the_script_has_come_counts(tmp_path: Path) -> None:
    """By a slow line: neither what was kept before nor the script's late start costs what was typed meanwhile."""
    data = tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": "It was a bright cold day."}) + "\n")
    arrives = asyncio.Event()

    async def late(route: Route) -> None:
        await arrives.wait()
        await route.continue_()

    async with submitting(tmp_path) as watched:
        page = watched.page
        await page.locator("#name").fill("before")
        await page.locator("#model").fill("hf://org/kept")
        await expect(page.locator("#document")).to_have_value(holding("name: before"))
        await page.route("**/submit.js*", late)
        await page.goto("/submit", wait_until="commit")
        await page.locator("#name").fill("typed-early")
        await page.locator("#kind-pretrain").check()
        await page.locator("#preset").select_option("muster-1m")
        await page.locator("#file").set_input_files(data)
        arrives.set()
        await expect(page.locator("#uploads")).to_contain_text("1 samples")
        await expect(page.locator("#document")).to_have_value(holding("name: typed-early"))
        await expect(page.locator("#document")).to_have_value(holding("preset: muster-1m"))
        await expect(page.locator("#document")).to_have_value(holding("source: file-"))
        await expect(page.locator("#model")).to_have_value("hf://org/kept")
        await expect(page.locator("#plan h2")).to_have_text("It would be queued")
        await what_is_typed_while_the_form_writes_stays(page)


async def what_is_typed_while_the_form_writes_stays(page: Page) -> None:
    async def typed_meanwhile(route: Route) -> None:
        await page.unroute("**/submit")
        written = await route.fetch()
        await page.locator("#document").press("Control+End")
        await page.keyboard.type("# by hand")
        with contextlib.suppress(
            Error
        ):  # after a pause in the typing the page asks anew, and reads this answer no more
            await route.fulfill(response=written)

    await page.route("**/submit", typed_meanwhile)
    async with page.expect_response(lambda reply: "verb=check" in (reply.request.post_data or "")):
        await page.locator("#name").fill("renamed")
    await expect(page.locator("#document")).to_have_value(holding("# by hand"))


async def test_keys_and_values_are_completed_under_the_caret(tmp_path: Path) -> None:
    async with submitting(tmp_path) as watched:
        page = watched.page
        text, listed = page.locator("#document"), page.locator("#completions")
        await text.focus()
        await page.keyboard.press("Control+Space")
        await expect(listed.locator("strong")).to_have_text(["apiVersion", "kind", "metadata", "spec"])
        await must_look_well(watched)
        await page.keyboard.press("Escape")
        await expect(listed).to_be_hidden()
        await page.keyboard.type("sp")
        await expect(listed.locator("li[aria-selected=true] strong")).to_have_text("spec")
        await page.keyboard.press("Enter")
        await page.keyboard.type("traini")
        await expect(listed.locator("strong")).to_have_text(["training"])
        await page.keyboard.press("Tab")
        await page.keyboard.type("prec")
        await page.keyboard.press("Enter")
        await page.keyboard.type("b")
        await expect(listed.locator("strong").first).to_have_text("bf16")
        await page.keyboard.press("Enter")
        await page.keyboard.press("Enter")
        await page.keyboard.type("    optimizer: {lr: 1e-4, schedule: {na")
        await expect(listed.locator("strong").first).to_have_text("name")
        await listed.locator("li").first.click()
        await page.keyboard.press("Control+Space")
        await expect(listed).to_contain_text("cosine")
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("ArrowUp")
        await page.keyboard.press("Escape")
        await page.keyboard.type("cosine}}")
        assert await page.evaluate(VALUE) == (
            "spec:\n  training:\n    precision: bf16\n    optimizer: {lr: 1e-4, schedule: {name: cosine}}"
        )
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.id") != "document", "Tab leaves where no list is open"
