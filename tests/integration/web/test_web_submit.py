"""The page for submitting, as a browser without JavaScript sends it: written, checked, submitted once, cloned."""

from __future__ import annotations

import html
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import yaml
from tests.integration.api.people import People, settle
from tests.integration.api.platform import Platform, document, platform
from tests.integration.web.pages import Browser, notes

from muster.documents.examples import examples
from muster.plan.plan_words import describe_memory
from muster.replies.jobs import Plan
from muster.web.app import create_app
from muster.web.submit_form import FIELDS

HOSTILE = "</textarea><script>document.title='owned'</script>\x1b[31m\u202e'\"&"


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state", make=create_app) as running:
        yield running


@pytest.fixture
def browser(here: Platform) -> Browser:
    return Browser(here.client)


def typed(page: httpx2.Response) -> str:
    """What stands in the text area."""
    match = re.search(r'<textarea id="document".*?>\n(.*?)</textarea>', page.text, re.DOTALL)
    assert match, page.text[:2_000]
    return html.unescape(match[1])


def key(page: httpx2.Response) -> str:
    match = re.search(r'name="key" value="([^"]+)"', page.text)
    assert match
    return match[1]


def plan(page: httpx2.Response) -> str:
    """The words of what would become of it."""
    part = page.text[page.text.index('id="plan"') : page.text.index("</section>", page.text.index('id="plan"'))]
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", part)))


async def test_the_form_writes_the_document_and_submits_it(here: Platform, browser: Browser) -> None:
    form = {"form_token": await browser.form_token("/submit"), "key": "k", "verb": "write"}
    fields = {
        "kind": "pretrain",
        "name": "mine",
        "preset": "muster-1m",
        "data": "builtin://python-stdlib",
        "steps": "7",
    }
    page = await browser.post("/submit", form | fields | {"steps": "7", "sequence": "256", "nodes": "2"})
    text = typed(page)
    training = yaml.safe_load(text)["spec"]["training"]
    assert (training["model"], training["length"]) == ({"preset": "muster-1m"}, {"steps": 7})
    assert 'value="mine"' in page.text  # the fields stay as they were
    for words in ("It would be queued", "pretrain muster-1m", "2 workers", "memory of a rank", "7 steps"):
        assert words in plan(page), words
    reply = await browser.post("/submit", form | {"verb": "submit", "document": text.replace("\n", "\r\n")})
    assert reply.status_code == 303, reply.text
    assert notes(await browser.get(reply.headers["location"])) == ["Submitted."]
    assert (await here.get("/jobs"))["items"][0]["name"] == "mine"


