"""Commands that run the platform on this machine: up, down, demo."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from muster.cli.errors import Exit
from muster.cli.options import Json, StateFolder
from muster.cli.output import print_json

Nodes = Annotated[int | None, typer.Option("--nodes", min=1, help="Virtual nodes; a worker takes one.")]


def up(
    state: StateFolder = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any free one.")] = 8642,
    host: Annotated[str, typer.Option("--host", help="The address to listen on; each demands tokens.")] = "127.0.0.1",
    nodes: Nodes = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=0, help="GPUs of each virtual node.")
    ] = None,
    stop_jobs: Annotated[
        bool,
        typer.Option(
            "--stop-jobs", help="At the end stop the jobs too; each commits first, and the next `up` lets it go on."
        ),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; `muster down` ends it.")
    ] = False,
    prometheus_url: Annotated[
        str | None, typer.Option("--prometheus-url", metavar="URL", help="Ask this Prometheus about jobs too.")
    ] = None,
    operator_port: Annotated[
        int | None,
        typer.Option(
            "--operator-port",
            min=0,
            max=65535,
            help="Where Prometheus scrapes the operator and Alertmanager posts to it; left out: any free one.",
        ),
    ] = None,
    parent_pid: Annotated[int | None, typer.Option("--parent-pid", hidden=True)] = None,
    json: Json = False,
) -> None:
    """Run Muster on this machine: API, operator, workers. No Kubernetes, no database server, no GPU needed.

    Stopping it (Ctrl-C) stops no training: jobs go on, and the next `muster up` on the same state folder adopts them.
    """
    from muster.cli import up as story
    from muster.client.address import state_folder

    options = story.PlatformOptions(
        state_folder(state), host, port, nodes, gpus_per_node, stop_jobs, parent_pid, prometheus_url, operator_port
    )
    (story.detach if detach else story.run)(options)


def down(state: StateFolder = None, json: Json = False) -> None:
    """Stop the `muster up` of this machine. Jobs go on, unless it was started with --stop-jobs."""
    from muster.cli import up as story
    from muster.client.address import state_folder

    story.down(state_folder(state))


def demo(
    job: Annotated[Path | None, typer.Option("--job", help="Another job file than the example.")] = None,
    state: Annotated[Path | None, typer.Option("--state", help="An empty folder; default: a temporary one.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the state folder.")] = False,
    finetune: Annotated[
        bool,
        typer.Option(
            "--finetune", help="Another one: a model in transformers' layout, pretrained, fine-tuned and opened there."
        ),
    ] = False,
    pretrain_steps: Annotated[int, typer.Option("--pretrain-steps", min=12, hidden=True)] = 150,
    finetune_steps: Annotated[int, typer.Option("--finetune-steps", min=12, hidden=True)] = 90,
    json: Json = False,
) -> None:
    """Show the whole promise: submit a job, kill a worker, watch it resume and finish. Leaves nothing running.

    Exits with 0 only if every promise was kept, by the API's own records.
    """
    from muster.cli import demo as story
    from muster.cli import demo_report, up
    from muster.cli.demo_checks import run_checks

    up.refuse_missing_extras()
    began = time.monotonic()
    if finetune:
        from muster.cli import demo_finetune

        examples = story.find_example(None).parent
        found = demo_finetune.run(examples, state, keep, (pretrain_steps, finetune_steps))
        evidence, results = found.tuning, demo_finetune.run_checks(found)
        document = demo_finetune.document(found, results, time.monotonic() - began)
    else:
        evidence = story.run(story.find_example(job), state, keep)
        results = run_checks(evidence)
        document = demo_report.document(evidence, results, time.monotonic() - began)
    if json:
        print_json(document)
    else:
        demo_report.show(evidence, results, document["seconds"])
    if not all(result.kept for result in results):
        raise typer.Exit(Exit.FAILED)
