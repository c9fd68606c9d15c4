"""How fast the operator turns jobs into running gangs on a real API server, beside a bare client loop.

    KUBEBUILDER_ASSETS=… python benchmarks/operator_scale.py --jobs 1000 --workers 8 --nodes 500

Starts etcd, kube-apiserver, kube-controller-manager and kube-scheduler; nodes are hollow, and a stand-in kubelet only
patches statuses and answers for heartbeats. A bare loop creates the same pods, and deletes each at its end; then as
many jobs are submitted at once and run to their end; then the bare loop again; each on a control plane of its own.
Pods live alike in all: they run, and end well five seconds after the last of their gang runs. Prints JSON lines.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from control_plane_costs import Costs, watches

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.cluster.controlplane import ControlPlane, missing  # noqa: E402

from muster.kube import paths  # noqa: E402
from muster.kube.client import STRATEGIC, ApiClient, Object  # noqa: E402
from muster.kube.connection import from_kubeconfig  # noqa: E402
from muster.kube.errors import ApiError  # noqa: E402
from muster.kube.watch import (  # noqa: E402
    ObjectCache,
    Reflector,
)
from muster.operator.core.decision import CreateWorker  # noqa: E402
from muster.operator.kubernetes.jobs import JobStore  # noqa: E402
from muster.operator.kubernetes.render import SiteSettings, pin, render_pod  # noqa: E402
from muster.operator.kubernetes.settings import TOLERATIONS  # noqa: E402
from muster.recipe.document import JobSpec  # noqa: E402
from muster.words.names import FINALIZER, WorkerId  # noqa: E402

NAMESPACE = "scale"
AT_ONCE = 64
REPORT_PORT = 29_777
RUN_SECONDS = 5.0  # how long a pod runs after its whole gang does


@dataclass
class Hollow:
    """A kubelet that runs nothing: what is bound runs at once, and ends well some time after its gang was complete."""

    client: ApiClient
    gang_size: int
    running: dict[str, float] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)
    _by_ip: dict[str, Object] = field(default_factory=dict)
    _gangs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def put(self, item: Object) -> None:
        meta = item["metadata"]
        if "deletionTimestamp" in meta:
            self._start(self._remove(meta["name"]))
        elif meta["uid"] not in self._known:
            self._known.add(meta["uid"])
            number = len(self._known)
            self._start(self._run(item, f"127.{1 + number // 60_000}.{number // 250 % 240}.{number % 250 + 1}"))

    def drop(self, item: Object) -> None:
        self.running.pop(item["metadata"]["uid"], None)

    def keep_only(self, uids: set[str]) -> None:
        """Nothing: what is gone is gone."""

    async def serve(self) -> None:
        """Heartbeats of every pod, told apart by the address that was asked."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            item = self._by_ip.get(writer.get_extra_info("sockname")[0])
            body = json.dumps(_heartbeats(item)).encode() if item else b"{}"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "0.0.0.0", REPORT_PORT) as server:
            await server.serve_forever()

    async def _run(self, item: Object, ip: str) -> None:
        meta = item["metadata"]
        self._by_ip[ip] = item
        state = {"running": {"startedAt": _stamp()}}
        await self._status(meta["name"], {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}, state)
        self.running[meta["uid"]] = time.monotonic()
        gang = f"{meta['labels']['muster.dev/job-uid']}/{meta['labels']['muster.dev/attempt']}"
        members = self._gangs.setdefault(gang, [])
        members.append((meta["name"], meta["uid"]))
        if len(members) == self.gang_size:
            await asyncio.sleep(RUN_SECONDS)
            ended = {
                "terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": _stamp(), "startedAt": _stamp()}
            }
            await asyncio.gather(*(self._status(name, {"phase": "Succeeded"}, ended) for name, _ in members))

    async def _remove(self, name: str) -> None:
        try:
            await self.client.delete(paths.core(NAMESPACE, "pods", name), {"gracePeriodSeconds": 0})
        except ApiError:
            pass

    async def _status(self, name: str, status: Object, state: Object) -> None:
        container = {"name": "trainer", "image": "x", "imageID": "", "ready": True, "restartCount": 0, "state": state}
        body = {"status": {**status, "containerStatuses": [container]}}
        for _ in range(5):
            try:
                await self.client.patch(f"{paths.core(NAMESPACE, 'pods', name)}/status", body, STRATEGIC)
                return
            except ApiError:
                return
            except OSError:  # an API server that is worked too hard breaks connections; a kubelet asks again
                await asyncio.sleep(0.5)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _heartbeats(item: Object) -> Object:
    labels, now = item["metadata"]["labels"], time.time()
    beat = {
        "attempt": int(labels["muster.dev/attempt"]), "rank": int(labels["muster.dev/worker"]), "pid": 1,
        "phase": "step", "step": 1, "at": now, "progressedAt": now, "startedAt": now,
    }  # fmt: skip
    return {"jobUid": labels["muster.dev/job-uid"], "heartbeats": [beat]}


