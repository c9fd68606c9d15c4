"""Heartbeats by our own clock, the lease by our own clock, jobs that are understood once, credentials that change."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.kubernetes.making import job_item, pod_item

from muster.api.core.cluster.kubernetes_config_maps import write_quotas
from muster.kube import connection as kubernetes
from muster.kube.connection import BearerCredentials, from_kubeconfig
from muster.kube.errors import ApiError, NoCluster
from muster.operator.core.observed import NodeReservation
from muster.operator.kubernetes.heartbeats import HeartbeatCache
from muster.operator.kubernetes.jobs import JobStore
from muster.operator.kubernetes.leader import LEASE_SECONDS, LeaderElection, LeadershipLost
from muster.operator.kubernetes.pods import PodCache, read_pod
from muster.operator.kubernetes.quotas import QuotaReader
from muster.operator.kubernetes.reservations import ReservationStore
from muster.operator.world import UnreadableDocument, VersionConflict
from muster.recipe.document import JobSpec
from muster.words.base import dump_json
from muster.words.quotas import QUOTAS, ProjectQuota, Quota
from muster.words.status import Phase


class Store:
    """One object, with the API server's compare-and-swap."""

    def __init__(self) -> None:
        self.item: dict[str, Any] | None = None

    async def get(self, path: str) -> dict[str, Any]:
        if self.item is None:
            raise ApiError(404, "NotFound", path)
        return self.item

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.item is not None:
            raise ApiError(409, "AlreadyExists", path)
        return self._keep(body, 1)

    async def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self.item is not None
        version = self.item["metadata"]["resourceVersion"]
        if body["metadata"].get("resourceVersion") != version:
            raise ApiError(409, "Conflict", "it changed")
        return self._keep(body, int(version) + 1)

    async def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A merge patch of `data`."""
        item = await self.get(path)
        data = {key: value for key, value in (item["data"] | body["data"]).items() if value is not None}
        return self._keep(item | {"data": data}, int(item["metadata"]["resourceVersion"]) + 1)

    def _keep(self, body: dict[str, Any], version: int) -> dict[str, Any]:
        self.item = body | {"metadata": body["metadata"] | {"resourceVersion": str(version)}}
        return self.item


def beat(at: float, progressed_at: float) -> dict[str, Any]:
    return {
        "attempt": 1, "rank": 0, "pid": 1, "phase": "step", "step": 4, "at": at, "progressedAt": progressed_at,
        "startedAt": at,
    }  # fmt: skip


def test_a_worker_whose_clock_is_an_hour_off_is_heard_right() -> None:
    heartbeats = HeartbeatCache(JobStore(lambda uid: None, JobSpec), PodCache(lambda uid: None), lambda uid: None)
    pod = read_pod(pod_item())
    assert pod is not None
    wrong = time.time() - 3600
    heartbeats._record_heartbeat(pod, beat(wrong, wrong - 7))
    (heard,) = heartbeats.of(pod)
    assert abs(heard.at - time.time()) < 600
    assert heard.at - heard.progressed_at == pytest.approx(7)


def test_a_heartbeat_that_is_told_again_is_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeats = HeartbeatCache(JobStore(lambda uid: None, JobSpec), PodCache(lambda uid: None), lambda uid: None)
    pod = read_pod(pod_item())
    assert pod is not None
    heartbeats._record_heartbeat(pod, beat(100.0, 99.0))
    first = heartbeats.of(pod)
    monkeypatch.setattr(time, "time", lambda: 1e10)
    heartbeats._record_heartbeat(pod, beat(100.0, 99.0))
    assert heartbeats.of(pod) == first


@pytest.mark.parametrize("rubbish", [None, {}, {"attempt": "x"}, beat(1.0, 1.0) | {"attempt": 2}])
def test_rubbish_and_other_attempts_are_no_news(rubbish: object) -> None:
    heartbeats = HeartbeatCache(JobStore(lambda uid: None, JobSpec), PodCache(lambda uid: None), lambda uid: None)
    pod = read_pod(pod_item())
    assert pod is not None
    heartbeats._record_heartbeat(pod, rubbish)
    assert heartbeats.of(pod) == ()


async def test_the_lead_is_taken_from_one_who_shows_no_sign_for_the_leases_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, clock = Store(), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    first, second = (LeaderElection(store, "system", name) for name in ("first", "second"))  # type: ignore[arg-type]
    assert await first._try()
    assert not await second._try()
    clock[0] += LEASE_SECONDS - 1
    await first._renew()
    assert not await second._try()
    clock[0] += LEASE_SECONDS - 1
    assert not await second._try()
    clock[0] += 2
    assert await second._try()
    with pytest.raises(LeadershipLost, match="another operator has taken the lease"):
        await first._renew()


async def test_a_renewal_whose_answer_was_lost_is_still_ours() -> None:
    store = Store()
    leader = LeaderElection(store, "system", "first")  # type: ignore[arg-type]
    assert await leader._try()
    before = leader._lease
    await leader._renew()
    leader._lease = before  # as if the answer had not come
    await leader._renew()
    assert leader._lease != before


async def test_a_released_lead_is_free_at_once() -> None:
    store = Store()
    first, second = (LeaderElection(store, "system", name) for name in ("first", "second"))  # type: ignore[arg-type]
    assert await first._try()
    await first.release()
    assert await second._try()


async def test_the_ledger_is_written_by_compare_and_swap() -> None:
    store = Store()
    one, other = ReservationStore(store, "system"), ReservationStore(store, "system")  # type: ignore[arg-type]
    entry = NodeReservation("uid", 3, "team", ("a", "b"), "pool", "spot", gpus=8)
    empty = await other.read()
    await one.write((entry,), (await one.read()).version)
    with pytest.raises(VersionConflict):
        await other.write((), empty.version)
    assert (await other.read()).entries == (entry,)
    assert other.of("uid") == (entry,)


async def test_a_ledger_that_makes_no_sense_is_not_overwritten() -> None:
    store = Store()
    await store.create("", {"metadata": {"name": "x", "namespace": "system"}, "binaryData": {"entries": "AAAA"}})
    with pytest.raises(UnreadableDocument):
        await ReservationStore(store, "system").read()  # type: ignore[arg-type]


async def test_quotas_are_read_anew_when_they_change_and_a_fault_is_told_once() -> None:
    store, told = Store(), list[str]()
    reader = QuotaReader(store, "system", lambda what, error: told.append(f"{what}: {error}"))  # type: ignore[arg-type]
    assert await reader.read() == {}
    names = {"name": QUOTAS, "namespace": "system"}
    await store.create("", {"metadata": names, "data": {"nlp": dump_json(ProjectQuota(gpus=8))}})
    assert await reader.read() == {"nlp": ProjectQuota(gpus=8)}
    await store.put("", {"metadata": names | {"resourceVersion": "1"}, "data": {"nlp": "gpus: 9"}})
    assert await reader.read() == await reader.read() == {"nlp": ProjectQuota(gpus=8)}
    assert [fault.split(" can't be read")[0] for fault in told] == [
        "ConfigMap system/muster-project-quotas: the quota of project nlp"
    ]


async def test_what_the_api_writes_of_quotas_the_operator_reads() -> None:
    store: Any = Store()
    reader = QuotaReader(store, "system", lambda what, error: pytest.fail(f"{what}: {error}"))
    await write_quotas(store, "system", {"nlp": None, "cv": None})
    assert store.item is None
    await write_quotas(store, "system", {"nlp": ProjectQuota(gpus=8), "cv": None})
    assert await reader.read() == {"nlp": ProjectQuota(gpus=8)}
    await write_quotas(store, "system", {"nlp": None, "asr": ProjectQuota(person=Quota(gangs=1))})
    assert await reader.read() == {"asr": ProjectQuota(person=Quota(gangs=1))}


def test_a_job_is_of_the_project_and_the_person_that_its_labels_name() -> None:
    item = job_item()
    known = JobStore(lambda uid: None, JobSpec).keep(item).summary
    assert (known.project, known.owner) == ("default", "")
    item["metadata"] = item["metadata"] | {"labels": {"muster.dev/project": "nlp", "muster.dev/owner": "ada"}}
    known = JobStore(lambda uid: None, JobSpec).keep(item).summary
    assert (known.project, known.owner) == ("nlp", "ada")


def test_equal_specs_are_kept_once() -> None:
    jobs = JobStore(lambda uid: None, JobSpec)
    first, second = job_item(), job_item()
    second["metadata"] = second["metadata"] | {"uid": "other"}
    assert jobs.keep(first).spec is jobs.keep(second).spec


@pytest.mark.parametrize(("operation", "applied"), [("Apply", True), ("Update", False)])
def test_who_applies_a_job_keeps_the_record_of_his_fields(operation: str, applied: bool) -> None:
    item = job_item()
    item["metadata"]["managedFields"] = [{"manager": "flux", "operation": operation}]
    assert JobStore(lambda uid: None, JobSpec).keep(item).applied is applied


def test_a_spec_that_the_schema_let_in_and_we_do_not_is_told_with_its_path() -> None:
    job = JobStore(lambda uid: None, JobSpec).keep(job_item(gang={"nodes": 3}))
    assert "tokensPerStep 524288 can't be divided over 3 ranks" in job.invalid


def test_keys_that_a_newer_definition_let_in_are_left_out() -> None:
    """While an upgrade replaces operators one after the other, the definition is newer than the one that leads."""
    item, newer = job_item(), job_item()
    newer["spec"] = newer["spec"] | {"recovery": {"levitate": False}, "levitation": {"height": 1}}
    newer["spec"]["training"] = newer["spec"]["training"] | {"data": {
        "train": [{"source": "s3://data/chat.jsonl", "format": "jsonl", "levitate": 1}], "sequenceLength": 8192,
    }}  # fmt: skip
    jobs = JobStore(lambda uid: None, JobSpec)
    expected, job = jobs.keep(item), jobs.keep(newer)
    assert job.invalid == ""
    assert job.spec == expected.spec
    assert newer["spec"]["recovery"] == {"levitate": False}, "the object itself is left alone"


def test_words_of_a_newer_muster_keep_their_nodes_held() -> None:
    status = {"phase": "Levitating", "attempt": 2, "reservation": 5, "gang": {"nodes": ["a"], "wanted": 1}}
    job = JobStore(lambda uid: None, JobSpec).keep(job_item(status))
    assert job.unreadable
    assert (job.status.phase, job.status.reservation, job.status.gang.nodes) == (Phase.RUNNING, 5, ("a",))


def test_a_rotated_token_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    path = tmp_path / "token"
    path.write_text("first\n")
    credentials = BearerCredentials(token_file=path)
    assert credentials.bearer() == "first"
    path.write_text("second\n")
    assert credentials.bearer() == "first"
    clock[0] += kubernetes.TOKEN_SECONDS + 1
    assert credentials.bearer() == "second"
    path.write_text("third\n")
    credentials.forget()
    assert credentials.bearer() == "third"


def test_a_credential_plugin_is_asked_again_before_its_token_ends(tmp_path: Path) -> None:
    script = tmp_path / "plugin"
    script.write_text(
        "#!/bin/sh\necho x >>" + str(tmp_path / "calls") + "\n"
        'echo \'{"status": {"token": "t", "expirationTimestamp": "2020-01-01T00:00:00Z"}}\'\n'
    )
    script.chmod(0o755)
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script)}
    credentials = BearerCredentials(plugin=plugin)
    assert [credentials.bearer(), credentials.bearer()] == ["t", "t"]
    assert (tmp_path / "calls").read_text() == "x\nx\n"


def test_a_kubeconfig_is_read_and_a_broken_one_named(tmp_path: Path) -> None:
    path = tmp_path / "config"
    cluster = {"server": "https://host:6443/", "insecure-skip-tls-verify": True}
    document = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": base64.b64encode(b"x").decode()}}],
    }
    path.write_text(json.dumps(document))
    connection = from_kubeconfig(path)
    assert (connection.server, connection.namespace) == ("https://host:6443", "team")
    path.write_text("{}")
    with pytest.raises(NoCluster, match="no kubeconfig with a current context"):
        from_kubeconfig(path)


def test_jobs_of_a_sweep_keep_what_is_equal_once() -> None:
    """Ten thousand that differ in one number took 45 MiB more, for each had a whole training section of its own."""
    jobs, specs = JobStore(lambda uid: None, JobSpec), []
    for steps in (100, 200):
        item = job_item()
        item["metadata"]["uid"] = f"uid-{steps}"
        item["spec"]["training"]["length"] = {"steps": steps}
        specs.append(jobs.keep(item).spec)
    first, second = specs
    trainings = [spec.training for spec in specs if isinstance(spec, JobSpec) and spec.training is not None]
    assert [training.length.steps for training in trainings] == [100, 200]
    assert trainings[0].data is trainings[1].data
    assert first.gang is second.gang
