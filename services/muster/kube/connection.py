"""Connection to the API server and identity there: the pod's own service account, or a kubeconfig."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.kube.errors import NoCluster
from muster.kube.timestamps import seconds_of
from muster.kube.tls import api_server_context

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0  # a projected token is rotated long before it ends; looking once a minute is enough


@dataclass
class BearerCredentials:
    """Source of the bearer token: a file that may be rotated, a plugin, or the kubeconfig itself."""

    token: str | None = field(default=None, repr=False)  # None: not read yet, or a certificate says who we are
    token_file: Path | None = None
    plugin: dict[str, Any] | None = field(default=None, repr=False)  # the kubeconfig's `exec` (ExecCredential)
    _read_at: float = field(default=-1e9, repr=False)
    _expires_at: float = field(default=float("inf"), repr=False)
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def slow(self) -> bool:
        """Return whether the next `bearer` runs a plugin, which may take seconds and must not run in an event loop."""
        return self.plugin is not None and (self.token is None or time.time() > self._expires_at - TOKEN_SECONDS)

    def bearer(self) -> str | None:
        """The token to send now. From any thread; of several that ask at once, one runs the plugin for all."""
        with self._turn:
            now = time.monotonic()
            if self.token_file is not None and now - self._read_at > TOKEN_SECONDS:
                self.token, self._read_at = self.token_file.read_text().strip(), now
            elif self.plugin is not None and self.slow:
                self.token, self._expires_at = _run_plugin(self.plugin)
            return self.token

    def forget(self) -> None:
        """The server refused the token: get another one next time."""
        self._read_at, self._expires_at = -1e9, 0.0


@dataclass(frozen=True)
class ApiConnection:
    """Address, trust and identity for one API server."""

    server: str  # https://host:port
    tls: ssl.SSLContext
    credentials: BearerCredentials
    namespace: str  # our pod's own, or the one of the kubeconfig's context
    ca: str | None = None  # the certificates of the server's CA, as PEM; None: the system's are used


def connect(kubeconfig: Path | None = None, service_account: Path = SERVICE_ACCOUNT) -> ApiConnection:
    """Connect by the pod's own service account if there is one, else by a kubeconfig.

    The kubeconfig is the given one, or $KUBECONFIG, or ~/.kube/config; one that is given is used in a pod, too.
    `service_account` is the folder that its token, its namespace and the server's CA are mounted in. Raises NoCluster.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if kubeconfig is None and host and (service_account / "token").exists():
        return _in_cluster(host, os.environ.get("KUBERNETES_SERVICE_PORT", "443"), service_account)
    named = os.environ.get("KUBECONFIG") or "~/.kube/config"
    paths = [kubeconfig] if kubeconfig else [Path(each).expanduser() for each in named.split(os.pathsep) if each]
    there = [path for path in paths if path.exists()]
    if not there:
        looked = " or ".join(map(str, paths))
        raise NoCluster(f"no cluster: this is no pod, and there is no kubeconfig at {looked}; set KUBECONFIG")
    return from_kubeconfig(*there)


def from_kubeconfig(*paths: Path) -> ApiConnection:
    """The current context of the files, merged as kubectl does it: what comes first holds. Raises NoCluster."""
    from muster.documents.reader import load_yaml  # an agent in its pod has no kubeconfig to read, and no YAML

    try:
        documents = [(path.parent, load_yaml(path.read_text()) or {}) for path in paths]
        current = next(document["current-context"] for _, document in documents if document.get("current-context"))
        _, context = _named(documents, "context", current)
        cluster_folder, cluster = _named(documents, "cluster", context["cluster"])
        user_folder, user = _named(documents, "user", context["user"])
        server = cluster["server"].rstrip("/")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        which = " with ".join(map(str, paths))
        raise NoCluster(f"{which} is no kubeconfig with a current context: {error!r}") from error
    ca = _pem(cluster, "certificate-authority", cluster_folder)
    tls = api_server_context(ca)
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    certificate, key = (_pem(user, f"client-{part}", user_folder) for part in ("certificate", "key"))
    if certificate and key:
        _load_certificate(tls, certificate, key)
    token_file = user_folder / user["tokenFile"] if user.get("tokenFile") else None
    credentials = BearerCredentials(user.get("token"), token_file, user.get("exec"))
    return ApiConnection(server, tls, credentials, context.get("namespace", "default"), ca)


def _in_cluster(host: str, port: str, service_account: Path) -> ApiConnection:
    ca, namespace = (service_account / "ca.crt").read_text(), service_account / "namespace"
    address = f"[{host}]" if ":" in host else host
    return ApiConnection(
        server=f"https://{address}:{port}",
        tls=api_server_context(ca),
        credentials=BearerCredentials(token_file=service_account / "token"),
        namespace=namespace.read_text().strip() if namespace.exists() else "default",
        ca=ca,
    )


def _named(documents: list[tuple[Path, dict[str, Any]]], kind: str, name: str) -> tuple[Path, dict[str, Any]]:
    """The first context, cluster or user of that name, and the folder that its relative paths are meant from."""
    entries = ((folder, each) for folder, document in documents for each in document.get(f"{kind}s") or ())
    return next((folder, each[kind]) for folder, each in entries if each["name"] == name)


def _pem(entry: dict[str, Any], key: str, folder: Path) -> str | None:
    if data := entry.get(f"{key}-data"):
        return base64.b64decode(data).decode()
    return (folder / entry[key]).read_text() if entry.get(key) else None


def _load_certificate(tls: ssl.SSLContext, certificate: str, key: str) -> None:
    """ssl reads certificates from files only; ours is gone again before anything else runs."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(f"{certificate}\n{key}\n")
        file.flush()
        tls.load_cert_chain(file.name)


def _run_plugin(plugin: dict[str, Any]) -> tuple[str, float]:
    """An ExecCredential (`aws eks get-token` and its like): the token and when it ends."""
    environment = os.environ | {entry["name"]: entry["value"] for entry in plugin.get("env") or ()}
    info = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
    environment["KUBERNETES_EXEC_INFO"] = json.dumps(info)
    command = [plugin["command"], *(plugin.get("args") or ())]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        status = json.loads(done.stdout)["status"]
        if "token" not in status:
            raise NoCluster(
                f"the kubeconfig's credential plugin {plugin['command']} gave no token, and only that is read"
            )
        return status["token"], seconds_of(status.get("expirationTimestamp")) or float("inf")
    except NoCluster:
        raise
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as error:
        output = getattr(error, "stderr", "") or error
        raise NoCluster(f"the kubeconfig's credential plugin {plugin['command']} failed: {output}") from error