def _stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def job_document(name: str, workers: int, cpu: str = "3") -> Object:
    return {
        "apiVersion": "muster.dev/v1alpha1",
        "kind": "TrainingJob",
        # As the API submits it; one that `kubectl` submits costs the operator one write more.
        "metadata": {"name": name, "namespace": NAMESPACE, "finalizers": [FINALIZER]},
        "spec": {
            "training": {
                "model": {"preset": "muster-1m"},
                "data": {"train": [{"source": "s3://data/text/*.txt"}], "sequenceLength": 64},
                "batch": {"tokensPerStep": 64 * workers},
                "length": {"steps": 10},
            },
            "gang": {"nodes": workers, "resources": {"cpu": cpu, "memory": "1Gi"}},
            "runtime": {"image": "trainer"},
        },
    }


def node_name(index: int) -> str:
    return f"hollow-{index:04d}"


async def set_up(client: ApiClient, nodes: int) -> None:
    await client.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    definition = yaml.safe_load((ROOT / "helm" / "muster" / "files" / "trainingjobs.yaml").read_text())
    await client.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    amounts = {"cpu": "64", "memory": "256Gi", "pods": "200"}
    ready = {"type": "Ready", "status": "True", "reason": "Hollow", "lastHeartbeatTime": _stamp()}

    async def add(index: int) -> None:
        name = node_name(index)
        await client.create(paths.NODES, {"metadata": {"name": name, "labels": {"muster.dev/pool": "hollow"}}})
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready | {"lastTransitionTime": _stamp()}]}
        await client.patch(f"{paths.NODES}/{name}/status", {"status": status}, STRATEGIC)

    await gather_at_most(add, range(nodes))
    await until(lambda: _serves(client), "TrainingJobs to be served")
    # It finds new kinds every half minute. Before that it asks for the owner of each pod that goes, one by one.
    await until(lambda: watches(client.connection, "trainingjobs") > 0, "the garbage collector to know TrainingJobs")


async def _serves(client: ApiClient) -> bool:
    try:
        await client.get(paths.JOBS)
        await client.get(paths.core(NAMESPACE, "serviceaccounts", "default"))
    except ApiError:
        return False
    return True


