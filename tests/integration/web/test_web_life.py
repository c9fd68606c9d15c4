"""A job's whole life in a real Chromium, on a real platform: submitted, watched, killed, recovered, compared."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Page, expect
from tests.integration.cli.house import House
from tests.integration.web.watching import IN_CHROMIUM, Watched, chromium, looking, must_look_well
from tests.polling import eventually

pytestmark = IN_CHROMIUM

RUNNING = re.compile(r"^(Running|[0-9]+ %( · [0-9.]+)?) · sums · Muster$")
STEP = re.compile(r"([\d,]+) / ")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A platform of three nodes: two for the job, one for its clone."""
    house = House(tmp_path)
    house.up("--stop-jobs", "--nodes", "3")
    yield house
    house.close()


async def test_a_jobs_life_on_pages_that_are_not_loaded_anew(house: House) -> None:
    async with chromium() as browser, looking(browser, house.url) as watched:
        page = watched.page
        page.on("dialog", lambda dialog: dialog.accept())
        await sign_in(page, house)
        await submit_by_the_form(page, await dropped_texts(page))
        first = page.url
        await page.evaluate("window.kept = true")
        await it_trains(page)
        await a_killed_rank_is_recovered_from(page, house, first.rpartition("/")[2])
        assert await page.evaluate("window.kept"), "the page was loaded anew"
        await must_look_well(watched)
        await its_log_is_followed(page)
        await its_commit_is_pinned(page)
        second = await its_clone_is_submitted(page)
        await both_are_compared(watched)
        for address in (second, first):
            await page.goto(address)
            await page.get_by_role("button", name="Cancel").click()
            # Its notice goes with the next phase, which may come before anybody reads it (test_web_session.py has it).
            await expect(page).to_have_title(re.compile("^Cancelled · "))


async def sign_in(page: Page, house: House) -> None:
    await page.goto("/submit")
    await page.locator("#token").fill(house.state.admin_token.read_text().strip())
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_have_text("Submit a job")


async def dropped_texts(page: Page) -> str:
    """A file of texts, dropped on the page as a file manager drops it. Returns the id under which it is uploaded."""
    texts = "".join(
        json.dumps({"text": f"{number} and {number} are {2 * number}. " * 8}) + "\n" for number in range(80)
    )
    drop = """words => { const data = new DataTransfer();
        data.items.add(new File([words], "sums.jsonl", { type: "application/json" }));
        const drop = new DragEvent("drop", { dataTransfer: data, bubbles: true });
        document.querySelector(".drop").dispatchEvent(drop); }"""
    await page.get_by_label("Pretrain a new one").check()
    await page.evaluate(drop, texts)
    await expect(page.locator("#uploads")).to_contain_text("80 samples")
    return await page.locator("#data").input_value()


async def submit_by_the_form(page: Page, file: str) -> None:
    await page.locator("#name").fill("sums")
    await page.locator("#preset").select_option("muster-1m")
    for field, value in (("steps", "100000"), ("sequence", "32"), ("lr", "0.001"), ("nodes", "2")):
        await page.locator(f"#{field}").fill(value)
    await expect(page.locator("#document")).to_have_value(re.compile(rf"source: {file}[\s\S]*nodes: 2"))
    text = await page.locator("#document").input_value()
    assert "    every: auto\n" in text
    text = text.replace(
        "    every: auto\n", "    every: 10\n    keep: {last: 1000}\n"
    )  # none goes between look and click
    await page.locator("#document").fill(text)
    await expect(page.locator("#plan h2")).to_have_text("It would start now")
    await page.get_by_role("button", name="Submit", exact=True).click()
    await expect(page.locator("h1")).to_contain_text("sums")


