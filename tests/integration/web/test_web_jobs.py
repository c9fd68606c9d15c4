"""The list of jobs and the pages of one, as a browser without JavaScript reads them."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from tests.integration.api.platform import Platform, frames, platform, served, until
from tests.integration.api.test_api_scale import store
from tests.integration.web.pages import Browser, lived, notes

from muster.web.app import READING_AT_ONCE, create_app
from muster.words.names import LOG, rank_mark
from muster.words.status import Phase

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x1b[31m'\"&"


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state", make=create_app) as running:
        yield running


@pytest.fixture
def browser(here: Platform) -> Browser:
    return Browser(here.client)


async def test_the_list_filters_searches_sorts_and_pages(
    here: Platform, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.web.api.JOBS_PER_PAGE", 2)
    monkeypatch.setattr("muster.web.jobs.JOBS_PER_PAGE", 2)
    assert "No job yet" in (await browser.get("/jobs")).text
    for name in ("beta", "alpha", "gamma"):
        await here.submit(name)

    async def names(query: str) -> list[str]:
        page = (await browser.get(f"/jobs?{query}")).text
        return re.findall(r'<th scope="row" class="name">\s*<a href="[^"]+">([^<]+)</a>', page)

    assert await names("") == ["gamma", "alpha"]
    assert await names("p=2") == ["beta"]
    assert await names("sort=name") == ["alpha", "beta"]
    assert await names("sort=oldest") == ["beta", "alpha"]
    assert await names("q=GAM") == ["gamma"]
    assert await names("q=%25") == []
    assert await names("phase=Queued&sort=name&p=2") == ["gamma"]
    assert await names("phase=live") == ["gamma", "alpha"]
    assert await names("phase=Failed") == []
    assert await names("owner=nobody") == []
    page = (await browser.get("/jobs?sort=name")).text
    assert 'href="/jobs?sort=name&amp;p=2"' in page
    assert "1–2 of 3" in page


async def test_the_table_has_the_columns_and_groups_of_its_address(here: Platform, browser: Browser) -> None:
    """And a file of it the same; nobody's variables are in either."""
    uid = await lived(here, "llama-sft", runtime={"env": [{"name": "MINE", "value": "hunter2"}]})
    other = (await here.submit("other"))["id"]
    await here.client.patch(f"/api/v1/jobs/{other}", json={"tags": ["paper"], "note": "=the note"})
    page = html.unescape((await browser.get("/jobs")).text)
    assert re.findall(r'class="tag" href="([^"]+)"[^>]*>([^<]+)', page) == [("/jobs?tag=paper", "paper")]
    assert "18.2k" in page
    asked = "columns=training.optimizer.lr,loss,nonsense,runtime.env[0].value&columns=note&group=model&sort=-loss"
    page = html.unescape((await browser.get(f"/jobs?{asked}")).text)
    heads = re.findall(r'<th scope="col"[^>]*>(?:<a [^>]*>)?([^<]+)', page)
    assert heads == ["Job", "Loss", "Note", "training.optimizer.lr"]
    assert re.findall(r"<tr class=.group..*?>(?:<a [^>]*>)?([\w-]+)(?:</a>)? <span[^>]*>([^<]+)", page, re.DOTALL) == [
        ("muster-1m", "2 jobs")
    ]
    assert "0.0003" in page
    assert "hunter2" not in page
    assert 'href="/jobs?group=model&columns=loss,note,training.optimizer.lr"' in page.replace("%2C", ",")
    assert re.findall(r'data-name="([^"]+)"', page) == ["llama-sft", "other"]
    file = await browser.get(f"/jobs.csv?{asked}")
    assert file.headers["content-disposition"] == 'attachment; filename="jobs.csv"'
    assert file.text.splitlines() == [
        "name,id,loss,note,training.optimizer.lr,tags",
        f"llama-sft,{uid},2.31,,0.0003,",
        f"other,{other},,'=the note,0.0003,paper",
    ]
    chosen = (await browser.get(f"/jobs.csv?{asked}&picked={other},nobody")).text.splitlines()
    assert [line.split(",")[0] for line in chosen] == ["name", "other"]
    picked = (await browser.get(f"/jobs?picked={other},nobody&chart=lr")).text
    assert html.unescape(re.findall(r'data-names="([^"]*)"', picked)[0]) == f'[["{other}", "other"]]'
    (curves,) = (await browser.get(f"/jobs/curves?jobs={uid},nobody&name=loss")).json()
    assert (curves["name"], list(curves["curves"]["series"])) == ("llama-sft", ["loss"])
    assert "No matching jobs" in (await browser.get("/jobs?tag=nothing")).text


