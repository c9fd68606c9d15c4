"""An API server's TLS and a few of its answers, with certificates of the test's own."""

import contextlib
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import yaml
from tests.certificates import Authority


class ApiServer(http.server.BaseHTTPRequestHandler):
    """Answers what the chart's smoke test, a fence and `muster --context` ask."""

    def _answer(self, status: int, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        lease = {"holderIdentity": "first", "renewTime": datetime.now(UTC).isoformat()}
        self._answer(200, {"metadata": {"resourceVersion": "1"}, "status": {"attempt": 3}, "spec": lease})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(422 if "epochs" in body["spec"]["training"]["length"] else 201, {"message": "two lengths"})

    def log_message(self, format: str, *arguments: object) -> None: ...


@contextlib.contextmanager
def api_server(certificate: Path, key: Path) -> Iterator[int]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ApiServer)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def kubeconfig(folder: Path, authority: Authority, port: int) -> Path:
    (folder / "authority.crt").write_text(authority.pem)
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump({
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "clusters": [{"name": "it", "cluster": {
            "server": f"https://127.0.0.1:{port}", "certificate-authority": str(folder / "authority.crt"),
        }}],
        "users": [{"name": "it", "user": {"token": "x"}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
    }))  # fmt: skip
    return path


def service_account(folder: Path, authority: Authority) -> Path:
    account = folder / "account"
    account.mkdir(exist_ok=True)
    for name, text in {"ca.crt": authority.pem, "token": "x", "namespace": "team"}.items():
        (account / name).write_text(text)
    return account
