"""A kubelet without containers: hollow nodes whose pods are processes of this machine.

What a kubelet promises is kept: a pod's command runs with its environment, its projected token and its volumes (folders
here), is told to stop by SIGTERM, is killed when its grace is over, and how it ended stands in its status. What the
network would do (names, an address per pod) is done here too: every pod has a loopback address of its own.
Faults on demand: a node that goes dark, a killed container, an image that can't be pulled.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from muster.kube import paths
from muster.kube.client import STRATEGIC, ApiClient, Object
from muster.kube.errors import ApiError
from muster.kube.timestamps import now, now_micro
from muster.kube.watch import Reflector

LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
LEASE_SECONDS = 1.5
WORKER = str(Path(__file__).with_name("pod_worker.py"))
# What stands for an image: the real trainer, or a worker that keeps its promises in milliseconds.
IMAGES = {"trainer": ["-m", "muster.trainer.launch"], "quick": [WORKER]}


class Kubelets:
    """Of all hollow nodes. Runs in an event loop; `client` has the rights of an administrator."""

    def __init__(self, client: ApiClient, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.pods: dict[str, PodProcess] = {}  # by uid
        self.dark: set[str] = set()
        self._nodes: dict[str, Object] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._addresses = itertools.count(2)
        self._ports = itertools.count(24_000 + os.getpid() % 500 * 8, 4)  # a gang's preflight meets beside its port
        self._rendezvous: dict[tuple[str, str], int] = {}
        self._log_port = 0
        self._web: web.AppRunner | None = None

    async def serve_logs(self, certificate: Path, key: Path) -> None:
        """As the API server asks a kubelet for them: `kubectl logs`, followed or not."""
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate, key)
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._log)
        self._web = web.AppRunner(app)
        await self._web.setup()
        site = web.TCPSite(self._web, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        self._log_port = int(self._web.addresses[0][1])

    async def _log(self, request: web.Request) -> web.StreamResponse:
        pod = self.of(request.match_info["pod"])
        if pod is None or pod.process is None:
            raise web.HTTPNotFound
        reply = web.StreamResponse()
        await reply.prepare(request)
        with open(pod.folder / "log", "rb") as log:
            while True:
                over = pod.process.poll() is not None  # asked before reading, so that nothing is missed
                if piece := log.read():
                    await reply.write(piece)
                elif over or "follow" not in request.query:
                    return reply
                await asyncio.sleep(0.05)  # not a wait: a log that is followed

    async def run(self) -> None:
        reflector = Reflector(self.client, paths.PODS, self, _ignore, fieldSelector="spec.nodeName!=")
        async with asyncio.TaskGroup() as group:
            group.create_task(reflector.run())
            group.create_task(self._renew())

    async def add_node(self, name: str, labels: dict[str, str] | None = None, **allocatable: str) -> None:
        """allocatable: quantities, e.g. gpus="8"."""
        amounts = {"cpu": "8", "memory": "32Gi", "pods": "110"}
        amounts |= {"nvidia.com/gpu" if key == "gpus" else key: value for key, value in allocatable.items()}
        node: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name} | (labels or {})},
        }
        made = await self.client.create(paths.NODES, node)
        self._nodes[name] = {"capacity": amounts, "allocatable": amounts}
        await self._tell_ready(name)
        await self._lease(name, made["metadata"]["uid"])

    async def remove_node(self, name: str) -> None:
        """The machine is gone and its object with it."""
        await self.darken(name)
        self._nodes.pop(name, None)
        await self.client.delete(f"{paths.NODES}/{name}")

    async def darken(self, name: str) -> None:
        """Power off: processes end, and nobody reports anything any more."""
        self.dark.add(name)
        for pod in self.pods.values():
            if pod.node == name:
                pod.kill()

    async def lighten(self, name: str) -> None:
        self.dark.discard(name)
        await self._tell_ready(name)

    def of(self, name: str) -> "PodProcess | None":
        """The newest process of the pod of that name."""
        return next((pod for pod in reversed(self.pods.values()) if pod.name == name), None)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._web is not None:
            await self._web.cleanup()
        for pod in self.pods.values():
            pod.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- the keeper's part ---

    def put(self, item: Object) -> None:
        uid = item["metadata"]["uid"]
        if item["spec"]["nodeName"] not in self._nodes:
            return
        if uid not in self.pods:
            if item.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                return
            self.pods[uid] = PodProcess(self, item, f"127.{os.getpid() % 200 + 20}.{next(self._addresses)}.1")
            self.start(self.pods[uid].live())
        if "deletionTimestamp" in item["metadata"]:
            self.pods[uid].told_to_stop(int(item["metadata"].get("deletionGracePeriodSeconds") or 0))

    def drop(self, item: Object) -> None:
        pod = self.pods.get(item["metadata"]["uid"])
        if pod is not None:
            pod.kill()

    def keep_only(self, uids: set[str]) -> None:
        for uid in self.pods.keys() - uids:
            self.pods[uid].kill()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def port(self, namespace: str, host: str) -> int:
        """What the network would reach under that name; fails as the name would not resolve."""
        if host == "127.0.0.1":
            return next(self._ports)
        first, service = host.split(".")[:2]
        found = await self.client.get(paths.core(namespace, "services", service))
        assert found["spec"]["clusterIP"] == "None"
        assert found["spec"]["publishNotReadyAddresses"]
        pod = await self.client.get(paths.core(namespace, "pods", first))
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (first, service)
        assert found["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        return self._rendezvous.setdefault((namespace, host), next(self._ports))

    async def _renew(self) -> None:
        """All at once: one after another, the leases of all modules' nodes ended on a machine that was busy."""
        while True:
            spec = {"renewTime": now_micro()}
            living = [f"{LEASES}/{name}" for name in self._nodes if name not in self.dark]
            await asyncio.gather(*(self.client.patch(path, {"spec": spec}) for path in living), return_exceptions=True)
            await asyncio.sleep(LEASE_SECONDS)  # not a wait: the beat of a kubelet

    async def _lease(self, name: str, uid: str) -> None:
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}
        spec = {"holderIdentity": name, "leaseDurationSeconds": 5, "renewTime": now_micro()}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}
        meta = {"name": name, "namespace": "kube-node-lease", "ownerReferences": [owner]}
        await self.client.create(LEASES, {**body, "metadata": meta})

    async def _tell_ready(self, name: str) -> None:
        condition = {
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "hollow",
            "lastHeartbeatTime": now(), "lastTransitionTime": now(),
        }  # fmt: skip
        status = {**self._nodes[name], "conditions": [condition]}
        if self._log_port:
            status["addresses"] = [{"type": "InternalIP", "address": "127.0.0.1"}]
            status["daemonEndpoints"] = {"kubeletEndpoint": {"Port": self._log_port}}
        await self.client.patch(f"{paths.NODES}/{name}/status", {"status": status})


