"""`muster serve`: the commands of vLLM and SGLang that serve a job's model. Muster trains; serving is theirs."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from muster.cli.options import Job, Json, Server, connect
from muster.cli.output import print_json, say

if TYPE_CHECKING:
    from muster.recipe.document import JobSpec
    from muster.recipe.training import TrainingConfig

# The ranks that vLLM has kernels for; an adapter of another one is served with the next larger.
VLLM_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class ServeCommands:
    """Commands to run in this order: the export, then either server. `note` says what is exported and why."""

    export: str
    vllm: str
    sglang: str
    note: str


def serve(
    job: Job,
    step: Annotated[str, typer.Option("--step", help="best, last or a number.")] = "best",
    to: Annotated[str, typer.Option("--to", help="Folder that the export creates. Default: ./JOB.")] = "",
    server: Server = None,
    json: Json = False,
) -> None:
    """Print the commands that export a job's model and serve it with vLLM or SGLang.

    An adapter is served together with its base model, which several adapters can share. Nothing is started.
    """
    from muster.recipe.document import JobSpec

    with connect(server) as client:
        document = client.get(f"jobs/{client.job_id(job)}")
    spec = JobSpec.model_validate(document["spec"])
    commands = commands_for(document["metadata"]["name"], spec, job, step, to or f"./{document['metadata']['name']}")
    if json:
        print_json(asdict(commands))
        return
    say(commands.note)
    typer.echo(f"{commands.export}\n\n# vLLM\n{commands.vllm}\n\n# SGLang\n{commands.sglang}")


def commands_for(name: str, spec: JobSpec, job: str, step: str, to: str) -> ServeCommands:
    """The commands for a job that is called `name`, and named as `job`. Raises CliError for a program, and for a model
    that scores."""
    from muster.cli.errors import usage

    training = spec.training
    if training is None:
        raise usage(
            f"{name} runs a program of its own, whose checkpoints only it can read",
            f"`muster export {job} --to {to}` writes its folder",
        )
    if training.scores is not None:
        raise usage(
            f"{name} scores texts (task {training.task}) and writes none",
            "export it and open it with AutoModelForSequenceClassification",
        )
    base, why_merged = _base_of_adapter(training)
    export = ["muster", "export", job, "--step", step, "--to", to, "--format", "peft" if base else "transformers"]
    if base is None:
        note = f"The whole model is exported{why_merged} and served as {name}."
        vllm = ["vllm", "serve", to, "--served-model-name", name]
        sglang = ["python", "-m", "sglang.launch_server", "--model-path", to, "--served-model-name", name]
        return ServeCommands(_line(export), _line(vllm), _line(sglang), note)
    assert training.adapter is not None
    rank = training.adapter.rank
    rank_max = next((size for size in VLLM_RANKS if size >= rank), rank)
    model, *revision = base
    vllm = ["vllm", "serve", model, *revision, "--enable-lora", "--max-lora-rank", str(rank_max)]
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", model, *revision, "--enable-lora"]
    return ServeCommands(
        _line(export),
        _line([*vllm, "--lora-modules", f"{name}={to}"]),
        _line([*sglang, "--max-lora-rank", str(rank), "--lora-paths", f"{name}={to}"]),
        f"The adapter is exported, and served as {name} beside its base model {model}.",
    )


def _base_of_adapter(training: TrainingConfig) -> tuple[tuple[str, ...] | None, str]:
    """The base model as servers name it, with its revision's flag; None where the whole model must be served, and
    why."""
    from muster.words.address import parse_address

    adapter, source = training.adapter, training.model.source
    if adapter is None:
        return None, ""
    if adapter.kind == "dora" or adapter.target_parameters or adapter.modules_to_save:
        what = "dora" if adapter.kind == "dora" else "weights beside linear layers"
        return None, f", with its adapter merged in (servers do not load {what} as an adapter),"
    address = parse_address(source) if source else None
    if address is None or address.scheme not in ("hf", "file"):
        return None, ", with its adapter merged in (its base model is no folder and no repository of the hub),"
    if address.scheme == "file":
        return (str(address.local),), ""
    repository, _, revision = str(source).removeprefix("hf://").partition("@")
    return (repository, *(("--revision", revision) if revision else ())), ""


def _line(words: list[str]) -> str:
    return shlex.join(words)
