"""What goes wrong under an open page, in a real Chromium: sessions that end, an API that restarts, a refusal."""

from __future__ import annotations

import re
import time
from pathlib import Path
from urllib.parse import urlsplit

from playwright.async_api import Page, expect
from tests.integration.api.people import People, bearer, settle
from tests.integration.api.platform import served
from tests.integration.web.pages import lived
from tests.integration.web.test_web_provider import settings
from tests.integration.web.watching import IN_CHROMIUM, chromium, looking
from tests.oidc_provider import oidc_provider
from tests.ports import free_port

from muster.web.app import create_app
from muster.words.status import Phase

pytestmark = IN_CHROMIUM

NOT_ANSWERED = "Failed to load resource"  # the browser's own words for a refusal that the test means to happen


async def sign_in(page: Page, token: str) -> None:
    await page.locator("#token").fill(token)
    await page.keyboard.press("Enter")
    await expect(page.locator(".person")).to_be_visible()


async def settled_token(people: People, person: str) -> dict[str, str]:
    made: dict[str, str] = await people.token(person, None)
    return made


async def test_a_session_that_ends_under_an_open_page_is_said_and_what_was_typed_stays(tmp_path: Path) -> None:
    async with served(tmp_path / "state", make=create_app, auth=True) as (here, _), chromium() as browser:
        people = await settle(here, tmp_path / "state")
        first, second = [await settled_token(people, "nlp-owner") for _ in range(2)]
        async with looking(browser, here, forgiven=(NOT_ANSWERED,)) as watched:
            page = watched.page
            await page.goto(f"/submit?clone={people.jobs['nlp']}")
            await sign_in(page, first["token"])
            clone = page.url
            written = (await page.locator("#document").input_value()).replace("steps: 200", "steps: 7")
            await page.locator("#document").fill(written)
            listed = await page.context.new_page()
            watched.watch(listed)
            await listed.goto("/jobs")
            await expect(listed.locator("[data-theme-toggle]")).to_have_attribute("data-shown", "")
            gone = await here.client.delete(f"/api/v1/tokens/{first['id']}", headers=people.admin)
            assert gone.status_code == 204
            await expect(listed.locator("#ended")).to_be_visible()  # its stream says so at once
            await page.get_by_role("button", name="Submit").click()
            await expect(page.locator("#ended")).to_be_visible()
            await expect(page.locator("#stale")).to_be_hidden()
            assert page.url == clone, "nothing was sent"
            other = await page.context.new_page()
            watched.watch(other)
            await other.goto("/sign-in")
            await sign_in(other, second["token"])
            await expect(page.locator("#ended")).to_be_hidden()
            await expect(listed.locator("#ended")).to_be_hidden()
            await expect(page.locator("#document")).to_have_value(written)
            await page.get_by_role("button", name="Submit").click()
            await expect(page).to_have_url(re.compile("/jobs/"))


async def test_an_api_that_restarts_is_said_and_nothing_is_missed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with chromium() as browser:
        port = free_port()  # one that the kernel gives to nobody else while no API holds it
        async with served(state, make=create_app, port=port) as (here, _):
            uid = await lived(here)
            url = str(here.client.base_url)
            cluster = here.cluster
        async with looking(browser, url, forgiven=(NOT_ANSWERED,)) as watched:
            page = watched.page
            async with served(state, make=create_app, port=port):
                await page.goto(f"/jobs/{uid}")
                await page.evaluate("window.kept = true")
            await expect(page.locator("#stale")).to_be_visible()
            await page.get_by_role("button", name="Suspend").click()
            await expect(page.locator("#said")).to_contain_text("Nothing was sent")
            job = cluster.get(uid)  # the operator goes on while the API is down
            status = job.status.model_copy(update={"phase": Phase.RESTARTING, "since": time.time()})
            cluster.write_status(uid, status, job.metadata.resource_version)
            async with served(state, make=create_app, port=port):
                await expect(page).to_have_title("Restarting · llama-sft · Muster")
                await expect(page.locator("#stale")).to_be_hidden()
                assert await page.evaluate("window.kept"), "it was not loaded anew"
                await page.get_by_role("button", name="Suspend").click()
                await expect(page.locator(".notice.good")).to_contain_text("asked for")


