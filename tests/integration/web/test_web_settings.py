"""The page of one's own tokens and projects, as a browser without JavaScript sends its forms."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.api.people import People, bearer, settle
from tests.integration.api.platform import Platform, platform
from tests.integration.web.pages import Browser, notes

from muster.web.app import create_app
from muster.web.settings import limits_of

HOSTILE = "<script>document.title='owned'</script>"


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state", make=create_app, auth=True) as running:
        yield running


async def _signed_in(here: Platform, people: People, person: str) -> tuple[Browser, dict[str, str]]:
    browser = Browser(here.client)
    await browser.sign_in(people.headers[person]["authorization"].removeprefix("Bearer "))
    return browser, {"form_token": await browser.form_token("/settings")}


async def test_a_token_is_made_shown_once_rotated_and_revoked(here: Platform, tmp_path: Path) -> None:
    people = await settle(here, tmp_path / "state")
    browser, form = await _signed_in(here, people, "nlp-member")
    wanted = form | {"name": HOSTILE, "scope": "read", "project": "nlp", "days": "30"}
    page = await browser.post("/settings/tokens", wanted)
    made = re.search(r'class="new-token" tabindex="0">(muster_[\w-]+)<', page.text)
    assert made, page.text
    assert page.headers["cache-control"] == "no-store"
    assert HOSTILE not in page.text
    reply = await here.client.get("/api/v1/me", headers=bearer(made[1]))
    assert (reply.json()["person"], reply.json()["scopes"], reply.json()["project"]) == ("nlp-member", ["read"], "nlp")
    again = await browser.get("/settings")
    assert (made[1] in again.text, html.escape(HOSTILE).replace("&#x27;", "&#39;") in again.text) == (False, True)
    token_id = reply.json()["token"]
    rotated = await browser.post(f"/settings/tokens/{token_id}/rotate", form)
    successor = re.search(r'tabindex="0">(muster_[\w-]+)<', rotated.text)
    assert successor
    for token in (made[1], successor[1]):  # for a day both are taken
        assert (await here.client.get("/api/v1/me", headers=bearer(token))).status_code == 200
    gone = await browser.post(f"/settings/tokens/{token_id}/revoke", form)
    assert notes(await browser.get(gone.headers["location"])) == ["It opens nothing any more."]
    assert (await here.client.get("/api/v1/me", headers=bearer(made[1]))).status_code == 401
    wrong = await browser.post("/settings/tokens", wanted | {"days": "many"})
    assert (wrong.status_code, "expiresInDays" in notes(wrong)[0]) == (422, True)
    foreign = await browser.post("/settings/tokens", wanted | {"project": "cv"})
    assert (foreign.status_code, "no project" in notes(foreign)[0]) == (404, True)


async def test_a_maintainer_chooses_the_members_and_nobody_else_does(here: Platform, tmp_path: Path) -> None:
    people = await settle(here, tmp_path / "state")
    browser, form = await _signed_in(here, people, "nlp-maintainer")
    page = (await browser.get("/settings")).text
    assert "/settings/projects/nlp/members/nlp-viewer/remove" in page
    assert "cv" not in re.findall(r'id="project-\d">([^<]+)<', page)
    place = "/settings/projects/nlp/members"
    given = await browser.post(place, form | {"person": "cv-member", "role": "viewer"})
    assert notes(await browser.get(given.headers["location"])) == ["cv-member is a viewer of nlp."]
    taken = await browser.post(f"{place}/cv-member/remove", form)
    assert "sees nothing of nlp" in notes(await browser.get(taken.headers["location"]))[0]
    for person, role in (("nobody-known", "member"), ("Ann", "member"), ("nlp-viewer", "admin")):
        refused = await browser.post(place, form | {"person": person, "role": role})
        assert len(notes(await browser.get(refused.headers["location"]))) == 1
    members = (await people.ask("nlp-maintainer", "GET", "/projects/nlp/members")).json()["items"]
    assert {each["person"] for each in members} == {"nlp-viewer", "nlp-member", "nlp-owner", "nlp-maintainer"}
    assert {each["person"]: each["role"] for each in members}["nlp-viewer"] == "viewer"
    assert (await browser.post(place, {"person": "cv-member", "role": "viewer"})).status_code == 403  # no form of ours
    browser, form = await _signed_in(here, people, "nlp-member")
    assert "/members/" not in (await browser.get("/settings")).text
    refused = await browser.post(f"{place}/nlp-viewer/remove", form)  # which the page does not offer
    assert (refused.status_code, "a maintainer is needed" in refused.text) == (403, True)


async def test_an_admin_makes_a_project_and_changes_none_that_is_there(here: Platform, tmp_path: Path) -> None:
    people = await settle(here, tmp_path / "state")
    browser, form = await _signed_in(here, people, "admin")
    for name, namespace, words in (
        ("speech", "", "Project speech is there"),
        ("nlp", "", "There is a project 'nlp' already"),
        ("Speech!", "", "begins with a letter"),
        ("vision", "speech", "is that of project 'speech'"),
        ("vision", "No Namespace", "namespace"),
    ):
        before = (await people.ask("admin", "GET", "/projects/nlp")).json()
        reply = await browser.post("/settings/projects", form | {"name": name, "namespace": namespace})
        assert words in notes(await browser.get(reply.headers["location"]))[0], (name, namespace)
        assert (await people.ask("admin", "GET", "/projects/nlp")).json() == before
    assert (await people.ask("admin", "GET", "/projects/speech")).json()["namespace"] == "speech"
    assert (await people.ask("admin", "GET", "/projects/vision")).status_code == 404
    browser, _ = await _signed_in(here, people, "nlp-maintainer")
    assert "Make a project" not in (await browser.get("/settings")).text


async def test_a_session_of_a_lesser_token_manages_nothing(here: Platform, tmp_path: Path) -> None:
    people = await settle(here, tmp_path / "state")
    lesser = await people.token("nlp-maintainer", None, "write")
    browser = Browser(here.client)
    await browser.sign_in(lesser["token"])
    page = (await browser.get("/settings")).text
    assert "Tokens are managed with one of the scope admin" in page
    form = {"form_token": await browser.form_token("/submit"), "name": "more", "scope": "admin"}
    for path in (
        "/tokens",
        f"/tokens/{lesser['id']}/rotate",
        f"/tokens/{lesser['id']}/revoke",
        "/projects",
        "/projects/nlp/members",
        "/projects/nlp/webhooks",
        "/projects/nlp/webhooks/hook/test",
    ):
        assert (await browser.post(f"/settings{path}", form)).status_code == 403, path


def test_a_quota_in_words() -> None:
    quota = {"gpus": 16, "moneyPerMonth": 5000.0, "person": {"gangs": 2}}
    assert limits_of(quota, "USD") == "16 GPUs at a time, 5,000 USD a month; each person: 2 gangs at a time"
    assert limits_of({"person": {}}, "USD") == ""


async def test_webhooks_are_listed_to_maintainers_without_their_addresses(here: Platform, tmp_path: Path) -> None:
    people = await settle(here, tmp_path / "state")
    wanted = {"name": "on-call", "url": "https://example.com/secret-path", "kinds": ["job.failed"]}
    reply = await here.client.post("/api/v1/projects/nlp/webhooks", json=wanted, headers=people.admin)
    assert reply.status_code == 201, reply.text
    for person, sees in (("nlp-maintainer", True), ("nlp-member", False), ("cv-maintainer", False)):
        here.client.cookies.clear()
        browser, _ = await _signed_in(here, people, person)
        page = (await browser.get("/settings")).text
        assert ("on-call" in page, "example.com" in page) == (sees, sees), person
        assert "secret-path" not in page
