"""The REST API over TrainingJobs of a real API server: relay, mirror, jobs that were made with kubectl."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.house import House, quick_job
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.ports import free_port

from muster.kube import paths

KIND = {"node.kubernetes.io/instance-type": "rest"}


class Rest:
    def __init__(self, house: House, folder: Path) -> None:
        self._house, self.folder = house, folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = {
            "MUSTER_API_CLUSTER": "kubernetes", "MUSTER_API_KUBECONFIG": str(self._house.plane.kubeconfig),
            "MUSTER_API_AUTH": "false", "MUSTER_API_CHECKPOINT_URI": f"file://{self._house.checkpoints}",
        }  # fmt: skip
        arguments = ["--state", str(self.folder), "--host", "127.0.0.1", "--port", str(self._port)]
        with open(self.folder / "api.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "muster.api", *arguments], env=os.environ | settings, stdout=log, stderr=log
            )
        eventually(self._answers, f"the API; its log: {self.folder / 'api.log'}")
        self.ask("PUT", "/projects/default", {"limits": {"namespaces": ["default", "team"]}})

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(WAIT_SECONDS_MAX)

    def ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/api/v1{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS_MAX) as reply:
            return json.loads(reply.read() or b"null")

    def stream(self, path: str) -> Any:
        return urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1{path}", timeout=2 * WAIT_SECONDS_MAX)

    def job(self, name: str) -> Any:
        """By name; None while the API does not know it."""
        items = self.ask("GET", "/jobs?namespace=team")["items"]
        return next((item for item in items if item["name"] == name), None)

    def phase(self, name: str) -> str:
        return str((self.job(name) or {}).get("phase", ""))

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "api.log").read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=20) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture(scope="module")
def rest(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    for index in range(2):
        house.node(f"rest-{index}", KIND)
    house.start_operator()
    rest = Rest(house, tmp_path_factory.mktemp("api"))
    rest.start()
    yield rest
    rest.stop()
    house.stop_operators()


def job(name: str, **changes: object) -> dict[str, Any]:
    document: dict[str, Any] = quick_job(name, gang={"instanceTypes": ["rest"]}, **changes)
    return document


def test_a_job_goes_in_by_rest_and_trains(house: House, rest: Rest) -> None:
    made = rest.ask("POST", "/jobs", job("by-rest", steps=10))
    house.reaches("by-rest", "Succeeded")
    eventually(lambda: rest.phase("by-rest") == "Succeeded", "the mirror to tell")
    there = house.job("by-rest")["metadata"]
    assert there["labels"]["muster.dev/job-id"] == made["id"]
    assert (house.checkpoints / made["id"] / "commits").is_dir()
    assert rest.ask("GET", f"/jobs/{made['id']}/attempts")["items"][0]["number"] == 1


def test_a_job_that_can_not_be_read_has_a_row_a_reason_and_an_end(house: House, rest: Rest) -> None:
    """As an older definition of TrainingJobs let it in: today's refuses such a thing."""
    house.submit(job("readable", suspend=True))
    house.reaches("readable", "Suspended")
    key = "/registry/muster.dev/trainingjobs/team"
    stored = house.plane.stored(f"{key}/readable")
    gang = stored["spec"]["gang"] | {"nodes": "four"}
    strange = {"metadata": stored["metadata"] | {"name": "strange", "uid": str(uuid.uuid4())}, "status": {}}
    house.plane.store({f"{key}/strange": stored | strange | {"spec": stored["spec"] | {"gang": gang}}})
    eventually(lambda: rest.phase("strange") == "Failed", f"a row that tells of it\n{house.tail()}")
    row = rest.job("strange")
    assert "gang.nodes" in row["because"]
    why = rest.ask("GET", f"/jobs/{row['id']}/why")
    assert "gang.nodes" in json.dumps(why)
    eventually(
        lambda: "InvalidSpec" in house.kubectl("events", "-n", "team", "--for", "trainingjob/strange"), "its event"
    )
    house.kubectl("delete", "tj", "-n", "team", "strange", "readable", "--timeout=200s")


def test_logs_and_steps_of_pods_are_read_and_outlive_them(house: House, rest: Rest) -> None:
    made = rest.ask("POST", "/jobs", job("logged", steps=40, runtime=house.holds("logged", 5)))
    house.reaches("logged", "Running")
    house.steps("logged", 3)
    path = f"/jobs/{made['id']}"

    def lines() -> list[Any]:
        try:
            page = rest.ask("GET", f"{path}/logs?worker=0")
        except urllib.error.HTTPError:  # the API has not heard of its workers yet
            return []
        return [json.loads(line) for line in page["text"].splitlines()]

    eventually(lambda: len(lines()) >= 3, "the log of a running pod")
    eventually(lambda: rest.ask("GET", f"{path}/logs?worker=0")["workers"] == [0, 1], "the log of the other")
    house.let_go("logged")
    house.reaches("logged", "Succeeded")
    eventually(lambda: not house.pods("logged"), "its pods to be gone")
    eventually(lambda: rest.phase("logged") == "Succeeded", "the mirror to tell")
    assert [line["step"] for line in lines()] == list(range(1, 41))
    history = rest.ask("GET", f"{path}/metrics")
    assert [point["step"] for point in history["points"]] == list(range(1, 41))
    assert history["points"][3]["loss"] == 0.25


