"""`muster models`: names for OpenAI's clients, written to the file of the platform on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muster.api.openai.models.base_models import load_models
from muster.cli.errors import CliError
from muster.cli.main import app

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUSTER_STATE", str(tmp_path))
    return tmp_path


def muster(*words: str) -> str:
    result = CliRunner().invoke(app, ["models", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_folder_is_mapped_with_settings_and_removed(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = json.loads(muster("add", "gpt-4o-mini", str(EXAMPLES / "tiny-model"), "--json"))
    assert added["spec"]["training"]["model"] == {"source": str(EXAMPLES / "tiny-model")}
    muster("add", "new", "muster-1m", "--gpus", "2")
    models = load_models(state / "base-models.yaml").models  # as the API reads them, each tried with a job
    assert list(models) == ["gpt-4o-mini", "new"]
    assert models["new"].spec["gang"] == {"nodes": 1, "gpusPerNode": 2}
    monkeypatch.chdir(EXAMPLES)
    relative = json.loads(muster("add", "gpt-4o-mini", "tiny-model", "--json"))
    assert relative["spec"]["training"]["model"] == {"source": str(EXAMPLES / "tiny-model")}
    muster("add", "new", "muster-4m")
    assert load_models(state / "base-models.yaml").models["new"].spec["training"]["model"] == {"preset": "muster-4m"}
    muster("rm", "gpt-4o-mini")
    assert list(load_models(state / "base-models.yaml").models) == ["new"]
    with pytest.raises(CliError, match="'newer' was not added by"):
        muster("rm", "newer")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a:b", "muster-1m"], "a model's name has letters"),
        (["a", "my-job"], "a job's checkpoint needs no name of its own"),
        (["a", "muster-1m", "--method", "lorra"], "--method is one of"),
        (["a", "file:///nowhere"], "can't be used"),
    ],
)
def test_what_no_job_could_start_from_is_refused(state: Path, words: list[str], message: str) -> None:
    with pytest.raises(CliError, match=message):
        muster("add", *words)
    assert not (state / "base-models.yaml").exists()


def test_a_file_that_is_damaged_is_not_written_over(state: Path) -> None:
    (state / "base-models.yaml").write_text("models: 1")
    with pytest.raises(CliError, match=r"base-models\.yaml can't be read"):
        muster("add", "a", "muster-1m")
    assert (state / "base-models.yaml").read_text() == "models: 1"


def test_without_a_platform_there_is_nothing_to_map_for(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_STATE", str(state / "nowhere"))
    with pytest.raises(CliError, match="no platform was ever started"):
        muster("add", "a", "muster-1m")
