"""The page of a project's webhooks, as a browser without JavaScript sends its forms, against a real receiver."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.integration.api.people import People, settle, token_of
from tests.integration.api.platform import Platform, platform, until
from tests.integration.api.webhook_receiver import Receiver, receiver
from tests.integration.web.pages import Browser, notes

from muster.api.webhooks.service import WebhookServices
from muster.web.app import create_app

PLACE = "/settings/projects/nlp/webhooks"
HOSTILE = "<script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def hears() -> Iterator[Receiver]:
    with receiver() as there:
        yield there


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state", make=create_app, auth=True, webhook_networks=["127.0.0.0/8"]) as running:
        yield running


async def _signed_in(here: Platform, tmp_path: Path) -> tuple[Browser, dict[str, str], People]:
    people = await settle(here, tmp_path / "state")
    browser = Browser(here.client)
    await browser.sign_in(token_of(people, "nlp-maintainer"))
    return browser, {"form_token": await browser.form_token(PLACE)}, people


async def _said(browser: Browser, path: str, form: dict[str, str]) -> str:
    reply = await browser.post(f"{PLACE}/{path}", form)
    assert (reply.status_code, reply.headers.get("location")) == (303, PLACE), reply.text[-500:]
    (said,) = notes(await browser.get(PLACE))
    return said


async def test_a_webhook_is_made_tried_replayed_and_deleted(here: Platform, hears: Receiver, tmp_path: Path) -> None:
    browser, form, _ = await _signed_in(here, tmp_path)
    wanted = {"name": "on-call", "url": f"{hears.url}/ok/hidden", "kinds": ["job.failed", "job.succeeded"]}
    page = await browser.post(PLACE, form | wanted)
    secret = re.search(r'class="new-token" tabindex="0">(whsec_[^<]+)<', page.text)
    assert secret, page.text
    assert page.headers["cache-control"] == "no-store"
    shown = (await browser.get(PLACE)).text
    assert (html.unescape(secret[1]) in html.unescape(shown), "ok/hidden" in shown) == (False, False)
    assert "job.failed, job.succeeded" in shown
    assert "muster webhooks test on-call --project nlp" in shown
    assert (await _said(browser, "on-call/test", form)).startswith("on-call answered 204 after")
    (first,) = hears.heard("/ok/hidden")
    replays = re.findall(rf'action="{PLACE}/(on-call/deliveries/[^/"]+/replay)"', (await browser.get(PLACE)).text)
    assert [first["headers"]["webhook-id"] in path for path in replays] == [True]
    assert "is told again" in await _said(browser, replays[0], form)

    async def heard_twice() -> bool:
        here.services[WebhookServices].deliveries.freed.set()
        return len(hears.heard("/ok/hidden")) == 2

    await until(heard_twice, "the message that is sent again")
    assert hears.heard("/ok/hidden")[1]["headers"]["webhook-id"] == first["headers"]["webhook-id"]
    assert "on-call is gone" in await _said(browser, "on-call/delete", form)
    assert "on-call/test" not in (await browser.get(PLACE)).text
    gone = await browser.post(f"{PLACE}/on-call/test", form)
    assert (gone.status_code, "has no webhook" in html.unescape(gone.text)) == (404, True)


async def test_a_receiver_that_refuses_is_told_of(here: Platform, hears: Receiver, tmp_path: Path) -> None:
    browser, form, _ = await _signed_in(here, tmp_path)
    made = await browser.post(PLACE, form | {"name": "sick", "url": f"{hears.url}/500/9", "kinds": "job.failed"})
    assert made.status_code == 200, made.text
    assert await _said(browser, "sick/test", form) == "sick was not told: answered 500."
    assert "answered 500" in (await browser.get(PLACE)).text


async def test_what_is_wrong_is_said_and_what_was_typed_stays(here: Platform, tmp_path: Path) -> None:
    browser, form, people = await _signed_in(here, tmp_path)
    right = {"name": "hook", "url": "http://127.0.0.1:9/", "kinds": "job.failed"}
    for changes, words in (
        ({"name": HOSTILE}, "name"),
        ({"url": f"ftp://{HOSTILE}"}, "url"),
        ({"url": "http://10.0.0.1/"}, "MUSTER_API_WEBHOOK_NETWORKS"),
        ({"url": "http://169.254.169.254/"}, "metadata"),
        ({"kinds": []}, "kinds"),
        ({"kinds": "job.unheard"}, "kinds"),
        ({"preset": "teams"}, "preset"),
    ):
        sent = right | changes
        page = await browser.post(PLACE, form | sent)
        assert (page.status_code, words in notes(page)[0]) == (422, True), (changes, notes(page))
        assert f'value="{html.escape(str(sent["url"])).replace("&#x27;", "&#39;")}"' in page.text
        assert HOSTILE not in page.text
    assert (await people.ask("nlp-maintainer", "GET", "/projects/nlp/webhooks")).json()["items"] == []
    assert (await browser.post(PLACE, right)).status_code == 403  # no form of ours
    assert (await browser.post(PLACE, form | right, sec_fetch_site="cross-site")).status_code == 403
    assert (await browser.post(PLACE, form | right)).status_code == 200
    again = await browser.post(PLACE, form | right)
    assert (again.status_code, "has a webhook 'hook'" in notes(again)[0]) == (409, True)
