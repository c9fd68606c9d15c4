"""Commands on jobs: submit, ls, get, cancel, suspend, resume, clone."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.cli.errors import ExitStatus, cli_error, usage
from muster.cli.options import Job, Jobs, Json, Project, Server, Settings, connect
from muster.cli.output import answers, json_wanted, print_json, say
from muster.client.errors import MusterError, Unavailable

if TYPE_CHECKING:
    from muster.cli.options import JobsClient

Follow = Annotated[
    bool, typer.Option("--follow", "-f", "--wait", "-w", help="Follow the job to its end; its result is the exit code.")
]
Hold = Annotated[
    str | None,
    typer.Option(
        "--hold",
        metavar="TIME",
        help="Run nothing on the gang, and keep it so long (90s, 30m, 2h) for `muster shell`.",
    ),
]
NewName = Annotated[str | None, typer.Option("--name", help="The name to use instead of the file's.")]


def submit(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Job file (YAML or JSON); - reads standard input.")],
    name: NewName = None,
    project: Project = None,
    settings: Settings = None,
    hold: Hold = None,
    follow: Follow = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the file and show the plan without submitting.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Check a job file, show what it will do, need and cost, and submit it.

    Refuses a job that would fail at its start, because of its model or data. Asks before it submits one that does not
    fit into memory, or needs --yes.
    Relative paths in the file are relative to the file. If the server is on another machine, the files are uploaded
    after you confirm (without asking if --yes, --json or no terminal; never with --dry-run). A program's source folder
    is uploaded to any server, once for the same content. Ctrl-C while watching doesn't stop the job.
    """
    from muster.cli import submit as story
    from muster.cli.follow import follow as watch
    from muster.cli.holding import hold_gang
    from muster.cli.source import packed_source
    from muster.client.documents import project_of

    with connect(server) as client:
        send = None if dry_run else story.uploader(client, asks=not (yes or json))
        document = story.prepare(file, name, settings or [], client.server.local, project, send)
        if hold is not None:
            hold_gang(document, hold)
        with packed_source(document, client) as source:
            plan = story.request_plan(client, document)
            if dry_run and json:
                print_json(plan)
            elif not json:
                story.show_plan(plan)
            if source is not None:
                source.show()
            if dry_run:
                raise typer.Exit(ExitStatus.FAILED if story.does_not_fit(plan) else ExitStatus.OK)
            if not (yes or story.agreed(plan, json)):
                say("Nothing was submitted.")
                raise typer.Exit(ExitStatus.FAILED)
            if source is not None:
                source.upload(client, project_of(document.data))
            job = story.send(client, document)
        if not follow:
            story.announce(job)
            return
        say(f"Submitted {job['metadata']['name']} ({job['id']})", "bold green")
        raise typer.Exit(watch(client, job))


