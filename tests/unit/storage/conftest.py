"""S3 servers of both kinds, started once per module that asks."""

from collections.abc import Iterator

import pytest
from tests.s3_servers import Missing, S3Server, moto_server, rclone_server


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
