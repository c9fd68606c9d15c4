"""Signing in, the session's cookie, and forms that other sites send."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.api.people import People, bearer, settle, token_of
from tests.integration.api.platform import Platform, platform
from tests.integration.web.pages import Browser, notes

from muster.web.app import create_app


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state", make=create_app, auth=True) as here:
        yield here


@pytest.fixture
async def people(guarded: Platform, tmp_path: Path) -> People:
    return await settle(guarded, tmp_path / "state")


@pytest.fixture
def browser(guarded: Platform) -> Browser:
    return Browser(guarded.client)


async def test_one_signs_in_by_a_token_and_goes_where_one_wanted(browser: Browser, people: People) -> None:
    first = await browser.get("/jobs?phase=Running")
    assert (first.status_code, first.headers["location"]) == (303, "/sign-in?next=/jobs%3Fphase%3DRunning")
    wrong = await browser.post("/sign-in", {"token": "muster_" + "x" * 40})
    assert wrong.status_code == 401
    assert "unknown, revoked or expired" in wrong.text
    assert "x" * 40 not in wrong.text
    token = token_of(people, "nlp-owner")
    reply = await browser.post("/sign-in", {"token": token, "next": "/jobs?phase=Running"})
    cookie = reply.headers["set-cookie"]
    assert (reply.status_code, reply.headers["location"]) == (303, "/jobs?phase=Running")
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert token not in cookie
    page = await browser.get("/jobs")
    assert page.status_code == 200
    assert "nlp-job" in page.text
    assert "cv-job" not in page.text
    assert page.headers["cache-control"] == "no-store"
    assert "script-src 'self'" in page.headers["content-security-policy"]


async def test_what_one_may_not_see_is_not_there(browser: Browser, people: People) -> None:
    await browser.sign_in(token_of(people, "nlp-owner"))
    assert (await browser.get(f"/jobs/{people.jobs['nlp']}")).status_code == 200
    for path in ("", "/logs", "/events", "/checkpoints", "/samples", "/config", "/clone", "/logs/download"):
        there = await browser.get(f"/jobs/{people.jobs['cv']}{path}")
        nowhere = await browser.get(f"/jobs/nowhere{path}")
        assert (there.status_code, nowhere.status_code) == (404, 404), path
        assert "cv-" not in there.text
    assert (await browser.get(f"/live?job={people.jobs['cv']}")).status_code == 404


async def test_the_session_ends_with_signing_out_and_with_its_token(
    guarded: Platform, browser: Browser, people: People
) -> None:
    made = await people.token("nlp-owner", None)
    await browser.sign_in(made["token"])
    kept = dict(guarded.client.cookies)
    assert (await browser.post("/sign-out")).status_code == 303
    guarded.client.cookies.update(kept)  # somebody who kept the cookie
    assert (await browser.get("/jobs")).status_code == 303
    guarded.client.cookies.clear()
    await browser.sign_in(made["token"])
    assert (await browser.get("/jobs")).status_code == 200
    gone = await guarded.client.delete(f"/api/v1/tokens/{made['id']}", headers=people.admin)
    assert gone.status_code == 204, gone.text
    assert (await browser.get("/jobs")).status_code == 303


async def test_forms_of_other_sites_and_sessions_do_nothing(browser: Browser, people: People) -> None:
    await browser.sign_in(token_of(people, "nlp-owner"))
    job = people.jobs["nlp"]
    token = await browser.form_token(f"/jobs/{job}")
    cancel = f"/jobs/{job}/cancel"
    for form, headers in (
        ({"form_token": token}, {"sec_fetch_site": "cross-site"}),
        ({"form_token": token}, {"sec_fetch_site": "same-site"}),
        ({"form_token": "0" * 64}, {}),
        ({}, {}),
    ):
        assert (await browser.post(cancel, form, **headers)).status_code == 403
    # A browser that says no Sec-Fetch-Site says the origin.
    client = browser.client
    other = {"accept": "text/html", "origin": "https://evil.example"}
    assert (await client.post(cancel, data={"form_token": token}, headers=other)).status_code == 403
    # By the cookie alone one reads at the API, and changes nothing.
    assert (await client.get("/api/v1/jobs")).status_code == 200
    assert (await client.post(f"/api/v1/jobs/{job}:cancel")).status_code == 401
    assert "cancel" not in str((await client.get(f"/api/v1/jobs/{job}/events")).json()["items"])
    assert (await browser.post(cancel, {"form_token": token})).status_code == 303
    assert notes(await browser.get(f"/jobs/{job}"))[0].startswith("Cancellation was asked for")


async def test_a_reader_changes_nothing(browser: Browser, people: People, guarded: Platform) -> None:
    made = await people.token("nlp-owner", None, "read")
    await browser.sign_in(made["token"])
    job = people.jobs["nlp"]
    page = await browser.get(f"/jobs/{job}")
    assert f"/jobs/{job}/cancel" not in page.text
    token = await browser.form_token("/jobs")
    assert (await browser.post(f"/jobs/{job}/cancel", {"form_token": token})).status_code == 403


async def test_programs_are_answered_as_before(guarded: Platform, browser: Browser, people: People) -> None:
    assert (await guarded.client.get("/")).json()["name"] == "Muster"
    assert (await browser.get("/")).headers["location"] == "/jobs"
    refused = await guarded.client.get("/api/v1/jobs", headers={"accept": "text/html"})
    assert refused.headers["content-type"] == "application/problem+json"
    by_token = await guarded.client.get("/jobs", headers={"accept": "text/html", **bearer(token_of(people, "admin"))})
    assert by_token.status_code == 200
    assert (await guarded.client.get("/jobs", headers={"accept": "application/json"})).status_code == 401
    missing = await guarded.client.get("/nothing-here", headers={"accept": "text/html"})
    assert (missing.status_code, "There is nothing here" in missing.text) == (404, True)