async def test_ticked_jobs_are_compared_exported_tagged_and_deleted(here: Platform, browser: Browser) -> None:
    ids = [(await here.submit(name))["id"] for name in ("one", "two")]
    await here.finish(ids[1])
    form = {"form_token": await browser.form_token(), "job": ids, "next": "/jobs"}
    reply = await browser.post("/jobs/act", form | {"verb": "compare"})
    assert (reply.status_code, reply.headers["location"]) == (303, f"/compare?jobs={'%2C'.join(ids)}")
    exported = await browser.post("/jobs/act", form | {"verb": "export"})
    assert [line.split(",")[0] for line in exported.text.splitlines()] == ["name", "one", "two"]
    await browser.post("/jobs/act", form | {"verb": "tag", "tags": "paper, baseline"})
    assert notes(await browser.get("/jobs")) == ["Changed 2 of 2."]
    await browser.post("/jobs/act", form | {"verb": "untag", "tags": "paper"})
    await browser.post("/jobs/act", form | {"verb": "note", "note": "as in table 2"})
    assert [job["tags"] for job in (await here.get("/jobs"))["items"]] == [["baseline"], ["baseline"]]
    await browser.get("/jobs")
    await browser.post("/jobs/act", form | {"verb": "tag", "tags": "§"})
    assert "The tags or the note are not valid" in notes(await browser.get("/jobs"))[0]
    asks = html.unescape((await browser.post("/jobs/act", form | {"verb": "delete"})).text)
    assert "Delete 1 job?" in asks
    assert "This one has not ended" in asks
    assert re.findall(r'name="job" value="([^"]+)"', asks) == ids[1:]
    assert {job["name"] for job in (await here.get("/jobs"))["items"]} == {"one", "two"}, "it asks first"

    async def let_go() -> bool:
        """Acts of the operator on a job that is marked."""
        if here.cluster.get(ids[1]).metadata.deletion_timestamp is None:
            return False
        here.cluster.remove(ids[1])
        return True

    operator = asyncio.create_task(until(let_go, "the mark"))
    reply = await browser.post("/jobs/delete", form | {"job": ids})
    await operator
    assert reply.status_code == 303
    told = notes(await browser.get("/jobs"))
    assert told[0] == "Deleted 1 of 2."
    assert "has not ended" in told[1]
    assert [job["name"] for job in (await here.get("/jobs"))["items"]] == ["one"]


async def test_several_jobs_are_acted_upon_at_once(here: Platform, browser: Browser) -> None:
    ids = [(await here.submit(name))["id"] for name in ("one", "two", "done")]
    await here.finish(ids[2])
    token = await browser.form_token()
    form = {"form_token": token, "verb": "suspend", "job": [*ids, "nowhere"], "next": "/jobs?sort=name"}
    reply = await browser.post("/jobs/act", form)
    assert (reply.status_code, reply.headers["location"]) == (303, "/jobs?sort=name")
    told = notes(await browser.get("/jobs?sort=name"))
    assert told[0] == "Asked 2 of 4 to suspend."
    assert "Job 'done' is Succeeded" in told[1]
    assert "no job with the id 'nowhere'" in told[2]
    assert notes(await browser.get("/jobs")) == []  # said once
    assert (await here.get(f"/jobs/{ids[0]}"))["spec"]["suspend"] is True
    assert (await browser.post("/jobs/act", form | {"verb": "explode"})).status_code == 404


