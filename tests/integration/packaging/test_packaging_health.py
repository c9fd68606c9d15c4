"""The health checks of docker-compose.yml against the real programs: they fail before, and while one is ill."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from tests.integration.api.postgres import postgres_server
from tests.polling import eventually
from tests.s3_servers import free_port, moto_server
from tests.tidy.repository import ROOT

SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PROMETHEUS = shutil.which("prometheus")


def healthy(service: str, port: int, **replaced: str) -> bool:
    """What the service's own check says, on this machine's programs and another port."""
    check = SERVICES[service]["healthcheck"]
    own_port = {"api": "8642", "operator": "8080", "prometheus": "9090", "postgres": "5432"}[service]
    assert any(own_port in word for word in check["test"]), "the port stands in the check"
    words = [word.replace(own_port, str(port)) for word in check["test"][1:]]
    words = [replaced.get(word, word) for word in words]
    timeout = int(check["timeout"].removesuffix("s"))
    try:
        done = subprocess.run(words, timeout=timeout, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


@contextmanager
def running(*words: str | Path, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        words, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(30)


def test_the_api(tmp_path: Path) -> None:
    port = free_port()
    assert not healthy("api", port, python=sys.executable)
    state = {"MUSTER_API_STATE": str(tmp_path), "MUSTER_API_HOST": "0.0.0.0", "MUSTER_API_PORT": str(port)}
    with running(sys.executable, "-m", "muster.api", **state) as api:
        eventually(lambda: healthy("api", port, python=sys.executable), "a healthy API", 60)
        api.send_signal(signal.SIGSTOP)
        assert not healthy("api", port, python=sys.executable)


def test_the_operator(tmp_path: Path) -> None:
    port = free_port()
    own, *words = SERVICES["operator"]["entrypoint"]
    given = [{"/state": str(tmp_path), "8080": str(port)}.get(word, word) for word in words]
    assert not healthy("operator", port, python=sys.executable)
    with running(Path(sys.executable).with_name(own), *given) as operator:
        eventually(lambda: healthy("operator", port, python=sys.executable), "a healthy operator", 60)
        operator.send_signal(signal.SIGSTOP)
        assert not healthy("operator", port, python=sys.executable)


@pytest.mark.postgres
def test_postgres() -> None:
    """By its socket: the tests' server has no port."""
    with postgres_server() as server:
        words = {"pg_isready": str(server.bin / "pg_isready"), "--host=127.0.0.1": f"--host={server.folder}"}
        assert healthy("postgres", 5432, **words)
        assert not healthy("postgres", free_port(), pg_isready=str(server.bin / "pg_isready"))


@pytest.mark.skipif(PROMETHEUS is None or not shutil.which("wget"), reason="prometheus or wget is not installed")
def test_prometheus(tmp_path: Path) -> None:
    assert PROMETHEUS is not None
    (tmp_path / "prometheus.yml").write_text((ROOT / "deploy/compose/prometheus.yml").read_text())
    (tmp_path / "alerts.yaml").write_text((ROOT / "helm/muster/files/alerts.yaml").read_text())
    port = free_port()
    assert not healthy("prometheus", port)
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with running(PROMETHEUS, *options, f"--web.listen-address=127.0.0.1:{port}"):
        eventually(lambda: healthy("prometheus", port), "a ready Prometheus", 60)


def test_the_bucket_is_made_once() -> None:
    with moto_server() as server:
        script = [sys.executable, ROOT / "deploy/compose/make_bucket.py", "muster"]
        environment = os.environ | server.environment() | {"AWS_ENDPOINT_URL": server.url}
        for _ in range(2):
            done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout) == (0, "the bucket muster is there\n"), done.stderr
        assert "muster" in [bucket["Name"] for bucket in server.client().list_buckets()["Buckets"]]
