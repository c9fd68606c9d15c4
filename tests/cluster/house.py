"""A cluster with hollow nodes and an operator in it, as the tests want to speak to it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import yaml
from tests.cluster.controlplane import ControlPlane
from tests.cluster.kubelet import Kubelets
from tests.cluster.official import Object, OfficialClient, Refused
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.tidy.repository import ROOT
from tests.unit.packaging.chart import Chart
from tests.unit.packaging.conftest import tool

from muster.kube import paths
from muster.kube.client import ApiClient
from muster.kube.connection import from_kubeconfig
from muster.words.names import Label

T = TypeVar("T")
SYSTEM = "muster-system"
CHART = ROOT / "helm" / "muster"


class House:
    """plane: started. Everything else is made here: CRD, RBAC, kubelets. Calls are made from the test's own thread."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.folder = plane, folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.client = OfficialClient(plane.kubeconfig)
        self._own = ApiClient(from_kubeconfig(plane.kubeconfig), agent="kubelets")
        self.do(self._own.__aenter__())
        self.kubelets = Kubelets(self._own, folder / "pods")
        self.do(self.kubelets.serve_logs(plane.folder / "apiserver.crt", plane.folder / "apiserver.key"))
        self._kubelets = asyncio.run_coroutine_threadsafe(self.kubelets.run(), self._loop)
        self.operators: list[subprocess.Popen[bytes]] = []

    def do(self, work: Coroutine[Any, Any, T], timeout: float = 2 * WAIT_SECONDS_MAX) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def close(self) -> None:
        self.stop_operators()
        self._kubelets.cancel()
        self.do(self.kubelets.close())
        self.do(self._own.__aexit__())
        self.client.close()
        self.do(_end_other_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # --- the cluster ---

    def install(self, values: Object | None = None) -> None:
        """CRD, the operator's RBAC and its policies, as the chart is rendered for the namespace muster-system."""
        self.namespace(SYSTEM)
        self.apply(yaml.safe_load((CHART / "files" / "trainingjobs.yaml").read_text()))
        chart = Chart(tool("get_helm").get_helm())
        for name in ("operator-rbac", "operator-policy"):
            for document in chart.objects(values or {}, "--show-only", f"templates/{name}.yaml"):
                self.apply(document)
        crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.muster.dev"
        eventually(lambda: _is_true(self.get(crd), "Established"), "an established CRD")
        eventually(lambda: self.get(paths.JOBS) or True, "TrainingJobs to be served")

    def apply(self, document: Object) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", given=json.dumps(document))

    def kubectl(self, *words: str, given: str | None = None, check: bool = True) -> str:
        done = subprocess.run(
            ["kubectl", f"--kubeconfig={self.plane.kubeconfig}", *words], input=given, capture_output=True, text=True,
            check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout + ("" if check else done.stderr)

    def namespace(self, name: str) -> None:
        """With the restricted Pod Security Standard enforced."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        with contextlib.suppress(Refused):
            self.client.create("/api/v1/namespaces", body)
        path = paths.core(name, "serviceaccounts", "default")
        eventually(lambda: self.find(path), f"the default service account of {name}")

    def node(self, name: str, labels: dict[str, str] | None = None, **allocatable: str) -> None:
        self.do(self.kubelets.add_node(name, labels, **allocatable))

    def get(self, path: str) -> Object:
        return self.client.get(path)

    def find(self, path: str) -> Object | None:
        try:
            return self.get(path)
        except Refused as error:
            if error.status != 404:
                raise
            return None

    # --- the operator ---

    def start_operator(
        self,
        identity: str = "first",
        server: str = "",
        program: tuple[str, ...] = ("-m", "muster.operator"),
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        """With its own service account's token and the chart's RBAC."""
        kubeconfig = self.folder / f"operator{'-by-proxy' if server else ''}.kubeconfig"
        if not kubeconfig.exists():
            request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
            path = f"{paths.core(SYSTEM, 'serviceaccounts', 'muster-operator')}/token"
            token = self.client.create(path, request)["status"]["token"]
            self.plane.write_kubeconfig(kubeconfig, {"token": token}, server)
        settings = {
            "MUSTER_OPERATOR_NAMESPACE": SYSTEM, "MUSTER_OPERATOR_IDENTITY": identity, "MUSTER_OPERATOR_PORT": "0",
            "MUSTER_OPERATOR_HOST": "127.0.0.1", "MUSTER_OPERATOR_LOG_FORMAT": "json",
            "MUSTER_OPERATOR_LOG_LEVEL": "debug", "MUSTER_OPERATOR_IMAGE": "quick",
            "MUSTER_OPERATOR_CHECKPOINT_URI": f"file://{self.checkpoints}",
        }  # fmt: skip
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *program, "--world", "kubernetes", "--kubeconfig", str(kubeconfig)],
                env=os.environ | settings | environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self.operators.append(process)
        return process

    def stop_operators(self, how: signal.Signals = signal.SIGTERM) -> None:
        for process in self.operators:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(how)
        for process in self.operators:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.operators = []

    @property
    def log(self) -> Path:
        return self.folder / "operator.log"

    @property
    def checkpoints(self) -> Path:
        place = self.folder / "checkpoints"
        place.mkdir(exist_ok=True)
        return place

    # --- jobs ---

    def submit(self, document: Object) -> str:
        """Returns its uid."""
        namespace = document["metadata"].get("namespace", "default")
        made = self.client.create(paths.jobs(namespace), document)
        return str(made["metadata"]["uid"])

    def job(self, name: str, namespace: str = "team") -> Object:
        return self.get(paths.job(namespace, name))

    def status(self, name: str, namespace: str = "team") -> Object:
        status: Object = (self.find(paths.job(namespace, name)) or {}).get("status") or {}
        return status

    def change(self, name: str, spec: Object, namespace: str = "team") -> None:
        self.client.patch(paths.job(namespace, name), {"spec": spec})

    def pods(self, name: str, namespace: str = "team") -> list[Object]:
        query = f"?labelSelector=muster.dev%2Fjob%3D{name}"
        items: list[Object] = self.get(paths.core(namespace, "pods") + query)["items"]
        return items

    def reaches(self, name: str, phase: str, timeout: float = 2 * WAIT_SECONDS_MAX, namespace: str = "team") -> Object:
        """The status when it has that phase."""

        def look() -> Object | None:
            status = self.status(name, namespace)
            assert status.get("phase") == phase, (
                f"{status.get('phase')} ({status.get('code')}): {status.get('because')}"
            )
            return status

        return eventually(look, f"{name} to be {phase}\n{self.tail()}", timeout)

    def steps(self, name: str, at_least: int, timeout: float = 2 * WAIT_SECONDS_MAX) -> int:
        """Steps that every worker of a quick job has trained, once they are so many: they don't wait for each other."""
        meta = self.job(name)["metadata"]
        uid = meta.get("labels", {}).get(Label.JOB_ID) or meta["uid"]  # by which its checkpoint folder goes

        def look() -> int | None:
            newest = {(attempt, worker): step for attempt, worker, step, _ in self.trace(uid)}
            current = max((attempt for attempt, _ in newest), default=0)
            reached = [step for (attempt, _), step in newest.items() if attempt == current]
            if not reached or len(reached) < self.job(name)["status"]["gang"]["wanted"]:
                return None
            return min(reached) if min(reached) >= at_least else None

        return eventually(look, f"{name} to train {at_least} steps\n{self.tail()}", timeout)

    def holds(self, name: str, step: int) -> Object:
        """Part of the job's `runtime`, by which its workers stand still after that step until they are let go."""
        return {"env": [{"name": "QUICK_HOLD", "value": f"{step}:{self._gate(name)}"}]}

    def let_go(self, name: str) -> None:
        self._gate(name).touch()

    def goes_on(self, name: str) -> Object:
        """The status of a job at its end, which has begun its second attempt and is let go in it."""
        eventually(lambda: self.status(name).get("attempt") == 2, f"the second attempt of {name}\n{self.tail()}")
        self.let_go(name)
        return self.reaches(name, "Succeeded")

    def _gate(self, name: str) -> Path:
        return self.folder / f"go-{name}"

    def trace(self, uid: str) -> list[tuple[int, int, int, float]]:
        """(attempt, worker, step, when) of everything that quick workers trained."""
        path = self.checkpoints / f"trace-{uid}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(a), int(w), int(s), float(t)) for a, w, s, t in (line.split() for line in lines)]

    def tail(self, lines: int = 15) -> str:
        text = self.log.read_text() if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def quick_job(name: str, nodes: int = 2, steps: int = 30, **changes: Any) -> Object:
    """A TrainingJob whose pods run `pod_worker.py`. changes: parts of the spec."""
    spec: Object = {
        "training": {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 64},
            "batch": {"tokensPerStep": 64 * nodes},
            "length": {"steps": steps},
        },
        "gang": {"nodes": nodes, "resources": {"cpu": "1", "memory": "1Gi"}},
        "recovery": {"backoffSeconds": 0.2},
    }
    for key, value in changes.items():
        spec[key] = spec.get(key, {}) | value if isinstance(value, dict) else value
    return {
        "apiVersion": "muster.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team"},
        "spec": spec,
    }


async def _end_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _is_true(item: Object, condition: str) -> bool:
    return any(c["type"] == condition and c["status"] == "True" for c in item.get("status", {}).get("conditions", ()))
