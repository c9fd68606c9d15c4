"""Output: documents for machines go to standard output, messages for people to standard error.

Tables and details are answers, so they are on standard output too; with `--json` only JSON is. Colour only on a
terminal, and never with NO_COLOR (https://no-color.org).
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from muster.cli.errors import CliError, DocumentFault
from muster.words.text import STEERING

if TYPE_CHECKING:
    from rich.console import Console

# A table in a pipe has no window to fit into.
PIPE_WIDTH = 180


class _OutputFormat:
    json = False


def use_json(value: bool) -> bool:
    """Callback of every `--json`: errors must know of it too."""
    _OutputFormat.json = _OutputFormat.json or value
    return value


def json_wanted() -> bool:
    return _OutputFormat.json


@functools.cache
def answers() -> Console:
    return _console(stderr=False)


@functools.cache
def messages() -> Console:
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    from muster.cli.console import SafeConsole

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    # markup off: a job's error message may hold [brackets].
    return SafeConsole(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def print_json(document: Any) -> None:
    _write(json.dumps(document, indent=2, ensure_ascii=False))


def print_json_line(document: Any) -> None:
    """Print one line of a stream."""
    _write(json.dumps(document, ensure_ascii=False))


def _write(text: str) -> None:
    """Write JSON whose strings don't steer the terminal: they mean the same with escapes."""
    sys.stdout.write(STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")
    sys.stdout.flush()


def say(text: str, style: str = "", end: str = "\n") -> None:
    """A line for the person who watches."""
    from rich.text import Text

    # A style of the text, not of the print: that would colour a live display below it too.
    messages().print(Text(text, style=style), soft_wrap=True, end=end)


def show_error(error: CliError) -> None:
    """Print the error: what, where, what next; with --json also as a document on standard output."""
    from rich.text import Text

    messages().print(Text.assemble(("error: ", "bold red"), error.what), soft_wrap=True)
    for fault in error.faults:
        if fault.line or fault.setting or _message(fault) not in error.what:  # else it has been said
            _show_fault(error, fault)
    if error.next_step:
        messages().print(Text.assemble(("next:  ", "bold"), error.next_step), soft_wrap=True)
    if json_wanted():
        print_json(error.document())


def _show_fault(error: CliError, fault: DocumentFault) -> None:
    from rich.text import Text

    if fault.problem.path:
        messages().print(Text.assemble("  ", (fault.problem.path, "bold"), f": {_message(fault)}"), soft_wrap=True)
    if fault.setting:
        messages().print(Text(f"  {fault.setting}", style="dim"), soft_wrap=True)
    if fault.line is None:
        return
    number = f"{fault.line:>5}"
    excerpt = fault.excerpt.replace("\t", " ")[:200]
    messages().print(Text(f"  {error.file}:{fault.line}:{fault.column}", style="dim"), soft_wrap=True)
    messages().print(Text.assemble((f"{number} | ", "dim"), excerpt), soft_wrap=True)
    messages().print(
        Text.assemble((f"{'':>5} | ", "dim"), " " * ((fault.column or 1) - 1), ("^", "bold red")), soft_wrap=True
    )


def _message(fault: DocumentFault) -> str:
    near = fault.problem.did_you_mean
    return f"{fault.problem.message}{f'. Did you mean {near!r}?' if near else ''}"
