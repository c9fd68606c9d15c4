"""The chart's life on a real node, with the images that `make images` built: installed, tested, upgraded, rolled back,
uninstalled, while a job trains. PostgreSQL and an S3 server are processes of this machine.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import node as real
from tests.cluster.chart_house import ChartHouse
from tests.cluster.controlplane import ControlPlane
from tests.cluster.network import HOST
from tests.integration.api.postgres import PostgresServer, postgres_server
from tests.polling import eventually
from tests.s3_servers import KEYS, S3Server, moto_server
from tests.unit.packaging.conftest import helm, tool  # noqa: F401 - helm is a fixture
from tests.unit.packaging.images import IMAGES, missing, save

pytestmark = [
    pytest.mark.skipif(bool(real.missing()), reason=real.missing() or "a node can be had"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "the images are there"),
    pytest.mark.timeout(900),
]
SYSTEM, TEAM = "muster-system", "team"
S3_PORT = 9000
TOKEN = f"muster_{'a' * 40}"
CREDENTIALS = [{"secretRef": {"name": "s3"}}]
SECRETS: dict[str, dict[str, str]] = {
    "s3": {**KEYS, "AWS_ENDPOINT_URL": f"http://{HOST}:{S3_PORT}"},
    "muster": {"url": f"postgresql://postgres@{HOST}:5432/muster", "token": TOKEN, "webhook": "b" * 40},
}
VALUES: dict[str, Any] = {
    "global": {"imageRegistry": "localhost"},
    "operator": {"envFrom": CREDENTIALS, "webhook": {"existingSecret": "muster", "key": "webhook"}},
    "workers": {"checkpointUri": "s3://checkpoints/muster", "envFrom": CREDENTIALS},
    "api": {
        "replicas": 2,
        "database": {"existingSecret": "muster"},
        "bootstrapToken": {"existingSecret": "muster"},
    },
    "networkPolicy": {"enabled": True},
}
# As docs/operations.md has it.
BACK_UP = "import sqlite3; sqlite3.connect('/state/muster.db').backup(sqlite3.connect('/tmp/muster.db'))"
LOOK_INSIDE = "import sqlite3; print(sqlite3.connect('/tmp/muster.db').execute('SELECT name FROM jobs').fetchall())"
HOSTILE = Path(__file__).with_name("hostile_pod.py").read_text()
NEXT = {kind: {"image": {"tag": "next"}} for kind in ("operator", "workers", "api")}


def job(name: str, steps: int) -> dict[str, Any]:
    return {
        "apiVersion": "muster.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": TEAM},
        "spec": {
            "training": {
                "model": {"preset": "muster-1m"},
                "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 64},
                "batch": {"tokensPerStep": 64},
                "length": {"steps": steps},
            },
            "gang": {"nodes": 1, "resources": {"cpu": "200m", "memory": "1Gi"}},
            "checkpoint": {"every": 50},  # with the keys that workers.envFrom of the chart brings
        },
    }


@dataclass
class World:
    house: ChartHouse
    node: real.Node
    postgres: PostgresServer
    s3: S3Server


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, helm: Path) -> Iterator[World]:  # noqa: F811
    archives = save(tmp_path_factory.mktemp("images"), {"pause": real.PAUSE})
    with ExitStack() as stack:
        postgres = stack.enter_context(postgres_server())
        s3 = stack.enter_context(moto_server())
        postgres.sql("CREATE DATABASE muster")
        postgres.sql("ALTER SYSTEM SET log_statement = 'ddl'")
        postgres.sql("SELECT pg_reload_conf()")
        plane = ControlPlane(tmp_path_factory.mktemp("node-plane"), whole=True)
        stack.callback(plane.stop)
        plane.start()
        node = real.Node(plane, Path(tempfile.mkdtemp(prefix="muster-node-", dir="/tmp")))
        stack.callback(node.stop)
        node.start(*archives)
        for archive in archives:
            archive.unlink()
        node.network.expose(S3_PORT, int(s3.url.rpartition(":")[2]))
        node.network.expose(5432, str(postgres.folder / ".s.PGSQL.5432"))
        for image in IMAGES:
            node.ctr("images", "tag", f"{image}:0.1.0", f"{image}:next")
        house = ChartHouse(plane, helm, tmp_path_factory.mktemp("house"))
        for namespace in (SYSTEM, TEAM):
            house.namespace(namespace)
            for name, data in SECRETS.items():
                secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace}}
                house.kubectl("apply", "-f", "-", given=secret | {"stringData": data})
        yield World(house, node, postgres, s3)
        house.helm("uninstall", "muster", "--namespace", SYSTEM, "--ignore-not-found")


def test_a_cluster_without_storage_is_told_so_before_anything_is_installed(world: World) -> None:
    told = world.house.helm_refuses("install", "--values", "-", given={"global": {"imageRegistry": "localhost"}})
    assert "this cluster has no default StorageClass" in told
    assert world.house.names("deployments", SYSTEM) == []


def test_it_is_installed_and_migrates_once(world: World) -> None:
    """Two replicas of the API start at once, and --wait waits for all."""
    told = world.house.install(VALUES, "--wait", "--timeout", "5m")
    assert "STATUS: deployed" in told
    ready = world.house.ready_pods(SYSTEM)
    assert sorted(ready.values()) == ["api", "api", "operator", "operator"]
    log = (world.postgres.folder / "log").read_text()
    assert log.count("CREATE TABLE jobs ") == 1
    assert log.count("CREATE TABLE alembic_version") == 1


def test_nothing_runs_as_root_or_may_write_to_its_root(world: World) -> None:
    """Asked of the processes themselves; that the API server enforces *restricted* is shown by its refusal."""
    look = "import os; print(os.getuid(), os.access('/opt', os.W_OK), open('/proc/self/status').read())"
    for pod in world.house.ready_pods(SYSTEM):
        told = world.house.kubectl("exec", "-n", SYSTEM, pod, "--", "python", "-c", look)
        assert told.startswith("1000 False ")
        assert "CapEff:\t0000000000000000" in told
        assert "NoNewPrivs:\t1" in told
        assert "Seccomp:\t2" in told
    root = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root", "namespace": SYSTEM},
        "spec": {"containers": [{"name": "it", "image": real.PAUSE, "securityContext": {"runAsUser": 0}}]},
    }  # fmt: skip
    assert 'violates PodSecurity "restricted' in world.house.kubectl_refuses("apply", "-f", "-", given=root)


def test_the_images_run_the_python_that_the_dockerfiles_name(world: World) -> None:
    """Another one has other defaults: images of 3.11 hid that 3.13 refused the certificates of an API server."""
    python, _ = tool("make_base_image").named_base()
    for pod in world.house.ready_pods(SYSTEM):
        told = world.house.kubectl("exec", "-n", SYSTEM, pod, "--", "python", "-V")
        assert told.startswith(f"Python {python}."), f"{told}: tools/make_base_image.py makes a base with {python}"


def test_helm_test_passes(world: World) -> None:
    told = world.house.helm("test", "muster", "--namespace", SYSTEM, "--logs", "--timeout", "3m")
    for check in ("definition_is_served", "operator_leads", "api_is_ready"):
        assert f"ok      {check}" in told, told
    for kind in ("roles", "rolebindings", "serviceaccounts"):
        assert "muster-test" not in [*world.house.names(kind, SYSTEM), *world.house.names(kind, "default")], kind


def test_the_doctor_finds_it_well(world: World) -> None:
    """The store too, whose keys are in a Secret; it failed on every correct installation with one."""
    environment = os.environ | {"KUBECONFIG": str(world.house.plane.kubeconfig)}
    command = [sys.executable, "-m", "muster.cli", "doctor", "--namespace", TEAM, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    told = json.loads(done.stdout)
    found = {finding["check"]: (finding["state"], finding["message"]) for finding in told["findings"]}
    assert told["ready"], found
    assert found["operator"][1].startswith("2 of 2 ready")
    assert found["leader"] == ("ok", f"{found['leader'][1].partition(' ')[0]} leads")
    assert found["checkpoint store"][0] == "ok", found["checkpoint store"]


def test_a_dry_run_says_what_the_operator_would_do(world: World) -> None:
    """The API asks the chart's operator, through the network policies."""
    larger = job("larger", 10)
    larger["spec"]["gang"]["resources"]["cpu"] = "640"
    with world.house.rest(SYSTEM, TOKEN) as rest:
        rest("PUT", "/projects/default", {"limits": {"namespaces": [TEAM], "secrets": ["s3"]}})
        first, other = (
            rest("POST", "/jobs?dryRun=true", each)["admission"] for each in (job("first", 10), larger)
        )  # fmt: skip
    assert (first["verdict"], first["nodes"]) == ("starts", 1), first
    assert other["verdict"] == "waits", other
    assert "cpu" in other["because"].lower(), other


