"""`muster submit`: read the file, let the server check it and show the plan, then submit it once and only once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.cli import formatting
from muster.cli.errors import CliError, ExitStatus, cli_error, usage
from muster.cli.job_file import JobFile, explaining, read_job_file, set_value
from muster.cli.options import command_prefix
from muster.cli.output import answers, json_wanted, print_json, say
from muster.cli.paths import Send, make_absolute
from muster.cli.table import TextTable
from muster.client.documents import project_of
from muster.client.errors import MusterError
from muster.plan.plan_words import does_not_fit, plan_facts
from muster.words.base import DocumentProblem
from muster.words.names import Label

if TYPE_CHECKING:
    from muster.cli.options import JobsClient


def prepare(
    source: str,
    name: str | None,
    settings: list[str],
    local: bool,
    project: str | None = None,
    send: Callable[[str | None], Send] | None = None,
    sweep: bool = False,
) -> JobFile:
    """The document to send: read, with --set, --name and --project applied and relative paths made absolute; or, where
    the server is not `local`, uploaded by what `send` gives for the job's project. A sweep is refused unless `sweep`.
    """
    file = read_job_file(source)
    if not sweep:
        refuse_sweep(file, source)
    for assignment in settings:
        set_value(file, assignment)
    if name is not None:
        metadata = file.data.setdefault("metadata", {})
        if isinstance(metadata, dict):
            metadata["name"] = name
    if project is not None:
        metadata = file.data.setdefault("metadata", {})
        labels = metadata.setdefault("labels", {}) if isinstance(metadata, dict) else None
        if isinstance(labels, dict):  # else the server says what is wrong with it
            labels[Label.PROJECT] = project
    make_absolute(file, local, send(project_of(file.data)) if send is not None else None)
    return file


def refuse_sweep(file: JobFile, source: str) -> None:
    """Raise CliError (exit 2) for a document of a sweep, which is many jobs."""
    if "sweep" in file.data:
        raise usage(f"{file.name} is a sweep, and this command takes one job", f"muster sweep {source}", "is-a-sweep")


def uploader(client: JobsClient, asks: bool) -> Callable[[str | None], Send] | None:
    """Return the function that uploads a job's files to a server on another machine, asking first if `asks`.

    None for a cluster, which keeps no files.
    """
    from muster.cli.uploading import send_file
    from muster.client.connection import Connection

    if not isinstance(client, Connection):
        return None

    def to_project(project: str | None) -> Send:
        def send(purposes: dict[Path, str]) -> dict[Path, str]:
            for path in purposes:
                say(f"  {path.name}  {formatting.size(path.stat().st_size)}")
            many = formatting.plural(len(purposes), "file")
            if asks and not confirmed(f"Upload {many} of this machine to {client.server.url}?"):
                raise CliError("nothing was uploaded, and nothing submitted", ExitStatus.FAILED, "not-uploaded")
            ids: dict[Path, str] = {}
            for path, purpose in purposes.items():
                file = send_file(client, path, purpose, project)
                if file["status"] == "failed":
                    what = f"nothing can be learnt from {path}: {file['fault']}"
                    raise CliError(what, ExitStatus.FAILED, "bad-data", next_step="mend it, and submit the job again")
                ids[path] = file["id"]
            return ids

        return send

    return to_project


def request_plan(client: JobsClient, file: JobFile) -> dict[str, Any]:
    """Return the server's dry run (replies.Plan).

    Raises CliError with the line of every fault, also for what a submission would refuse, and for what would end the
    job at its start: a model that can't be trained, data that is not there or that its task can't learn from.
    """
    with placed(file):
        plan = client.plan(file.data)
    if not plan["accepted"]:
        raise _refused(plan, file)
    if faults := tuple(file.fault(DocumentProblem(each["path"], each["message"])) for each in plan.get("faults", ())):
        raise CliError("the job would fail at its start", ExitStatus.FAILED, "would-fail", file.name, faults)
    return plan


def send(client: JobsClient, file: JobFile) -> dict[str, Any]:
    with placed(file):
        return client.submit(file.data)


def show_plan(plan: dict[str, Any]) -> None:
    """Show what the job would do, need, take and cost."""
    table = TextTable("", "", header=False)
    for name, words in plan_facts(plan):
        table.add_row(name, words)
    answers().print(table, soft_wrap=True)
    show_warnings(plan)
    if unknown := plan.get("notEstimated"):
        say(f"not estimated: {unknown}", "dim")
    for gap in (plan.get("estimate") or {}).get("gaps", ()):
        say(f"not known: {gap}", "dim")
    if advice := does_not_fit(plan):
        say(f"does not fit: {advice}", "bold red")


def show_warnings(plan: dict[str, Any]) -> None:
    for warning in plan["warnings"]:
        say(f"warning: {warning['path']}: {warning['message']}", "yellow")


def on_terminal() -> bool:
    """Return whether somebody can be asked: both the question and the answer go through a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirmed(question: str = "Submit?", by_default: bool = True) -> bool:
    """Ask on a terminal; anything else has already said what it wants by calling us. Enter means `by_default`."""
    if not on_terminal():
        return True
    say(f"{question} {'[Y/n]' if by_default else '[y/N]'} ", "bold", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes", *([""] if by_default else []))


def agreed(plan: dict[str, Any], json: bool) -> bool:
    """Ask whether to submit the job, with No as the default for one that does not fit into memory.

    Raises CliError for one that does not fit where nobody can be asked.
    """
    if not does_not_fit(plan):
        return json or confirmed()
    if json or not on_terminal():
        next_step = "change the job as `muster estimate` advises, or submit it all the same with --yes"
        raise CliError("the job does not fit into memory", ExitStatus.FAILED, "does-not-fit", next_step=next_step)
    return confirmed("Submit it all the same?", by_default=False)


def announce(job: dict[str, Any]) -> None:
    name = job["metadata"]["name"]
    if json_wanted():
        print_json(job)
    say(f"Submitted {name} ({job['id']})", "bold green")
    say(f"  {command_prefix()} get {name} --follow    watch it")
    say(f"  {command_prefix()} logs {name} -f         what the workers write")
    say(f"  {command_prefix()} why {name}             why it is where it is")


@contextlib.contextmanager
def placed(file: JobFile) -> Iterator[None]:
    """Adds file and lines to the faults that the server names by path."""
    try:
        yield
    except MusterError as raised:
        error = cli_error(raised)
        error.faults = tuple(file.fault(fault.problem) for fault in error.faults)
        error.file = file.name if error.faults else error.file
        error.next_step = error.next_step or explaining(error.faults)
        raise error from None


def _refused(plan: dict[str, Any], file: JobFile) -> CliError:
    faults = tuple(file.fault(DocumentProblem(r.get("path") or "", r["message"])) for r in plan["refusals"])
    code = plan["refusals"][0]["code"] if plan["refusals"] else "refused"
    next_step = "`--name` submits it under another name" if code == "name_taken" else ""
    return CliError(
        f"the server would refuse {plan['job']['name']}", ExitStatus.FAILED, code, file.name, faults, next_step
    )
