"""Watching a job until it ends: live on a terminal, a line per happening in a pipe. Ctrl-C leaves the job alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muster.cli import formatting
from muster.cli.errors import CliError, Exit
from muster.cli.options import command_prefix
from muster.cli.output import json_wanted, print_json_line, say
from muster.cli.output import messages as console
from muster.cli.plot import sparkline
from muster.cli.render import ENDED, PHASE_STYLE, format_event, format_progress, format_progress_line, unicode_ok

if TYPE_CHECKING:
    from rich.console import Group

    from muster.cli.options import JobsClient

POLL_SECONDS = 0.5
PLAIN_LINE_SECONDS = 10.0
# What the live line says anyway, or what the reader has just done.
_QUIET_EVENTS = {"job.created", "job.queued", "job.running", "job.starting", "job.waiting", "job.stopping"}


@dataclass(frozen=True)
class Moment:
    """What is new since the last look: the whole job, and the events and steps that came since.

    The status reports progress every few seconds; the steps are as new as the workers' own records.
    """

    job: dict[str, Any]
    events: tuple[dict[str, Any], ...] = ()
    steps: tuple[dict[str, Any], ...] = ()

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.job["status"]
        return status

    @property
    def phase(self) -> str:
        return str(self.status["phase"])

    @property
    def progress(self) -> dict[str, Any]:
        """As in the status, brought up to date by the newest step."""
        told: dict[str, Any] = self.status.get("progress") or {}
        if not self.steps or self.ended:
            return told
        newest, recent = self.steps[-1], self.steps[-8:]
        # Step 0 is an evaluation before the first step: nothing is known of the speed yet.
        known = [seconds for step in recent if (seconds := step.get("stepSeconds"))]
        left = newest["steps"] - newest["step"] if newest.get("steps") and known else None
        live = {key: newest.get(key) for key in ("step", "steps", "loss", "tokensPerSecond")}
        return told | live | {"etaSeconds": left * sum(known) / len(known) if left is not None else None}

    @property
    def ended(self) -> bool:
        return self.phase in ENDED


def moments(client: JobsClient, job_id: str, after_event: int = 0) -> Iterator[Moment]:
    """A look every half second; the last one is of the ended job, with its last events."""
    steps: tuple[dict[str, Any], ...] = ()
    while True:
        job = client.get(f"jobs/{job_id}")  # before the events: what the job says has its event by then
        news = client.get(f"jobs/{job_id}/events", after=after_event, limit=500)["items"]
        after_event = max([after_event, *(event["id"] for event in news)])
        steps = _newest_steps(client, job, steps)
        moment = Moment(job, tuple(news), steps)
        yield moment
        if moment.ended:
            return
        time.sleep(POLL_SECONDS)


def _newest_steps(
    client: JobsClient, job: dict[str, Any], before: tuple[dict[str, Any], ...]
) -> tuple[dict[str, Any], ...]:
    """Steps of the running attempt since the last look, or that look's again where there are none."""
    attempt = job["status"]["attempt"]
    if job["status"]["phase"] != "Running":
        return ()
    known = [step for step in before if step["attempt"] == attempt]
    after = known[-1]["step"] if known else job["status"]["resumeStep"]
    points = client.get(f"jobs/{job['id']}/metrics", afterStep=after, points=500)["points"]
    return tuple(point for point in points if point["attempt"] == attempt and point["step"] > after) or tuple(known)


@dataclass
class Display:
    """Shows moments on standard error. Use as a context manager; `live` only on a terminal."""

    name: str
    losses: list[float] = field(default_factory=list)
    _live: Any = None
    _last_step: int = 0
    _last_attempt: int = 0
    _last_line_at: float = 0.0
    _last_phase: str = ""

    def __enter__(self) -> Display:
        if console().is_terminal:
            from rich.live import Live

            self._live = Live(console=console(), refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, moment: Moment) -> None:
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

    def _line(self, moment: Moment) -> None:
        """In a pipe: each phase once, and progress now and then."""
        now = time.monotonic()
        changed = moment.phase != self._last_phase
        if not changed and (moment.phase != "Running" or now - self._last_line_at < PLAIN_LINE_SECONDS):
            return
        self._last_phase, self._last_line_at = moment.phase, now
        running = moment.phase == "Running" and moment.progress
        detail = format_progress_line(moment.progress) if running else moment.status["because"]
        say(f"{formatting.clock(time.time())}  {moment.phase} (attempt {moment.status['attempt']}): {detail}")

    def _picture(self, moment: Moment) -> Group:
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


