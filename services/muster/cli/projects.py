"""Commands on projects: what owns jobs, who works there, and what their jobs may name."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from muster.cli.options import JobsClient, Json, Server, Settings, connect
from muster.cli.output import answers, print_json, say
from muster.cli.table import TextTable
from muster.client.errors import MusterError

app = typer.Typer(help="Projects: they own jobs and have members, limits and quotas.", no_args_is_help=True)

ProjectName = Annotated[str, typer.Argument(metavar="PROJECT", help="Name of the project.")]
Person = Annotated[str, typer.Argument(metavar="PERSON", help="Name of a person or service account.")]


class Role(StrEnum):
    """Each includes those before it."""

    VIEWER = "viewer"
    MEMBER = "member"
    MAINTAINER = "maintainer"


@app.command("ls")
def ls(server: Server = None, json: Json = False) -> None:
    """List the projects that you may see."""
    with connect(server) as client:
        projects = client.get("projects")
    if json:
        print_json(projects)
        return
    table = TextTable("NAME", "NAMESPACE", "YOUR ROLE")
    for project in projects["items"]:
        table.add_row(project["name"], project["namespace"] or "", project["role"])
    answers().print(table, soft_wrap=True)


@app.command("get")
def get(project: ProjectName, server: Server = None, json: Json = False) -> None:
    """Show a project: its namespace, limits and members."""
    with connect(server) as client:
        document = client.get(f"projects/{project}")
        members = client.get(f"projects/{project}/members")["items"]
    if json:
        print_json(document | {"members": members})
        return
    table = TextTable("", "", header=False)
    table.add_row("namespace", document["namespace"] or "those of `namespaces`, else default")
    for name, value in _lines(document["limits"]):
        table.add_row(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    for member in members:
        table.add_row(member["role"], member["person"])
    answers().print(table, soft_wrap=True)


@app.command("set")
def set_project(
    project: ProjectName,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="Namespace of a new project. Default: the project's name.")
    ] = None,
    settings: Settings = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Create a project, or change its limits: `--set gangSizes=[1,2]`. For admins.

    What its jobs may name: serviceAccount, serviceAccounts, secrets, claims, checkpointPrefix, kmsKeyId, dataPrefixes,
    endpoints, queue, gangSizes, instanceTypes and images; for project `default` also namespaces. What they may use at a
    time: `quota.gpus=64`, `quota.gangs`, `quota.processes`, `quota.queuedJobs`, and per person `quota.person.gpus=16`.
    Per month: `quota.gpuHoursPerMonth` and `quota.moneyPerMonth`. Relative to other projects: `quota.weight=2`,
    `quota.guaranteedGpus=16`, and `quota.preempts=true` if its jobs may preempt others. An empty value removes a limit.
    """
    from muster.cli.job_file import JobFile, set_value

    with connect(server) as client:
        changed = JobFile({"spec": _limits(client, project)}, "--set")
        for assignment in settings or []:
            set_value(changed, assignment)
        body = {"limits": {key: value for key, value in changed.data["spec"].items() if value not in (None, "")}}
        made = client.put(f"projects/{project}", body | ({"namespace": namespace} if namespace else {}))
    if json:
        print_json(made)
    say(f"project {project} is as it was asked for", "bold green")


def _lines(limits: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each limit with the path that sets it."""
    for name, value in limits.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{above}{name}.")
        elif value is not None:
            yield above + name, value


def _limits(client: JobsClient, project: str) -> dict[str, Any]:
    """Return the limits of the project; none if it is still to be created."""
    try:
        limits: dict[str, Any] = client.get(f"projects/{project}")["limits"]
    except MusterError as error:
        if error.code != "project_not_found":
            raise
        return {}
    return limits


@app.command("rm")
def rm(project: ProjectName, server: Server = None, json: Json = False) -> None:
    """Delete a project that has no jobs, and revoke its tokens. For admins."""
    with connect(server) as client:
        client.delete(f"projects/{project}")
    if json:
        print_json({"name": project, "deleted": True})
    say(f"project {project} is gone")


@app.command("add")
def add(
    project: ProjectName,
    person: Person,
    role: Annotated[Role, typer.Option("--role", help="Each includes those before it.")] = Role.MEMBER,
    server: Server = None,
    json: Json = False,
) -> None:
    """Give somebody a role in a project: a viewer sees its jobs, a member submits and acts on their own, a maintainer
    acts on all and chooses the members. For maintainers. An admin adds new people.
    """
    with connect(server) as client:
        made = client.put(f"projects/{project}/members/{person}", {"role": role.value})
    if json:
        print_json(made)
    say(f"{person} is a {role.value} of {project}", "bold green")


@app.command("remove")
def remove(project: ProjectName, person: Person, server: Server = None, json: Json = False) -> None:
    """Remove somebody from a project. Their jobs continue; their open streams end."""
    with connect(server) as client:
        client.delete(f"projects/{project}/members/{person}")
    if json:
        print_json({"person": person, "role": None})
    say(f"{person} sees nothing of {project} any more")