def estimate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Job file (YAML or JSON); - reads standard input.")],
    settings: Settings = None,
    here: Annotated[bool, typer.Option("--here", help="Estimate on this machine even if there is a server.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Estimate the memory, time and cost of a job without submitting it. Exit code 1 if it does not fit, or would fail
    at its start.

    A server estimates from the speed of earlier jobs like it. Without one, published figures are used.
    """
    from muster.cli import estimate as story
    from muster.cli import submit as submission

    try:
        client = None if here else connect(server)
    except MusterError as error:
        if server is not None or not isinstance(error, Unavailable):
            raise
        client = None
    document = submission.prepare(file, None, settings or [], client is None or client.server.local)
    if client is None:
        result = story.work_out(document)
    else:
        with client:
            result = story.ask(client, document)
    if json:
        print_json(result)
    else:
        story.show(result)
    if result.get("fits") is False or result.get("faults"):
        raise typer.Exit(ExitStatus.FAILED)


def ls(
    phase: Annotated[list[str] | None, typer.Option("--phase", "-p", help="Only jobs in this phase.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Only jobs that have not ended.")] = False,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="KEY=VALUE", help="Only jobs with this label.")
    ] = None,
    project: Annotated[str | None, typer.Option("--project", metavar="NAME", help="Only jobs of this project.")] = None,
    owner: Annotated[str | None, typer.Option("--owner", metavar="NAME", help="Only jobs of this person.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only jobs with this tag.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most this many.")] = 30,
    server: Server = None,
    json: Json = False,
) -> None:
    """List jobs, the newest first, and below them older ones that run."""
    from muster.cli.render import show_jobs

    count = 0
    ids: set[str] = set()

    def pages() -> Iterator[list[dict[str, Any]]]:
        """The pages up to the limit. One job more is asked for, to know whether there are more."""
        nonlocal count
        filters = {
            "phase": phases,
            "label": label or [],
            "live": "true" if live else None,
            "project": project,
            "owner": owner,
            "tag": tag,
        }
        for page in client.job_pages(limit + 1, **filters):
            ids.update(job["id"] for job in page[: limit - count])
            yield page[: limit - count]
            count += len(page)

    def pages_and_running() -> Iterator[list[dict[str, Any]]]:
        """The pages, and where there are more jobs than fit, those of the others that run, up to the same limit."""
        yield from pages()
        if count <= limit or phases:
            return
        filters = {"phase": ["Running"], "label": label or [], "project": project, "owner": owner, "tag": tag}
        for page in client.job_pages(limit, **filters):
            yield [job for job in page if job["id"] not in ids]

    phases = [word.capitalize() for word in phase or []]
    with connect(server) as client:
        if json:
            print_json({"items": [job for page in pages() for job in page], "more": count > limit})
            return
        show_jobs(pages_and_running())
    if not count:
        say("No jobs." if not (phases or label or live or project or owner) else "No such jobs.")
    elif count > limit:
        say(f"There are more than {limit}, of which those that run are shown; --limit shows more.", "dim")


def get(
    job: Job,
    follow: Follow = False,
    output_spec: Annotated[bool, typer.Option("--spec", help="Print the job as a file that `submit` takes.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Show one job: phase and reason, progress, attempts, where its time went, loss curve, samples of its last
    evaluation.
    """
    from muster.cli.follow import follow as watch
    from muster.cli.render import show_job, show_samples, step_points

    with connect(server) as client:
        job_id = client.job_id(job)
        document = client.get(f"jobs/{job_id}")
        if output_spec:
            _print_spec(document)
            return
        if follow:
            raise typer.Exit(watch(client, document))
        if json:
            print_json(document)
            return
        history = client.get(f"jobs/{job_id}/attempts")
        points = step_points(client.get(f"jobs/{job_id}/metrics", points=400))
        samples = _last_samples(client, document)
        scores = _scores(client, document)
        queue = client.get(f"jobs/{job_id}/why")["queue"] if document["status"]["phase"] == "Queued" else None
    show_job(document, history["items"], points, history.get("cost"), (queue or {}).get("expected", ""))
    for line in scores:
        answers().print(line, soft_wrap=True)
    if samples is not None:
        show_samples(samples)


def _last_samples(client: JobsClient, job: dict[str, Any]) -> dict[str, Any] | None:
    """Return the model's samples of its last evaluation.

    None if no prompts are configured, nothing is written yet, or the job's storage doesn't answer: the rest of the
    job is worth showing all the same.
    """
    evaluation = (job["spec"].get("training") or {}).get("evaluation") or {}
    if not evaluation.get("generate"):
        return None
    try:
        items = client.get(f"jobs/{job['id']}/samples", limit=1)["items"]
    except MusterError as error:
        say(f"warning: its samples are left out: {error}", "yellow")
        return None
    return items[-1] if items else None


def _scores(client: JobsClient, job: dict[str, Any]) -> list[str]:
    """Return a line for each checkpoint that evaluations have scored, the newest last.

    Empty if the job has none, or its storage doesn't answer: the rest of the job is worth showing all the same.
    """
    from muster.cli.render import evaluation_words

    if not job["status"].get("checkpoint"):
        return []
    try:
        items = client.get(f"jobs/{job['id']}/checkpoints")["items"]
    except MusterError:
        return []
    scored = [(item["step"], each) for item in items for each in item["evaluations"] if each["results"]]
    return [f"scored      step {step:,}, {evaluation_words(each)}" for step, each in scored[-SCORES_MAX:]]


def cancel(
    jobs: Jobs,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until the workers are gone.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Stop jobs for good. Their records, logs and checkpoints stay."""
    _act(jobs, "cancel", "is being cancelled", wait, server, _ENDED)


def suspend(
    jobs: Jobs,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Wait until it has saved a checkpoint and stopped.")
    ] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Save a checkpoint and stop jobs. `muster resume` continues them from there."""
    _act(jobs, "suspend", "is being suspended", wait, server, (*_ENDED, "Suspended"))


def resume(
    jobs: Jobs,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until it trains again.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Resume suspended jobs from their last checkpoint."""
    _act(jobs, "resume", "is being resumed", wait, server, (*_ENDED, "Running"))


def clone(
    job: Job,
    name: NewName = None,
    settings: Settings = None,
    follow: Follow = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Submit a copy of a job, with changes from --set."""
    from muster.cli import submit as story
    from muster.cli.follow import follow as watch
    from muster.cli.job_file import JobFile, in_place_of_others, set_value

    patch = JobFile({"spec": {}}, "--set")
    for assignment in settings or []:
        set_value(patch, assignment)
    body = ({"name": name} if name else {}) | (
        {"spec": in_place_of_others(patch.data["spec"])} if patch.data["spec"] else {}
    )
    with connect(server) as client:
        made = client.post(f"jobs/{client.job_id(job)}:clone", body, key=str(uuid.uuid4()))
        if not follow:
            story.announce(made)
            return
        raise typer.Exit(watch(client, made))


def rm(
    jobs: Jobs,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Delete their checkpoints too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Delete jobs that have ended: records and logs. Checkpoints stay without --checkpoints.

    On a terminal it asks first. Without one, --checkpoints needs --yes.

    Refused while a job is active. With --checkpoints, also refused if a checkpoint is pinned or another job needs it.
    """
    from muster.cli.submit import confirmed, on_terminal

    extent = "records, logs and every checkpoint" if checkpoints else "records and logs"
    if not yes:
        if checkpoints and (json or not on_terminal()):
            raise usage(
                f"nothing was deleted: the checkpoints of {', '.join(jobs)} can't be brought back, and there is no "
                "terminal to confirm it on",
                "add --yes, or leave out --checkpoints to keep them",
                "not-confirmed",
            )
        if not (json or confirmed(f"Delete {', '.join(jobs)}: {extent}?", by_default=False)):
            say("Nothing was deleted.")
            raise typer.Exit(ExitStatus.FAILED)
    gone, errors = [], []
    with connect(server) as client:
        for name in jobs:
            try:
                job_id = client.job_id(name)
                client.delete(f"jobs/{job_id}", checkpoints="true" if checkpoints else None)
                gone.append(job_id)
                say(f"{name} is deleted")
            except MusterError as raised:
                error = cli_error(raised)
                if error.exit_code == ExitStatus.UNREACHABLE or len(jobs) == 1:
                    raise
                errors.append(error)
                say(f"error: {name}: {error}", "red")
    if json_wanted():
        print_json({"deleted": gone, "errors": [error.document() for error in errors]})
    if errors:
        raise typer.Exit(max(error.exit_code for error in errors))


_ENDED = ("Succeeded", "Failed", "Cancelled")
SCORES_MAX = 5  # that `get` shows
WAIT_POLL_SECONDS = 0.3


def _act(
    names: list[str], action: str, words: str, wait: bool, server: str | None, final_phases: tuple[str, ...]
) -> None:
    """Send the action to each job; one that fails does not keep the others from theirs.

    The action is complete in one of the `final_phases`. Until then the job's phase is the one from before, so the
    answer says what is being done: a job that was just resumed is still `Suspended`.
    """
    answered, errors = [], []
    with connect(server) as client:
        for name in names:
            try:
                job = client.post(f"jobs/{client.job_id(name)}:{action}")
                job = _until(client, job, final_phases) if wait else job
                answered.append(job)
                say(f"{job['metadata']['name']} {_progress(job, words, final_phases)}")
            except MusterError as raised:
                error = cli_error(raised)
                if error.exit_code == ExitStatus.UNREACHABLE or len(names) == 1:
                    raise
                errors.append((name, error))
                say(f"error: {name}: {error}", "red")
    if json_wanted():
        failures = [{"job": name, **error.document()} for name, error in errors]
        print_json({"items": answered, "errors": failures} if len(names) > 1 else answered[0])
    if errors:
        raise typer.Exit(max(error.exit_code for _, error in errors))


def _until(client: JobsClient, job: dict[str, Any], final_phases: tuple[str, ...]) -> dict[str, Any]:
    while job["status"]["phase"] not in final_phases:
        time.sleep(WAIT_POLL_SECONDS)
        job = client.get(f"jobs/{job['id']}")
    return job


def _progress(job: dict[str, Any], words: str, final_phases: tuple[str, ...]) -> str:
    phase, because = job["status"]["phase"], job["status"]["because"]
    return f"is {phase}" if phase in final_phases else f"{words} (now {phase}: {because})"


def _print_spec(job: dict[str, Any]) -> None:
    """The resolved job as YAML that can be submitted again, once what is hidden in it has been filled in."""
    from muster.documents.yaml_text import write_yaml
    from muster.words.names import DEFAULT_PROJECT, Label
    from muster.words.redaction import masked_paths

    metadata = {key: job["metadata"][key] for key in ("name", "namespace", "labels") if job["metadata"].get(key)}
    if job["metadata"].get("project") not in (None, DEFAULT_PROJECT):
        metadata["labels"] = metadata.get("labels", {}) | {Label.PROJECT: job["metadata"]["project"]}
    document = {"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": metadata, "spec": job["spec"]}
    hidden = list(masked_paths(document))
    if hidden:
        say(f"warning: fill in what is hidden before you submit this: {', '.join(hidden)}", "yellow")
    if json_wanted():
        print_json(document)
        return
    for path in hidden:
        typer.echo(f"# fill in: {path}")
    typer.echo(write_yaml(document), nl=False)
