"""`muster open`: the pages, in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from muster.cli.errors import usage
from muster.cli.options import Json, Server, chosen_cluster, connect
from muster.cli.output import print_json, say

MaybeJob = Annotated[str | None, typer.Argument(metavar="JOB", help="Name or id of a job. Default: all jobs.")]


def open(job: MaybeJob = None, server: Server = None, json: Json = False) -> None:
    """Open the web pages in a browser, or print their address. They ask for a token once."""
    import webbrowser

    from muster.client.address import find_server

    if chosen_cluster()[0] is not None:
        raise usage("--context speaks to a cluster, which has no pages: Muster's API has, and --server names it")
    url = f"{find_server(server).url}/jobs"
    if job is not None:
        with connect(server) as client:
            url = f"{url}/{client.job_id(job)}"
    if json:
        print_json({"url": url})
        return
    opened = webbrowser.open(url)
    say(f"{'Opening' if opened else 'There is no browser here; open'} {url}")
