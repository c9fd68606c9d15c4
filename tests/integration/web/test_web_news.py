"""Open pages put their questions to the database together, and none misses what is news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.integration.api.platform import Platform, platform
from tests.polling import WAIT_SECONDS_MAX

from muster.api.core.hub import NotificationHub
from muster.web import api
from muster.web.api import ANY_JOB, Services
from muster.web.app import create_app
from muster.web.news import NewsBoard


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state", make=create_app) as running:
        yield running


@pytest.fixture(autouse=True)
def only_news_end_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.web.news.POLL_SECONDS", 3600.0)


@dataclass
class Questions:
    """The jobs of each question that the database was asked. `answers` holds its answers back while it is cleared."""

    asked: list[set[str]] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> Questions:
    seen, real = Questions(), api.versions_of
    seen.answers.set()

    async def watched(services: Services, job_ids: Collection[str]) -> dict[str, tuple[int, ...]]:
        seen.asked.append(set(job_ids))
        answer = await real(services, job_ids)
        seen.begun.set()
        await seen.answers.wait()
        return answer

    monkeypatch.setattr(api, "versions_of", watched)
    return seen


async def test_pages_that_wake_together_cost_one_question_and_one_more(here: Platform, questions: Questions) -> None:
    jobs = [(await here.submit(f"job-{number}"))["id"] for number in range(5)]
    news, services = NewsBoard(), replace(here.services, hub=NotificationHub())  # a hub that only this test tells
    questions.answers.clear()
    first = asyncio.gather(*(news.version(services, job) for job in [ANY_JOB, *jobs] * 20))
    await questions.begun.wait()
    services.hub.tell(jobs[0])
    late = asyncio.gather(*(news.version(services, job) for job in jobs * 20))
    questions.answers.set()
    versions = await first
    assert versions[:6] == versions[6:12]
    assert all(len(version) == 3 for version in versions[1:6])
    await late
    assert questions.asked == [{ANY_JOB, *jobs}, set(jobs)], "after news, what was read before them answers nobody"
    await news.version(services, jobs[1])
    assert len(questions.asked) == 2, "nobody told anything since"
    assert await news.version(services, "no-job") == ()
    await news.newest(services, jobs[1])
    assert len(questions.asked) == 4, "but who has written something reads it"


async def test_what_was_committed_before_the_question_is_in_the_answer(here: Platform, questions: Questions) -> None:
    news = NewsBoard()
    questions.answers.clear()
    before = asyncio.create_task(news.newest(here.services, ANY_JOB))
    await questions.begun.wait()
    uid = (await here.submit())["id"]
    after = asyncio.create_task(news.newest(here.services, ANY_JOB)), news.newest(here.services, uid)
    questions.answers.set()
    assert await before != await after[0]
    assert len(await after[1]) == 3


async def test_all_who_wait_for_a_job_are_woken_by_its_news(here: Platform) -> None:
    news, services = NewsBoard(), replace(here.services, hub=NotificationHub())
    waiting = [asyncio.create_task(news.wait(services, job)) for job in ("one", "one", ANY_JOB, "two")]
    await asyncio.sleep(0)
    waiting[1].cancel()  # a page that is closed takes nobody's news away
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while not (waiting[0].done() and waiting[2].done()):
            services.hub.tell("one")  # again until they listen
            await asyncio.sleep(0)
    again = asyncio.create_task(news.wait(services, "one"))
    await asyncio.sleep(0)
    assert not waiting[3].done()
    assert not again.done(), "news wake once"
    services.hub.close()
    await asyncio.wait_for(asyncio.gather(waiting[3], again), WAIT_SECONDS_MAX)
