"""A real Kueue manager on the tests' control plane, where its binary (`kueue-manager` in KUBEBUILDER_ASSETS) and its
manifests (KUEUE_CONFIG: the folder config/components of its sources) are present.
"""

import base64
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.controlplane import openssl
from tests.cluster.house import House
from tests.polling import eventually
from tests.ports import free_port

# Where the manager looks for its webhook's and its metrics' certificates, whatever its configuration says.
CERTIFICATES = (
    Path(tempfile.gettempdir()) / "k8s-webhook-server" / "serving-certs",
    Path("/etc/kueue/metrics/certs"),
)


def missing() -> str:
    binary = Path(os.environ.get("KUBEBUILDER_ASSETS", "")) / "kueue-manager"
    if not os.access(binary, os.X_OK):
        return "no Kueue here: KUBEBUILDER_ASSETS has no kueue-manager"
    if not (Path(os.environ.get("KUEUE_CONFIG", "/nowhere")) / "crd").is_dir():
        return "no Kueue here: KUEUE_CONFIG does not name the folder config/components of its sources"
    try:
        for folder in CERTIFICATES:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"no Kueue here: its manager reads certificates from a folder that can't be made: {error}"
    return ""


class Kueue:
    def __init__(self, house: House) -> None:
        self.house, self.folder = house, house.folder / "kueue"
        self._port, self._health, self._metrics = (free_port() for _ in range(3))
        self._manager: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir()
        objects = self.folder / "objects.yaml"
        objects.write_text(yaml.safe_dump_all(self._manifests(self._certificates())))
        self.house.kubectl("create", "namespace", "kueue-system", check=False)
        self.house.kubectl("apply", "--server-side", "-f", str(objects))
        self.house.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        config = self.folder / "config.yaml"
        config.write_text(yaml.safe_dump(self._configuration()))
        binary = Path(os.environ["KUBEBUILDER_ASSETS"]) / "kueue-manager"
        with open(self.folder / "log", "wb") as log:
            self._manager = subprocess.Popen(
                [binary, f"--config={config}", "--feature-gates=VisibilityOnDemand=false"],
                env=os.environ | {"KUBECONFIG": str(self.house.plane.kubeconfig)}, stdout=log, stderr=log,
            )  # fmt: skip
        flavor = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "any"}}
        eventually(lambda: self._takes(flavor), f"Kueue to answer; its log: {self.folder / 'log'}")

    def stop(self) -> None:
        """Its webhooks go first: without it they would refuse every pod of the tests that follow."""
        for kind in ("validatingwebhookconfigurations", "mutatingwebhookconfigurations"):
            self.house.kubectl("delete", kind, "--all")
        if self._manager is not None:
            self._manager.kill()
            self._manager.wait()

    def queue(self, name: str, cpu: str, preempting: bool = False) -> None:
        """A ClusterQueue with that many cores, and a LocalQueue of the same name in the namespace team."""
        quota = {"name": "any", "resources": [{"name": "cpu", "nominalQuota": cpu}]}
        memory = {"name": "memory", "nominalQuota": "1Ti"}
        quota["resources"] = [*quota["resources"], memory]  # type: ignore[misc]
        spec: dict[str, Any] = {
            "namespaceSelector": {},
            "queueingStrategy": "BestEffortFIFO",
            "resourceGroups": [{"coveredResources": ["cpu", "memory"], "flavors": [quota]}],
        }
        if preempting:
            spec["preemption"] = {"withinClusterQueue": "LowerPriority"}
        api = "kueue.x-k8s.io/v1beta2"
        self.house.apply({"apiVersion": api, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec})
        meta = {"name": name, "namespace": "team"}
        self.house.apply({"apiVersion": api, "kind": "LocalQueue", "metadata": meta, "spec": {"clusterQueue": name}})

    def _takes(self, document: dict[str, Any]) -> bool:
        assert self._manager is not None
        assert self._manager.poll() is None, (self.folder / "log").read_text()[-2000:]
        self.house.apply(document)  # fails as an AssertionError while the webhook does not answer
        return True

    def _configuration(self) -> dict[str, Any]:
        return {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self._health}"},
            "metrics": {"bindAddress": f"127.0.0.1:{self._metrics}"},
            "webhook": {"port": self._port},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["batch/job", "pod"]},
        }

    def _certificates(self) -> str:
        """Signed by the cluster's CA, laid where the manager looks; returns the CA bundle, base64."""
        plane, key, request, made = self.house.plane, *(self.folder / name for name in ("key", "request", "crt"))
        names = self.folder / "names"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl("req", *curve, "-keyout", str(key), "-out", str(request), "-subj", "/CN=kueue")
        openssl(
            "x509", "-req", "-in", str(request), "-CA", str(plane.ca), "-CAkey", str(plane.folder / "ca.key"),
            "-CAcreateserial", "-out", str(made), "-days", "30", "-extfile", str(names),
        )  # fmt: skip
        for folder in CERTIFICATES:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "tls.crt").write_bytes(made.read_bytes())
            (folder / "tls.key").write_bytes(key.read_bytes())
        return base64.b64encode(plane.ca.read_bytes()).decode()

    def _manifests(self, ca: str) -> list[dict[str, Any]]:
        config = Path(os.environ["KUEUE_CONFIG"])
        url = f"https://127.0.0.1:{self._port}"
        objects = []
        for item in yaml.safe_load_all(self.house.kubectl("kustomize", str(config / "crd"))):
            if item and (conversion := item["spec"].get("conversion")):
                conversion["webhook"]["clientConfig"] = {"url": f"{url}/convert", "caBundle": ca}
            objects += [item] if item else []
        for item in yaml.safe_load_all((config / "webhook" / "manifests.yaml").read_text()):
            for hook in (item or {}).get("webhooks", []):
                hook["clientConfig"] = {"url": url + hook["clientConfig"]["service"]["path"], "caBundle": ca}
            objects += [item] if item else []
        return objects