async def test_a_page_that_was_missed_asks_whether_its_session_is_over(tmp_path: Path) -> None:
    """The API restarts, and meanwhile the session ended: the stream is refused, and the page says which it is."""
    state = tmp_path / "state"
    async with chromium() as browser:
        port = free_port()
        async with served(state, make=create_app, auth=True, port=port) as (here, _):
            people = await settle(here, state)
            made = await settled_token(people, "nlp-owner")
            url = str(here.client.base_url)
        async with looking(browser, url, forgiven=(NOT_ANSWERED,)) as watched:
            page = watched.page
            async with served(state, make=create_app, auth=True, port=port):
                await page.goto(f"/jobs/{people.jobs['nlp']}")
                await sign_in(page, made["token"])
            await expect(page.locator("#stale")).to_be_visible()
            async with served(state, make=create_app, auth=True) as (elsewhere, _):
                gone = await elsewhere.client.delete(f"/api/v1/tokens/{made['id']}", headers=people.admin)
                assert gone.status_code == 204
            async with served(state, make=create_app, auth=True, port=port):
                await expect(page.locator("#ended")).to_be_visible()
                await expect(page.locator("#stale")).to_be_hidden()


async def test_what_one_may_not_see_is_not_found_and_what_goes_is_said(tmp_path: Path) -> None:
    async with served(tmp_path / "state", make=create_app, auth=True) as (here, _), chromium() as browser:
        people = await settle(here, tmp_path / "state")
        made = await settled_token(people, "nlp-owner")
        async with looking(browser, here, forgiven=(NOT_ANSWERED,)) as watched:
            page = watched.page
            await page.goto("/jobs")
            await sign_in(page, made["token"])
            reply = await page.goto(f"/jobs/{people.jobs['cv']}")
            assert reply is not None
            assert reply.status == 404
            await expect(page.locator("h1")).to_have_text("There is nothing here")
            assert "cv-job" not in await page.content()
            await page.goto(f"/jobs/{people.jobs['nlp']}")
            await expect(page.locator("h1")).to_contain_text("nlp-job")
            members = "/api/v1/projects/nlp/members/nlp-owner"
            assert (await here.client.delete(members, headers=people.admin)).status_code == 204
            await here.client.post(f"/api/v1/jobs/{people.jobs['nlp']}:suspend", headers=people.admin)
            await expect(page.locator("#vanished")).to_be_visible()
            await expect(page.locator("#stale")).to_be_hidden()


async def test_one_signs_in_by_the_provider_and_out(tmp_path: Path) -> None:
    with oidc_provider() as provider:
        options = settings(provider)
        async with served(tmp_path / "state", make=create_app, **options) as (here, _), chromium() as browser:
            admin = bearer(here.state.admin_token.read_text().strip())
            assert (await here.client.put("/api/v1/projects/nlp", json={}, headers=admin)).status_code == 201
            async with looking(browser, here, hosts=(urlsplit(provider.issuer).netloc,)) as watched:
                page = watched.page
                await page.goto("/jobs?phase=Running")
                await page.keyboard.press("Enter")  # the button has the focus
                await expect(page.locator(".person")).to_contain_text("ann")
                assert urlsplit(page.url)[2:4] == ("/jobs", "phase=Running")
                await page.get_by_role("button", name="Sign out").click()
                await expect(page.locator(".notice")).to_have_text("You are signed out.")
                await page.goto("/jobs")
                await expect(page.get_by_role("link", name="Sign in with 127.0.0.1")).to_be_visible()
            provider.claims["groups"] = ["guests"]
            refused = (NOT_ANSWERED,)
            async with looking(browser, here, refused, hosts=(urlsplit(provider.issuer).netloc,)) as watched:
                page = watched.page
                await page.goto("/jobs")
                await page.get_by_role("link", name="Sign in with").click()
                await expect(page.locator("#fault")).to_contain_text("your groups (guests) open no project here")