async def test_the_forms_job_learns_from_few_short_chats(here: Platform, browser: Browser, tmp_path: Path) -> None:
    """Two hundred of them were once one step, within a warm-up of ten."""
    turns = [{"role": "user", "content": "What is three plus four?"}, {"role": "assistant", "content": "Seven."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 200)
    form = {"form_token": await browser.form_token("/submit"), "key": "k", "verb": "write", "name": "mine"}
    model = str(Path(__file__).parents[3] / "examples" / "tiny-model")
    page = await browser.post("/submit", form | {"model": model, "data": str(tmp_path / "chats.jsonl")})
    text = typed(page)
    training = yaml.safe_load(text)["spec"]["training"]
    assert "# 5 % of the run's about" in text
    wanted = {"dryRun": True}
    reply = (await here.client.post("/api/v1/jobs", params=wanted, json=yaml.safe_load(text))).json()
    assert reply["estimate"]["steps"] >= 20
    assert training["optimizer"]["schedule"]["warmupSteps"] < reply["estimate"]["steps"] / 5
    assert [each["path"] for each in reply["warnings"]] == []


async def test_the_dry_run_and_the_page_tell_one_plan(here: Platform, browser: Browser, tmp_path: Path) -> None:
    wanted = document("mine")
    training = wanted["spec"]["training"]
    training |= {"evaluation": {"every": 1, "data": [{"source": str(tmp_path / "nosuch.jsonl")}]}}
    reply = await here.client.post("/api/v1/jobs", params={"dryRun": True}, json=wanted)
    answer = Plan.model_validate(reply.json())
    (fault,) = answer.faults
    assert (answer.accepted, fault.path, answer.not_estimated) == (True, "spec.training.evaluation.data[0].source", "")
    assert answer.estimate is not None
    assert [(each.path, each.message) for each in answer.estimate.faults] == [(fault.path, fault.message)]
    form = {"form_token": await browser.form_token("/submit"), "key": "k", "document": yaml.safe_dump(wanted)}
    for verb in ("check", "submit", "anyway"):
        shown = plan(await browser.post("/submit", form | {"verb": verb}))
        assert ("It would fail at its start" in shown, "It was not submitted" in shown) == (True, verb != "check")
        assert fault.message in shown
        assert all(" ".join(warning.message.split()) in shown for warning in answer.warnings)
        assert describe_memory(reply.json()["estimate"]) in shown
    training |= {"evaluation": None, "model": {"preset": "llama-8b"}}
    form["document"] = yaml.safe_dump(wanted)
    shown = plan(await browser.post("/submit", form | {"verb": "submit"}))
    assert "it does not fit into memory. Submit it all the same" in shown
    assert (await here.get("/jobs"))["items"] == []
    assert (await browser.post("/submit", form | {"verb": "anyway"})).status_code == 303
    training |= {"model": {"source": str(tmp_path)}}
    broken = (
        await here.client.post("/api/v1/jobs", params={"dryRun": True}, json=wanted | {"metadata": {"name": "b"}})
    ).json()
    assert (broken["accepted"], broken["estimate"], broken["faults"][0]["path"]) == (True, None, "spec.training.model")
    assert "holds no config.json" in broken["faults"][0]["message"]


async def test_the_same_words_sent_twice_are_one_job_and_others_another(here: Platform, browser: Browser) -> None:
    page = await browser.get("/submit?example=pretrain-stdlib")
    form = {"form_token": await browser.form_token("/submit"), "verb": "submit", "document": typed(page)}
    first = await browser.post("/submit", form | {"key": key(page)})
    again = await browser.post("/submit", form | {"key": key(page)})
    assert (first.status_code, again.status_code) == (303, 303), again.text
    assert first.headers["location"] == again.headers["location"]
    assert "submitted before" in notes(await browser.get(again.headers["location"]))[0]
    changed = form["document"].replace("name: pretrain-stdlib", "name: another")
    other = await browser.post("/submit", form | {"key": key(page), "document": changed})
    assert other.headers["location"] != first.headers["location"]
    taken = await browser.post("/submit", form | {"key": key(await browser.get("/submit"))})
    assert (taken.status_code, "has a live job named" in plan(taken)) == (422, True) or taken.status_code == 409
    assert len((await here.get("/jobs"))["items"]) == 2


async def test_each_fault_stands_at_its_line_and_what_was_typed_stays(here: Platform, browser: Browser) -> None:
    token = await browser.form_token("/submit")
    text = "metadata: {name: mine}\nspec:\n  training:\n    optimizer:\n      lrr: 1\n"
    for verb, status in (("check", 200), ("submit", 422)):
        page = await browser.post("/submit", {"form_token": token, "key": "k", "verb": verb, "document": text})
        assert (page.status_code, typed(page)) == (status, text)
        told = plan(page)
        assert re.search(r"Line 5 : spec\.training\.optimizer\.lrr unknown key; did you mean lr", told), told
        assert 'data-line="5"' in page.text
        assert "Line 3 : spec.training.batch is required" in told
    torn = await browser.post("/submit", {"form_token": token, "verb": "check", "document": "a: 1\nb: c: d\n"})
    assert "Line 2 : mapping values are not allowed" in plan(torn)
    refused = await browser.post("/submit", {"form_token": token, "verb": "check", "document": yaml.safe_dump(
        document("mine", runtime={"env": [{"name": "LD_PRELOAD", "value": "x"}]}))})  # fmt: skip
    assert re.search(r"Line \d+ : spec.runtime.env\[0\].name LD_PRELOAD decides", plan(refused))
    assert (await here.get("/jobs"))["items"] == []


async def test_a_program_is_submitted_and_its_page_says_what_is_known_of_it(here: Platform, browser: Browser) -> None:
    text = "metadata: {name: mine}\nspec:\n  program: {command: [train.py, --lr, '1']}\n  gang: {processesPerNode: 2}\n"
    form = {"form_token": await browser.form_token("/submit"), "key": "k", "document": text}
    words = plan(await browser.post("/submit", form | {"verb": "check"}))
    assert "train.py --lr 1 (once per rank)" in words
    assert "Memory, time and price are not known: a program is not estimated" in words
    form["document"] = text.replace("command", "source: ., command")
    folder = plan(await browser.post("/submit", form | {"verb": "check"}))
    assert "Line 3 : spec.program.source must be an uploaded file's id" in folder
    assert "`muster submit` uploads a folder by itself" in folder
    reply = await browser.post("/submit", form | {"verb": "submit", "document": text})
    page = await browser.get(reply.headers["location"])
    assert "<code>train.py --lr 1  (once per rank)</code>" in page.text
    assert "no checkpoint of the program&#39;s is kept yet, so that a restart begins anew" in page.text


async def test_every_example_can_be_started_from(here: Platform, browser: Browser) -> None:
    listed = (await browser.get("/submit")).text
    for name in examples():
        assert f"/submit?example={name}" in listed
        page = await browser.get(f"/submit?example={name}")
        assert yaml.safe_load(typed(page))["metadata"]["name"]
    # What lies beside an example is named so that a worker of this machine finds it.
    page = await browser.get("/submit?example=sft-folder")
    assert "It would be queued" in plan(page), plan(page)
    assert (await browser.get("/submit?example=none")).status_code == 404


async def test_a_clone_begins_with_the_jobs_document_and_shows_no_secret(here: Platform, browser: Browser) -> None:
    env = [{"name": "WANDB_API_KEY", "value": "hunter2"}, {"name": "MODE", "value": "fast"}]
    made = await here.submit("base-run", runtime={"env": env}, priority=3)
    moved = await browser.get(f"/jobs/{made['id']}/clone")
    assert (moved.status_code, moved.headers["location"]) == (303, f"/submit?clone={made['id']}")
    page = await browser.get(moved.headers["location"])
    found = yaml.safe_load(typed(page))
    assert "hunter2" not in page.text
    assert (found["metadata"]["name"], found["spec"]["priority"]) == ("base-run-2", 3)
    assert "recovery" not in found["spec"]  # what is as it would be anyway is left out
    token = await browser.form_token("/submit")
    changed = typed(page).replace("priority: 3", "priority: 4")
    form = {"form_token": token, "key": key(page), "cloned": made["id"], "document": changed, "verb": "submit"}
    reply = await browser.post("/submit", form)
    assert reply.status_code == 303, plan(reply)
    uid = reply.headers["location"].removeprefix("/jobs/")
    row = next(row for row in await _specs(here) if row[0] == uid)[1]
    assert [each["value"] for each in row["runtime"]["env"]] == ["hunter2", "fast"]
    assert row["priority"] == 4
    assert {**row, "priority": 3} == next(row for row in await _specs(here) if row[0] == made["id"])[1]
    created = (await here.get(f"/jobs/{uid}/events"))["items"][0]
    assert created["data"]["clonedFrom"] == made["id"]


async def _specs(here: Platform) -> list[tuple[str, dict[str, object]]]:
    from sqlalchemy import select

    from muster.api.core.database.tables import JobRow

    async with here.services.database.read() as session:
        return [(row[0], row[1]) for row in await session.execute(select(JobRow.id, JobRow.spec))]


async def test_hostile_words_stay_words(browser: Browser) -> None:
    token = await browser.form_token("/submit")
    fields = {name: HOSTILE for name in FIELDS if name not in ("kind", "method", "preset")}
    for sent in ({"document": HOSTILE, "verb": "check"}, {**fields, "verb": "write"}, {"document": HOSTILE, **fields}):
        page = await browser.post("/submit", {"form_token": token, "key": HOSTILE, **sent})
        assert page.status_code == 200
        assert "<script>document" not in page.text
        assert page.text.count("</textarea>") == 1
    assert (await browser.get("/submit?example=%3Cscript%3Ealert(1)%3C/script%3E")).text.count("<script>alert") == 0


async def test_who_may_submit_and_where(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", make=create_app, auth=True) as here:
        people, browser = await settle(here, tmp_path / "state"), Browser(here.client)
        await _sign_in(browser, people, "nlp-viewer")
        token = await browser.form_token("/submit")
        text = yaml.safe_dump(document("mine"))
        form = {"form_token": token, "key": "k", "document": text, "verb": "submit"}
        page = await browser.post("/submit", form)
        assert (page.status_code, "a member is needed" in plan(page)) == (403, True), plan(page)
        assert (await browser.get(f"/submit?clone={people.jobs['cv']}")).status_code == 404
        await _sign_in(browser, people, "nlp-member")
        other = await browser.post("/submit", form)  # of the session before
        assert other.status_code == 403
        form["form_token"] = await browser.form_token("/submit")
        forged = await browser.post("/submit", form, sec_fetch_site="cross-site")
        assert forged.status_code == 403
        assert (await browser.post("/submit", form)).status_code == 303
        reader = await people.token("nlp-owner", None, "read")
        await browser.sign_in(reader["token"])
        assert "Your token may only read" in (await browser.get("/submit")).text
        assert (await browser.post("/submit", form)).status_code == 403


async def test_only_a_page_of_ours_sends_files_by_the_cookie(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", make=create_app, auth=True) as here:
        people, browser = await settle(here, tmp_path / "state"), Browser(here.client)
        await _sign_in(browser, people, "nlp-member")
        token = await browser.form_token("/submit")
        where = "/api/v1/files?name=a.txt&purpose=user_data"
        for headers in ({}, {"x-muster-form": "0" * 64}, {"x-muster-form": ""}):
            assert (await here.client.post(where, content=b"hello", headers=headers)).status_code == 401
        made = await here.client.post(where, content=b"hello", headers={"x-muster-form": token})
        assert (made.status_code, made.json()["owner"]) == (201, "nlp-member")


async def test_a_session_that_ended_leads_back_to_the_form(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", make=create_app, auth=True) as here:
        browser = Browser(here.client)
        for came, onward in (
            ("http://127.0.0.1:8642/submit?clone=1", "/submit?clone=1"),
            ("https://evil.example/submit", "/jobs"),
        ):
            page = await browser.post("/submit", {"document": "a"}, referer=came)
            assert page.status_code == 401
            assert f'name="next" value="{onward}"' in page.text


async def _sign_in(browser: Browser, people: People, person: str) -> None:
    await browser.sign_in(people.headers[person]["authorization"].removeprefix("Bearer "))