async def bare_loop(client: ApiClient, jobs: int, workers: int, nodes: int) -> Object:
    """The same pods, made and deleted by a client that decides nothing; a job that nobody looks at owns them."""
    hollow, sweeper = Hollow(client, gang_size=workers), Sweeper(client)
    reflectors = [asyncio.create_task(_follow(client, cache)) for cache in (hollow, sweeper)]
    template = JobStore(lambda uid: None, JobSpec).keep(
        await client.create(paths.jobs(NAMESPACE), job_document("bare", workers))
    )
    site = SiteSettings(image="trainer", checkpoint_uri="file:///tmp", tolerations=TOLERATIONS)
    manifests = []
    for number in range(jobs * workers):
        gang, worker = divmod(number, workers)
        pod = render_pod(template, CreateWorker(WorkerId(1, worker), "", ("",) * workers, 0), site, "builtin")
        pin(pod, node_name(number % nodes))
        pod["spec"]["hostname"] = pod["metadata"]["name"] = f"bare-{gang}-{worker}"
        pod["metadata"]["labels"]["muster.dev/job-uid"] = f"bare-{gang}"
        manifests.append(pod)
    began = time.monotonic()
    await gather_at_most(lambda pod: client.create(paths.core(NAMESPACE, "pods"), pod), manifests)
    created = time.monotonic() - began
    await until(lambda: sweeper.swept >= len(manifests), "all pods to be deleted")
    total = time.monotonic() - began
    for reflector in reflectors:
        reflector.cancel()
    await client.delete(paths.job(NAMESPACE, "bare"))
    return {
        "what": "bare loop", "pods": len(manifests), "seconds": round(total, 1), "created_seconds": round(created, 1),
        "pods_per_second": round(len(manifests) / (total - RUN_SECONDS), 1), "writes_per_worker": 2.0,
    }  # fmt: skip


