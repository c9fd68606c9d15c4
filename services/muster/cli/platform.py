"""Commands that run the platform on this machine: up, down, demo."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from muster.cli.errors import ExitStatus
from muster.cli.options import Json, StateFolder
from muster.cli.output import print_json

Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        help="Number of virtual nodes. Default: 1 with all GPUs of the machine; without GPUs 4, each for one worker.",
    ),
]


def up(
    state: StateFolder = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the API; 0 picks a free one.")] = 8642,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. A token is always required.")
    ] = "127.0.0.1",
    nodes: Nodes = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node",
            min=0,
            help="GPUs of each virtual node; this machine must have them. Default: all that it has, over the nodes.",
        ),
    ] = None,
    stop_jobs: Annotated[
        bool,
        typer.Option(
            "--stop-jobs", help="Also stop the jobs on exit; each saves a checkpoint, and the next `up` resumes it."
        ),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; `muster down` stops it.")
    ] = False,
    prometheus_url: Annotated[
        str | None,
        typer.Option("--prometheus-url", metavar="URL", help="Also read metrics about jobs from this Prometheus."),
    ] = None,
    operator_port: Annotated[
        int | None,
        typer.Option(
            "--operator-port",
            min=0,
            max=65535,
            help="Port for Prometheus to scrape and Alertmanager to post to; default: a free one.",
        ),
    ] = None,
    parent_pid: Annotated[int | None, typer.Option("--parent-pid", hidden=True)] = None,
    json: Json = False,
) -> None:
    """Run Muster on this machine: API, operator, workers. No Kubernetes, no database server, no GPU needed.

    Ctrl-C stops the platform but no training: jobs continue, and the next `muster up` on the same state folder adopts
    them.
    """
    from muster.cli import up as story
    from muster.client.address import state_folder

    options = story.PlatformOptions(
        state_folder(state), host, port, nodes, gpus_per_node, stop_jobs, parent_pid, prometheus_url, operator_port
    )
    (story.detach if detach else story.run)(options)


def down(state: StateFolder = None, json: Json = False) -> None:
    """Stop the `muster up` of this machine. Jobs continue, unless it was started with --stop-jobs."""
    from muster.cli import up as story
    from muster.client.address import state_folder

    story.down(state_folder(state))


def demo(
    job: Annotated[Path | None, typer.Option("--job", help="Job file to run instead of the example.")] = None,
    state: Annotated[Path | None, typer.Option("--state", help="An empty folder; default: a temporary one.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the state folder.")] = False,
    finetune: Annotated[
        bool,
        typer.Option(
            "--finetune",
            help="Run the fine-tuning demo: pretrain, fine-tune and align (DPO) a model in transformers' layout.",
        ),
    ] = False,
    pretrain_steps: Annotated[int, typer.Option("--pretrain-steps", min=12, hidden=True)] = 60,
    finetune_steps: Annotated[int, typer.Option("--finetune-steps", min=12, hidden=True)] = 400,
    preference_steps: Annotated[int, typer.Option("--preference-steps", min=12, hidden=True)] = 120,
    json: Json = False,
) -> None:
    """Demonstrate recovery: submit a job, kill a worker, watch it resume and finish. Leaves nothing running.

    Exits with 0 only if the API's records show that every check passed that could be made.
    """
    from muster.cli import demo as story
    from muster.cli import demo_report, up
    from muster.cli.demo_checks import run_checks

    up.refuse_missing_extras()
    began = time.monotonic()
    if finetune:
        from muster.cli import demo_finetune

        examples = story.find_example(None).parent
        steps = pretrain_steps, finetune_steps, preference_steps
        gathered = demo_finetune.run(examples, state, keep, steps)
        evidence, results = gathered.preferring, demo_finetune.run_checks(gathered)
        document = demo_finetune.document(gathered, results, time.monotonic() - began)
    else:
        evidence = story.run(story.find_example(job), state, keep)
        results = run_checks(evidence)
        document = demo_report.document(evidence, results, time.monotonic() - began)
    if json:
        print_json(document)
    else:
        demo_report.show(evidence, results, document["seconds"])
    if any(result.broken for result in results):
        raise typer.Exit(ExitStatus.FAILED)
