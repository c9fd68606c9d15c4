"""The set-up behind every make target: it says why it can't, does nothing twice and installs once for two makes."""

import ast
import importlib.util
import json
import subprocess
import sys
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
    monkeypatch.setattr(tool, "VENV", str(tmp_path / ".venv"))
    monkeypatch.setattr(tool, "VENV_PYTHON", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr(tool, "STAMP", str(tmp_path / ".venv" / "muster-installed.json"))
    monkeypatch.setattr(tool, "LOCK", str(tmp_path / ".venv.lock"))
    monkeypatch.setattr(tool, "LOADED", {"all": ("planted",), "dev": ("json",)})
    (tmp_path / "planted.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return tool


@pytest.fixture
def installs(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Notes pip's calls instead of making them; the environment itself is real but bare."""
    calls: list[list[str]] = []
    real = subprocess.call

    def call(command: list[str], **options: Any) -> int:
        if command[-1] == "check":
            calls.append(["check"])
            return 0
        if command[1:3] == ["-m", "venv"]:
            command = [*command[:3], "--without-pip", *command[3:]]
        return real(command, **options)

    def install(command: list[str]) -> bool:
        calls.append(command[command.index("--disable-pip-version-check") + 1 :])
        return True

    monkeypatch.setattr(setup.subprocess, "call", call)
    monkeypatch.setattr(setup, "run_showing_the_last_line", install)
    monkeypatch.setattr(setup, "has_pip", lambda: True)
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


def test_a_python_without_ensurepip_is_named(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    assert setup.main(["dev"]) == 1
    message = capsys.readouterr().err
    assert "no 'ensurepip' module" in message
    assert "apt install python3." in message


def test_the_second_run_does_nothing(setup: ModuleType, installs: list[list[str]]) -> None:
    assert setup.main(["run"]) == 0
    assert installs == [["install", "--no-compile", "--retries", "5", "--editable", ".[all]"], ["check"]]
    installs.clear()
    assert setup.main(["run"]) == 0
    assert installs == []


def test_the_tests_need_more_than_the_demo_and_not_the_other_way_round(
    setup: ModuleType, installs: list[list[str]]
) -> None:
    assert setup.main(["run"]) == 0
    assert setup.main(["dev"]) == 0
    assert [call[-1] for call in installs if call[0] == "install"] == [".[all]", ".[all,dev]"]
    installs.clear()
    assert setup.main(["run"]) == 0
    assert installs == []


def test_changed_requirements_are_installed(setup: ModuleType, installs: list[list[str]], tmp_path: Path) -> None:
    assert setup.main(["dev"]) == 0
    installs.clear()
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'planted'\ndependencies = ['wheel']\n")
    assert setup.main(["dev"]) == 0
    assert [call[-1] for call in installs] == [".[all,dev]", "check"]


def test_what_is_loaded_is_compiled_even_where_processes_must_not(
    setup: ModuleType, installs: list[list[str]], tmp_path: Path
) -> None:
    assert setup.main(["run"]) == 0
    assert [path.name.split(".")[0] for path in tmp_path.glob("__pycache__/*.pyc")] == ["planted"]


def test_what_can_not_be_loaded_is_said_and_leaves_no_stamp(
    setup: ModuleType, installs: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted.py").write_text("import nothing_of_that_name")
    assert setup.main(["dev"]) == 1
    assert "what was installed can't be loaded" in capsys.readouterr().err
    assert not (tmp_path / ".venv" / "muster-installed.json").exists()


def test_a_failed_installation_shows_pips_last_words_and_leaves_no_stamp(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "create_venv", lambda: None)
    pip = tmp_path / ".venv" / "bin" / "python"
    pip.parent.mkdir(parents=True)
    pip.write_text("#!/bin/sh\nseq 100\necho 'ERROR: no matching distribution' >&2\nexit 1\n")
    pip.chmod(0o755)
    assert setup.main(["dev"]) == 1
    message = capsys.readouterr().err
    assert "\n100\nERROR: no matching distribution\n" in message
    assert "\n50\n" not in message
    assert "pip could not install" in message
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
    assert [call[-1] for call in installs] == [".[all,dev]", "check"]


def test_a_stamp_cut_short_counts_as_none(setup: ModuleType, installs: list[list[str]], tmp_path: Path) -> None:
    assert setup.main(["dev"]) == 0
    stamp = tmp_path / ".venv" / "muster-installed.json"
    stamp.write_text(stamp.read_text()[:20])
    installs.clear()
    assert setup.main(["dev"]) == 0
    assert [call[-1] for call in installs] == [".[all,dev]", "check"]
    assert json.loads(stamp.read_text())["extras"] == ["all", "dev"]
