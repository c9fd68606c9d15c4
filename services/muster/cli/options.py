"""Arguments and options that many commands share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from muster.cli.errors import usage
from muster.cli.output import json_wanted, say, use_json


def _job_names(incomplete: str) -> list[str]:
    """Return the names of jobs for shell completion, quietly and quickly, whatever is wrong."""
    from muster.client.address import find_server
    from muster.client.connection import Connection

    try:
        with Connection(find_server(None), patience_seconds=1) as client:
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
Project = Annotated[
    str | None, typer.Option("--project", metavar="NAME", help="The project. Default: your token's project.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a value, such as training.length.steps=100."),
]


class JobsClient(Protocol):
    """Protocol of what answers a command: the API (`Connection`) or a cluster (`cluster_client.ClusterClient`)."""

    @property
    def server(self) -> AnswerSource: ...

    def __enter__(self) -> JobsClient: ...

    def __exit__(self, *_: object) -> None: ...

    def get(self, path: str, **params: Any) -> Any: ...

    def post(self, path: str, body: Any = None, key: str | None = None, repeat: bool = True, **params: Any) -> Any: ...

    def put(self, path: str, body: Any) -> Any: ...

    def patch(self, path: str, body: Any) -> Any: ...

    def delete(self, path: str, **params: Any) -> None: ...

    def job_id(self, name: str) -> str: ...

    def job_pages(self, limit: int, **filters: Any) -> Iterator[list[dict[str, Any]]]: ...

    def submit(self, document: Any) -> dict[str, Any]: ...

    def plan(self, document: Any) -> dict[str, Any]: ...

    def stream(self, path: str, last_id: str = "", **params: Any) -> Iterator[Any]: ...


class AnswerSource(Protocol):
    """Source of the answers. If it is `local`, this machine's paths mean the same there."""

    @property
    def local(self) -> bool: ...


@dataclass
class _ChosenCluster:
    """Choice of `muster --context NAME --namespace NAME …`, for every command."""

    context: str | None = None
    namespace: str | None = None


_CHOSEN = _ChosenCluster()


def choose_cluster(context: str | None, namespace: str | None) -> None:
    _CHOSEN.context, _CHOSEN.namespace = context, namespace


def chosen_cluster() -> tuple[str | None, str | None]:
    """Context and namespace before the command."""
    return _CHOSEN.context, _CHOSEN.namespace


def command_prefix() -> str:
    """Return `muster` with the chosen cluster, for commands that are shown to be typed."""
    context, namespace = chosen_cluster()
    chosen = f" --context {context}" if context else ""
    return f"muster{chosen}{f' --namespace {namespace}' if namespace else ''}"


def connect(server: str | None, patience_seconds: float = 20.0) -> JobsClient:
    """A client of the chosen cluster or server, which says when it has to wait."""
    if _CHOSEN.context is not None:
        if server is not None:
            raise usage("--context speaks to a cluster and --server to an API: give one of them", code="two-servers")
        from muster.cli.cluster_client import ClusterClient
        from muster.cli.cluster_connection import connect_cluster

        return ClusterClient(connect_cluster(_CHOSEN.context, _CHOSEN.namespace))
    if _CHOSEN.namespace is not None:
        raise usage("--namespace is for --context: a server knows the namespaces of its jobs", code="namespace")
    from muster.client.address import find_server
    from muster.client.connection import Connection

    target = find_server(server)
    if target.token and not target.local and target.url.startswith("http://"):
        say(f"warning: the token goes to {target.url} unencrypted; use https://", "yellow")
    return Connection(
        target, patience_seconds, waiting=lambda reason: say(f"waiting for {target.url}: {reason}", "yellow")
    )


def project_of(client: JobsClient, named: str | None) -> str:
    """The project that was named, or the token's own."""
    return named or str(client.get("me")["home"])


__all__ = [
    "Job",
    "Jobs",
    "JobsClient",
    "Json",
    "Project",
    "Server",
    "Settings",
    "StateFolder",
    "connect",
    "json_wanted",
    "project_of",
]
