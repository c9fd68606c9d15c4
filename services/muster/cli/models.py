"""`muster models`: the base models that clients of OpenAI's API may name on this machine's platform."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from muster.cli.errors import CliError, ExitStatus, usage
from muster.cli.options import Json, Server, StateFolder, connect
from muster.cli.output import answers, print_json, say

app = typer.Typer(help="Base models that clients of OpenAI's API may fine-tune by name.", no_args_is_help=True)

# Tokens of a sample: an example is one, without packing, so that long ones cost much on a CPU.
ROW_ON_CPU, ROW_ON_GPU = 512, 2_048
Name = Annotated[str, typer.Argument(metavar="NAME", help="The name that clients use, such as gpt-4o-mini.")]


@app.command("ls")
def ls(server: Server = None, json: Json = False) -> None:
    """List the models that clients may name: mapped ones, and those fine-tuned from them."""
    from muster.cli import formatting
    from muster.cli.table import TextTable

    with connect(server) as client:
        models = client.get("/v1/models")["data"]
    if json:
        print_json({"items": models})
        return
    table = TextTable("name", "owner", "since")
    for model in models:
        table.add_row(model["id"], model["owned_by"], formatting.moment(model["created"]) if model["created"] else "")
    answers().print(table, soft_wrap=True)


@app.command("add")
def add(
    name: Name,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A folder, hf://organisation/name, s3://bucket/folder or a preset.")
    ],
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, help="GPUs of each job; 0: CPU. Default: one, where there are some.")
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="whole, lora or qlora. Default: by the model's size.")
    ] = None,
    state: StateFolder = None,
    json: Json = False,
) -> None:
    """Map a name to a model, for the platform of this machine; it needs no restart.

    Looks at the model, and chooses the settings of its jobs as `muster finetune` does. The file base-models.yaml of the
    state folder holds them. In a cluster, set the chart's value baseModels.
    """
    from muster.plan.proposal import METHODS
    from muster.recipe.document import JobSpec
    from muster.words.base import InvalidDocument, parse
    from muster.words.model_map import MODEL_NAME, MODEL_NAME_WORDS

    if not MODEL_NAME.fullmatch(name):
        raise usage(f"{name!r}: {MODEL_NAME_WORDS}", "muster models add gpt-4o-mini SOURCE")
    if method is not None and method not in METHODS:
        raise usage(f"--method is one of {', '.join(METHODS)}, not {method!r}", "--method lora")
    spec = _spec_for(source, gpus, method)
    training = {
        **spec["training"],
        "data": {**spec["training"]["data"], "train": [{"source": "builtin://python-stdlib"}]},
        "batch": {"tokensPerStep": spec["training"]["data"]["sequenceLength"] * max(1, spec["gang"]["gpusPerNode"])},
        "length": {"epochs": 1},
    }
    try:
        parse(JobSpec, {"training": training, "gang": spec["gang"]}, "spec")
    except InvalidDocument as invalid:
        raise usage(f"no job could start from {source}: {invalid.problems[0]}", "muster models add --help") from None
    path = _file(state)
    models = _read(path)
    replaced = name in models
    _write(path, {**models, name: {"spec": spec, "ownedBy": "muster"}})
    if json:
        print_json({"name": name, "spec": spec, "file": str(path)})
    say(f"{'Replaced' if replaced else 'Added'} {name}: {source} (its settings are in {path})", "bold green")


@app.command("rm")
def rm(name: Name, state: StateFolder = None, json: Json = False) -> None:
    """Remove a name that `muster models add` has mapped. Jobs and fine-tuned models stay."""
    from muster.words.text import nearest

    path = _file(state)
    models = _read(path)
    if name not in models:
        near = nearest(name, models)
        hint = f"muster models rm {near}" if near else "muster models ls"
        what = f"{name!r} was not added by `muster models add` on this machine"
        raise CliError(what, ExitStatus.FAILED, "no-such-model", next_step=hint)
    _write(path, {key: value for key, value in models.items() if key != name})
    if json:
        print_json({"name": name, "file": str(path)})
    say(f"Removed {name}")


def _spec_for(source: str, gpus: int | None, method: str | None) -> dict[str, Any]:
    """Return the spec of jobs that start from the model. Raises CliError for one that can't be trained or read."""
    from dataclasses import replace

    from muster.cli.job_file import JobFile
    from muster.cli.paths import make_absolute
    from muster.cli.proposing import model_setting
    from muster.local.gpus import gpu_bytes, own_gpu_count
    from muster.plan.proposal import JobWishes, preliminary, spec_without_data
    from muster.recipe.document import parse_job
    from muster.storage.proposing import look_at_model
    from muster.words.base import InvalidDocument

    model = model_setting(source, Path.cwd())
    if origin := model.get("from"):
        what = f"{source} is no folder here, and a job's checkpoint needs no name of its own"
        raise usage(what, f'model="job:{origin["job"]}" names the best checkpoint of a job')
    gpus = min(1, own_gpu_count(os.environ)) if gpus is None else gpus
    wishes = JobWishes("model", model, "builtin://python-stdlib", task="sft", method=method or "", gpus=gpus)
    file = JobFile(preliminary(wishes), source, folder=Path.cwd())
    make_absolute(file, local=True)
    try:
        training = parse_job(file.data).spec.training_config
    except InvalidDocument as invalid:
        raise usage(f"{invalid.problems[0]}", "muster models add --help") from None
    look = look_at_model(training)
    if look.model_fault or look.gaps:
        raise CliError(f"{source} can't be used: {look.model_fault or look.gaps[0]}", ExitStatus.USAGE, "not-usable")
    row = min(ROW_ON_GPU if gpus else ROW_ON_CPU, look.facts.position_limit or ROW_ON_GPU)
    model = file.data["spec"]["training"]["model"]
    wishes = replace(wishes, model=model, sequence_length=row)
    return spec_without_data(wishes, replace(look.facts, gpu_bytes=gpu_bytes() if gpus else None))


def _file(state: Path | None) -> Path:
    from muster.client.address import state_folder

    folder = state_folder(state)
    if not folder.root.is_dir():
        what = f"no platform was ever started in {folder.root}"
        next_step = "start one with `muster up`; in a cluster, set the chart's value baseModels"
        raise CliError(what, ExitStatus.UNREACHABLE, "no-platform", next_step=next_step)
    return folder.base_models


def _read(path: Path) -> dict[str, Any]:
    from muster.documents.document import DocumentError
    from muster.documents.reader import read_file
    from muster.words.base import InvalidDocument, dump, parse
    from muster.words.model_map import ModelMapFile

    if not path.exists():
        return {}
    try:
        models: dict[str, Any] = dump(parse(ModelMapFile, read_file(path).data))["models"]
    except (DocumentError, InvalidDocument) as error:
        what = f"{path} can't be read: {error}"
        raise CliError(what, ExitStatus.USAGE, "bad-models", next_step="mend it, or remove it") from None
    return models


def _write(path: Path, models: dict[str, Any]) -> None:
    """Write the file whole or not at all: the platform may read it at any time."""
    from muster.documents.yaml_text import write_yaml

    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(write_yaml({"models": models}))
    new.replace(path)