def test_a_secret_that_is_missing_as_a_volume_is_the_users_error(world: World) -> None:
    """The pod's status says ContainerCreating for ever, the kubelet's event what is missing."""
    hopeless = job("hopeless", 10)
    hopeless["spec"]["runtime"] = {"volumes": [{"name": "keys", "secret": {"secretName": "absent"}}]}
    world.house.kubectl("apply", "-f", "-", given=hopeless)
    status: dict[str, Any] = {}

    def failed() -> bool:
        status.update(world.house.get("tj", "hopeless", "-n", TEAM).get("status") or {})
        return bool(status.get("phase") == "Failed")

    eventually(failed, "the job to fail", 180)
    assert status["lastFailure"]["cause"] == "user_error"
    assert 'secret "absent" not found' in status["because"], status["because"]
    world.house.kubectl("delete", "tj", "hopeless", "-n", TEAM)


def test_a_job_goes_in_by_rest_and_trains_through_upgrade_rollback_and_uninstall(world: World) -> None:
    house = world.house
    with house.rest(SYSTEM, TOKEN) as rest:
        made = rest("POST", "/jobs", job("first", 1_000_000))
        eventually(lambda: house.step("first", TEAM) > 0, "the job to train", 240)
        eventually(lambda: rest("GET", f"/jobs/{made['id']}")["status"]["phase"] == "Running", "the API to tell")
    (worker,) = house.ready_pods(TEAM)
    uid = house.get("pod", worker, "-n", TEAM)["metadata"]["uid"]
    first = house.revision(SYSTEM)
    _reaches_nothing(house, worker)

    def trains_on() -> None:
        """The same pod, in its first attempt, some steps further."""
        before = house.step("first", TEAM)
        eventually(lambda: house.step("first", TEAM) > before, "more steps")
        status = house.get("tj", "first", "-n", TEAM)["status"]
        assert (status["attempt"], status["phase"]) == (1, "Running")
        assert house.get("pod", worker, "-n", TEAM)["metadata"]["uid"] == uid

    old = set(house.ready_pods(SYSTEM))
    house.upgrade(_deep(VALUES, NEXT), "--wait", "--timeout", "5m")
    assert not old & set(house.ready_pods(SYSTEM)), "every pod was replaced"
    assert house.workers_image(SYSTEM) == "localhost/muster-trainer:next"
    trains_on()

    house.helm("rollback", "muster", str(first), "--namespace", SYSTEM, "--wait", "--timeout", "5m")
    assert house.workers_image(SYSTEM) == "localhost/muster-trainer:0.1.0"
    trains_on()
    house.helm("test", "muster", "--namespace", SYSTEM, "--timeout", "3m")

    told = house.helm("uninstall", "muster", "--namespace", SYSTEM, "--wait")
    assert "trainingjobs.muster.dev" in told
    assert "muster-worker" in told, "without that role no worker may ask whether its attempt is current"
    eventually(lambda: set(house.names("pods", SYSTEM)) <= {"muster-test"}, "the release's pods to go")
    assert house.get("pod", worker, "-n", TEAM)["metadata"]["uid"] == uid
    before = _newest_commit(world)
    eventually(lambda: _newest_commit(world) > before, "a checkpoint that no operator watched over", 180)

    house.install(VALUES, "--wait", "--timeout", "5m")
    trains_on()
    with house.rest(SYSTEM, TOKEN) as rest:
        assert rest("GET", f"/jobs/{made['id']}")["id"] == made["id"], "the history is where it was"
        rest("POST", f"/jobs/{made['id']}:suspend")
        eventually(lambda: rest("GET", f"/jobs/{made['id']}")["status"]["phase"] == "Suspended", "a suspension", 180)
        status = house.get("tj", "first", "-n", TEAM)["status"]
        assert status["checkpoint"]["step"] >= before
        assert status["restarts"].get("total", 0) == 0


