"""Every example is a valid job, reads as the command reads it, and what it names is there."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from tests.tidy.documents import FENCE, documents

from muster.cli.job_file import read_job_file
from muster.cli.paths import make_absolute
from muster.recipe.document import parse_job

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))


def test_there_are_examples() -> None:
    assert {"pretrain-stdlib.yaml", "sft-chat.yaml", "pretrain-llama-8b.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_example_is_a_valid_job(file: Path) -> None:
    document = read_job_file(str(file))
    make_absolute(document, local=True)
    document.data.pop("sweep", None)  # what is left is the job that it makes many of
    job = parse_job(document.data)
    sources = [source.source for source in job.spec.training.data.train]
    for source in sources:
        assert "://" in source or Path(source).exists(), source
    for nodes in job.spec.gang_sizes():
        assert job.spec.training.accumulation(nodes * job.spec.gang.ranks_per_node) >= 1
    assert job.spec.gang.nodes.max in job.spec.gang_sizes()


def documented_jobs() -> list[tuple[str, str]]:
    """(document, text) of each whole TrainingJob in the documentation."""
    root = EXAMPLES.parent
    blocks = [
        (str(path.relative_to(root)), block) for path in documents(root) for block in FENCE.finditer(path.read_text())
    ]
    return [(name, block["body"]) for name, block in blocks if "kind: TrainingJob\n" in block["body"]]


@pytest.mark.parametrize(("name", "text"), documented_jobs(), ids=lambda part: part if part.endswith(".md") else "")
def test_a_job_in_the_documentation_is_valid(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    document = read_job_file(str(file))
    make_absolute(document, local=True)
    assert parse_job(document.data).name, name


def test_the_documentation_has_whole_jobs() -> None:
    assert len(documented_jobs()) >= 2


@pytest.mark.parametrize("name", ["sft-chat.yaml", "lora-chat.yaml"])
def test_the_fine_tuning_examples_start_from_the_pretraining_example(name: str) -> None:
    base = parse_job(read_job_file(str(EXAMPLES / "pretrain-stdlib.yaml")).data)
    tuned = parse_job(read_job_file(str(EXAMPLES / name)).data)
    assert (tuned.spec.training.adapter is not None) is (name == "lora-chat.yaml")
    origin = tuned.spec.training.model.from_
    assert origin is not None
    assert origin.job == base.name
    assert tuned.spec.training.data.tokenizer == base.spec.training.data.tokenizer


@pytest.mark.parametrize("name", ["dpo-chat.yaml", "reward-chat.yaml"])
def test_the_examples_of_preferences_start_from_the_fine_tuned_example(name: str) -> None:
    base = parse_job(read_job_file(str(EXAMPLES / "sft-chat.yaml")).data)
    origin = parse_job(read_job_file(str(EXAMPLES / name)).data).spec.training.model.from_
    assert origin is not None
    assert origin.job == base.name


def test_the_demo_has_an_evaluation_and_commits_before_its_middle() -> None:
    spec = parse_job(read_job_file(str(EXAMPLES / "pretrain-stdlib.yaml")).data).spec
    steps = spec.training.length.steps
    assert steps is not None
    assert spec.training.evaluation is not None
    assert isinstance(spec.checkpoint.every, int)
    assert spec.checkpoint.every < steps / 2
    assert (spec.gang.nodes.min, spec.gang.gpus_per_node, spec.training.parallel.shard) == (2, 0, "fsdp")


@pytest.mark.parametrize(
    ("script", "name"), [("make_chat.py", "chat.jsonl"), ("make_preferences.py", "preferences.jsonl")]
)
def test_the_data_is_what_the_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    shutil.copy(EXAMPLES / "chat.jsonl", tmp_path)
    module = runpy.run_path(str(EXAMPLES / script))
    module["main"].__globals__["TARGET"] = tmp_path / name
    module["main"]()
    assert (tmp_path / name).read_text() == (EXAMPLES / name).read_text()


def test_every_conversation_ends_with_the_assistant() -> None:
    for line in (EXAMPLES / "chat.jsonl").read_text().splitlines():
        assert json.loads(line)["messages"][-1]["role"] == "assistant"


def test_the_first_job_of_the_installation_fits_one_node(tmp_path: Path) -> None:
    """As docs/install.md makes it: a worker takes a node, so a gang of two never started in a cluster of one."""
    command = "sed 's/nodes: 2/nodes: 1/' examples/pretrain-stdlib.yaml | kubectl apply"
    assert command in (EXAMPLES.parent / "docs" / "install.md").read_text()
    file = tmp_path / "first.yaml"
    file.write_text((EXAMPLES / "pretrain-stdlib.yaml").read_text().replace("nodes: 2", "nodes: 1"))
    spec = parse_job(read_job_file(str(file)).data).spec
    assert tuple(spec.gang_sizes()) == (1,)
    assert spec.training.accumulation(1) >= 1
