"""docs/cli.md is what the command says of itself, and the check that says so notices a difference."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_cli_docs", ROOT / "tools" / "generate_cli_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_fresh(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0


def test_a_difference_is_noticed_and_put_right(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "TARGET", tmp_path / "docs" / "cli.md")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    generator.TARGET.write_text(generator.TARGET.read_text().replace("--follow", "--wait-for-it", 1))
    assert generator.main(["--check"]) == 1


def test_every_command_is_in_it(generator: ModuleType) -> None:
    text = generator.text()
    for command in ("up", "demo", "submit", "logs", "checkpoints ls", "checkpoints verify"):
        assert f"### `muster {command} [OPTIONS]" in text
    assert "--parent-pid" not in text, "hidden options stay hidden"
