"""`muster explain`, and docs/job.md, which is made from the same reference."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from muster.cli.errors import CliError, ExitStatus
from muster.cli.job_file import explaining, read_job_file
from muster.cli.main import app
from muster.documents.reader import read
from muster.recipe.document import parse_job
from muster.recipe.reference import job_reference
from muster.words.base import DocumentProblem

ROOT = Path(__file__).parents[3]


def explain(*words: str) -> str:
    result = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app, ["explain", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_key_has_its_facts_its_meaning_and_an_example() -> None:
    output = explain("training.batch.tokensPerStep")
    assert output.splitlines()[:2] == [
        "training.batch.tokensPerStep",
        "whole number, at least 1, in tokens, required",
    ]
    assert "Tokens of one optimizer step, over all ranks." in output
    assert "spec:\n  training:\n    batch:\n      tokensPerStep: 65536" in output


def test_a_section_lists_its_keys() -> None:
    output = explain("training.data.train")
    assert re.search(r"^source +text +required", output, re.MULTILINE)
    assert re.search(r"^format +choice +auto", output, re.MULTILINE)


def test_without_a_path_the_sections_are_listed() -> None:
    assert re.search(r"^training +section", explain(), re.MULTILINE)
    assert explain("spec") == explain()


def test_a_name_of_another_tool_is_answered_by_the_key() -> None:
    output = explain("lora_alpha")
    assert output.startswith("lora_alpha of other tools is this key here\n\ntraining.adapter.alpha\n")
    assert "accumulation follows from it" in explain("gradient_accumulation_steps")
    assert "\ngang.gpusPerNode\n" in explain("gpus")
    assert explain("gang.deviceClasses.gpus").startswith("gang.deviceClasses.gpus\n")
    assert explain("logging_steps").startswith("logging_steps of other tools has no key here: every step is recorded")


def test_a_name_that_several_keys_have_lists_them_with_their_paths() -> None:
    output = explain("beta")
    assert "5 keys have this name." in output
    assert "training.dpo.beta" in output


def test_json_says_the_same() -> None:
    key = json.loads(explain("warmup_steps", "--json"))
    assert key["path"] == "training.optimizer.schedule.warmupSteps"
    assert (key["type"], key["unit"], key["default"], key["required"]) == ("whole number", "steps", 0, False)
    assert [each["path"] for each in json.loads(explain("training.batch", "--json"))["keys"]] == [
        "training.batch.tokensPerStep",
        "training.batch.microBatch",
    ]
    assert json.loads(explain("learning_rate", "--json"))["note"].startswith("learning_rate of other tools")
    assert json.loads(explain("logging_steps", "--json"))["path"] is None


@pytest.mark.parametrize(("path", "near"), [("training.optimzer", "training.optimizer"), ("seqenceLength", "data.seq")])
def test_an_unknown_key_is_refused_with_a_near_one(path: str, near: str) -> None:
    result = CliRunner().invoke(app, ["explain", path])
    assert isinstance(result.exception, CliError)
    assert result.exception.exit_code == ExitStatus.USAGE
    assert near in result.exception.next_step


def test_a_fault_of_a_document_leads_to_the_section_that_it_is_in(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("spec: {}\n")
    file = read_job_file(str(tmp_path / "job.yaml"))
    faults = (file.fault(DocumentProblem("spec.training.data.train[0].formt", "unknown key", "format")),)
    assert explaining(faults) == "`muster explain training.data.train` lists the keys of that section"
    assert explaining((file.fault(DocumentProblem("spec.training", "is required")),)) == ""
    assert explain("training.data.train")


@pytest.fixture
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_job_docs", ROOT / "tools" / "generate_job_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh_and_a_difference_is_noticed(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generator.main(["--check"]) == 0
    monkeypatch.setattr(generator, "TARGET", tmp_path / "job.md")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0


def test_every_link_of_the_page_leads_to_a_heading(generator: ModuleType) -> None:
    text = generator.text()
    headings = {
        re.sub(r"[^\w -]", "", line[3:].lower()).replace(" ", "-") for line in text.splitlines() if line[:3] == "## "
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= headings


def test_every_key_is_on_the_page(generator: ModuleType) -> None:
    text = generator.text()
    for key in job_reference().values():
        assert f"**`{key.name}`**" in text or f"**[`{key.name}`](#" in text or not key.name.strip("*"), key.path


@pytest.mark.parametrize("page", ["README.md", "docs/job.md"])
def test_the_job_of_a_page_is_valid(page: str) -> None:
    (document,) = re.findall(r"```yaml\n(apiVersion.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert parse_job(read(document.encode(), "yaml").data).name == "my-assistant"
