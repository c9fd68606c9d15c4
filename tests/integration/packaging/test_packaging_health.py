"""The health checks of docker-compose.yml against the real programs: they fail before, and while one is ill."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError
from tests.integration.api.postgres import postgres_server
from tests.polling import eventually
from tests.ports import free_port
from tests.s3_servers import Missing, moto_server, seaweedfs
from tests.tidy.repository import ROOT

SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PROMETHEUS = shutil.which("prometheus")


def healthy(service: str, port: int, **replaced: str) -> bool:
    """What the service's own check says, on this machine's programs and another port."""
    check = SERVICES[service]["healthcheck"]
    ports = {"api": "8642", "operator": "8080", "prometheus": "9090", "postgres": "5432", "object-store": "8333"}
    own_port = ports[service]
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
        process.kill()  # how they end is not asked here, and SeaweedFS takes its time
        process.wait()


@pytest.mark.long
def test_the_api(tmp_path: Path) -> None:
    port = free_port()
    assert not healthy("api", port, python=sys.executable)
    state = {"MUSTER_API_STATE": str(tmp_path), "MUSTER_API_HOST": "0.0.0.0", "MUSTER_API_PORT": str(port)}
    with running(sys.executable, "-m", "muster.api", **state) as api:
        eventually(lambda: healthy("api", port, python=sys.executable), "a healthy API")
        api.send_signal(signal.SIGSTOP)
        assert not healthy("api", port, python=sys.executable)


@pytest.mark.long
def test_the_operator(tmp_path: Path) -> None:
    port = free_port()
    own, *words = SERVICES["operator"]["entrypoint"]
    given = [{"/state": str(tmp_path), "8080": str(port)}.get(word, word) for word in words]
    assert not healthy("operator", port, python=sys.executable)
    with running(Path(sys.executable).with_name(own), *given) as operator:
        eventually(lambda: healthy("operator", port, python=sys.executable), "a healthy operator")
        operator.send_signal(signal.SIGSTOP)
        assert not healthy("operator", port, python=sys.executable)


@pytest.mark.postgres
def test_postgres() -> None:
    """By its socket: the tests' server has no port."""
    with postgres_server() as server:
        words = {"pg_isready": str(server.bin / "pg_isready"), "--host=127.0.0.1": f"--host={server.folder}"}
        eventually(lambda: healthy("postgres", 5432, **words), "a healthy PostgreSQL")
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
        eventually(lambda: healthy("prometheus", port), "a ready Prometheus")


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("wget"), reason="wget is not installed")
def test_the_object_store(tmp_path: Path) -> None:
    """SeaweedFS in the image's version, with the options, the key and the errand that docker-compose.yml gives it."""
    try:
        program = seaweedfs()
    except Missing as missing:
        pytest.skip(str(missing))
    version = SERVICES["object-store"]["image"].partition(":")[2]
    assert version in subprocess.run([program, "version"], capture_output=True, text=True, check=True).stdout
    port, *others = (free_port() for _ in range(4))
    here = {
        "-dir=/data": f"-dir={tmp_path}", "-ip=object-store": "-ip=127.0.0.1", "-s3.port=8333": f"-s3.port={port}",
        "-s3.config=/etc/seaweedfs/s3.json": f"-s3.config={ROOT / 'deploy/compose/s3.json'}",
    }  # fmt: skip
    words = [here.pop(word, word) for word in SERVICES["object-store"]["command"]]
    assert not here, "each of them stands in the file"
    for role, own in zip(("master", "volume", "filer"), others, strict=True):
        words += [f"-{role}.port={own}", f"-{role}.port.grpc={free_port()}"]
    words += [f"-s3.port.grpc={free_port()}", "-s3.port.iceberg=0"]
    assert not healthy("object-store", port)
    with running(program, *words) as server:
        eventually(lambda: healthy("object-store", port), "a healthy SeaweedFS")
        given = SERVICES["operator"]["environment"] | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        make_bucket(given)
        store = boto3.client(
            "s3", endpoint_url=given["AWS_ENDPOINT_URL"], region_name=given["AWS_REGION"],
            aws_access_key_id=given["AWS_ACCESS_KEY_ID"], aws_secret_access_key=given["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip
        # By which a commit is published once.
        store.put_object(Bucket="muster", Key="commit", Body=b"first", IfNoneMatch="*")
        with pytest.raises(ClientError, match="PreconditionFailed"):
            store.put_object(Bucket="muster", Key="commit", Body=b"second", IfNoneMatch="*")
        server.send_signal(signal.SIGSTOP)
        assert not healthy("object-store", port)


def make_bucket(environment: dict[str, str]) -> None:
    script = [sys.executable, ROOT / "deploy/compose/make_bucket.py", "muster"]
    for _ in range(2):
        done = subprocess.run(script, env=os.environ | environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "the bucket muster is there\n"), done.stderr


def test_the_bucket_is_made_once() -> None:
    with moto_server() as server:
        make_bucket(server.environment() | {"AWS_ENDPOINT_URL": server.url})
        assert "muster" in [bucket["Name"] for bucket in server.client().list_buckets()["Buckets"]]
