"""`muster estimate` without a server: the tables, the exit code, the faults with their lines."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests import forked

EXAMPLES = Path(__file__).parents[3] / "examples"


def estimate(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "MUSTER_S3_RETRY_SECONDS": "0.1"}  # no example's bucket is there
    return forked.run("muster.cli", ["estimate", *words], environment)


def test_every_example_that_stands_alone_has_an_estimate() -> None:
    for name in ("pretrain-stdlib", "pretrain-llama-8b", "sft-folder", "qlora-folder"):
        done = estimate(str(EXAMPLES / f"{name}.yaml"), "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["memory"][0]["total"] > 0


def test_the_tables_name_parts_gangs_and_what_is_not_known() -> None:
    done = estimate(str(EXAMPLES / "pretrain-llama-8b.yaml"))
    assert done.returncode == 0
    for word in ("8.03G parameters", "optimizer", "in all", "gangs that fit", "p5.48xlarge", "published"):
        assert word in done.stdout


def test_what_does_not_fit_ends_with_1_and_a_change() -> None:
    gpu = ["--set", "gang.gpusPerNode=1", "--set", "gang.nodes=1", "--set", "gang.instanceTypes=[p4d.24xlarge]"]
    done = estimate(str(EXAMPLES / "pretrain-llama-8b.yaml"), *gpu)
    assert done.returncode == 1
    assert "does not fit: a rank needs about" in done.stderr
    assert "would fit with" in done.stderr


def test_a_folder_that_is_not_there_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text((EXAMPLES / "sft-folder.yaml").read_text().replace("tiny-model", "nothing"))
    done = estimate(str(file))
    assert done.returncode == 2
    assert "holds no config.json" in done.stderr
    assert "model: {source: nothing}" in done.stderr
