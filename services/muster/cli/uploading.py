"""Files on their way between this machine and a server, with progress for the person who waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.cli import formatting
from muster.cli.output import messages, say

if TYPE_CHECKING:
    from muster.client.connection import Connection


def send_file(
    client: Connection, path: Path, purpose: str, project: str | None, lifetime_seconds: float | None = None
) -> dict[str, Any]:
    """Upload it and wait until it is ready or failed; a failure is printed. Raises MusterError."""
    from muster.client.transfers import FileTransfers

    with FileTransfers(client) as transfers, transfer_progress(path.name) as progress:
        made = transfers.upload(path, purpose, project, None, lifetime_seconds, progress)
    with FileTransfers(client) as transfers:
        file = transfers.until_checked(made["id"])
    if file["status"] == "failed":
        say(f"{path}: nothing can be learnt from it: {file['fault']}", "red")
    elif file["samples"] is not None:
        say(f"{path.name}: {contents_of(file)}", "dim")
    return file


def contents_of(file: dict[str, Any]) -> str:
    """Return the summary of a checked data file. An older server estimates no tokens."""
    words = f"{formatting.plural(file['samples'], 'sample')}, {file['format']}"
    tokens = file.get("tokensEstimated")
    return words if tokens is None else f"{words}, about {formatting.amount(tokens)} tokens (by 4 bytes of text each)"


def fetch_file(client: Connection, file: dict[str, Any], target: Path) -> None:
    """Write a file of the server to `target`. Raises MusterError."""
    from muster.client.transfers import FileTransfers

    with FileTransfers(client) as transfers, transfer_progress(file["name"]) as progress:
        transfers.download(f"files/{file['id']}/content", target, file["bytes"], progress)


def fetch_export(client: Connection, job_id: str, step: str, target: Path, **form: Any) -> dict[str, Any]:
    """Write the model of a commit, as the server makes it, to the folder `target`. Raises MusterError."""
    from muster.client.transfers import FileTransfers

    with FileTransfers(client) as transfers, transfer_progress(target.name) as progress:
        return transfers.export(job_id, step, target, progress, **form)


@contextlib.contextmanager
def transfer_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Tell of progress on a terminal: share, size, speed, time left. Nothing where nobody watches."""
    if not messages().is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=messages(), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None)

        yield tell
