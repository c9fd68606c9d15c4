"""Output: documents for machines go to standard output, messages for people to standard error.

Tables and details are answers, so they are on standard output too; with `--json` only JSON is. Colour only on a
terminal, and never with NO_COLOR (https://no-color.org).

A reader may leave early (`muster submit job.yaml --yes | head -1`). A command then does the rest of its work and says
it to nobody; only what does nothing but print, such as `logs --follow`, stops.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

import typer

from muster.cli.errors import CliError, DocumentFault, ExitStatus
from muster.words.text import STEERING

if TYPE_CHECKING:
    from rich.console import Console

# A table in a pipe has no window to fit into.
PIPE_WIDTH = 180


class _OutputFormat:
    json = False


class OutputStream:
    """A standard stream whose reader may leave. What is written afterwards is dropped, and `unread` says so."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.unread = False

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        # What is left in the buffer needs a place to go too: the interpreter flushes it at its end.
        self.unread = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Let a command do its work to the end although nobody reads its output any more, or nobody ever did (`>&-`)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, OutputStream(stream if stream is not None else open(os.devnull, "w")))  # noqa: SIM115


def stop_if_unread(stream: TextIO | None = None) -> None:
    """End a command that does nothing but print to the stream (standard output unless given), where its reader left."""
    if getattr(stream or sys.stdout, "unread", False):
        raise typer.Exit(ExitStatus.UNREAD)


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
