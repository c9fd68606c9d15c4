"""`muster doctor`: whether a cluster is ready for Muster, line by line, each with what to do next."""

from __future__ import annotations

from typing import Annotated

import typer

from muster.cli.errors import Exit
from muster.cli.options import Json, chosen_cluster
from muster.cli.output import answers, print_json, say
from muster.cli.table import Styled, Table

_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def doctor(
    context: Annotated[
        str | None, typer.Option("--context", help="Context of the kubeconfig; left out: the current one.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="Where you submit jobs; left out: the context's.")
    ] = None,
    system: Annotated[str, typer.Option("--system", help="Namespace that Muster is installed in.")] = "muster-system",
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="URI", help="Checkpoint store to reach; left out: that of the installation."),
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Worker image to reach it from; left out: that of the installation.")
    ] = None,
    env_from: Annotated[
        list[str] | None,
        typer.Option(
            "--env-from",
            metavar="SECRET",
            help="Secret of the namespace with the store's keys, as in a job's runtime.envFrom; may be given several "
            "times. Those of the installation (workers.envFrom) are used anyhow.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check whether a cluster is ready: versions, rights, schedulers, devices, storage, agents, monitoring.

    Nothing is changed, but for one pod that tries to reach the checkpoint store and is removed again. Exit code 1 when
    something that Muster can't do without is missing.
    """
    from muster.cli.cluster_checks import examine
    from muster.cli.cluster_connection import connect_cluster
    from muster.cli.examined_cluster import ExaminedCluster

    before_context, before_namespace = chosen_cluster()
    cluster = connect_cluster(context or before_context, namespace or before_namespace)
    say(f"Looking at context {cluster.context}, namespace {cluster.namespace} …", "dim")
    findings = examine(ExaminedCluster(cluster, system, store, image, tuple(env_from or ())))
    failures = sum(finding.state == "failure" for finding in findings)
    if json:
        print_json({
            "context": cluster.context,
            "namespace": cluster.namespace,
            "ready": not failures,
            "findings": [finding.document() for finding in findings],
        })  # fmt: skip
    else:
        table = Table("CHECK", "STATE", "WHAT WAS SEEN")
        for finding in findings:
            told = finding.message + (f"\nnext: {finding.next_step}" if finding.next_step else "")
            table.add_row(finding.check, Styled(finding.state, _STYLES[finding.state]), told)
        answers().print(table, soft_wrap=True)
    if failures:
        raise typer.Exit(Exit.FAILED)
