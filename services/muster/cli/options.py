"""Arguments and options that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.output import json_wanted, say, use_json

if TYPE_CHECKING:
    from muster.cli.client import Client


def _job_names(incomplete: str) -> list[str]:
    """For shell completion: quiet and quick, whatever is wrong."""
    from muster.cli.address import find_server
    from muster.cli.client import Client

    try:
        with Client(find_server(None), patience_seconds=1) as client:
            names = [job["name"] for page in client.job_pages(200) for job in page]
    except Exception:  # a shell that completes must not print tracebacks
        return []
    return sorted({name for name in names if name.startswith(incomplete)})


Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.", callback=use_json)]
Server = Annotated[
    str | None,
    typer.Option("--server", help="Address of the API (env: MUSTER_SERVER; default: the `muster up` of this machine)."),
]
Job = Annotated[str, typer.Argument(metavar="JOB", help="Name or id of a job.", autocompletion=_job_names)]
Jobs = Annotated[list[str], typer.Argument(metavar="JOB…", help="Names or ids of jobs.", autocompletion=_job_names)]
StateFolder = Annotated[
    Path | None,
    typer.Option("--state", help="State folder (env: MUSTER_STATE; default: ~/.muster).", show_default=False),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a value, such as training.length.steps=100."),
]


def connect(server: str | None, patience_seconds: float = 20.0) -> Client:
    """A client of the chosen server, which says when it has to wait."""
    from muster.cli.address import find_server
    from muster.cli.client import Client

    found = find_server(server)
    if found.token and not found.local and found.url.startswith("http://"):
        say(f"warning: the token goes to {found.url} unencrypted; use https://", "yellow")
    return Client(found, patience_seconds, waiting=lambda reason: say(f"waiting for {found.url}: {reason}", "yellow"))


__all__ = ["Job", "Jobs", "Json", "Server", "Settings", "StateFolder", "connect", "json_wanted"]
