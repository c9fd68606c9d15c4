"""Watching a job until it ends: live on a terminal, a line per happening in a pipe. Ctrl-C leaves the job alone."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muster.cli import formatting
from muster.cli.errors import ExitStatus
from muster.cli.options import command_prefix
from muster.cli.output import json_wanted, print_json_line, say, stop_if_unread
from muster.cli.output import messages as console
from muster.cli.plot import sparkline
from muster.cli.render import PHASE_STYLE, format_event, format_progress, format_progress_line, unicode_ok
from muster.client import following
from muster.client.exchange import StreamEvent
from muster.client.following import JobMoment
from muster.client.steps import walk
from muster.words.log_words import step_words
from muster.words.text import readable

if TYPE_CHECKING:
    from rich.console import Group

    from muster.cli.options import JobsClient

PLAIN_LINE_SECONDS = 10.0
WAIT_LINE_SECONDS = 15.0  # of a phase without steps: whoever watches must see that something still goes on
# What the live line says anyway, or what the reader has just done.
_QUIET_EVENTS = {"job.created", "job.queued", "job.running", "job.starting", "job.waiting", "job.stopping"}


def moments(client: JobsClient, job_id: str, after_event: int = 0) -> Iterator[JobMoment]:
    """A look every half second; the last one is of the ended job, with its last events."""
    return walk(following.moments(job_id, after_event), lambda ask: client.get(ask.path, **ask.params))


@dataclass
class MomentDisplay:
    """Shows moments on standard error. Use as a context manager; `live` only on a terminal."""

    name: str
    losses: list[float] = field(default_factory=list)
    _live: Any = None
    _last_step: int = 0
    _last_attempt: int = 0
    _last_line_at: float = 0.0
    _last_phase: str = ""
    _phase_since: float = 0.0

    def __enter__(self) -> MomentDisplay:
        if console().is_terminal:
            from rich.live import Live

            self._live = Live(console=console(), refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, moment: JobMoment) -> None:
        new = [step for step in moment.steps if step["step"] > self._last_step or step["attempt"] > self._last_attempt]
        self.losses += [step["loss"] for step in new if step.get("loss") is not None]
        if new:
            self._last_step, self._last_attempt = new[-1]["step"], new[-1]["attempt"]
        for event in moment.events:
            if event["type"] not in _QUIET_EVENTS:
                style = "red" if event["type"].endswith("failed") else "dim"
                say(format_event(event), style)
        if self._live is not None:
            self._live.update(self._picture(moment))
        else:
            self._line(moment)

    def _line(self, moment: JobMoment) -> None:
        """Print a line, as for a pipe: each phase, progress now and then, and that a wait lasts."""
        now = time.monotonic()
        if moment.phase != self._last_phase:
            self._last_phase, self._phase_since = moment.phase, now
        elif now - self._last_line_at < (PLAIN_LINE_SECONDS if moment.phase == "Running" else WAIT_LINE_SECONDS):
            return
        self._last_line_at = now
        running = moment.phase == "Running" and moment.progress
        detail = format_progress_line(moment.progress) if running else moment.status["because"]
        if (lasted := now - self._phase_since) >= WAIT_LINE_SECONDS and not running:
            detail += f", for {formatting.duration(lasted)}"
        say(f"{formatting.clock(time.time())}  {moment.phase} (attempt {moment.status['attempt']}): {detail}")

    def _picture(self, moment: JobMoment) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress, status = moment.progress, moment.status
        step, steps = progress.get("step") or 0, progress.get("steps")
        head = Text.assemble(
            (self.name, "bold"), "  ", (moment.phase, PHASE_STYLE.get(moment.phase, "")),
            f"  attempt {status['attempt']}  {status['because']}",
        )  # fmt: skip
        row = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=steps or 1, completed=step, width=24)
        loss = Text.assemble("loss ", (formatting.loss(progress.get("loss")), "bold"))
        speed = f"{formatting.amount(progress.get('tokensPerSecond'))} tokens/s"
        eta = f"ETA {formatting.duration(progress.get('etaSeconds'))}"
        row.add_row(bar, format_progress(step, steps), loss, self._spark(), speed, eta)
        return Group(head, row)

    def _spark(self) -> str:
        return sparkline(self.losses, width=20, unicode=unicode_ok(console()))


def follow(client: JobsClient, job: dict[str, Any]) -> ExitStatus:
    """Show the job until it ends, then its result. Returns the exit code for it."""
    name, job_id = job["metadata"]["name"], job["id"]
    last: JobMoment | None = None
    try:
        with MomentDisplay(name) as display:
            for moment in moments(client, job_id):
                if json_wanted() and (last is None or moment.status != last.status) and not moment.ended:
                    print_json_line(moment.job)
                last = moment
                display.show(moment)
                stop_if_unread(sys.stdout if json_wanted() else sys.stderr)
    except KeyboardInterrupt:
        say(f"\nDetached; {name} goes on.", "bold")
        say(f"  {command_prefix()} get {name} --follow    watch it again")
        say(f"  {command_prefix()} cancel {name}          stop it")
        return ExitStatus.INTERRUPTED
    assert last is not None, "there is always a first look"
    return conclude(last.job)


def conclude(job: dict[str, Any]) -> ExitStatus:
    """Say how an ended job ended. With --json the whole job is printed, as the last line of the stream."""
    status, name = job["status"], job["metadata"]["name"]
    if json_wanted():
        print_json_line(job)
    if status["phase"] == "Succeeded":
        progress = status.get("progress") or {}
        say(f"{name} succeeded: {format_progress_line(progress, ended=True)}", "bold green")
        say_next_steps(job)
        return ExitStatus.OK
    say(f"{name} {'was cancelled' if status['phase'] == 'Cancelled' else 'failed'}: {status['because']}", "bold red")
    failure = status.get("lastFailure") or {}
    if failure and status["phase"] == "Failed":
        say(f"  {failure['cause']} in attempt {failure['attempt']}: {failure['message']}")
        for line in (failure.get("logTail") or "").strip().splitlines()[-8:]:
            say(f"  | {line}", "dim")
    say(f"  {command_prefix()} why {name}     what happened and what to do")
    say(f"  {command_prefix()} logs {name}    what the workers wrote")
    return ExitStatus.FAILED


def say_next_steps(job: dict[str, Any]) -> None:
    """Say what can be done with a job that succeeded, by commands with its name."""
    name, checkpoint, prefix = job["metadata"]["name"], job["status"].get("checkpoint"), command_prefix()
    if (job.get("spec") or {}).get("program"):
        steps = [(f"logs {name}", "what it wrote")]
        if checkpoint:
            steps.append((f"checkpoints ls {name}", "what is kept of its checkpoint folder"))
    elif checkpoint:
        steps = [
            (f"chat {name}", "try the model, at its best checkpoint"),
            (f"export {name} --to FOLDER", "a folder that transformers opens"),
            (f"serve {name}", "the commands that serve it by vLLM or SGLang"),
            (f"open {name}", "its curves, samples and data in a browser"),
        ]
    else:
        steps = [(f"open {name}", "its curves and log in a browser")]
    width = max(len(command) for command, _ in steps)
    for command, words in steps:
        say(f"  {prefix} {command:<{width}}    {words}")
    if checkpoint:
        say(f"  checkpoints: {checkpoint['uri']}", "dim")


def follow_log(client: JobsClient, job_id: str, params: dict[str, Any], label_workers: bool, raw: bool = False) -> None:
    """Print log lines as they are written, attempt after attempt, until the job ends; step records in words, unless
    they are wanted `raw`."""
    for event in client.stream(f"jobs/{job_id}/logs", follow="true", **params):
        document = _document(event)
        if json_wanted():
            print_json_line({"event": event.event, **document})
        elif event.event == "log":
            prefix = f"{document['worker']}| " if label_workers else ""
            line = document["line"]
            print_line(prefix + (line if raw else step_words(line) or line))
        elif event.event == "attempt":
            say(f"--- attempt {document['attempt']} ---", "bold")
        elif event.event == "end":
            say(f"--- {document['phase']} ---", "bold")
        stop_if_unread()


def follow_events(client: JobsClient, job_id: str, after: int, kinds: list[str]) -> None:
    for event in client.stream(f"jobs/{job_id}/events", last_id=str(after), follow="true", type=kinds):
        document = _document(event)
        if event.event == "end":
            say(f"--- {document['phase']} ---", "bold")
        elif json_wanted():
            print_json_line(document)
        else:
            print_line(format_event(document))
        stop_if_unread()


def print_line(line: str) -> None:
    """A worker's own words: no markup, no wrapping, no orders to the terminal, flushed at once."""
    with contextlib.suppress(UnicodeEncodeError):
        print(readable(line), flush=True)


def _document(event: StreamEvent) -> dict[str, Any]:
    document = event.json()
    return document if isinstance(document, dict) else {}
