"""Jobs, attempts, events and checkpoints as tables and paragraphs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from muster.cli import formatting
from muster.cli.output import answers
from muster.cli.plot import PlotPoint, curve, smoothed
from muster.cli.table import StyledCell, TextTable
from muster.plan.plan_words import program_facts, results_words
from muster.words.times import epoch_seconds

if TYPE_CHECKING:
    from rich.console import Console

PHASE_STYLE = {
    "Queued": "yellow",
    "Starting": "cyan",
    "Running": "green",
    "Restarting": "magenta",
    "Stopping": "yellow",
    "Suspended": "yellow",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Cancelled": "dim",
}
ENDED = ("Succeeded", "Failed", "Cancelled")
_JOB_COLUMNS = ("PHASE", ">STEP", ">LOSS", ">TOKENS/S", ">ETA", ">ATTEMPT", ">RESTARTS", ">AGE", "BECAUSE")
LOG_LINES = 12
SAMPLES_SHOWN = 4
SAMPLE_CHARACTERS = 100  # of a prompt, and of what was written after it
SMOOTHING_PARTS = 50


def phase_cell(phase: str) -> StyledCell:
    return StyledCell(phase, PHASE_STYLE.get(phase, ""))


def unicode_ok(console: Console) -> bool:
    return console.encoding.lower().replace("-", "") in ("utf8", "utf16", "utf32")


# Columns of the list that a narrow terminal has no room for, the least needed first.
_DISPENSABLE = ("RESTARTS", "ATTEMPT", "TOKENS/S", "ETA", "AGE", "OWNER", "PROJECT")


def show_jobs(pages: Iterable[Sequence[dict[str, Any]]]) -> None:
    """Print the jobs page by page, as they come. On a terminal each has one line, of the columns that fit."""
    console = answers()
    widths: list[int] = []
    whose, without = False, 0
    for page in filter(None, pages):
        whose = whose or (not widths and len({(job.get("project"), job.get("owner")) for job in page}) > 1)
        table = jobs_table(page, time.time(), widths, whose, _DISPENSABLE[:without])
        while not widths and console.is_terminal and without < len(_DISPENSABLE) and not table.fits(console.width):
            without += 1
            table = jobs_table(page, time.time(), widths, whose, _DISPENSABLE[:without])
        console.print(table, soft_wrap=True)
        widths = table.widths


def jobs_table(
    jobs: Sequence[dict[str, Any]],
    now: float,
    widths: Sequence[int] = (),
    whose: bool = False,
    without: Sequence[str] = (),
) -> TextTable:
    """A page of the list. `widths` are those of the page before; the first page has none, and the header. `whose` adds
    project and owner, which on a machine of one person say nothing. Columns `without` are left out."""
    columns = ("NAME", *(("PROJECT", "OWNER") if whose else ()), *_JOB_COLUMNS)
    kept = [index for index, column in enumerate(columns) if column.removeprefix(">") not in without]
    table = TextTable(*(columns[index] for index in kept), header=not widths, widths=widths, cut=True)
    for job in jobs:
        ended = job["phase"] in ENDED
        cells = (
            job["name"],
            *((job.get("project", ""), job.get("owner", "")) if whose else ()),
            phase_cell(job["phase"]),
            format_progress(job["step"], job["steps"]),
            formatting.loss(job["loss"]),
            formatting.NOTHING if ended else formatting.amount(job["tokensPerSecond"]),
            _left(job),
            str(job["attempt"] or formatting.NOTHING),
            str(job["restarts"]),
            formatting.duration(now - epoch_seconds(job["createdAt"])),
            one_line(job["because"]),
        )
        table.add_row(*(cells[index] for index in kept))
    return table


def _left(job: Mapping[str, Any]) -> str:
    """Return the time until the job ends; of a queued one, until it is expected to start."""
    if (starts_in := job.get("startsInSeconds")) is not None:
        return f"starts in {formatting.duration(starts_in)}"
    return formatting.NOTHING if job["phase"] in ENDED else formatting.duration(job["etaSeconds"])


def format_progress(step: int | None, steps: int | None) -> str:
    if step is None:
        return formatting.NOTHING
    return f"{step:,}/{steps:,}" if steps else f"{step:,}"


def show_job(
    job: dict[str, Any],
    attempts: Sequence[dict[str, Any]],
    points: Sequence[PlotPoint],
    cost: dict[str, Any] | None = None,
    expected: str = "",
) -> None:
    """Print the output of `muster get` for one job. `expected` says when a queued one starts."""
    console = answers()
    status, metadata = job["status"], job["metadata"]
    progress, checkpoint = status.get("progress") or {}, status.get("checkpoint") or {}
    gang = status.get("gang") or {}
    table = TextTable("", "", header=False)
    table.add_row("job", f"{metadata['name']}  ({metadata['namespace']}, {job['id']})")
    table.add_row("phase", phase_cell(status["phase"]))
    table.add_row("because", status["because"])
    if expected:
        table.add_row("expected", expected)
    for name, words in program_facts(job["spec"], status):
        table.add_row(name, words)
    table.add_row("age", format_age(status, metadata["creationTimestamp"]))
    if progress:
        table.add_row("progress", format_progress_line(progress, ended=status["phase"] in ENDED))
    if gang.get("wanted") or status["phase"] not in ENDED:
        table.add_row("gang", f"{gang.get('ready', 0)} of {formatting.plural(gang.get('wanted', 0), 'worker')} ready")
    table.add_row("attempt", f"{status['attempt']}  ({formatting.plural(status['restarts']['total'], 'restart')})")
    if checkpoint:
        best = f", best {checkpoint['bestStep']}" if checkpoint.get("bestStep") is not None else ""
        at = formatting.moment(checkpoint["committedAt"])
        table.add_row("checkpoint", f"step {checkpoint['step']:,}{best}, {at}\n{checkpoint['uri']}")
    if cost and cost.get("nodeHours"):
        table.add_row("cost", format_cost(cost))
    console.print(table, soft_wrap=True)
    if len(attempts) > 1 or any(attempt.get("cause") for attempt in attempts):
        console.print()
        console.print(attempts_table(attempts), soft_wrap=True)
    show_goodput(goodput_shares(status))
    show_curve(points)
    if failure := status.get("lastFailure"):
        show_failure(failure)


def format_cost(cost: dict[str, Any]) -> str:
    """Money where there are prices, hours in any case, and what is not in it."""
    hours = [f"{formatting.amount(value)} GPU-hours {capacity}" for capacity, value in cost["gpuHours"].items()]
    parts = hours or [f"{cost['nodeHours']:.2f} node-hours"]
    if cost["nodeHours"] > cost["unpricedHours"]:
        parts.insert(0, f"{cost['cost']:,.2f} {cost['currency']}")
    if cost["saved"] > 0:
        full = cost["cost"] + cost["saved"]
        parts.append(f"{cost['saved']:,.2f} saved on spot ({formatting.share(cost['saved'] / full)})")
    if cost["gaps"]:
        parts.append(f"not counted: {', '.join(cost['gaps'])}")
    return "; ".join(parts)


def format_age(status: dict[str, Any], created: str) -> str:
    ended = " (ended)" if status.get("finishedAt") else ""
    return f"{_lasted(created, status.get('finishedAt'))}{ended}, created {formatting.moment(created)}"


def _lasted(begin: str, end: str | None) -> str:
    """Return the duration, until now if there is no end yet."""
    return formatting.duration((epoch_seconds(end) if end else time.time()) - epoch_seconds(begin))


def format_progress_line(progress: dict[str, Any], ended: bool = False) -> str:
    parts = [f"step {format_progress(progress.get('step') or 0, progress.get('steps'))}"]
    if progress.get("loss") is not None:
        parts.append(f"loss {formatting.loss(progress['loss'])}")
    if progress.get("evaluationLoss") is not None:
        parts.append(f"evaluation {formatting.loss(progress['evaluationLoss'])}")
    values = progress.get("evaluationValues") or progress.get("values") or {}
    if (accuracy := values.get("rewards/accuracies")) is not None:
        parts.append(f"prefers the chosen in {accuracy:.0%}")
    if not ended and progress.get("tokensPerSecond"):
        parts.append(f"{formatting.amount(progress['tokensPerSecond'])} tokens/s")
    if not ended and progress.get("etaSeconds") is not None:
        parts.append(f"ETA {formatting.duration(progress['etaSeconds'])}")
    return ", ".join(parts)


def attempts_table(attempts: Iterable[dict[str, Any]]) -> TextTable:
    table = TextTable(
        ">ATTEMPT", "STARTED", ">LASTED", ">FROM STEP", ">TO STEP", ">LOST STEPS", "OUTCOME", "CAUSE", "MESSAGE"
    )
    for attempt in attempts:
        table.add_row(
            str(attempt["number"]),
            formatting.clock(attempt["createdAt"]),
            _lasted(attempt["createdAt"], attempt.get("endedAt")),
            str(attempt["resumeStep"]),
            formatting.NOTHING if attempt.get("lastStep") is None else str(attempt["lastStep"]),
            str(attempt["lostSteps"]),
            attempt["outcome"],
            attempt.get("cause") or formatting.NOTHING,
            one_line(attempt.get("message") or ""),
        )
    return table


def goodput_shares(status: dict[str, Any]) -> dict[str, float]:
    """Fractions of the job's life by state, largest first; empty where nothing is accounted for yet."""
    seconds = (status.get("ledger") or {}).get("seconds") or {}
    total = sum(seconds.values())
    shares = {state: value / total for state, value in seconds.items() if value > 0} if total > 0 else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def show_goodput(shares: dict[str, float]) -> None:
    if not shares:
        return
    answers().print()
    table = TextTable("GOODPUT", ">SHARE", "")
    for state, value in shares.items():
        bar = "█" if unicode_ok(answers()) else "#"
        table.add_row(state, formatting.share(value), bar * max(1, round(value * 40)) if value >= 0.005 else "")
    answers().print(table, soft_wrap=True)


