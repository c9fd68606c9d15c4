"""The command as a user meets it, without a server: help, exit codes, errors for people and for machines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import forked
from typer.testing import CliRunner

from muster.cli.main import app


def muster(*words: str, tmp_path: Path, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config"), "MUSTER_STATE": str(tmp_path / "state")}
    return forked.run("muster.cli", words, {**os.environ, **home, **environ}, stdin)


COMMANDS = ["up", "down", "demo", "submit", "ls", "get", "cancel", "suspend", "resume", "clone"]
COMMANDS += ["logs", "events", "metrics", "why", "export", "generate", "chat", "samples", "checkpoints"]


def test_help_names_every_command_and_the_exit_codes(tmp_path: Path) -> None:
    result = muster("--help", tmp_path=tmp_path)
    assert result.returncode == 0
    assert set(COMMANDS) <= set(result.stdout.split())
    assert "130 Ctrl-C" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str) -> None:
    words = [command, "ls"] if command == "checkpoints" else [command]
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    """What makes `--help` slow is what it imports; the time itself is measured by hand, for machines differ."""
    code = (
        "import sys; sys.argv = ['muster', '--help']\n"
        "from muster.cli.main import app\n"
        "try: app()\nexcept SystemExit: pass\n"
        "heavy = {'pydantic', 'httpx2', 'yaml', 'psutil', 'sqlite3', 'asyncio', 'ssl'} & set(sys.modules)\n"
        "print('heavy:', *sorted(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "heavy:"


def test_colour_is_only_for_terminals_and_never_with_no_color(tmp_path: Path) -> None:
    plain = muster("get", "x", "--server", "http://127.0.0.1:9", tmp_path=tmp_path)
    forced = muster("get", "x", "--server", "http://127.0.0.1:9", tmp_path=tmp_path, FORCE_COLOR="1")
    never = muster("get", "x", "--server", "http://127.0.0.1:9", tmp_path=tmp_path, FORCE_COLOR="1", NO_COLOR="1")
    assert "\x1b[31m" not in plain.stderr
    assert "31m" in forced.stderr
    assert "31m" not in never.stderr


def test_no_server_is_exit_code_3_with_the_next_step(tmp_path: Path) -> None:
    result = muster("ls", tmp_path=tmp_path)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.splitlines() == [
        "error: no Muster server is named, and none runs on this machine",
        "next:  start one with `muster up`, or name one with --server or MUSTER_SERVER",
    ]
    before = muster("--server", "http://127.0.0.1:9", "ls", tmp_path=tmp_path)
    assert (before.returncode, "no Muster answers at http://127.0.0.1:9: " in before.stderr) == (3, True)
    named = muster("ls", "--server", "http://127.0.0.1:9", tmp_path=tmp_path)
    assert named.returncode == 3
    assert "no Muster answers at http://127.0.0.1:9: connection refused" in named.stderr


def test_errors_are_json_too_where_that_is_wanted(tmp_path: Path) -> None:
    result = muster("ls", "--json", tmp_path=tmp_path, MUSTER_SERVER="http://127.0.0.1:9")
    assert result.returncode == 3
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["exitCode"], error["server"]) == ("unreachable", 3, "http://127.0.0.1:9")
    assert "error: no Muster answers" in result.stderr


def test_bad_yaml_is_exit_code_2_and_shows_the_place(tmp_path: Path) -> None:
    server = "http://127.0.0.1:9"
    result = muster("submit", "-", "--server", server, tmp_path=tmp_path, stdin="spec:\n  a: [1\n  b: 2\n")
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: standard input, line 3, column 4: did not find expected ',' or ']'")
    assert lines[1:] == ["  standard input:3:4", "    3 |   b: 2", "      |    ^"]


@pytest.mark.parametrize(
    "words",
    [["submit"], ["submit", "/nowhere.yaml"], ["fly"], ["ls", "--fast"], ["up", "--port", "x"], ["up", "--nodes", "0"]],
)
def test_bad_usage_is_exit_code_2(tmp_path: Path, words: list[str]) -> None:
    result = muster(*words, tmp_path=tmp_path, MUSTER_SERVER="http://127.0.0.1:9")
    assert (result.returncode, result.stdout) == (2, "")


def test_the_version() -> None:
    command = [sys.executable, "-m", "muster.cli", "--version"]  # from nothing, as nothing else of this file
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("muster 0.")


def test_no_standard_output_at_all_ends_in_no_traceback() -> None:
    words = [sys.executable, "-m", "muster.cli", "explain", "training.batch"]
    ended = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *words], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete(tmp_path: Path, shell: str) -> None:
    words = {"COMP_WORDS": "muster su", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "muster su"}
    words |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_WORD_TO_COMPLETE": "su"}
    result = muster(tmp_path=tmp_path, _MUSTER_COMPLETE=f"complete_{shell}", **words)
    assert {"submit", "suspend"} <= set(result.stdout.replace('"', " ").replace(":", " ").split())


def test_completing_job_names_is_silent_without_a_server(tmp_path: Path) -> None:
    words = {"COMP_WORDS": "muster get ", "COMP_CWORD": "2", "_TYPER_COMPLETE_ARGS": "muster get "}
    result = muster(tmp_path=tmp_path, _MUSTER_COMPLETE="complete_bash", **words)
    assert (result.stdout.strip(), result.stderr) == ("", "")


def test_down_without_up_says_so(tmp_path: Path) -> None:
    result = muster("down", tmp_path=tmp_path)
    assert result.returncode == 1
    assert "no `muster up` runs on" in result.stderr


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("ls --context c", "--context c ls"),
        ("ls --limit 3 --context=c --namespace n", "--context=c --namespace n ls --limit 3"),
        ("checkpoints ls job --context c", "--context c checkpoints ls job"),
        ("--context c ls", "--context c ls"),
        ("doctor --context c", "doctor --context c"),  # an option of its own
        ("up --context c", "up --context c"),  # speaks to no cluster, and refuses it
        ("run --gpus 1 -- train.py --context c", "run --gpus 1 -- train.py --context c"),
        ("ls --context", "ls --context"),
        ("--help", "--help"),
    ],
)
def test_the_cluster_may_be_named_on_either_side_of_the_command(typed: str, read: str) -> None:
    from typer.main import get_command

    from muster.cli.main import options_first

    assert options_first(get_command(app), typed.split()) == read.split()
