"""A real control plane on this machine's loopback: etcd, kube-apiserver, kube-controller-manager, kube-scheduler.

The binaries are found by KUBEBUILDER_ASSETS, as envtest does it.
"""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from tests.certificates import Authority, private_pem
from tests.polling import eventually
from tests.ports import free_port

from muster.kube.tls import api_server_context

SERVICES = "10.97.0"  # the first is the API server's own
WANTED = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


def missing() -> str:
    """Why no control plane can be started here; empty if one can."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        return "KUBEBUILDER_ASSETS is not set: it names the folder of etcd, kube-apiserver and their like"
    absent = [name for name in WANTED if not os.access(Path(folder) / name, os.X_OK)]
    if absent:
        return f"KUBEBUILDER_ASSETS={folder} has no {', '.join(absent)}"
    return "" if shutil.which("openssl") else "openssl is not installed"


class ControlPlane:
    """folder: for state, certificates and logs. features: of all components. serve: API versions to switch on. lenient:
    hollow nodes need not report that they live. whole: for real nodes; all controllers run, and kubelets may be asked.
    """

    def __init__(
        self, folder: Path, features: str = "", serve: str = "", lenient: bool = False, whole: bool = False
    ) -> None:
        self._grace = "1h" if lenient else "40s" if whole else "20s"  # of thirteen beats of a hollow kubelet
        self._whole = whole
        self.folder, self._features, self._serve = folder, features, serve
        self._bin = Path(os.environ["KUBEBUILDER_ASSETS"])
        self._port, self._etcd, self._peer = (free_port() for _ in range(3))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.server = f"https://127.0.0.1:{self._port}"
        self.kubeconfig = folder / "kubeconfig"
        self.ca = folder / "ca.crt"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._certificates()
        etcd = f"http://127.0.0.1:{self._etcd}"
        self._run(
            "etcd", "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync", "--listen-client-urls", etcd,
            "--advertise-client-urls", etcd, "--listen-peer-urls", f"http://127.0.0.1:{self._peer}",
        )  # fmt: skip
        self._start_api_server()
        user = {"client-certificate": self._pem("admin.crt"), "client-key": self._pem("admin.key")}
        self.write_kubeconfig(self.kubeconfig, user)
        config = f"--kubeconfig={self.kubeconfig}"
        gates = [f"--feature-gates={self._features}"] if self._features else []
        idle = (
            ""
            if self._whole
            else ",-endpoints-controller,-endpointslice-controller,-persistentvolume-binder-controller"
        )
        self._run(
            "kube-controller-manager", config, "--leader-elect=false", "--bind-address=127.0.0.1", "--secure-port=0",
            f"--service-account-private-key-file={self._pem('sa.key')}", f"--root-ca-file={self.ca}",
            "--use-service-account-credentials=false", "--node-monitor-period=1s",
            f"--node-monitor-grace-period={self._grace}",
            *gates, "--kube-api-qps=500", "--kube-api-burst=1000",
            # A create whose client was killed in the middle stays counted until quotas are counted anew: 5 minutes.
            "--resource-quota-sync-period=5s",
            f"--controllers=*{idle}",
        )  # fmt: skip
        self._run(
            "kube-scheduler",
            config,
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--secure-port=0",
            "--kube-api-qps=2000",
            "--kube-api-burst=4000",
            *gates,
        )

    def stop(self) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)  # the state goes too
        for process in self._running.values():
            process.wait()
        self._running = {}

    def restart_api_server(self) -> None:
        """Gone and back, as in an upgrade: every stream breaks."""
        process = self._running.pop("kube-apiserver")
        process.kill()
        process.wait()
        self._start_api_server()

    def freeze_api_server(self, frozen: bool) -> None:
        """Connections stay open and nothing comes any more."""
        self._running["kube-apiserver"].send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def stored(self, key: str) -> dict[str, Any]:
        """The custom resource that etcd has there (`/registry/<group>/<plural>/<namespace>/<name>`)."""
        (found,) = self._etcd_kv("range", {"key": _packed(key)})["kvs"]
        document: dict[str, Any] = json.loads(base64.b64decode(found["value"]))
        return document

    def store(self, documents: dict[str, dict[str, Any]]) -> None:
        """Custom resources by their keys, past everything that the API server checks; at most 128."""
        puts = [
            {"requestPut": {"key": _packed(key), "value": _packed(json.dumps(document))}}
            for key, document in documents.items()
        ]
        self._etcd_kv("txn", {"success": puts})

    def compact(self) -> None:
        """Let etcd forget the past, so that old places in watches are answered with 410."""
        revision = self._etcd_kv("range", {"key": _packed("/registry")})["header"]["revision"]
        self._etcd_kv("compaction", {"revision": revision, "physical": True})

    def _etcd_kv(self, verb: str, body: dict[str, object]) -> dict[str, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{self._etcd}/v3/kv/{verb}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer: dict[str, Any] = json.load(reply)
            return answer

    def write_kubeconfig(self, path: Path, user: dict[str, str], server: str = "") -> None:
        cluster = {"server": server or self.server, "certificate-authority": str(self.ca)}
        path.write_text(
            yaml.safe_dump({
                "apiVersion": "v1", "kind": "Config", "current-context": "it",
                "clusters": [{"name": "it", "cluster": cluster}], "users": [{"name": "it", "user": user}],
                "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            })
        )  # fmt: skip

    def _start_api_server(self) -> None:
        extra = [f"--feature-gates={self._features}"] if self._features else []
        extra += [f"--runtime-config={self._serve}"] if self._serve else []
        if self._whole:
            extra += [
                "--kubelet-preferred-address-types=InternalIP",
                f"--kubelet-client-certificate={self._pem('admin.crt')}",
                f"--kubelet-client-key={self._pem('admin.key')}",
            ]
        self._run(
            "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{self._etcd}", f"--secure-port={self._port}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
            f"--tls-cert-file={self._pem('apiserver.crt')}", f"--tls-private-key-file={self._pem('apiserver.key')}",
            f"--client-ca-file={self.ca}", f"--service-account-key-file={self._pem('sa.key')}",
            f"--service-account-signing-key-file={self._pem('sa.key')}",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-cluster-ip-range={SERVICES}.0/24",
            "--authorization-mode=Node,RBAC", "--endpoint-reconciler-type=none", *extra,
        )  # fmt: skip
        eventually(self._is_ready, f"an API server (its log: {self.folder / 'kube-apiserver.log'})")

    def _is_ready(self) -> bool:
        tls = api_server_context(self.ca.read_text())
        tls.load_cert_chain(self._pem("admin.crt"), self._pem("admin.key"))
        try:
            with urllib.request.urlopen(f"{self.server}/readyz", timeout=20, context=tls) as reply:
                return bool(reply.status == 200)
        except OSError:
            assert self._running["kube-apiserver"].poll() is None, self._tail("kube-apiserver")
            return False

    def _run(self, name: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                [self._bin / name, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def _tail(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-2000:]

    def _pem(self, name: str) -> str:
        return str(self.folder / name)

    def _certificates(self) -> None:
        authority = Authority(key_usage=False, identifiers=False)  # as on EKS: valid, but not as RFC 5280 wants it
        self.ca.write_text(authority.pem)
        (self.folder / "ca.key").write_bytes(private_pem(authority.key))
        openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", self._pem("sa.key"))
        names = ("127.0.0.1", f"{SERVICES}.1", "localhost", "kubernetes.default.svc")
        authority.issue(self.folder, "kube-apiserver", *names, file="apiserver")
        authority.issue(self.folder, "admin", *names, organization="system:masters")


def _packed(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
