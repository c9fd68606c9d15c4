"""Commands that look into a job: logs, events, metrics, why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from muster.cli import formatting
from muster.cli.errors import ExitStatus
from muster.cli.options import Job, Json, Server, connect
from muster.cli.output import answers, json_wanted, print_json, say
from muster.cli.table import TextTable
from muster.words.log_words import in_words

FollowStream = Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")]


def logs(
    job: Job,
    follow: FollowStream = False,
    attempt: Annotated[
        int | None, typer.Option("--attempt", "-a", min=1, help="Attempt to show. Default: the newest.")
    ] = None,
    worker: Annotated[str, typer.Option("--worker", help="Worker to show, or `all`.")] = "0",
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last lines.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print step records as they were written, in JSON.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Print the workers' logs, with the record of each step in words. They are kept per attempt after the workers are
    gone."""
    from muster.cli.follow import follow_log

    if worker != "all" and not worker.isdigit():
        raise typer.BadParameter(f"a worker's number or all, not {worker!r}", param_hint="--worker")
    with connect(server) as client:
        job_id = client.job_id(job)
        try:
            if follow:
                follow_log(client, job_id, {"attempt": attempt, "worker": worker, "tail": tail}, worker == "all", raw)
            else:
                _print_logs(client, job_id, attempt, worker, tail, raw)
        except KeyboardInterrupt:
            say(f"\nDetached; {job} goes on.")
            raise typer.Exit(ExitStatus.INTERRUPTED) from None


def _print_logs(client: Any, job_id: str, attempt: int | None, worker: str, tail: int | None, raw: bool) -> None:
    first = client.get(f"jobs/{job_id}/logs", attempt=attempt, worker=0 if worker == "all" else worker, tail=tail)
    numbers = first["workers"] if worker == "all" else [int(worker)]
    documents = []
    for number in numbers:
        page = first if number == first["worker"] else None
        page = page or client.get(f"jobs/{job_id}/logs", attempt=first["attempt"], worker=number, tail=tail)
        text = page["text"]
        while not page["complete"] and page["nextOffset"] > page["offset"] and page["text"]:
            # Complete as of now: what a running worker writes meanwhile is for --follow.
            page = client.get(f"jobs/{job_id}/logs", attempt=first["attempt"], worker=number, offset=page["nextOffset"])
            text += page["text"]
        documents.append({"attempt": first["attempt"], "worker": number, "text": text})
        if not json_wanted():
            if len(numbers) > 1:
                say(f"--- worker {number} ---", "bold")
            text = text if raw else in_words(text)
            typer.echo(text, nl=not text.endswith("\n") and bool(text))
            if not text:
                say("Nothing is written yet.")
    if json_wanted():
        print_json({"items": documents, "attempts": first["attempts"], "workers": first["workers"]})


def events(
    job: Job,
    follow: FollowStream = False,
    kind: Annotated[
        list[str] | None, typer.Option("--type", "-t", help="Only this type, such as attempt.failed.")
    ] = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Print a job's events, oldest first."""
    from muster.cli.follow import follow_events
    from muster.cli.render import format_event

    with connect(server) as client:
        job_id = client.job_id(job)
        try:
            if follow:
                follow_events(client, job_id, 0, kind or [])
                return
        except KeyboardInterrupt:
            say(f"\nDetached; {job} goes on.")
            raise typer.Exit(ExitStatus.INTERRUPTED) from None
        items = all_events(client, job_id, kind or [])
    if json:
        print_json({"items": items})
        return
    for event in items:
        answers().print(format_event(event), soft_wrap=True)


def all_events(client: Any, job_id: str, kinds: list[str] | None = None) -> list[dict[str, Any]]:
    """Page by page."""
    items: list[dict[str, Any]] = []
    while True:
        page = client.get(f"jobs/{job_id}/events", after=items[-1]["id"] if items else 0, limit=500, type=kinds or [])
        items += page["items"]
        if not page["items"]:
            return items


def metrics(
    job: Job,
    points: Annotated[int, typer.Option("--points", min=2, max=10_000, help="Plot at most this many steps.")] = 500,
    server: Server = None,
    json: Json = False,
) -> None:
    """Plot the loss and list the evaluations."""
    from muster.cli.render import show_curve, step_points

    with connect(server) as client:
        document = client.get(f"jobs/{client.job_id(job)}/metrics", points=points)
    if json:
        print_json(document)
        return
    if not document["points"]:
        say("No step is done yet.")
        return
    show_curve(step_points(document))
    if document["evaluations"]:
        table = TextTable(">STEP", ">EVALUATION LOSS", ">ATTEMPT", "AT")
        for entry in document["evaluations"]:
            attempt = formatting.NOTHING if entry.get("attempt") is None else str(entry["attempt"])
            table.add_row(
                f"{entry['step']:,}", formatting.loss(entry["loss"]), attempt, formatting.clock(entry.get("at"))
            )
        answers().print()
        answers().print(table, soft_wrap=True)
        if values := document["evaluations"][-1].get("values"):
            named = TextTable("METRIC OF THE LAST", ">VALUE")
            for name, value in values.items():
                named.add_row(name, f"{value:.4g}")
            answers().print()
            answers().print(named, soft_wrap=True)


def samples(
    job: Job,
    limit: Annotated[int, typer.Option("--last", min=1, max=100, help="Show the newest N evaluations.")] = 1,
    server: Server = None,
    json: Json = False,
) -> None:
    """Show what the model wrote at its evaluations (evaluation.generate)."""
    with connect(server) as client:
        document = client.get(f"jobs/{client.job_id(job)}/samples", limit=limit)
    if json:
        print_json(document)
        return
    from muster.cli.render import samples_heading

    if not document["items"]:
        say("Nothing is written yet: evaluation.generate names the prompts.")
    for entry in document["items"]:
        say(samples_heading(entry), "dim")
        for sample in entry["samples"]:
            answers().print(f"> {sample['prompt']}", markup=False, soft_wrap=True)
            ending = "" if sample["finished"] else " …"
            answers().print(f"{sample['text']}{ending}\n", markup=False, soft_wrap=True)


def why(job: Job, server: Server = None, json: Json = False) -> None:
    """Explain a job's state: what it waits for or why it failed, and what to do."""
    from muster.cli.render import phase_cell, show_failure

    with connect(server) as client:
        document = client.get(f"jobs/{client.job_id(job)}/why")
    if json:
        print_json(document)
        return
    table = TextTable("", "", header=False)
    table.add_row("job", document["name"])
    table.add_row("phase", phase_cell(document["phase"]))
    table.add_row("because", document["because"])
    table.add_row("since", formatting.moment(document["since"]))
    if queue := document.get("queue"):
        table.add_row("queue", f"position {queue['position']} of {queue['queued']}")
        if queue.get("expected"):
            table.add_row("expected", queue["expected"])
    if document.get("retryAt"):
        table.add_row("next try", formatting.moment(document["retryAt"]))
    if document.get("best"):
        table.add_row("best", document["best"])
    answers().print(table, soft_wrap=True)
    for warning in document.get("warnings", ()):
        answers().print(f"warning: {warning}", style="yellow", soft_wrap=True)
    failure = document.get("lastFailure")
    if failure and document["phase"] != "Succeeded":
        show_failure(failure)
    if document.get("next"):
        answers().print("\nwhat to do", style="bold")
        for step in document["next"]:
            answers().print(f"  {step.replace('{id}', document['id'])}", soft_wrap=True)
