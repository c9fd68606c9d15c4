"""The trainer's tools, run as processes: the command line imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import typer

from muster.cli.errors import CliError, ExitStatus
from muster.cli.output import json_wanted

# Exit codes of the trainer's tools in ours: 2 and 80 are requests that can't be met, 83 is a store that fails.
_EXITS = {1: ExitStatus.FAILED, 2: ExitStatus.USAGE, 80: ExitStatus.USAGE, 83: ExitStatus.FAILED}


def run_tool(code: str, module: str, *arguments: str, given: str | None = None) -> None:
    """Let the trainer's tool do it; its words and its document are ours. `code` is the error's name with --json, and
    `given` its standard input. Raises typer.Exit when it fails."""
    command = [sys.executable, "-m", module, *arguments]
    if json_wanted():
        done = subprocess.run([*command, "--json"], check=False, stderr=subprocess.PIPE, text=True, input=given)
        if done.returncode and (words := _error_in(done.stderr)):
            raise CliError(words, exit_code=_EXITS.get(done.returncode, ExitStatus.FAILED), code=code)
        sys.stderr.write(done.stderr)
        status = done.returncode
    else:
        status = subprocess.run(command, check=False, text=True, input=given).returncode
    if status:
        raise typer.Exit(_EXITS.get(status, ExitStatus.FAILED))


def _error_in(text: str) -> str | None:
    """The words of the tool's error document, its last line; None where it ended otherwise."""
    try:
        return str(json.loads(text.strip().splitlines()[-1])["error"])
    except (ValueError, IndexError, KeyError, TypeError):
        return None
