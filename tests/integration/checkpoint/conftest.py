"""S3 servers of both kinds, started once per module that asks, and room for the node cache."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.s3_servers import Missing, S3Server, moto_server, rclone_server

from muster.contract.names import Env


@pytest.fixture(scope="module")
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Ignores If-None-Match, checks Content-MD5."""
    try:
        with rclone_server(tmp_path_factory.mktemp("rclone")) as server:
            yield server
    except Missing as missing:
        pytest.skip(reason=str(missing))


@pytest.fixture(scope="module")
def moto_s3() -> Iterator[S3Server]:
    """Honours If-None-Match, checks no body."""
    with moto_server() as server:
        yield server


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the node cache that has room however full this machine's disks are: a cache takes no disk's last."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="muster-tests-cache-") as folder:
        monkeypatch.setenv(Env.CACHE_DIR, folder)
        yield Path(folder)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(("MUSTER_S3", "MUSTER_LOCAL")):
            monkeypatch.delenv(name)
    return monkeypatch