def follow(client: JobsClient, job: dict[str, Any]) -> Exit:
    """Show the job until it ends, then its result. Returns the exit code for it."""
    name, job_id = job["metadata"]["name"], job["id"]
    last: Moment | None = None
    try:
        with Display(name) as display:
            for moment in moments(client, job_id):
                if json_wanted() and (last is None or moment.status != last.status) and not moment.ended:
                    print_json_line(moment.job)
                last = moment
                display.show(moment)
    except KeyboardInterrupt:
        say(f"\nDetached; {name} goes on.", "bold")
        say(f"  {command_prefix()} get {name} --follow    watch it again")
        say(f"  {command_prefix()} cancel {name}          stop it")
        return Exit.INTERRUPTED
    assert last is not None, "there is always a first look"
    return conclude(last.job)


def conclude(job: dict[str, Any]) -> Exit:
    """Say how an ended job ended. With --json the whole job is printed, as the last line of the stream."""
    status, name = job["status"], job["metadata"]["name"]
    if json_wanted():
        print_json_line(job)
    if status["phase"] == "Succeeded":
        progress = status.get("progress") or {}
        say(f"{name} succeeded: {format_progress_line(progress, ended=True)}", "bold green")
        if checkpoint := status.get("checkpoint"):
            say(f"  checkpoints: {checkpoint['uri']}")
        return Exit.OK
    say(f"{name} {'was cancelled' if status['phase'] == 'Cancelled' else 'failed'}: {status['because']}", "bold red")
    failure = status.get("lastFailure") or {}
    if failure and status["phase"] == "Failed":
        say(f"  {failure['cause']} in attempt {failure['attempt']}: {failure['message']}")
        for line in (failure.get("logTail") or "").strip().splitlines()[-8:]:
            say(f"  | {line}", "dim")
    say(f"  {command_prefix()} why {name}     what happened and what to do")
    say(f"  {command_prefix()} logs {name}    what the workers wrote")
    return Exit.FAILED


def follow_log(client: JobsClient, job_id: str, params: dict[str, Any], label_workers: bool) -> None:
    """Print log lines as they are written, attempt after attempt, until the job ends."""
    for event in client.stream(f"jobs/{job_id}/logs", follow="true", **params):
        document = _json(event.data)
        if json_wanted():
            print_json_line({"event": event.event, **document})
        elif event.event == "log":
            prefix = f"{document['worker']}| " if label_workers else ""
            print_line(prefix + document["line"])
        elif event.event == "attempt":
            say(f"--- attempt {document['attempt']} ---", "bold")
        elif event.event == "end":
            say(f"--- {document['phase']} ---", "bold")


def follow_events(client: JobsClient, job_id: str, after: int, kinds: list[str]) -> None:
    for event in client.stream(f"jobs/{job_id}/events", last_id=str(after), follow="true", type=kinds):
        document = _json(event.data)
        if event.event == "end":
            say(f"--- {document['phase']} ---", "bold")
        elif json_wanted():
            print_json_line(document)
        else:
            print_line(format_event(document))


def print_line(line: str) -> None:
    """A worker's own words: no markup, no wrapping, flushed at once."""
    with contextlib.suppress(UnicodeEncodeError):
        print(line, flush=True)


def _json(text: str) -> dict[str, Any]:
    import json

    try:
        document = json.loads(text)
    except ValueError:
        raise CliError(f"the server sent a stream event that is not JSON: {text[:100]!r}", code="bad-event") from None
    return document if isinstance(document, dict) else {}
