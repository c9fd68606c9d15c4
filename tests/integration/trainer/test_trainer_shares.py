"""A data-parallel share is not a rank: whoever computes which share of a step's samples, the numbers are the same,
those drawn for dropout and for noise too."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.integration.trainer.shares import DIVIDED, DIVISIONS, STEPS, UNDRAWN
from tests.ports import free_port


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank: what two ranks saw of the same steps under every division."""
    out = tmp_path_factory.mktemp("shares") / "seen"
    about = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.trainer.shares", str(out)],
            env={**os.environ, **about, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=800)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", list(DIVISIONS))
def test_the_numbers_do_not_depend_on_who_computes_a_share(seen: list[dict[str, Any]], shard: str, name: str) -> None:
    _must_be_alike(seen, "ddp: plain", f"{shard}: {name}")


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_ranks_that_divide_the_tokens_of_their_rows_compute_the_same(seen: list[dict[str, Any]], shard: str) -> None:
    _must_be_alike(seen, f"ddp: {UNDRAWN}", f"{shard}: {DIVIDED}")


def _must_be_alike(seen: list[dict[str, Any]], one: str, other: str) -> None:
    plain, found = seen[0][one], seen[0][other]
    assert seen[1][other] == found  # what is reported is the same on every rank
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert found["evaluation"] == pytest.approx(plain["evaluation"], rel=1e-5)
    assert found["samples"] == plain["samples"]
    assert all(found["samples"])
    assert found["metrics"] == pytest.approx(plain["metrics"], rel=1e-5)
    assert {"sources/even/loss", "sources/odd/loss", "few/loss", "few/perplexity"} <= found["metrics"].keys()
    assert (found["tokens"], found["cursor"]) == (plain["tokens"], plain["cursor"])
