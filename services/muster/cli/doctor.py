"""`muster doctor`: whether a cluster or this machine is ready for Muster, line by line, each with what to do next."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated

import typer

from muster.cli.errors import ExitStatus, usage
from muster.cli.findings import Finding
from muster.cli.options import Json, chosen_cluster
from muster.cli.output import answers, print_json, say
from muster.cli.table import StyledCell, TextTable

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
    here: Annotated[bool, typer.Option("--here", help="Check this machine, even if there is a kubeconfig.")] = False,
    json: Json = False,
) -> None:
    """Check whether a cluster is ready, or this machine where there is no kubeconfig.

    Of a cluster: versions, rights, schedulers, devices, storage, agents, monitoring. Nothing is changed, but for one
    pod that tries to reach the checkpoint store and is removed again. Of a machine: Python, GPUs, torch against the
    driver, NCCL, disk, port, shared memory. Exit code 1 when something that Muster can't do without is missing.
    """
    before_context, before_namespace = chosen_cluster()
    context_name = context or before_context
    if here and context_name:
        raise usage("--here is this machine, and a context is named", "leave one of the two out", "two-places")
    if here or not (context_name or _has_kubeconfig()):
        _report_machine(json)
        return
    from muster.cli.cluster_checks import examine
    from muster.cli.cluster_connection import connect_cluster
    from muster.cli.examined_cluster import ExaminedCluster

    cluster = connect_cluster(context_name, namespace or before_namespace)
    say(f"Looking at context {cluster.context}, namespace {cluster.namespace} …", "dim")
    findings = examine(ExaminedCluster(cluster, system, store, image, tuple(env_from or ())))
    _report({"context": cluster.context, "namespace": cluster.namespace}, findings, json)


def _has_kubeconfig() -> bool:
    paths = [Path(each) for each in os.environ.get("KUBECONFIG", "").split(os.pathsep) if each] or [
        Path.home() / ".kube" / "config"
    ]
    return any(path.exists() for path in paths)


def _report_machine(json: bool) -> None:
    from muster.cli.machine_checks import ExaminedMachine, examine_machine
    from muster.client.address import state_folder

    say("Looking at this machine; `muster doctor --context NAME` looks at a cluster …", "dim")
    _report({"machine": platform.node()}, examine_machine(ExaminedMachine(state_folder(None))), json)


def _report(place: dict[str, str], findings: list[Finding], json: bool) -> None:
    failures = sum(finding.state == "failure" for finding in findings)
    if json:
        print_json({**place, "ready": not failures, "findings": [finding.document() for finding in findings]})
    else:
        table = TextTable("CHECK", "STATE", "WHAT WAS SEEN")
        for finding in findings:
            words = finding.message + (f"\nnext: {finding.next_step}" if finding.next_step else "")
            table.add_row(finding.check, StyledCell(finding.state, _STYLES[finding.state]), words)
        answers().print(table, soft_wrap=True)
    if failures:
        raise typer.Exit(ExitStatus.FAILED)
