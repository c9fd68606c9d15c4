"""The S3 servers of the stores' own tests, and room for the node cache."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.storage.conftest import moto_s3, rclone_s3

from muster.words.names import Env

__all__ = ["moto_s3", "rclone_s3"]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the node cache that has room however full this machine's disks are: a cache takes no disk's last."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="muster-tests-cache-") as folder:
        monkeypatch.setenv(Env.CACHE_DIR, folder)
        yield Path(folder)