def show_curve(points: Sequence[PlotPoint]) -> None:
    """The loss; a long run's is smoothed, for single steps on small batches are mostly noise."""
    console = answers()
    window = max(1, len(points) // SMOOTHING_PARTS)
    lines = curve(smoothed(points, window), width=min(72, max(20, console.width - 16)), unicode=unicode_ok(console))
    if lines:
        console.print("\nloss" + (f" (mean of {window} steps)" if window > 1 else ""))
        console.print("\n".join(lines))


def show_samples(evaluation: dict[str, Any]) -> None:
    """The first samples of an evaluation, a prompt and an answer on a line each; `muster samples` has all of them."""
    console, samples = answers(), evaluation["samples"]
    console.print(f"\nsamples of {samples_heading(evaluation)}")
    for sample in samples[:SAMPLES_SHOWN]:
        console.print(f"  > {_beginning(sample['prompt'])}", markup=False, soft_wrap=True)
        cut = sample["text"] + ("" if sample["finished"] else " …")
        console.print(f"    {_beginning(cut)}", markup=False, soft_wrap=True)
    if (more := len(samples) - SAMPLES_SHOWN) > 0:
        console.print(f"  and {more} more: muster samples JOB", style="dim")


def samples_heading(evaluation: dict[str, Any]) -> str:
    return f"step {evaluation['step']:,}, attempt {evaluation['attempt']}, {formatting.clock(evaluation['at'])}"


def _beginning(text: str) -> str:
    """Return the beginning of the text on one line, no longer than a line should be."""
    line = one_line(text)
    return line if len(line) <= SAMPLE_CHARACTERS else line[: SAMPLE_CHARACTERS - 2] + " …"


def show_failure(failure: dict[str, Any]) -> None:
    console = answers()
    where = [f"{key} {failure[key]}" for key in ("worker", "rank", "node", "step") if failure.get(key) is not None]
    code = f", exit code {failure['exitCode']}" if failure.get("exitCode") is not None else ""
    console.print(f"\nlast failure: {failure['cause']} in attempt {failure['attempt']}", style="bold")
    console.print(f"  {failure['message']}", soft_wrap=True)
    console.print(f"  ({', '.join(where)}{code})" if where or code else "", style="dim")
    for line in (failure.get("logTail") or "").strip().splitlines()[-LOG_LINES:]:
        console.print(f"  | {line}", style="dim", soft_wrap=True)


def format_event(event: dict[str, Any]) -> str:
    attempt = f"#{event['attempt']}" if event.get("attempt") else ""
    return f"{formatting.clock(event['at'])}  {attempt:<4} {event['type']:<24} {event['message']}"


def checkpoints_table(document: dict[str, Any]) -> TextTable:
    columns = [">STEP", ">ATTEMPT", "COMMITTED", ">RANKS", ">SIZE", ">LOSS", ">EVALUATION", "MARKS"]
    judged = any(commit.get("evaluations") for commit in document["items"])
    table = TextTable(*columns, *(["RESULTS"] if judged else []))
    for commit in document["items"]:
        metrics = commit.get("metrics") or {}
        table.add_row(
            f"{commit['step']:,}",
            str(commit["attempt"]),
            formatting.moment(commit["committedAt"]),
            str(commit["worldSize"]),
            formatting.size(commit.get("addedBytes", commit["bytes"])),
            formatting.loss(metrics.get("loss")),
            formatting.loss(metrics.get("evaluation_loss", metrics.get("evaluationLoss"))),
            " ".join((*(mark for mark in ("best", "pinned") if commit[mark]), *_kind(commit))),
            *([_results(commit)] if judged else []),
        )
    return table


def _results(commit: dict[str, Any]) -> str:
    return "; ".join(map(evaluation_words, commit.get("evaluations") or ())) or formatting.NOTHING


def evaluation_words(evaluation: dict[str, Any]) -> str:
    """Return what an evaluation of a checkpoint gave: its numbers, or its phase and why there are none."""
    if evaluation["results"]:
        return f"{evaluation['evaluation']}: {results_words(evaluation['results'])}"
    reason = f" ({one_line(evaluation['reason'])})" if evaluation.get("reason") else ""
    return f"{evaluation['evaluation']}: {evaluation['phase']}{reason}"


def _kind(commit: dict[str, Any]) -> tuple[str, ...]:
    return ("folder",) if commit.get("kind") == "folder" else ()


def show_commit(commit: dict[str, Any]) -> None:
    """Print the output of `muster checkpoints inspect` for one checkpoint."""
    console = answers()
    table = TextTable("", "", header=False)
    marks = "".join(f", {mark}" for mark in ("best", "pinned") if commit[mark])
    table.add_row("checkpoint", f"step {commit['step']:,} of {commit['job']}{marks}\n{commit['uri']}")
    table.add_row("committed", f"{formatting.moment(commit['committedAt'])} by attempt {commit['attempt']}")
    table.add_row("trained", f"{commit['tokens']:,} tokens on {formatting.plural(commit['worldSize'], 'rank')}")
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(commit["metrics"].items()))
    table.add_row("metrics", metrics or formatting.NOTHING)
    for evaluation in commit.get("evaluations") or ():
        table.add_row("results", evaluation_words(evaluation))
    if is_folder := commit.get("kind") == "folder":
        table.add_row("contents", "a folder that the program wrote: resumes by the program; data position not checked")
    else:
        weights = f"{commit['elements']:,} weights, {formatting.size(commit['tensorBytes'])} with optimizer"
        table.add_row("model", weights)
    table.add_row("files", f"{len(commit['files'])}, {formatting.size(commit['bytes'])}")
    table.add_row("made by", ", ".join(f"{name} {value}" for name, value in sorted(commit["versions"].items())))
    console.print(table, soft_wrap=True)
    console.print()
    if is_folder:
        files = TextTable("FILE", ">SIZE", "CRC-32")
        for file in commit["files"]:
            files.add_row(
                file["key"].partition("/files/")[2] or file["key"], formatting.size(file["bytes"]), file["checksum"]
            )
        return console.print(files, soft_wrap=True)
    tensors = TextTable("TENSOR", "DTYPE", "SHAPE", ">SLICES")
    for name, tensor in commit["tensors"].items():
        shape = "×".join(map(str, tensor["shape"])) or "one number"
        tensors.add_row(name, tensor["dtype"], shape, str(tensor["slices"]))
    console.print(tensors, soft_wrap=True)


def one_line(text: str) -> str:
    return " ".join(text.split())


def step_points(metrics: dict[str, Any]) -> list[PlotPoint]:
    return [PlotPoint(p["step"], p["loss"]) for p in metrics["points"] if p.get("loss") is not None]
