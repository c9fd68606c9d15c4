"""What loading takes: a model of 2 GB on two ranks, from a folder and from S3, against each rank's shard of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.trainer.gangs import training, write_corpus
from tests.loading_rank import load_on_two_ranks, write_large_model
from tests.s3_servers import BUCKET, rclone_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The folder of a model in a bucket's folder, and the bytes of its weights."""
    folder = tmp_path_factory.mktemp("loading") / BUCKET / "large"
    yield folder, write_large_model(folder)
    shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_loading_two_gigabytes_takes_the_shard_and_a_tenth(large: tuple[Path, int], tmp_path: Path, kind: str) -> None:
    """From where the filling begins: what the process takes before it is the libraries'."""
    folder, total = large
    assert total > 2 * 10**9
    config = training(
        write_corpus(tmp_path / "corpus"),
        model={"source": folder.as_uri() if kind == "file" else f"s3://{BUCKET}/large"},
        adapter={"rank": 1, "targets": ["q_proj"]},
        parallel={"shard": "fsdp"},
    )
    with rclone_server(folder.parents[1]) as server:
        said = load_on_two_ranks(config, server.environment())
    for one in said:
        assert total / 2 <= one["share"] <= 0.51 * total
        assert one["peak"] - one["before"] <= 1.1 * one["share"], said