class PodProcess:
    def __init__(self, house: Kubelets, item: Object, ip: str) -> None:
        meta = item["metadata"]
        self.house, self.item, self.ip = house, item, ip
        self.name, self.namespace, self.uid = meta["name"], meta["namespace"], meta["uid"]
        self.node = item["spec"]["nodeName"]
        self.folder = house.folder / f"{self.name}-{self.uid[:8]}"
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = ""
        self._stop = asyncio.Event()
        self._grace = 0.0
        self._hurry = asyncio.Event()
        self._killed = False

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text() if (self.folder / "log").exists() else ""

    def kill(self) -> None:
        """As the kernel's out-of-memory killer or a power cut would: everything at once."""
        self._killed = True
        self._stop.set()
        self.kill_container()

    def kill_container(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def told_to_stop(self, grace: float) -> None:
        if self._stop.is_set() and grace >= self._grace:
            return
        if self._stop.is_set():
            self._hurry.set()
        self._grace = grace
        self._stop.set()

    async def live(self) -> None:
        container = self.item["spec"]["containers"][0]
        if not await self._pulled(container):
            return await self._end(None)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "termination-log").touch()
        environment: dict[str, str] = {}
        try:
            while not environment and not self._stop.is_set():
                with contextlib.suppress(ApiError):  # worker 0 is not there, so its name does not resolve yet
                    environment = await self._environment(container)
                await asyncio.sleep(0.0 if environment else 0.1)  # not a wait: it is asked again
        except AssertionError as error:
            print(f"pod {self.name} could not start: {error!r}", file=sys.stderr)
            raise
        if self._stop.is_set():
            return await self._end(None)
        for first in self.item["spec"].get("initContainers") or ():
            await self._begin_with(first, environment)
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *IMAGES[container["image"]]], env=environment, cwd=self.folder, stdout=log,
                stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.started_at = now()
        await self._status("Running", {"running": {"startedAt": self.started_at}}, ready=True)
        return await self._end(await self._wait(self.process))

    async def _begin_with(self, container: Object, environment: dict[str, str]) -> None:
        """Run an init container. (One that fails is not needed by any test yet.)"""
        command = [sys.executable, *container["command"][1:]]
        with open(self.folder / f"log-{container['name']}", "ab") as log:
            process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
        assert await process.wait() == 0, (self.folder / f"log-{container['name']}").read_text()

    async def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit code, once it ended by itself or was made to."""
        told_at = None
        while (code := process.poll()) is None:
            if self._stop.is_set() and told_at is None:
                told_at = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            if told_at is not None and time.monotonic() - told_at > self._grace:
                self.kill_container()
            await asyncio.sleep(0.02)
        return code

    async def _pulled(self, container: Object) -> bool:
        """False when it was told to stop before its image and secrets were there."""
        while not self._stop.is_set():
            if (reason := await self._held_up(container)) is None:
                return True
            await self._status("Pending", {"waiting": {"reason": reason[0], "message": reason[1]}})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 0.5)
        return False

    async def _held_up(self, container: Object) -> tuple[str, str] | None:
        if "mistyped" in container["image"]:
            return "ErrImagePull", f"rpc error: code = NotFound desc = {container['image']}: not found"
        if container["image"] not in IMAGES:
            return "ImagePullBackOff", f'Back-off pulling image "{container["image"]}"'
        for source in container.get("envFrom") or ():
            name = source.get("secretRef", {}).get("name")
            try:
                if name:
                    await self.house.client.get(paths.core(self.namespace, "secrets", name))
            except ApiError:
                return "CreateContainerConfigError", f'secret "{name}" not found'
        return None

    async def _environment(self, container: Object) -> dict[str, str]:
        """The container's, with its paths in our folder and the cluster's names resolved."""
        fields = {"status.podIP": self.ip}
        asked = {
            entry["name"]: entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for entry in container["env"]
        }
        await self._project(container)
        for mount in container["volumeMounts"]:
            (self.folder / mount["mountPath"].lstrip("/")).mkdir(parents=True, exist_ok=True)
        # Not of /tmp: this folder, and much that tests name, lies there itself.
        inside = [mount["mountPath"] for mount in container["volumeMounts"] if mount["mountPath"] != "/tmp"]
        moved = {
            name: str(self.folder / value.lstrip("/")) if any(value.startswith(place) for place in inside) else value
            for name, value in asked.items()
        }
        moved["MUSTER_TERMINATION_LOG"] = str(self.folder / "termination-log")
        moved["MUSTER_FENCE"] = asked["MUSTER_FENCE"].replace(
            "https://kubernetes.default.svc", self.house.client.connection.server
        )
        moved["PET_MASTER_PORT"] = str(await self.house.port(self.namespace, asked["PET_MASTER_ADDR"]))
        moved["PET_MASTER_ADDR"] = "127.0.0.1"
        kept = {name: os.environ[name] for name in ("PATH", "MUSTERTESTS_RUN") if name in os.environ}
        return kept | {"MKL_NUM_THREADS": "1"} | moved

    async def _project(self, container: Object) -> None:
        """The projected token and the cluster's CA: a real token, of the pod's service account, bound to the pod."""
        volume = next(v for v in self.item["spec"]["volumes"] if "projected" in v)
        place = next(m["mountPath"] for m in container["volumeMounts"] if m["name"] == volume["name"])
        folder = self.folder / place.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        account = self.item["spec"]["serviceAccountName"]
        for source in volume["projected"]["sources"]:
            if token := source.get("serviceAccountToken"):
                pod = {"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid}
                body = {
                    "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                    "spec": {"expirationSeconds": token["expirationSeconds"], "boundObjectRef": pod},
                }  # fmt: skip
                path = paths.core(self.namespace, "serviceaccounts", account)
                made = await self.house.client.create(f"{path}/token", body)
                (folder / token["path"]).write_text(made["status"]["token"])
            elif wanted := source.get("configMap"):
                while True:  # a kubelet, too, waits for a ConfigMap that is not there yet
                    try:
                        found = await self.house.client.get(paths.core(self.namespace, "configmaps", wanted["name"]))
                        break
                    except ApiError:
                        await asyncio.sleep(0.1)  # not a wait: a kubelet asks again, too
                for entry in wanted["items"]:
                    (folder / entry["path"]).write_text(found["data"][entry["key"]])

    async def _end(self, code: int | None) -> None:
        if self.node in self.house.dark:
            return
        if code is not None:
            shown = 128 - code if code < 0 else code
            message = (self.folder / "termination-log").read_text()[:4096]
            if not message and shown:
                message = self.log[-2048:]
            ended = {
                "exitCode": shown, "reason": "Completed" if shown == 0 else "Error", "message": message,
                "startedAt": self.started_at, "finishedAt": now(),
            }  # fmt: skip
            await self._status("Failed" if shown else "Succeeded", {"terminated": ended})
        if not self._stop.is_set():
            await self._stop.wait()  # it stays as it is until somebody deletes it
        if self._killed and self.node in self.house.dark:
            return
        with contextlib.suppress(ApiError):
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
            await self.house.client.delete(paths.core(self.namespace, "pods", self.name), options)

    async def _status(self, phase: str, state: Object, ready: bool = False) -> None:
        container = self.item["spec"]["containers"][0]
        status = {
            "phase": phase,
            "podIP": self.ip,
            "podIPs": [{"ip": self.ip}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [
                {
                    "name": container["name"], "image": container["image"], "imageID": "", "ready": ready,
                    "restartCount": 0, "state": state,
                }
            ],
        }  # fmt: skip
        with contextlib.suppress(ApiError):  # gone meanwhile
            path = paths.core(self.namespace, "pods", self.name)
            await self.house.client.patch(
                f"{path}/status", {"status": status, "metadata": {"uid": self.uid}}, STRATEGIC
            )


def _ignore(what: str, error: Exception) -> None:
    """The API server is away in some tests; the reflector tries again."""
