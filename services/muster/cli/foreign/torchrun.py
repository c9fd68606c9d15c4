"""A command line, perhaps torchrun's, as the program of a job. Pure.

Of torchrun's options the job says in other words how many ranks there are; its rendezvous and its restarts are
Muster's own. Options with other meanings are named, so that nothing is lost without a word.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

_PYTHON: Final = re.compile(r"(.*/)?python(3(\.[0-9]+)?)?")
_TORCHRUN: Final = re.compile(r"(.*/)?torchrun")
_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch")
# Options that take a value, as torchrun has them with either `-` or `_` between their words.
_NODES, _RANKS = "nnodes", "nproc-per-node"
_RENDEZVOUS: Final = (
    "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "master-addr", "master-port", "node-rank", "local-addr",
)  # fmt: skip
_WITHOUT_MEANING: Final = {
    "max-restarts": "restarts have budgets by their cause (recovery.budgets)",
    "monitor-interval": "ranks are watched anyway",
    "start-method": "ranks are processes of their own",
    "role": "all ranks are alike",
    "log-dir": "the workers' output is kept (`muster logs`)",
    "redirects": "the workers' output is kept (`muster logs`)",
    "tee": "the workers' output is kept (`muster logs`)",
    "local-ranks-filter": "the workers' output is kept whole (`muster logs`)",
    "logs-specs": "the workers' output is kept (`muster logs`)",
    "numa-binding": "ranks are not bound to cores",
    "signals-to-handle": "SIGTERM is passed on to the ranks",
    "event-log-handler": "events are Muster's (`muster events`)",
}
_FLAGS: Final = ("standalone", "module", "m", "no-python", "run-path", "use-env")
# What a shell makes something else of than a word.
_SHELL: Final = re.compile(r"[$`;&|<>(){}*?\[\]~!#]")


@dataclass(frozen=True)
class ProgramCommand:
    """A program's command, started by `launcher`. `nodes` is a number or a range of them and `ranks` the ranks of a
    worker, where the line says so; `has_ranks` says that it started a rank for each GPU. `left` are the sentences about
    what was not carried over."""

    words: tuple[str, ...]
    launcher: str = "torchrun"
    nodes: int | tuple[int, int] | None = None
    ranks: int | None = None
    has_ranks: bool = False
    left: tuple[str, ...] = ()

    @property
    def program(self) -> dict[str, Any]:
        return {"command": [*self.words], **({"launcher": self.launcher} if self.launcher != "torchrun" else {})}


def read_words(words: Sequence[str]) -> ProgramCommand:
    """The command that words, as a shell or an exec gives them, start. Raises ValueError for torchrun's without a
    script."""
    rest = _after_torchrun(words)
    return ProgramCommand(_plain(words)) if rest is None else _torchrun(rest)


def read_line(line: str) -> ProgramCommand | None:
    """The command of one line of a shell, or None for what only a shell can carry out. Raises ValueError as
    `read_words` does."""
    text = re.sub(r"\\\n", " ", line).strip()
    if "\n" in text:
        return None
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    if words[:1] == ["exec"]:
        words = words[1:]
    rest = _after_torchrun(words)
    if rest is None:
        return None if _SHELL.search(text) or not words or _sets_variable(words[0]) else ProgramCommand(_plain(words))
    # A variable among torchrun's own options is one of the rendezvous; among those of the script only a shell knows it.
    command = _torchrun(rest)
    if not _SHELL.search(" ".join(command.words)):
        return command
    head, first = ("", command.words[0])
    if command.words[0] in ("-m", "python"):
        head, first = f"{command.words[0]} ", command.words[1]
    at = text.find(f" {first}")
    if at < 0:
        return None
    script = head + text[at + 1 :]
    python = "python " if _is_pythons(command.words) else ""
    return replace(command, words=("bash", "-c", f"exec {python}{script}"))


def _sets_variable(word: str) -> bool:
    return re.match(r"[A-Za-z_][A-Za-z0-9_]*=", word) is not None


def _plain(words: Sequence[str]) -> tuple[str, ...]:
    """The words without `python`, where Muster chooses the image's own: before a script or a module."""
    if len(words) > 1 and _PYTHON.fullmatch(words[0]) and _is_pythons(words[1:]):
        return tuple(words[1:])
    return tuple(words)


def _is_pythons(words: Sequence[str]) -> bool:
    return words[0].endswith(".py") or (words[0] == "-m" and len(words) > 1)


def _after_torchrun(words: Sequence[str]) -> Sequence[str] | None:
    """The words after torchrun, by any of its names; None for another command."""
    if words and _TORCHRUN.fullmatch(words[0]):
        return words[1:]
    if len(words) > 2 and _PYTHON.fullmatch(words[0]) and words[1] == "-m" and words[2] in _MODULES:
        return words[3:]
    return None


def _torchrun(words: Sequence[str]) -> ProgramCommand:
    options: dict[str, str] = {}
    flags: set[str] = set()
    left: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if name in _FLAGS:
            flags.add(name)
            continue
        if not equals:
            value = rest.pop(0) if rest else ""
        if name in (_NODES, _RANKS):
            options[name] = value
        elif name not in _RENDEZVOUS:
            left.append(f"torchrun --{name} {value}: {_WITHOUT_MEANING.get(name, 'is not known here')}")
    if not rest:
        raise ValueError("torchrun has no script to start; write it after the options")
    if flags & {"m", "module"}:
        rest = ["-m", *rest]
    elif "no-python" not in flags and not rest[0].endswith(".py"):
        rest = ["python", *rest]  # a script by another name
    nodes = _nodes(options.get(_NODES), left)
    return ProgramCommand(
        tuple(rest), nodes=nodes, ranks=_ranks(options.get(_RANKS), left), has_ranks=True, left=tuple(left)
    )


def _nodes(text: str | None, left: list[str]) -> int | tuple[int, int] | None:
    if text is None:
        return None
    if (both := re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text)) is None or int(both[1]) < 1:
        left.append(f"torchrun --nnodes {text}: is no number; give gang.nodes")
        return None
    return (int(both[1]), int(both[2])) if both[2] and both[1] != both[2] else int(both[1])


def _ranks(text: str | None, left: list[str]) -> int | None:
    if text is None or (text.isdigit() and int(text) > 0):
        return int(text) if text else None
    left.append(f"torchrun --nproc-per-node {text}: is no number; a worker has a rank for each of gang.gpusPerNode")
    return None
