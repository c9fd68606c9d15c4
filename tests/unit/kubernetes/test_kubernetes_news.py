"""What of a gang's pods calls for a look at once, what may wait for more, and what nobody needs to hear."""

from typing import Any

import pytest
from tests.unit.kubernetes.making import JOB_UID, ended, job_item, pod_item

from muster.operator.kubernetes.jobs import JobStore
from muster.operator.kubernetes.pods import PodCache
from muster.recipe.document import JobSpec
from muster.words.names import FINALIZER
from muster.words.status import JobStatus, Phase

MADE: dict[str, Any] = {"spec": {"nodeName": ""}, "status": {"phase": "Pending", "podIP": "", "containerStatuses": []}}
PLACED: dict[str, Any] = {"status": MADE["status"]}
DELETED = {"deletionTimestamp": "2026-11-20T09:00:00Z", "deletionGracePeriodSeconds": 0}


class Listener:
    def __init__(self) -> None:
        self.news: list[str] = []
        self.mentions: list[str] = []
        self.pods = PodCache(self.news.append, self.mentions.append)

    def heard(self) -> tuple[int, int]:
        """News and mentions since the last look."""
        found = len(self.news), len(self.mentions)
        self.news.clear()
        self.mentions.clear()
        return found


@pytest.fixture
def listener() -> Listener:
    """Of a gang of two that was just made."""
    listener = Listener()
    for worker in range(2):
        listener.pods.put(pod_item(worker, **MADE))
    assert listener.heard() == (0, 0)  # its maker tells when all are there
    return listener


def test_a_gang_that_comes_up_is_no_news_before_its_ranks_speak(listener: Listener) -> None:
    listener.pods.put(pod_item(0, version=2, **PLACED))
    listener.pods.put(pod_item(1, version=3, **PLACED))
    listener.pods.put(pod_item(0, version=4))
    listener.pods.put(pod_item(1, version=5))
    assert listener.heard() == (0, 4)


def test_an_end_is_news_and_the_next_attempt_that_comes_up_is_not(listener: Listener) -> None:
    listener.pods.put(pod_item(0, version=6, status=ended(1)))
    listener.pods.put(pod_item(1, version=7, status=ended(85)))
    assert listener.heard() == (2, 0)
    listener.pods.put(pod_item(0, attempt=2, version=8, **MADE))
    listener.pods.put(pod_item(0, attempt=2, version=9))
    assert listener.heard() == (0, 1)


def test_trouble_ends_and_deletions_are_news_at_once(listener: Listener) -> None:
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    listener.pods.put(pod_item(0, version=2, status={**MADE["status"], "containerStatuses": [waiting]}))
    assert listener.heard() == (1, 0)
    listener.pods.put(pod_item(0, version=3))
    assert listener.heard() == (1, 0)  # the trouble is over
    listener.pods.put(pod_item(0, version=4, meta=DELETED))
    assert listener.heard() == (1, 0)
    listener.pods.put(pod_item(0, version=5, meta=DELETED, status=ended(137)))
    assert listener.heard() == (1, 0)


def test_a_pod_that_vanishes_while_it_runs_is_news(listener: Listener) -> None:
    listener.pods.put(pod_item(0, version=2))
    listener.heard()
    listener.pods.drop(pod_item(0))
    assert listener.heard() == (1, 0)


def test_a_gang_that_has_ended_is_news_again_when_its_last_pod_is_gone(listener: Listener) -> None:
    for worker in range(2):
        listener.pods.put(pod_item(worker, version=2 + worker, status=ended(0)))
    assert listener.heard() == (2, 0)
    listener.pods.put(pod_item(0, version=5, meta=DELETED, status=ended(0)))
    listener.pods.drop(pod_item(0))
    assert listener.heard() == (0, 0)
    listener.pods.put(pod_item(1, version=6, meta=DELETED, status=ended(0)))  # as good as gone: somebody's finalizer
    assert listener.heard() == (1, 0)
    listener.pods.drop(pod_item(1))
    assert listener.heard() == (1, 0)


def test_the_last_drop_is_told_where_those_left_are_kept_by_a_finalizer(listener: Listener) -> None:
    listener.pods.put(pod_item(0, version=2, status=ended(0)))
    listener.pods.put(pod_item(1, version=3, status=ended(0)))
    listener.pods.put(pod_item(1, version=4, meta=DELETED, status=ended(0)))
    listener.heard()
    listener.pods.drop(pod_item(0))
    assert listener.heard() == (1, 0)


def test_an_answer_with_no_more_than_metadata_renews_the_job() -> None:
    jobs = JobStore(lambda uid: None, JobSpec)
    job = jobs.keep(job_item())
    meta = job_item(version=8)["metadata"] | {"finalizers": [FINALIZER]}
    renewed = jobs.written(job, {"metadata": meta})
    assert (renewed.version, renewed.finalizers, renewed.spec) == ("8", (FINALIZER,), job.spec)
    status = JobStatus(queued_at=1.0, since=1.0, phase=Phase.STARTING)
    written = jobs.written(renewed, {"metadata": meta | {"resourceVersion": "9"}}, status)
    assert jobs.get(JOB_UID) is written
    assert (written.version, written.status) == ("9", status)


def test_an_answer_about_a_spec_that_somebody_changed_meanwhile_is_left_to_the_watch() -> None:
    jobs = JobStore(lambda uid: None, JobSpec)
    job = jobs.keep(job_item())
    assert jobs.written(job, {"metadata": job_item(version=8)["metadata"] | {"generation": 2}}) is job
    assert jobs.get(JOB_UID) is job