async def test_a_jobs_pages_tell_its_story(here: Platform, browser: Browser) -> None:
    uid = await lived(here)
    page = html.unescape((await browser.get(f"/jobs/{uid}")).text)
    for words in (
        "62 % · 2.31 · llama-sft · Muster",
        "worker 1 was killed by signal 9",
        "Attempt 2: Starting for",
        "124 / 200 · 1m16s left",
        "76.7%",
        "muster suspend llama-sft",
        'data-live="/live?job=',
        "Loss from 3.49",
    ):
        assert words in page, words
    assert 'id="recovering"' not in page
    here.operate(uid, phase=Phase.STARTING, because="attempt 2 on 2 nodes, resuming from step 80")
    await here.phase(uid, "Starting")
    recovers = html.unescape((await browser.get(f"/jobs/{uid}")).text)
    assert "It recovers. Attempt 1 ended by infrastructure: worker 1 was killed by signal 9</p>" in recovers
    shares = [float(share) for share in re.findall(r'<td class="number">([\d.]+)%</td>', page)]
    assert sum(shares[:-1]) == pytest.approx(100.0)
    config = html.unescape((await browser.get(f"/jobs/{uid}/config")).text)
    assert re.search(r"<dt>Training</dt><dd>\w+ ", config)
    assert "<dt>Checkpoints</dt>" in config
    events = (await browser.get(f"/jobs/{uid}/events")).text
    assert "attempt.failed" in events
    assert "job.created" in events
    problems = (await browser.get(f"/jobs/{uid}/events?only=problems")).text
    assert "attempt.failed" in problems
    assert "<code>job.created</code>" not in problems
    assert "No such event." in (await browser.get(f"/jobs/{uid}/events?only=checkpoints&before=1")).text
    commits = (await browser.get(f"/jobs/{uid}/checkpoints")).text
    assert re.findall(r"/checkpoints/(\d+)\">", commits) == ["120", "80"]
    # A live page keeps a row by its id, and the form that was pressed in it: without, a newer row would take its place.
    assert re.findall(r'<tr id="commit-(\d+)">', commits) == ["120", "80"]
    assert re.findall(r'<form [^>]*/(\w+)" id="act-(\w+)"', page) == [("suspend", "suspend"), ("cancel", "cancel")]
    commit = html.unescape((await browser.get(f"/jobs/{uid}/checkpoints/120")).text)
    assert "muster checkpoints verify llama-sft 120" in commit
    assert "tokensPerStep: 16384" in (await browser.get(f"/jobs/{uid}/config")).text
    assert "has written nothing yet" in (await browser.get(f"/jobs/{uid}/samples")).text