class Sweeper:
    """Deletes each pod that has ended."""

    def __init__(self, client: ApiClient) -> None:
        self.swept = 0
        self._client, self._limit = client, asyncio.Semaphore(AT_ONCE)
        self._seen: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, item: Object) -> None:
        meta = item["metadata"]
        if (item.get("status") or {}).get("phase") == "Succeeded" and meta["uid"] not in self._seen:
            self._seen.add(meta["uid"])
            task = asyncio.get_running_loop().create_task(self._sweep(meta["name"]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def drop(self, item: Object) -> None:
        """By our own deletion."""

    def keep_only(self, uids: set[str]) -> None:
        """Nothing is missed: it is listed once."""

    async def _sweep(self, name: str) -> None:
        async with self._limit:
            await self._client.delete(paths.core(NAMESPACE, "pods", name), {"gracePeriodSeconds": 0})
        self.swept += 1


async def with_operator(client: ApiClient, plane: ControlPlane, folder: Path, jobs: int, workers: int) -> Object:
    hollow = Hollow(client, gang_size=workers)
    tasks = [asyncio.create_task(_follow(client, hollow)), asyncio.create_task(hollow.serve())]
    operator, port = await start_operator(plane, folder)
    watcher = Phases()
    tasks.append(asyncio.create_task(Reflector(client, paths.JOBS, watcher, lambda what, error: None).run()))
    began = time.monotonic()

    async def submit(index: int) -> None:
        name = f"job-{index}"
        watcher.submitted[name] = time.monotonic()
        await client.create(paths.jobs(NAMESPACE), job_document(name, workers))

    await gather_at_most(submit, range(jobs))
    submitted = time.monotonic() - began
    await until(lambda: watcher.ended >= jobs and not hollow.running, "all jobs and their pods to end", 900, operator)
    total = time.monotonic() - began
    waits = sorted(watcher.running[name] - watcher.submitted[name] for name in watcher.running)
    last_admitted = max(watcher.starting.values()) - began
    process = psutil.Process(operator.pid)
    calls = api_calls(port)
    writes = sum(count for call, count in calls.items() if call.split()[0] not in ("GET", "LIST", "WATCH"))
    told = {
        "what": "operator", "jobs": jobs, "pods": jobs * workers, "seconds": round(total, 1),
        "submitted_seconds": round(submitted, 1), "pods_per_second": round(jobs * workers / (total - RUN_SECONDS), 1),
        "admissions_per_second": round(jobs / last_admitted, 1),
        "submit_to_running_p50_seconds": round(statistics.median(waits), 2),
        "submit_to_running_p99_seconds": round(waits[int(len(waits) * 0.99) - 1], 2),
        "writes_per_worker": round(writes / (jobs * workers), 2),
        "reads_per_worker": round((sum(calls.values()) - writes) / (jobs * workers), 2),
        "calls": calls,
        "rss_mb": round(process.memory_info().rss / 2**20, 1),
        "cpu_seconds": round(sum(process.cpu_times()[:2]), 1),
    }  # fmt: skip
    stop(operator, tasks)
    return told


async def many_queued(client: ApiClient, plane: ControlPlane, folder: Path, jobs: int, workers: int) -> Object:
    """Memory with that many jobs in the queue: each asks for more than there is."""
    operator, port = await start_operator(plane, folder)
    watcher = Phases()
    task = asyncio.create_task(Reflector(client, paths.JOBS, watcher, lambda what, error: None).run())
    began = time.monotonic()
    document = job_document("q", workers, cpu="1000")
    await gather_at_most(
        lambda index: client.create(
            paths.jobs(NAMESPACE), {**document, "metadata": {"name": f"queued-{index}", "namespace": NAMESPACE}}
        ),
        range(jobs),
    )
    await until(lambda: watcher.told >= jobs, "all to be told why they wait", 900, operator)
    process = psutil.Process(operator.pid)
    told = {
        "what": "queued", "jobs": jobs, "seconds": round(time.monotonic() - began, 1),
        "rss_mb": round(process.memory_info().rss / 2**20, 1),
        "cpu_seconds": round(sum(process.cpu_times()[:2]), 1), "calls": api_calls(port),
    }  # fmt: skip
    stop(operator, [task])
    return told


class Phases:
    """When each job came into which phase."""

    def __init__(self) -> None:
        self.submitted: dict[str, float] = {}
        self.starting: dict[str, float] = {}
        self.running: dict[str, float] = {}
        self.ended = 0
        self.told = 0
        self._seen: dict[str, str] = {}

    def put(self, item: Object) -> None:
        name, status = item["metadata"]["name"], item.get("status") or {}
        phase, now = status.get("phase", ""), time.monotonic()
        if status.get("code") == "GangTooLarge" and self._seen.get(name) != "GangTooLarge":
            self._seen[name] = "GangTooLarge"
            self.told += 1
        if phase == self._seen.get(name):
            return
        if phase in ("Starting", "Running"):
            (self.starting if phase == "Starting" else self.running).setdefault(name, now)
            self.starting.setdefault(name, now)
        if phase in ("Succeeded", "Failed") and self._seen.get(name) != phase:
            self.ended += 1
        self._seen[name] = phase if status.get("code") != "GangTooLarge" else "GangTooLarge"

    def drop(self, item: Object) -> None:
        """Jobs stay."""

    def keep_only(self, uids: set[str]) -> None:
        """Jobs stay."""


def launch_operator(plane: ControlPlane, folder: Path) -> "subprocess.Popen[bytes]":
    settings = {
        "MUSTER_OPERATOR_NAMESPACE": NAMESPACE, "MUSTER_OPERATOR_PORT": "0", "MUSTER_OPERATOR_HOST": "127.0.0.1",
        "MUSTER_OPERATOR_LOG_LEVEL": os.environ.get("LEVEL", "info"), "MUSTER_OPERATOR_LOG_FORMAT": "json",
        "MUSTER_OPERATOR_CHECKPOINT_URI": f"file://{folder}", "MUSTER_OPERATOR_REPORT_PORT": str(REPORT_PORT),
        "MUSTER_OPERATOR_IDENTITY": "bench",
        # As the chart sets it: a NetworkPolicy per gang.
        "MUSTER_OPERATOR_REPORT_FROM": json.dumps([{"podSelector": {"matchLabels": {"app": "operator"}}}]),
    }  # fmt: skip
    with open(folder / "operator.log", "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "muster.operator", "--world", "kubernetes", "--kubeconfig", str(plane.kubeconfig)],
            env=os.environ | settings, stdout=file, stderr=file,
        )  # fmt: skip


async def start_operator(plane: ControlPlane, folder: Path) -> "tuple[subprocess.Popen[bytes], int]":
    process, log = launch_operator(plane, folder), folder / "operator.log"
    await until(lambda: "operator leads" in log.read_text(), "the operator to lead", 60, process)
    found = re.search(r'"port": (\d+)', log.read_text())
    assert found, log.read_text()
    return process, int(found[1])


def stop(operator: "subprocess.Popen[bytes]", tasks: list[Any]) -> None:
    operator.terminate()
    operator.wait(20)
    for task in tasks:
        task.cancel()


def api_calls(port: int) -> dict[str, int]:
    """By verb and resource."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        text = reply.read().decode()
    found = re.findall(r'muster_operator_api_calls_total\{resource="([\w/]+)",verb="(\w+)"\} ([\d.]+)', text)
    return {f"{verb} {resource}": int(float(count)) for resource, verb, count in sorted(found)}


async def _follow(client: ApiClient, cache: ObjectCache) -> None:
    await Reflector(
        client, paths.PODS, cache, lambda what, error: None,
        fieldSelector=f"spec.nodeName!=,metadata.namespace={NAMESPACE}",
    ).run()  # fmt: skip


async def gather_at_most(work: Any, items: Any) -> None:
    """work(item) for each, so many at once."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(item: Any) -> None:
        async with limit:
            await work(item)

    await asyncio.gather(*(one(item) for item in items))


async def until(question: Any, what: str, seconds: float = 600, process: Any = None) -> None:
    deadline = time.monotonic() + seconds
    while not (await answer if asyncio.iscoroutine(answer := question()) else answer):
        assert process is None or process.poll() is None, "the operator died; see its log"
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        await asyncio.sleep(0.1)


def on_a_fresh_plane(folder: Path, nodes: int, way: Callable[[ApiClient, ControlPlane], Awaitable[Object]]) -> Object:
    """What `way` found, and what it cost everybody, on a control plane that has seen nothing else."""

    async def measure() -> Object:
        connection = from_kubeconfig(plane.kubeconfig)
        async with ApiClient(connection, agent="benchmark", at_once=AT_ONCE * 2) as client:
            await set_up(client, nodes)
            costs = Costs(connection)
            found = await way(client, plane)
            return found | costs.since(found.get("pods", 0))

    folder.mkdir()
    plane = ControlPlane(folder, lenient=True)
    plane.start()
    try:
        found = asyncio.run(measure())
    finally:
        plane.stop()
    print(json.dumps(found), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--queued", type=int, default=0, help="also: memory with so many jobs in the queue")
    parser.add_argument("--queued-only", action="store_true")
    parser.add_argument("--folder", help="keep logs there")
    arguments = parser.parse_args()
    if reason := missing():
        print(f"can't measure: {reason}", file=sys.stderr)
        return 2
    size, nodes = (arguments.jobs, arguments.workers), arguments.nodes
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        try:
            if not arguments.queued_only:
                # A control plane grows slower with every pod that it has ever seen, so each has one of its own.
                before, operator, after = (
                    on_a_fresh_plane(folder / name, nodes, way)["pods_per_second"]
                    for name, way in (
                        ("before", lambda client, plane: bare_loop(client, *size, nodes)),
                        ("operator", lambda client, plane: with_operator(client, plane, folder, *size)),
                        ("after", lambda client, plane: bare_loop(client, *size, nodes)),
                    )
                )
                print(f"pods per second, operator ÷ bare loop before and after: {2 * operator / (before + after):.2f}")
            if arguments.queued:
                queued, workers = arguments.queued, arguments.workers
                on_a_fresh_plane(
                    folder / "queued", nodes, lambda client, plane: many_queued(client, plane, folder, queued, workers)
                )
        finally:
            log = folder / "operator.log"
            print(f"# the end of the operator's log\n{log.read_text()[-600:]}" if log.exists() else "", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