def test_the_last_words_of_a_worker_that_nobody_watched_are_kept(house: House, rest: Rest) -> None:
    told = {"name": "QUICK_EXIT", "value": "1:1:4:80"}
    made = rest.ask("POST", "/jobs", job("spoken", steps=40, runtime={"env": [told]}))
    house.reaches("spoken", "Failed")
    eventually(lambda: rest.phase("spoken") == "Failed", "the mirror to tell")
    failure = house.status("spoken")["lastFailure"]
    assert (failure["worker"], failure["exitCode"]) == (1, 80)

    def workers() -> list[int]:
        try:
            page = rest.ask("GET", f"/jobs/{made['id']}/logs?worker=1&attempt=1")
        except urllib.error.HTTPError:  # the API has not taken its words yet
            return []
        return list(page["workers"])

    eventually(lambda: workers() == [0, 1], "the words of both")


def test_a_log_is_streamed_while_its_pod_writes(house: House, rest: Rest) -> None:
    made = rest.ask("POST", "/jobs", job("streamed", steps=25, runtime=house.holds("streamed", 5)))
    house.reaches("streamed", "Running")
    with rest.stream(f"/jobs/{made['id']}/logs?worker=all&follow=true") as reply:
        house.let_go("streamed")
        told = [line[6:] for line in (raw.decode().strip() for raw in reply) if line.startswith("data: ")]
    logged = [json.loads(entry) for entry in told]
    assert [json.loads(entry["line"])["step"] for entry in logged if "line" in entry] == list(range(1, 26))
    assert logged[-1]["phase"] == "Succeeded"


def test_wishes_reach_the_cluster(house: House, rest: Rest) -> None:
    made = rest.ask("POST", "/jobs", job("wished", steps=10_000))
    house.reaches("wished", "Running")
    rest.ask("POST", f"/jobs/{made['id']}:suspend")
    house.reaches("wished", "Suspended")
    rest.ask("POST", f"/jobs/{made['id']}:resume")
    house.reaches("wished", "Running")
    rest.ask("POST", f"/jobs/{made['id']}:cancel")
    house.reaches("wished", "Cancelled")
    eventually(lambda: rest.phase("wished") == "Cancelled", "the mirror to tell")


def test_a_job_that_was_made_with_kubectl_appears(house: House, rest: Rest) -> None:
    uid = house.submit(job("by-kubectl", steps=5, runtime=house.holds("by-kubectl", 3)))
    logs = rest.folder / "jobs" / uid
    eventually(lambda: logs.is_dir(), "its mirrored log")
    house.let_go("by-kubectl")
    house.reaches("by-kubectl", "Succeeded")
    eventually(lambda: rest.phase("by-kubectl") == "Succeeded", "the job in the API")
    assert rest.job("by-kubectl")["id"] == uid
    house.kubectl("delete", "tj", "-n", "team", "by-kubectl", "--timeout=200s")
    eventually(lambda: not logs.exists(), "its log to go with it")


def test_what_happened_while_the_api_was_away_is_caught_up_with(house: House, rest: Rest) -> None:
    rest.ask("POST", "/jobs", job("goes-on", steps=40, runtime=house.holds("goes-on", 5)))
    rest.ask("POST", "/jobs", job("goes-away", steps=10_000, suspend=True))
    house.reaches("goes-on", "Running")
    house.reaches("goes-away", "Suspended")
    eventually(lambda: rest.phase("goes-away") == "Suspended", "the mirror to tell")
    rest.stop()
    house.let_go("goes-on")
    house.reaches("goes-on", "Succeeded")
    house.kubectl("delete", "tj", "-n", "team", "goes-away", "--timeout=200s")
    assert house.find(paths.job("team", "goes-away")) is None
    rest.start()
    eventually(lambda: rest.phase("goes-on") == "Succeeded", "the end to be told")
    eventually(
        lambda: rest.job("goes-away") is None or rest.phase("goes-away") == "Cancelled", "the deletion to be told"
    )


def test_a_secret_of_a_project_is_a_secret_of_its_namespace(house: House, rest: Rest) -> None:
    """Made, changed and deleted without being read, and never in place of one that is somebody else's."""
    house.namespace("keeps")
    rest.ask("PUT", "/projects/keeps", {})
    path, there = "/projects/keeps/secrets/hf-token", paths.core("keeps", "secrets", "hf-token")
    rest.ask("PUT", path, {"data": {"value": "first", "more": "1"}})
    made = house.get(there)
    rest.ask("PUT", path, {"data": {"value": "second"}})
    changed = house.get(there)
    assert (made["metadata"]["uid"], changed["data"]) == (changed["metadata"]["uid"], {"value": "c2Vjb25k"})
    rest.ask("DELETE", path)
    assert house.find(there) is None
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hf-token"}, "stringData": {"value": "theirs"}}
    house.client.create(paths.core("keeps", "secrets"), theirs)
    with pytest.raises(urllib.error.HTTPError) as refused:
        rest.ask("PUT", path, {"data": {"value": "ours"}})
    assert (refused.value.code, "that Muster did not make" in refused.value.read().decode()) == (503, True)
    assert house.get(there)["data"] == {"value": "dGhlaXJz"}
    assert rest.ask("GET", "/projects/keeps/secrets") == {"items": []}
    unlisted = quick_job("unlisted", runtime={"envFrom": [{"secretRef": {"name": "hf-token"}}]})
    unlisted["metadata"] = {"name": "unlisted", "labels": {"muster.dev/project": "keeps"}}
    plan = rest.ask("POST", "/jobs?dryRun=true", unlisted)
    assert [refusal["path"] for refusal in plan["refusals"]] == ["spec.runtime.envFrom[0].secretRef.name"]
    rest.ask("PUT", "/projects/keeps", {"limits": {"secrets": ["hf-token"]}})
    assert rest.ask("POST", "/jobs?dryRun=true", unlisted)["refusals"] == []