async def test_many_pages_at_once_leave_connections_to_programs(
    here: Platform, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is refused for want of a connection: those beyond a few wait before they ask for one."""
    uid = await lived(here)
    read, now, most = here.services.database.read, 0, 0

    @asynccontextmanager
    async def counted() -> AsyncIterator[AsyncSession]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            async with read() as session:
                yield session
        finally:
            now -= 1

    monkeypatch.setattr(here.services.database, "read", counted)
    pages = await asyncio.gather(*(browser.get(f"/jobs/{uid}") for _ in range(40)))
    assert {page.status_code for page in pages} == {200}
    assert 4 <= most <= 4 * READING_AT_ONCE + 4, "the API's own work reads too"


async def test_commits_are_pinned_and_configurations_compared(here: Platform, browser: Browser) -> None:
    uid = await lived(here)
    token = await browser.form_token(f"/jobs/{uid}/checkpoints")
    reply = await browser.post(f"/jobs/{uid}/checkpoints/80/pin", {"form_token": token})
    assert reply.status_code == 303
    page = await browser.get(reply.headers["location"])
    assert "The checkpoint of step 80 is kept" in notes(page)[0]
    assert f"/jobs/{uid}/checkpoints/80/unpin" in page.text
    gone = await browser.post(f"/jobs/{uid}/checkpoints/7/pin", {"form_token": token})
    assert gone.status_code == 303, "retention was faster than the reader of the list"
    page = await browser.get(gone.headers["location"])
    assert "There is no checkpoint of step 7;" in notes(page)[0]
    assert "the retention policy removed it" in notes(page)[0]
    assert f"/jobs/{uid}/checkpoints/80/unpin" in page.text, "what is there now is listed"

    cloned = f"/jobs/{(await here.submit('warmer', priority=3))['id']}"
    compared = (await browser.get(f"{cloned}/config?against=llama-sft")).text
    assert re.findall(r'<th scope="row"><code>([^<]+)</code>', compared) == ["priority"]
    nobody = (await browser.get(f"{cloned}/config?against=nobody")).text
    assert "There is no job" in nobody


async def test_a_log_is_read_searched_and_downloaded(here: Platform, browser: Browser) -> None:
    uid = await lived(here)
    page = (await browser.get(f"/jobs/{uid}/logs")).text
    assert "attempt 2: worker 1" in page
    assert "step 124 of 200" in page
    assert f'data-log="/jobs/{uid}/logs/lines?attempt=2&amp;worker=0"' in page
    found = (await browser.get(f"/jobs/{uid}/logs?attempt=1&find=STEP+77+")).text
    assert "<mark>step 77 of 200</mark>" in found
    assert "step 76 of 200" not in found
    assert "Nothing more holds" in (await browser.get(f"/jobs/{uid}/logs?find=nothing-like-it")).text
    file = await browser.get(f"/jobs/{uid}/logs/download?attempt=1")
    assert file.headers["content-disposition"] == 'attachment; filename="llama-sft-attempt-1-worker-0.log"'
    assert file.text == (here.state.worker(uid, 1, 0) / LOG).read_text()
    assert "has no worker 7" in (await browser.get(f"/jobs/{uid}/logs?worker=7")).text


async def test_a_log_is_read_by_rank(here: Platform, browser: Browser) -> None:
    """Also while it is followed; a choice of nothing is everybody's lines."""
    uid = await lived(here, gang={"nodes": 2, "gpusPerNode": 4})
    with (here.state.worker(uid, 2, 0) / LOG).open("a") as log:
        log.write(f"{rank_mark(2)}out of memory\n{rank_mark(3)}fine\n")
    everybody = (await browser.get(f"/jobs/{uid}/logs?attempt=2&rank=")).text
    assert "[rank 2] out of memory" in everybody
    assert "[rank 3] fine" in everybody
    assert re.findall(r'<option value="(\d)"', everybody.split('name="rank"')[1].split("</select>")[0]) == list("0123")
    page = (await browser.get(f"/jobs/{uid}/logs?attempt=2&rank=2")).text
    assert "out of memory" in page
    assert "fine" not in page
    assert f'data-log="/jobs/{uid}/logs/lines?attempt=2&amp;worker=0&amp;rank=2"' in page
    told = (await browser.get(f"/jobs/{uid}/logs/lines?attempt=2&rank=2")).json()
    assert told["text"] == "out of memory\n"
    assert told["nextOffset"] > len(told["text"])
    first = (await browser.get(f"/jobs/{uid}/logs?attempt=2&rank=0")).text
    assert "attempt 2: worker 1" in first
    assert "out of memory" not in first


async def test_of_a_long_queue_the_fleet_shows_the_beginning_and_counts_all(here: Platform, browser: Browser) -> None:
    await store(here, 130)
    urgent = (await here.submit("urgent", priority=9))["id"]
    page = (await browser.get("/fleet")).text
    rows = re.findall(r'<td class="number">(\d+)</td><td><a href="/jobs/([^"]+)">([^<]+)</a>', page)
    assert [int(place) for place, _, _ in rows] == list(range(1, 101))
    assert rows[0][1:] == (urgent, "urgent")
    assert [name for _, _, name in rows[1:]] == [f"job-{number}" for number in range(99)]
    assert "and 31 more" in page
    assert '<td class="number">131</td>' in page, "the project's own count"


async def test_hostile_words_are_words(here: Platform, browser: Browser) -> None:
    """Whatever comes from jobs, people and logs is text; what steers terminals is gone, and a megabyte is cut."""
    uid = await lived(here, message=HOSTILE + "y" * 1_000_000)
    for path in ("", "/events", "/logs?attempt=1", "/logs?find=%3Cscript", "/config?against=%3Cscript%3E"):
        page = await browser.get(f"/jobs/{uid}{path}")
        assert page.status_code == 200, path
        assert "<script>document" not in page.text, path
        assert "<img src=x" not in page.text, path
        assert "\x1b" not in page.text, path
        assert len(page.content) < 400_000, path
    listed = await browser.get("/jobs?q=%3Cscript%3Ealert(1)%3C/script%3E&owner=%22%3E%3Cimg&phase=%3Cb%3E&sort=%22")
    assert listed.status_code == 200
    assert "<script>alert" not in listed.text
    assert "<img" not in listed.text.replace('<img src="/static', "")


async def test_an_open_page_hears_of_news_at_once(tmp_path: Path) -> None:
    async with served(tmp_path / "state", make=create_app) as (here, _):
        uid = (await here.submit())["id"]
        await here.handed_over(uid)
        async with here.client.stream("GET", "/live", params={"job": uid}) as reply:
            told = frames(reply)
            assert (await anext(told)).event == "changed"
            here.operate(uid, because="something else")
            assert (await anext(told)).event == "changed"


async def test_files_are_kept_for_good_and_packed(here: Platform) -> None:
    page = (await here.client.get("/jobs", headers={"accept": "text/html"})).text
    for address in re.findall(r'(?:href|src)="(/static/[^"]+)"', page):
        reply = await here.client.get(address)
        assert (reply.status_code, "immutable" in reply.headers["cache-control"]) == (200, True), address
        stale = await here.client.get(re.sub(r"/static/\w+", "/static/before", address))
        assert stale.headers["cache-control"] == "no-cache"
    packed = await here.client.get(re.search(r'"(/static/[^"]+muster\.css)"', page)[1])
    assert packed.headers["content-encoding"] == "gzip"
    assert (await here.client.get("/static/x/../../app.py")).status_code == 404
