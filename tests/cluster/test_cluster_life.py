"""A job's life on a real API server, scheduler and controller manager, with the chart's RBAC: capacity and wishes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.house import SYSTEM, House, quick_job
from tests.polling import eventually

from muster.kube import paths


@pytest.fixture(scope="module")
def life(house: House) -> Iterator[House]:
    for index in range(3):
        house.node(f"life-{index}", {"node.kubernetes.io/instance-type": "life"})
    house.start_operator()
    yield house
    house.stop_operators()


def on_life(**gang: object) -> dict[str, object]:
    return {"instanceTypes": ["life"], **gang}


def test_a_job_trains_to_its_end(life: House) -> None:
    uid = life.submit(quick_job("plain", steps=10, gang=on_life()))
    status = life.reaches("plain", "Succeeded")
    assert status["attempt"] == 1
    assert {(attempt, worker) for attempt, worker, _, _ in life.trace(uid)} == {(1, 0), (1, 1)}
    eventually(lambda: life.pods("plain") == [], "its pods to be swept")
    assert "condition met" in life.kubectl(
        "wait", "-n", "team", "tj/plain", "--for=condition=Complete", "--timeout=60s"
    )
    told = life.kubectl(
        "get", "events", "-n", "team", "--field-selector=regarding.name=plain", "-o", "name", check=False
    )

    def reasons() -> set[str]:
        items = life.get(paths.group("events.k8s.io/v1", "team", "events"))["items"]
        return {entry["reason"] for entry in items if entry["regarding"]["name"] == "plain"}

    eventually(lambda: reasons() >= {"CreatingWorkers", "Finished"}, f"its events, beside these: {told}")


def test_a_gang_waits_for_capacity_and_starts_as_one(life: House) -> None:
    """Three nodes; the first gang takes two, the second needs two: it gets none until it gets both."""
    big = {"cpu": "6", "memory": "1Gi"}
    life.submit(quick_job("holds", steps=10_000, gang=on_life(resources=big)))
    life.reaches("holds", "Running")
    life.submit(quick_job("waits", steps=10, gang=on_life(resources=big), runtime=life.holds("waits", 5)))

    def waits() -> bool:
        why = "gang needs 2 nodes with 6 CPUs and 1 GiB each, 1 free in pool life; held by team/holds 2 nodes"
        return str(life.status("waits").get("because")).startswith(why)

    eventually(waits, "the reason of the wait")
    assert life.pods("waits") == []
    life.change("holds", {"cancel": True})
    assert life.steps("waits", 5) == 5, "both train, and neither has ended"
    assert len(life.pods("waits")) == 2
    life.let_go("waits")
    life.reaches("waits", "Succeeded")


def test_a_gang_that_may_not_exist_whole_holds_nothing(life: House) -> None:
    """A quota refuses the second pod: pods and nodes are given back, the reason is told, and it is tried again."""
    life.namespace("tight")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "two"}, "spec": {"hard": {"pods": "1"}}}
    life.client.create(paths.core("tight", "resourcequotas"), quota)
    eventually(
        lambda: "hard" in life.get(paths.core("tight", "resourcequotas", "two")).get("status", {}), "a counted quota"
    )
    document = quick_job("whole", steps=5, gang=on_life())
    document["metadata"]["namespace"] = "tight"
    life.submit(document)

    def given_back() -> bool:
        status = life.status("whole", "tight")
        told = "exceeded quota" in status.get("because", "")
        return told and status["phase"] == "Queued" and not status["gang"].get("nodes")

    eventually(given_back, "the quota to be named and the nodes to be given back")
    eventually(lambda: not life.pods("whole", "tight"), "the one pod to be gone")
    more = {"spec": {"hard": {"pods": "2"}}}
    life.client.patch(paths.core("tight", "resourcequotas", "two"), more)
    status = life.reaches("whole", "Succeeded", namespace="tight")
    assert not status["restarts"].get("byCause"), json.dumps(status, indent=1)


@pytest.mark.parametrize(
    ("name", "runtime", "words"),
    [
        ("nameless", {"serviceAccountName": "nobody"}, 'serviceaccount "nobody" not found'),
        ("insecure", {"volumes": [{"name": "disk", "hostPath": {"path": "/var"}}]}, 'violates PodSecurity "restricted'),
    ],
)
def test_a_pod_that_is_refused_for_good_ends_the_job_at_once(
    life: House, name: str, runtime: dict[str, object], words: str
) -> None:
    """A service account that is missing, and what Pod Security forbids."""
    life.submit(quick_job(name, steps=5, gang=on_life(), runtime={"image": "none"} | runtime))
    status = life.reaches(name, "Failed")
    assert status["lastFailure"]["cause"] == "user_error"
    assert words in status["because"]
    assert not status["gang"].get("nodes")
    assert status["attempt"] == 1


def test_suspend_and_resume(life: House) -> None:
    uid = life.submit(quick_job("pausing", steps=40, gang=on_life(), runtime=life.holds("pausing", 10)))
    life.steps("pausing", 6)
    life.change("pausing", {"suspend": True})
    life.reaches("pausing", "Suspended")
    assert life.pods("pausing") == []
    life.let_go("pausing")
    stopped_at = life.status("pausing")["checkpoint"]["step"]
    life.change("pausing", {"suspend": False})
    status = life.reaches("pausing", "Succeeded")
    assert status["attempt"] == 2
    assert min(step for attempt, _, step, _ in life.trace(uid) if attempt == 2) == stopped_at + 1
    assert not status["restarts"].get("byCause")


def test_deleting_a_job_lets_its_gang_commit(life: House) -> None:
    uid = life.submit(quick_job("leaving", steps=10_000, gang=on_life()))
    reached = life.steps("leaving", 3)
    life.kubectl("delete", "-n", "team", "tj/leaving", "--timeout=200s")
    assert life.find(paths.job("team", "leaving")) is None
    commits = sorted((life.checkpoints / uid / "commits").glob("*.json"))
    assert int(commits[-1].stem.removeprefix("step-")) >= reached
    eventually(lambda: not life.pods("leaving"), "its pods to be gone")


def test_a_finished_job_goes_when_its_time_is_up(life: House) -> None:
    life.submit(quick_job("brief", steps=2, gang=on_life(), ttlSecondsAfterFinished=1))
    eventually(lambda: life.find(paths.job("team", "brief")) is None, "the job to be removed")


def test_the_ledger_is_empty_when_nobody_holds_nodes(life: House) -> None:
    held = life.get(paths.core(SYSTEM, "configmaps", "muster-reservations"))
    assert set(held["binaryData"]) == {"entries"}


def test_kubectl_get_shows_what_matters(life: House) -> None:
    life.submit(quick_job("shown", steps=10_000, gang=on_life()))
    life.reaches("shown", "Running")
    eventually(lambda: life.status("shown")["gang"].get("ready") == 2, "both workers to be counted")
    shown = re.sub(r"\S+$", "<age>", life.kubectl("get", "tj", "shown", "-n", "team").rstrip())
    assert shown + "\n" == (Path(__file__).parent / "golden" / "get-tj.txt").read_text()
    life.change("shown", {"cancel": True})
    life.reaches("shown", "Cancelled")
