"""`muster tag`: a job's tags and its note."""

from __future__ import annotations

from typing import Annotated

import typer

from muster.cli.options import Job, Json, Server, connect
from muster.cli.output import json_wanted, print_json, say
from muster.words.text import readable


def tag(
    job: Job,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]…", help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", "-r", metavar="TAG", help="Tags to remove.")] = None,
    note: Annotated[
        str | None, typer.Option("--note", help="A note to write at the job in place of its own; '' removes it.")
    ] = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Show, add and remove a job's tags, and write its note. `muster ls --tag TAG` lists the jobs with a tag.

    Nothing of how the job runs changes. Whoever may act on the job may change them, also when it has ended.
    """
    with connect(server) as client:
        path = f"jobs/{client.job_id(job)}"
        change = {"addTags": tags or [], "removeTags": remove or []} | ({} if note is None else {"note": note})
        answer = client.patch(path, change) if tags or remove or note is not None else client.get(path)
    if json_wanted():
        print_json(answer)
        return
    metadata = answer["metadata"]
    say(f"{metadata['name']}: {' '.join(metadata.get('tags') or ()) or 'no tags'}")
    if metadata.get("note"):
        say(f"note: {readable(metadata['note'])}")
