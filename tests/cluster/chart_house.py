"""A release of the chart on a real control plane, as its tests want to speak to it."""

import contextlib
import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.cluster.controlplane import ControlPlane
from tests.polling import eventually
from tests.tidy.repository import ROOT

CHART = ROOT / "helm" / "muster"
SYSTEM = "muster-system"
COMPONENT = "app.kubernetes.io/component"
Rest = Callable[..., Any]


class ChartHouse:
    def __init__(self, plane: ControlPlane, helm: Path, folder: Path) -> None:
        self.plane, self.folder, self._helm = plane, folder, helm

    # --- helm ---

    def helm(self, *words: str | Path, given: Any = None) -> str:
        return self._run([self._helm, *words, "--kubeconfig", self.plane.kubeconfig], given)

    def install(self, values: Any, *words: str) -> str:
        return self.helm("install", "muster", CHART, "--namespace", SYSTEM, "--values", "-", *words, given=values)

    def upgrade(self, values: Any, *words: str) -> str:
        return self.helm("upgrade", "muster", CHART, "--namespace", SYSTEM, "--values", "-", *words, given=values)

    def helm_refuses(self, verb: str, *words: str, given: Any = None) -> str:
        command = [self._helm, verb, "muster", CHART, "--namespace", SYSTEM, *words]
        return self._fails([*command, "--kubeconfig", self.plane.kubeconfig], given)

    def revision(self, namespace: str) -> int:
        return int(json.loads(self.helm("history", "muster", "-n", namespace, "-o", "json"))[-1]["revision"])

    # --- kubectl ---

    def kubectl(self, *words: str, given: Any = None) -> str:
        return self._run(["kubectl", f"--kubeconfig={self.plane.kubeconfig}", *words], given)

    def kubectl_refuses(self, *words: str, given: Any = None) -> str:
        return self._fails(["kubectl", f"--kubeconfig={self.plane.kubeconfig}", *words], given)

    def get(self, *words: str) -> Any:
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def namespace(self, name: str) -> None:
        """With the restricted Pod Security Standard enforced."""
        self.kubectl("create", "namespace", name)
        self.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        eventually(lambda: "default" in self.names("serviceaccounts", name), "the default service account")

    def names(self, kind: str, namespace: str) -> list[str]:
        return [item["metadata"]["name"] for item in self.get(kind, "-n", namespace)["items"]]

    def ready_pods(self, namespace: str) -> dict[str, str]:
        """Name → component, of those that are not on their way out."""
        return {
            pod["metadata"]["name"]: pod["metadata"]["labels"].get(COMPONENT, "")
            for pod in self.get("pods", "-n", namespace)["items"]
            if "deletionTimestamp" not in pod["metadata"]
            and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ())
        }

    def step(self, job: str, namespace: str) -> int:
        """That the job has reported; with how it fares, should the wait for it end in vain."""
        status = self.get("tj", job, "-n", namespace).get("status") or {}
        assert "phase" in status, "no operator has looked at it"
        step = int((status.get("progress") or {}).get("step") or 0)
        assert step, f"{status['phase']}: {status.get('because')}"
        return step

    def workers_image(self, namespace: str) -> str:
        """What the operator would give a new worker."""
        (container,) = self.get("deployment", "muster-operator", "-n", namespace)["spec"]["template"]["spec"][
            "containers"
        ]
        return str(next(entry["value"] for entry in container["env"] if entry["name"] == "MUSTER_OPERATOR_IMAGE"))

    # --- the API ---

    @contextlib.contextmanager
    def rest(self, namespace: str, token: str) -> Iterator[Rest]:
        """By port-forward, as the chart's notes say."""
        log = self.folder / "port-forward"
        forward = ["kubectl", f"--kubeconfig={self.plane.kubeconfig}", "port-forward", "-n", namespace]
        with open(log, "wb") as out:
            process = subprocess.Popen([*forward, "svc/muster-api", ":80"], stdout=out, stderr=out)
        try:
            eventually(lambda: "Forwarding from 127.0.0.1" in log.read_text(), "a forwarded port")
            port = log.read_text().partition("127.0.0.1:")[2].partition(" ")[0]

            def ask(method: str, path: str, body: object = None) -> Any:
                headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
                data = None if body is None else json.dumps(body).encode()
                request = urllib.request.Request(f"http://127.0.0.1:{port}/api/v1{path}", data, headers, method=method)
                with urllib.request.urlopen(request, timeout=30) as reply:
                    return json.load(reply)

            yield ask
        finally:
            process.terminate()
            process.wait(10)

    def _run(self, words: list[str | Path], given: Any) -> str:
        done = self._done(words, given)
        assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.stderr}{done.stdout}"
        return done.stdout

    def _fails(self, words: list[str | Path], given: Any) -> str:
        done = self._done(words, given)
        assert done.returncode != 0, f"{' '.join(map(str, words))}: was not refused"
        return done.stderr

    def _done(self, words: list[str | Path], given: Any) -> "subprocess.CompletedProcess[str]":
        text = None if given is None else json.dumps(given)
        done = subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=600)
        with open(self.folder / "transcript", "a") as transcript:  # for whoever asks why a test failed
            transcript.write(f"$ {' '.join(map(str, words))}\n{done.stdout}{done.stderr}\n")
        return done
