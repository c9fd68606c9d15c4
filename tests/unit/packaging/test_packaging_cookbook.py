"""The cookbook's and the tutorial's YAML is read as a submission reads it, and keys that the comparisons name exist."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from tests.tidy.documents import FENCE

from muster.documents.reader import load_yaml
from muster.recipe.document import TrainingJob
from muster.recipe.reference import job_reference
from muster.recipe.sweep import Sweep

DOCS = Path(__file__).parents[3] / "docs"
SECTIONS = ("training.", "gang.", "checkpoint.", "runtime.", "program.", "tracking.", "recovery.")


def blocks(page: str, opening: str) -> list[str]:
    """Return the bodies of the page's blocks that open with these words."""
    found = FENCE.finditer((DOCS / page).read_text())
    return [block["body"] for block in found if block[0].partition("\n")[0].strip() == f"```{opening}"]


def tutorial_job() -> dict[str, Any]:
    (text,) = blocks("tutorial.md", 'yaml title="first.yaml"')
    job: dict[str, Any] = load_yaml(text)
    # `muster submit` writes the address of a folder that lies beside the file; the contract reads addresses alone.
    job["spec"]["training"]["model"]["source"] = "file:///home/you/first/tiny-model"
    return job


def replaced(spec: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
    """Return the spec with the piece's keys in place of its own: of `training` key by key, of all else as a whole."""
    result = {**copy.deepcopy(spec), **piece}
    if "training" in piece:
        result["training"] = {**spec["training"], **piece["training"]}
    return result


@pytest.mark.parametrize("piece", blocks("cookbook.md", "yaml"), ids=lambda piece: " ".join(piece.split())[:60])
def test_each_piece_of_the_cookbook_fits_into_the_tutorials_job(piece: str) -> None:
    job = tutorial_job()
    TrainingJob.model_validate({**job, "spec": replaced(job["spec"], load_yaml(piece))})


def test_the_sweep_of_the_cookbook_is_one() -> None:
    (text,) = blocks("cookbook.md", 'yaml title="sweep"')
    assert Sweep.model_validate(load_yaml(text)).trials == 8


def test_each_key_that_a_comparison_names_is_one_of_a_job() -> None:
    quoted = re.findall(r"`([a-zA-Z.]+)`", (DOCS / "coming-from.md").read_text())
    keys = {word for word in quoted if word.startswith(SECTIONS)}
    assert len(keys) > 40
    assert keys - job_reference().keys() == set()
