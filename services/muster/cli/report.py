"""`muster report`: what happened to a job as one HTML file, curves inside, that can be mailed."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from muster.cli import formatting
from muster.cli.errors import CliError
from muster.cli.options import Job, JobsClient, Json, Server, connect
from muster.cli.output import answers, print_json, say
from muster.client.errors import MusterError

POINTS = 800
SAMPLED_EVALUATIONS = 2


def report(
    job: Job,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")] = Path(
        "report.html"
    ),
    server: Server = None,
    json: Json = False,
) -> None:
    """Write a job's attempts, goodput, curves, events, results and settings into one HTML file.

    The file is self-contained: it needs no server and no network.
    """
    with connect(server) as client:
        job_id = client.job_id(job)
        page = make_report(client, job_id)
    write_report(page, output)
    if json:
        print_json({"job": job_id, "file": str(output.resolve()), "bytes": len(page.encode())})
        return
    answers().print(f"{output.resolve()} ({formatting.size(len(page.encode()))})", soft_wrap=True)


def make_report(client: JobsClient, job_id: str) -> str:
    """The file's text. Parts that the job's storage can't provide now are left out, and the text says so."""
    from muster.charts.report import JobReport, render_report
    from muster.cli.watch import all_events

    report = JobReport(
        job=client.get(f"jobs/{job_id}"),
        attempts=client.get(f"jobs/{job_id}/attempts"),
        events=all_events(client, job_id),
        curves=_curves(client, job_id),
        commits=_items(client, f"jobs/{job_id}/checkpoints"),
        samples=_items(client, f"jobs/{job_id}/samples", limit=SAMPLED_EVALUATIONS),
        made_at=time.time(),
        version=importlib.metadata.version("muster-train"),
    )
    return render_report(report)


def write_report(page: str, output: Path) -> None:
    """Write all of the report or nothing: an existing file stays until the new one is complete."""
    if output.is_dir():
        raise CliError(f"{output} is a folder", code="output", next_step="name a file: -o report.html")
    handle, name = tempfile.mkstemp(prefix=f".{output.name}.", dir=output.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        Path(name).chmod(0o644 & ~_umask())
        Path(name).replace(output)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _curves(client: JobsClient, job_id: str) -> Any:
    """Asked for until the server has read all records: a long job's are read piece by piece."""
    curves = client.get(f"jobs/{job_id}/curves", points=POINTS)
    while curves["unread"]:
        curves = client.get(f"jobs/{job_id}/curves", points=POINTS)
    return curves


def _items(client: JobsClient, path: str, **parameters: Any) -> list[Any]:
    try:
        page = client.get(path, **parameters)
        reason = page.get("reason")
    except MusterError as error:
        page, reason = {"items": []}, str(error)
    if reason:
        say(f"warning: left out of the report: {reason}", "yellow")
    return list(page["items"])
