"""The pages of tokens, projects and webhooks in a real Chromium, by keyboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import expect
from tests.integration.api.people import settle
from tests.integration.api.platform import served
from tests.integration.web.watching import CHROMIUM, chromium, looking, must_look_well

from muster.web.app import create_app

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]


async def test_tokens_and_webhooks_are_made_and_taken_away_by_keyboard(tmp_path: Path) -> None:
    async with (
        served(tmp_path / "state", make=create_app, auth=True, webhook_networks=["127.0.0.0/8"]) as (here, _),
        chromium() as browser,
    ):
        people = await settle(here, tmp_path / "state")
        token = people.headers["nlp-maintainer"]["authorization"].removeprefix("Bearer ")
        for scheme, width in (("light", 360), ("dark", 1920)):
            options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
            async with looking(browser, here, **options) as watched:
                page = watched.page
                await page.goto("/settings")
                await page.keyboard.type(token)
                await page.keyboard.press("Enter")
                await expect(page.locator("h1")).to_have_text("Settings")
                await must_look_well(watched, (scheme, width))
                await page.locator("#token-name").focus()
                await page.keyboard.type("laptop")
                await page.keyboard.press("Enter")
                await expect(page.locator(".new-token")).to_contain_text("muster_")
                await must_look_well(watched, (scheme, width))
                page.on("dialog", lambda dialog: dialog.accept())
                revoke = page.get_by_role("button", name="Revoke laptop")
                await revoke.focus()
                await page.keyboard.press("Enter")
                await expect(page.locator(".notice")).to_have_text("It opens nothing any more.")
                await expect(revoke).to_have_count(0)
                await page.goto("/settings/projects/nlp/webhooks")
                await page.locator("#name").focus()
                await page.keyboard.type("on-call")
                await page.keyboard.press("Tab")
                await page.keyboard.type("http://127.0.0.1:9/")
                await page.keyboard.press("Enter")
                await expect(page.locator(".new-token")).to_contain_text("whsec_")
                await page.get_by_role("button", name="Send a test to on-call").press("Enter")
                await expect(page.locator(".notice")).to_contain_text("on-call was not told")
                await expect(page.get_by_role("button", name="Send again")).to_have_count(1)
                await must_look_well(watched, (scheme, width))
                await page.get_by_role("button", name="Delete on-call").press("Enter")
                await expect(page.locator(".notice")).to_contain_text("on-call is gone")