def _reaches_nothing(house: ChartHouse, worker: str) -> None:
    """What a job may read of the cluster is jobs of its namespace: its fence is one of them."""
    api = next(pod for pod, kind in house.ready_pods(SYSTEM).items() if kind == "api")
    pod = house.get("pod", api, "-n", SYSTEM)
    address = f"{pod['status']['podIP']}:{pod['spec']['containers'][0]['ports'][0]['containerPort']}"
    found = json.loads(house.kubectl("exec", "-n", TEAM, worker, "--", "python", "-c", HOSTILE, address))
    assert found.pop("its own job") == 200
    assert found.pop("what the platform is told") == []
    assert found.pop("temporary files") == "done"
    assert {found.pop(name) for name in ("the platform's jobs", "the platform's jobs by its own token")} == {401}
    files = {name: found.pop(name) for name in list(found) if isinstance(found[name], str)}
    assert set(found.values()) <= {403, 405}, found
    assert files.pop("its user's folder of the image") == "OSError", "a root file system that is read only"
    assert set(files.values()) <= {"OSError", "PermissionError", "FileNotFoundError"}, files


def test_without_a_database_the_history_lies_in_a_volume(world: World) -> None:
    """And outlives the pod, with the token that was made at the first start."""
    house = world.house
    folder = world.node.folder / "volume"
    folder.mkdir()
    folder.chmod(0o777)  # fsGroup does not reach into a hostPath volume
    house.kubectl("apply", "-f", "-", given={
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "here"},
        "spec": {
            "storageClassName": "here", "capacity": {"storage": "10Gi"}, "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(folder)},
        },
    })  # fmt: skip
    api = {"replicas": 1, "database": {"existingSecret": ""}, "persistence": {"storageClassName": "here"}}
    house.upgrade(
        _deep(VALUES, {"api": {**api, "bootstrapToken": {"existingSecret": ""}}}), "--wait", "--timeout", "5m"
    )
    token = house.kubectl("exec", "-n", SYSTEM, "deploy/muster-api", "--", "cat", "/state/admin-token").strip()
    with house.rest(SYSTEM, token) as rest:
        # Made by another API, but the cluster tells.
        eventually(lambda: [j["name"] for j in rest("GET", f"/jobs?namespace={TEAM}")["items"]] == ["first"], "the job")
    house.kubectl("rollout", "restart", "deployment/muster-api", "-n", SYSTEM)
    house.kubectl("rollout", "status", "deployment/muster-api", "-n", SYSTEM, "--timeout=3m")
    with house.rest(SYSTEM, token) as rest:
        assert [j["name"] for j in rest("GET", f"/jobs?namespace={TEAM}")["items"]] == ["first"]
    assert (folder / "muster.db").stat().st_uid == 1000
    for program in (BACK_UP, LOOK_INSIDE):
        told = house.kubectl("exec", "-n", SYSTEM, "deploy/muster-api", "--", "python", "-c", program)
    assert told == "[('first',)]\n"


def _newest_commit(world: World) -> int:
    found = world.s3.client().list_objects_v2(Bucket="checkpoints", Prefix="muster/").get("Contents", ())
    commits = [item["Key"] for item in found if "/commits/step-" in item["Key"]]
    return max((int(key.rpartition("step-")[2].removesuffix(".json")) for key in commits), default=0)


def _deep(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = _deep(below[key], value) if both else value
    return merged
