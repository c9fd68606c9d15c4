"""Where the API server is and who we are there: the pod's own service account, or a kubeconfig.

Shared by the operator and the API, which both speak to it. YAML is read by whoever calls (`parse`).
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 60.0  # a projected token is rotated long before it ends; looking once a minute is enough


class NoCluster(Exception):
    """No API server is known; the message says what was looked at and what to do."""


@dataclass
class Credentials:
    """A bearer token: from a file that may be rotated, from a plugin (ExecCredential), or fixed. None: a certificate
    says who we are.
    """

    token: str | None = None
    token_file: Path | None = None
    plugin: dict[str, Any] | None = None
    _read_at: float = field(default=-1e9, repr=False)
    _expires_at: float = field(default=float("inf"), repr=False)

    def bearer(self) -> str | None:
        """The token to send now. May read a file or run a plugin: cheap except about once per token's life."""
        now = time.monotonic()
        if self.token_file is not None and now - self._read_at > TOKEN_SECONDS:
            self.token, self._read_at = self.token_file.read_text().strip(), now
        elif self.plugin is not None and (self.token is None or time.time() > self._expires_at - TOKEN_SECONDS):
            self.token, self._expires_at = _run_plugin(self.plugin)
        return self.token

    def forget(self) -> None:
        """The server refused the token: get another one next time."""
        self._read_at, self._expires_at = -1e9, 0.0


@dataclass(frozen=True)
class Connection:
    """server: https://host:port. ca: the server's CA as PEM. namespace: our own, or the context's."""

    server: str
    tls: ssl.SSLContext
    credentials: Credentials
    namespace: str
    ca: str | None = None


def connect(parse: Callable[[str], Any], kubeconfig: Path | None = None) -> Connection:
    """The pod's own service account if there is one, else the kubeconfig (given, or $KUBECONFIG, or ~/.kube/config).

    Raises NoCluster.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if kubeconfig is None and host and (SERVICE_ACCOUNT / "token").exists():
        return _in_cluster(host, os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
    path = kubeconfig or Path(os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)[0]).expanduser()
    if not path.exists():
        raise NoCluster(f"no cluster: this is no pod, and there is no kubeconfig at {path}; set KUBECONFIG")
    return from_kubeconfig(parse, path)


def from_kubeconfig(parse: Callable[[str], Any], path: Path) -> Connection:
    """The current context of the file. parse: YAML to objects. Raises NoCluster when it makes no sense."""
    try:
        document = parse(path.read_text())
        context = _named(document["contexts"], document["current-context"])["context"]
        cluster = _named(document["clusters"], context["cluster"])["cluster"]
        user = _named(document["users"], context["user"])["user"]
    except Exception as error:  # a YAML reader has errors of its own
        raise NoCluster(f"{path} is no kubeconfig with a current context: {error!r}") from error
    ca = _pem(cluster, "certificate-authority", path.parent)
    tls = ssl.create_default_context(cadata=ca)
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    certificate, key = _pem(user, "client-certificate", path.parent), _pem(user, "client-key", path.parent)
    if certificate and key:
        _load_certificate(tls, certificate, key)
    token_file = Path(user["tokenFile"]) if user.get("tokenFile") else None
    credentials = Credentials(user.get("token"), token_file, user.get("exec"))
    return Connection(cluster["server"].rstrip("/"), tls, credentials, context.get("namespace", "default"), ca)


def _in_cluster(host: str, port: str) -> Connection:
    ca = (SERVICE_ACCOUNT / "ca.crt").read_text()
    address = f"[{host}]" if ":" in host else host
    return Connection(
        server=f"https://{address}:{port}",
        tls=ssl.create_default_context(cadata=ca),
        credentials=Credentials(token_file=SERVICE_ACCOUNT / "token"),
        namespace=(SERVICE_ACCOUNT / "namespace").read_text().strip(),
        ca=ca,
    )


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)


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
        return status["token"], seconds_of(status.get("expirationTimestamp")) or float("inf")
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        told = getattr(error, "stderr", "") or error
        raise NoCluster(f"the kubeconfig's credential plugin {plugin['command']} failed: {told}") from error


def seconds_of(timestamp: str | None) -> float:
    """RFC 3339 as Kubernetes writes it, in seconds since the epoch; 0 for none."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0
