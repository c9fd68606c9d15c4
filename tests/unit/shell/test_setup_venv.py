"""The set-up behind every make target: it says why it can't, does nothing twice and installs once for two makes."""

import ast
import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "setup_venv.py"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool, pointed at a checkout that has nothing but a pyproject.toml."""
    spec = importlib.util.spec_from_file_location("setup_venv", TOOL)
    assert spec
    assert spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'planted'\n")
    monkeypatch.setattr(tool, "ROOT", str(tmp_path))
    return tool


@pytest.fixture
def installs(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Notes pip's calls instead of making them; the environment itself is real but bare."""
    calls: list[list[str]] = []
    real = subprocess.call

    def call(command: list[str], **options: Any) -> int:
        if command[1:3] == ["-m", "venv"]:
            return real([*command[:3], "--without-pip", *command[3:]], **options)
        if command[1:3] == ["-m", "pip"] and Path(command[0]).exists():
            if command[3] != "--version":
                calls.append(command[3:])
            return 0
        return real(command, **options)

    monkeypatch.setattr(setup.subprocess, "call", call)
    return calls


def test_an_old_python_is_refused_in_words(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup.sys, "version_info", (3, 10, 4))
    assert setup.main(["dev"]) == 1
    message = capsys.readouterr().err
    assert "needs Python 3.11 or newer" in message
    assert "is 3.10.4" in message
    assert "make PYTHON=" in message


def test_the_tool_parses_on_pythons_that_it_refuses() -> None:
    assert ast.parse(TOOL.read_text(), feature_version=(3, 7))


def test_a_folder_that_is_no_environment_is_left_alone(
    setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thesis = tmp_path / ".venv" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    assert setup.main(["dev"]) == 1
    assert "is not a virtual environment" in capsys.readouterr().err
    assert thesis.read_text() == "years of work"


def test_a_python_that_makes_no_environment_is_named(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup.sys, "executable", "/bin/false")
    assert setup.main(["dev"]) == 1
    message = capsys.readouterr().err
    assert "'/bin/false -m venv' failed" in message
    assert "apt install python3." in message


def test_the_second_run_does_nothing(setup: ModuleType, installs: list[list[str]]) -> None:
    assert setup.main(["run"]) == 0
    assert installs == [["install", "--quiet", "--no-compile", "--editable", ".[all,docs]"], ["check"]]
    installs.clear()
    assert setup.main(["run"]) == 0
    assert installs == []


def test_the_tests_need_more_than_the_demo_and_not_the_other_way_round(
    setup: ModuleType, installs: list[list[str]]
) -> None:
    assert setup.main(["run"]) == 0
    assert setup.main(["dev"]) == 0
    assert [call[-1] for call in installs if call[0] == "install"] == [".[all,docs]", ".[all,docs,dev]"]
    installs.clear()
    assert setup.main(["run"]) == 0
    assert installs == []


def test_changed_requirements_are_installed(setup: ModuleType, installs: list[list[str]], tmp_path: Path) -> None:
    assert setup.main(["dev"]) == 0
    installs.clear()
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'planted'\ndependencies = ['wheel']\n")
    assert setup.main(["dev"]) == 0
    assert [call[-1] for call in installs] == [".[all,docs,dev]", "check"]


def test_a_failed_installation_shows_pips_words_and_leaves_no_stamp(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "create_venv", lambda: None)
    pip = tmp_path / ".venv" / "bin" / "python"
    pip.parent.mkdir(parents=True)
    pip.write_text("#!/bin/sh\necho 'ERROR: no matching distribution' >&2\nexit 1\n")
    pip.chmod(0o755)
    assert setup.main(["dev"]) == 1
    message = capfd.readouterr().err
    assert "ERROR: no matching distribution\n" in message
    assert "pip could not install" in message
    assert not (tmp_path / ".venv" / "muster-installed.json").exists()


def test_packages_that_contradict_each_other_leave_no_stamp(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "create_venv", lambda: None)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$3" != check ] || { echo "a has requirement b" >&2; exit 1; }\n')
    python.chmod(0o755)
    assert setup.main(["dev"]) == 1
    message = capfd.readouterr().err
    assert "a has requirement b" in message
    assert "contradict each other" in message
    assert not (tmp_path / ".venv" / "muster-installed.json").exists()


def test_an_environment_whose_python_is_gone_is_made_anew(
    setup: ModuleType, installs: list[list[str]], tmp_path: Path
) -> None:
    assert setup.main(["dev"]) == 0
    python = tmp_path / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3")
    installs.clear()
    assert setup.main(["dev"]) == 0
    assert python.resolve().exists()
    assert [call[-1] for call in installs] == [".[all,docs,dev]", "check"]


def test_a_stamp_cut_short_counts_as_none(setup: ModuleType, installs: list[list[str]], tmp_path: Path) -> None:
    assert setup.main(["dev"]) == 0
    stamp = tmp_path / ".venv" / "muster-installed.json"
    stamp.write_text(stamp.read_text()[:20])
    installs.clear()
    assert setup.main(["dev"]) == 0
    assert [call[-1] for call in installs] == [".[all,docs,dev]", "check"]
    assert json.loads(stamp.read_text())["extras"] == ["all", "docs", "dev"]
