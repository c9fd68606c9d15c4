"""`muster profile`: trace the next steps of a running job, and fetch what was traced."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from muster.cli import formatting
from muster.cli.errors import CliError, ExitStatus
from muster.cli.options import Job, JobsClient, Json, Server, connect
from muster.cli.output import answers, json_wanted, print_json, say

POLL_SECONDS = 0.5


def profile(
    job: Job,
    steps: Annotated[int, typer.Option("--steps", "-n", help="Number of steps to trace, at most 50.")] = 5,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", help="Rank to trace; may be repeated. Default: 0.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="Download the files into this folder.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the files are written.")] = True,
    show: Annotated[bool, typer.Option("--list", help="List existing profiles instead of making one.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Profile a running job's next steps: operators, kernels and memory. Training continues meanwhile.

    Open traces at ui.perfetto.dev and GPU memory snapshots at pytorch.org/memory_viz. With --list, --to downloads the
    newest profile.
    """
    with connect(server) as client:
        job_id = client.job_id(job)
        if show:
            profiles = client.get(f"jobs/{job_id}/profiles")
            chosen = profiles["items"][-1:] if to is not None else profiles["items"]
        else:
            asked = client.post(f"jobs/{job_id}/profiles", {"steps": steps, "ranks": rank or [0]}, repeat=False)
            say(f"Asked {job} for {steps} steps of rank {', '.join(map(str, asked['ranks']))} (request {asked['id']})")
            if not wait:
                if json:
                    print_json(asked)
                return
            profiles, one = _until_written(client, job, job_id, asked)
            chosen = [one]
        fetched = [path for each in chosen for path in _fetch(client, job_id, each, to)] if to is not None else []
    if json_wanted():
        print_json(profiles if show else chosen[0])
        return
    if not chosen:
        say("No profile yet: `muster profile JOB` makes one.")
    for each in chosen:
        _show(each, profiles["uri"])
    for path in fetched:
        answers().print(str(path), markup=False, soft_wrap=True)
    if any(part["fault"] for each in chosen for part in each["done"]) and not show:
        raise typer.Exit(ExitStatus.FAILED)


def _until_written(
    client: JobsClient, name: str, job_id: str, asked: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The list, and in it the profile of this request. Raises CliError where the attempt has ended before."""
    while True:
        status = client.get(f"jobs/{job_id}")["status"]
        profiles = client.get(f"jobs/{job_id}/profiles")  # after the status: what was written before an end is seen
        one = next((each for each in profiles["items"] if each["id"] == asked["id"]), None)
        if one is not None and one["complete"]:
            return profiles, one
        if status["phase"] != "Running" or status["attempt"] != asked["attempt"]:
            raise CliError(
                f"attempt {asked['attempt']} of {name} ended before its trace was written ({status['phase']}: "
                f"{status['because']})",
                code="profile-lost",
                next_step=f"ask again when it trains: muster profile {name}",
            )
        time.sleep(POLL_SECONDS)


def _fetch(client: JobsClient, job_id: str, profile: dict[str, Any], to: Path) -> list[Path]:
    from muster.cli.files import api
    from muster.cli.uploading import transfer_progress
    from muster.client.transfers import FileTransfers, inside

    fetched = []
    for part in profile["done"]:
        for file in part["files"]:
            target = inside(to, f"{profile['name']}/{file['name']}")
            with FileTransfers(api(client)) as transfers, transfer_progress(file["name"]) as progress:
                path = f"jobs/{job_id}/profiles/{profile['name']}/{file['name']}"
                transfers.download(path, target, file["bytes"], progress)
            fetched.append(target)
    return fetched


def _show(profile: dict[str, Any], uri: str) -> None:
    last = profile["step"] + profile["steps"] - 1
    state = "" if profile["complete"] else ", not complete"
    say(f"steps {profile['step']:,} to {last:,}, attempt {profile['attempt']}{state}", "bold")
    for part in profile["done"]:
        for file in part["files"]:
            where = f"{uri}/{profile['name']}/{file['name']}"
            answers().print(f"  {where}  {formatting.size(file['bytes'])}", markup=False, soft_wrap=True)
        if part["fault"]:
            say(f"  rank {part['rank']}: {part['fault']}", "red")