async def it_trains(page: Page) -> None:
    """Phase, steps and curve grow on the open page."""
    await expect(page).to_have_title(RUNNING)
    await expect(page.locator("#curves canvas").first).to_be_visible()
    # The curves' points and the status come to the API on ways of their own, and either may be first.
    await expect(page.locator(".progress-wide")).to_contain_text(STEP)
    before = await steps(page)
    chart = page.locator("#curves .curve-plot").first
    drawn = await chart.get_attribute("aria-label")
    assert drawn is not None
    await expect(page.locator(".progress-wide")).not_to_contain_text(f"{before:,} / ")
    assert await steps(page) > before
    await expect(chart).not_to_have_attribute("aria-label", drawn)
    await expect(page.locator("#now-title + .progress-wide + .facts")).to_contain_text(re.compile(r"Loss\s*\d\.\d"))


async def steps(page: Page) -> int:
    found = STEP.search(await page.locator(".progress-wide").inner_text())
    assert found is not None
    return int(found[1].replace(",", ""))


async def a_killed_rank_is_recovered_from(page: Page, house: House, uid: str) -> None:
    await expect(page.locator("#attempt-1 .lane .commit").first).to_be_attached()
    rank = eventually(lambda: [beat for beat in house.beats(uid) if beat.rank == 1], "a heartbeat of rank 1")[0]
    os.kill(rank.pid, signal.SIGKILL)
    await expect(page.locator("#attempt-1 .outcome")).to_have_text("infrastructure")
    await expect(page.locator("#attempt-1 .evidence")).to_contain_text("rank 1 was killed by SIGKILL")
    await expect(page.locator("#attempt-2 .state-running")).to_be_attached()
    await expect(page).to_have_title(RUNNING)


async def its_log_is_followed(page: Page) -> None:
    await page.get_by_role("link", name="Logs", exact=True).click()
    log = page.locator("#log")
    await expect(log).to_contain_text("step")
    before = await log.inner_text()
    await expect(log).not_to_have_text(before)
    assert (await log.inner_text()).startswith(before[:200]), "what was there stays"


async def its_commit_is_pinned(page: Page) -> None:
    await page.get_by_role("link", name="Checkpoints", exact=True).click()
    pin = page.get_by_role("button", name=re.compile("^Pin")).last
    await pin.click()
    await expect(page.locator(".notice.good")).to_contain_text("is kept, whatever the retention policy says")
    await expect(page.get_by_text("pinned", exact=True)).to_have_count(1)


async def its_clone_is_submitted(page: Page) -> str:
    """With another learning rate, on one node. Returns the address of its page."""
    await page.get_by_role("link", name="Clone with changes").click()
    await expect(page.locator("h1")).to_contain_text("A new job like sums")
    text = await page.locator("#document").input_value()
    for before, after in (("lr: 0.001\n", "lr: 0.002\n"), ("min: 2\n      max: 2\n", "min: 1\n      max: 1\n")):
        assert before in text
        text = text.replace(before, after)
    await page.locator("#document").fill(text)
    await expect(page.locator("#plan h2")).to_have_text("It would start now")
    await page.get_by_role("button", name="Submit", exact=True).click()
    await expect(page).to_have_title(re.compile("^(Running|[0-9]+ %) · "))
    await expect(page.locator(".progress-wide")).to_contain_text(STEP)
    return page.url


async def both_are_compared(watched: Watched) -> None:
    page = watched.page
    name = (await page.locator("[data-name]").get_attribute("data-name")) or ""
    await page.get_by_role("link", name="Compare", exact=True).click()
    await page.locator("#jobs").fill(f"sums, {name}")
    await page.keyboard.press("Enter")
    await expect(page.locator("#compared canvas").first).to_be_visible()
    for path, one, other in (("training.optimizer.lr", "0.001", "0.002"), ("gang.nodes.min", "2", "1")):
        row = page.locator("tr", has=page.locator("code", has_text=re.compile(f"^{re.escape(path)}$")))
        await expect(row.locator("td")).to_have_text([one, other])
    await must_look_well(watched)
