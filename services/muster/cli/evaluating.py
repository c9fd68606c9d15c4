"""`muster evaluate`: score a job's checkpoint on held-out data, as a job of its own, and show the numbers."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.cli.errors import CliError, ExitStatus, usage
from muster.cli.options import Job, Json, Server, connect
from muster.cli.output import print_json, say

if TYPE_CHECKING:
    from muster.cli.job_file import JobFile
    from muster.cli.options import JobsClient

SCORER = "muster.trainer.train.scoring"
TASKS = ("sft", "pretrain")  # as in that module, which loads no sooner than it runs
POLL_SECONDS = 0.5
_SUFFIX_BYTES = 2
_NAME_LENGTH = 30


def evaluate(
    job: Job,
    data: Annotated[str, typer.Option("--data", metavar="FILE", help="Held-out data: a file, or s3://… or https://….")],
    step: Annotated[str, typer.Option("--step", help="The checkpoint: best, last, or the number of a step.")] = "best",
    samples: Annotated[int, typer.Option("--samples", min=1, help="Score at most so many samples.")] = 2_000,
    format: Annotated[str, typer.Option("--format", help="Format of the data, if it can't be detected.")] = "auto",
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the evaluation. Default: the job's, with a few letters.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Submit, and don't wait for the numbers.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Score a checkpoint of a job on held-out data, without training: its loss, perplexity and bits per byte.

    Runs as a job of low priority, which prepares the data as the job did; a file is uploaded. The numbers also stand
    at the checkpoint (`muster checkpoints ls JOB`) and in its page. `best` and `last` wait until the job has ended.
    Tasks sft and pretrain.
    """
    from muster.cli import submit as story
    from muster.cli.source import packed_source

    which: int | str = int(step) if step.isdecimal() and int(step) > 0 else step
    if which not in ("best", "last") and not isinstance(which, int):
        raise usage(f"--step is best, last or the number of a step, not {step!r}", "muster evaluate JOB --step best")
    with connect(server) as client, tempfile.TemporaryDirectory(prefix="muster-evaluate-") as folder:
        target = client.get(f"jobs/{client.job_id(job)}")
        _must_have(client, target, which)
        given = _given(data, Path(folder))
        document = _document(target, which, given, samples, format, name)
        if any(Path(folder).iterdir()):
            document.data["spec"]["program"]["source"] = folder
        with packed_source(document, client) as packed:
            story.show_warnings(story.request_plan(client, document))
            if packed is not None:
                packed.upload(client, target["metadata"].get("project"))
            made = story.send(client, document)
        if detach:
            story.announce(made)
            return
        say(f"Submitted {made['metadata']['name']} ({made['id']}); Ctrl-C leaves it running", "bold green")
        result = _result(client, target["id"], made)
    if json:
        print_json(result)
    if not result["results"]:
        raise CliError(
            f"{result['evaluation']}: {result['reason'] or result['phase']}",
            ExitStatus.FAILED,
            "not-evaluated",
            next_step=f"muster logs {result['log']}" if result["log"] else f"muster why {result['evaluation']}",
        )
    if not json:
        from muster.plan.plan_words import results_words

        typer.echo(f"{job}, step {result['step']:,}: {results_words(result['results'])}")


def _must_have(client: JobsClient, target: dict[str, Any], which: int | str) -> None:
    """Raise CliError for a job whose checkpoints can't be scored so, and for a step that is not there."""
    training, name = target["spec"].get("training"), target["metadata"]["name"]
    if training is None:
        next_step = "a program of your own with `after: {job: …}` evaluates it: docs/running-programs.md"
        raise CliError(f"{name} runs a program", ExitStatus.USAGE, "not-a-training", next_step=next_step)
    if training["task"] not in TASKS:
        what = f"{name} has the task {training['task']}, and `muster evaluate` scores {' and '.join(TASKS)}"
        raise CliError(what, ExitStatus.USAGE, "wrong-task", next_step=f"muster metrics {name}")
    if isinstance(which, int):
        from muster.cli.checkpoints import must_be_committed

        must_be_committed(client, target["id"], name, which)


def _given(data: str, folder: Path) -> str:
    """Return what the program calls the data: the address, or the name of the copy that is uploaded."""
    if "://" in data:
        return data
    path = Path(data).expanduser()
    if not path.is_file():
        next_step = "name a file, or an address that the workers can read: s3://…, https://…"
        raise CliError(f"{data} is no file", ExitStatus.USAGE, "no-such-file", next_step=next_step)
    shutil.copyfile(path, folder / path.name)
    return path.name


def _document(
    target: dict[str, Any], which: int | str, data: str, samples: int, format: str, name: str | None
) -> JobFile:
    """Return the job that scores the checkpoint: the data is prepared as the target's is."""
    from muster.cli.job_file import JobFile
    from muster.words.names import DEFAULT_PROJECT, Label

    training, metadata = target["spec"]["training"], target["metadata"]
    prepared = training["data"]
    command = ["-m", SCORER, "--data", data, "--task", training["task"]]
    command += ["--sequence-length", str(prepared["sequenceLength"]), "--samples", str(samples), "--format", format]
    command += ["--train-on", prepared.get("trainOn", "assistant")]
    gpus = min(1, target["spec"]["gang"].get("gpusPerNode") or 0)
    if gpus and training.get("precision") in ("bf16", "fp8"):
        command += ["--precision", "bf16"]
    if prepared.get("packing") is False:
        command.append("--no-packing")
    own = name or f"{metadata['name'][:_NAME_LENGTH].rstrip('-')}-eval-{secrets.token_hex(_SUFFIX_BYTES)}"
    document: dict[str, Any] = {
        "metadata": {"name": own},
        "spec": {
            "program": {"command": command, "after": {"job": target["id"], "each": which}},
            "gang": {"nodes": 1, "gpusPerNode": gpus},
        },
    }
    if metadata.get("project") not in (None, DEFAULT_PROJECT):
        document["metadata"]["labels"] = {str(Label.PROJECT): metadata["project"]}
    return JobFile(document, "the evaluation")


def _result(client: JobsClient, target_id: str, made: dict[str, Any]) -> dict[str, Any]:
    """Wait until the evaluation has ended, and return its numbers with the step, or the reason that there are none."""
    name, because = made["metadata"]["name"], ""
    try:
        while not (job := client.get(f"jobs/{made['id']}"))["status"].get("finishedAt"):
            if job["status"]["because"] != because:
                because = job["status"]["because"]
                say(f"  {because}", "dim")
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        say(f"\nDetached; {name} continues. `muster checkpoints ls` shows its numbers.")
        raise typer.Exit(ExitStatus.INTERRUPTED) from None
    for checkpoint in client.get(f"jobs/{target_id}/checkpoints")["items"]:
        for each in checkpoint["evaluations"]:
            if each["evaluationId"] == made["id"]:
                log = f"{name}-{checkpoint['step']}" if each["jobId"] else ""
                return {**each, "step": checkpoint["step"], "log": log}
    status = job["status"]
    return {
        "evaluation": name,
        "results": {},
        "phase": status["phase"],
        "reason": status["because"],
        "step": None,
        "log": "",
    }
