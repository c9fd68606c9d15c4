"""Open pages put their questions to the database together, and none misses what is news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.api.platform import Platform, platform

from muster.api.hub import Hub
from muster.web import api
from muster.web.api import ANY_JOB, Services
from muster.web.app import create_app
from muster.web.news import SETTLE_SECONDS, News


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state", make=create_app) as running:
        yield running


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The jobs of each question that the database was asked; it takes its time to answer."""
    questions: list[set[str]] = []
    real = api.versions_of

    async def counted(services: Services, job_ids: Collection[str]) -> dict[str, tuple[int, ...]]:
        questions.append(set(job_ids))
        answer = await real(services, job_ids)
        await asyncio.sleep(0.05)
        return answer

    monkeypatch.setattr(api, "versions_of", counted)
    return questions


async def test_pages_that_wake_together_cost_one_question_and_one_more(
    here: Platform, asked: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.web.news.POLL_SECONDS", 3600.0)
    jobs = [(await here.submit(f"job-{number}"))["id"] for number in range(5)]
    news, services = News(), replace(here.services, hub=Hub())  # a hub that only this test tells
    pages = [news.version(services, job) for job in [ANY_JOB, *jobs] * 20]
    first = asyncio.gather(*pages)
    await asyncio.sleep(0.01)
    services.hub.tell(jobs[0])
    late = asyncio.gather(*(news.version(services, job) for job in jobs * 20))
    versions = await first
    assert versions[:6] == versions[6:12]
    assert all(len(version) == 3 for version in versions[1:6])
    await late
    assert asked == [{ANY_JOB, *jobs}, set(jobs)], "what is asked after news is not answered with what was before them"
    await news.version(services, jobs[1])
    assert len(asked) == 2, "nobody told anything since"
    assert await news.version(services, "no-job") == ()
    await news.newest(services, jobs[1])
    assert len(asked) == 4, "but who has written something reads it"


async def test_what_was_committed_before_the_question_is_in_the_answer(here: Platform, asked: list[set[str]]) -> None:
    uid = (await here.submit())["id"]
    news = News()
    before = asyncio.create_task(news.version(here.services, uid))
    everything = asyncio.create_task(news.version(here.services, ANY_JOB))
    await asyncio.sleep(0.03)
    await here.submit("second")
    assert (await everything) != await news.newest(here.services, ANY_JOB)
    assert (await before)[1] == (await news.newest(here.services, uid))[1]


async def test_all_who_wait_for_a_job_are_woken_by_its_news(here: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.web.news.POLL_SECONDS", 3600.0)
    news = News()
    waiting = [asyncio.create_task(news.wait(here.services, job)) for job in ("one", "one", ANY_JOB, "two")]
    await asyncio.sleep(0)
    waiting[1].cancel()  # a page that is closed takes nobody's news away
    await asyncio.sleep(0.01)
    here.services.hub.tell("one")
    await asyncio.wait_for(asyncio.gather(waiting[0], waiting[2]), 20)
    assert not waiting[3].done()
    again = asyncio.create_task(news.wait(here.services, "one"))
    await asyncio.sleep(SETTLE_SECONDS)
    assert not again.done(), "news wake once"
    here.services.hub.close()
    await asyncio.wait_for(asyncio.gather(waiting[3], again), 20)
