"""Write docs/cli.md from the command line itself: python tools/generate_cli_docs.py [--check]"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import typer.main

from muster.cli.errors import ExitStatus
from muster.cli.main import PANELS, app, command_name

TARGET = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# The `muster` command

Written by `tools/generate_cli_docs.py` from the command itself; `make generated` fails when they part.

- Every command takes `--help`; those that answer take `--json`: then standard output holds JSON and nothing else
  (one document, or one per line where something is followed). An error is a document too: `{"error": {"code",
  "message", "exitCode", "problems": [{"path", "message", "didYouMean", "line", "column"}], "next"}}`.
- Words for people (progress, warnings, errors) go to standard error. Colour is for terminals only, and never with
  `NO_COLOR`.
- Ctrl-C while something is followed never stops the job.
- `JOB` is a name or an id. A name means the newest job of that name, here and in `training.model.from.job`; an older
  one is meant by its id.
- `muster --context my-cluster ls` speaks to the cluster of that kubeconfig context itself, where there is no API. So do
  `submit`, `get`, `why`, `events`, `logs`, `cancel`, `suspend` and `resume`, as the person of the kubeconfig, in the
  context's namespace or that of `--namespace`. Exec plugins (`aws eks get-token` and its like) and several files in
  `KUBECONFIG` work as with kubectl.
- The server is `--server`, else `MUSTER_SERVER`, else the `muster up` of this machine (state folder: `MUSTER_STATE`,
  by default `~/.muster`). The token is `MUSTER_TOKEN`, else the file `~/.config/muster/token`, which only you may
  read (`chmod 600`).
- `muster --install-completion` completes commands, options and the names of jobs in bash, zsh and fish.

## Exit codes

| code | meaning |
|---|---|
"""
MEANINGS = {
    ExitStatus.OK: "done; of a followed job: it succeeded",
    ExitStatus.FAILED: "the job failed or was cancelled, or the server said no (no such job, a name that is taken)",
    ExitStatus.USAGE: "bad arguments or bad input; nothing was done",
    ExitStatus.UNREACHABLE: "no server answers",
    ExitStatus.INTERRUPTED: "Ctrl-C; a followed job goes on",
    ExitStatus.UNREAD: "what reads the output left (`muster logs -f JOB \\| head`); other commands finish their work",
}


def text() -> str:
    lines = [HEAD.rstrip("\n")]
    lines += [f"| {int(code)} | {MEANINGS[code]} |" for code in ExitStatus]
    group = typer.main.get_command(app)
    commands: dict[str, Any] = group.commands  # type: ignore[attr-defined]
    panels = {name: [command_name(function) for function in functions] for name, functions in PANELS.items()}
    listed = {name for names in panels.values() for name in names}
    for panel, names in panels.items():
        lines += ["", f"## {panel}"]
        for name in names:
            lines += _command(f"muster {name}", commands[name])
    for name in sorted(set(commands) - listed):
        lines += ["", f"## `muster {name}`", "", inspect.cleandoc(commands[name].help or "")]
        for sub, command in commands[name].commands.items():
            lines += _command(f"muster {name} {sub}", command)
    return "\n".join(lines) + "\n"


def _command(name: str, command: Any) -> list[str]:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    options = [parameter for parameter in shown if parameter.param_type_name == "option" and parameter.name != "help"]
    usage = " ".join([name, *([] if not options else ["[OPTIONS]"]), *(_metavar(argument) for argument in arguments)])
    lines = ["", f"### `{usage}`", "", inspect.cleandoc(command.help or ""), ""]
    lines += [f"- `{_metavar(argument)}`: {argument.help}" for argument in arguments]
    for option in options:
        value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
        default = f" Default: `{option.default}`." if _worth_telling(option) else ""
        lines.append(f"- `{', '.join(option.opts)}{value}`: {option.help}{default}")
    return lines


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _worth_telling(option: Any) -> bool:
    return not option.is_flag and option.default is not None and not callable(option.default) and option.default != []


def main(arguments: list[str]) -> int:
    wanted = text()
    if arguments == ["--check"]:
        if not TARGET.exists() or TARGET.read_text() != wanted:
            print(f"{TARGET.name} is not what the command says of itself; run python tools/generate_cli_docs.py")
            return 1
        return 0
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
