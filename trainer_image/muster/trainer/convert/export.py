"""python -m muster.trainer.convert.export --checkpoint FOLDER --to DIRECTORY [--step best|last|N]
[--format transformers|peft] [--dtype bf16] [--ema] [--json] [--progress]

Writes the weights of a commit as `transformers` loads them, with its adapter, if it has one, merged; or the adapter,
as `peft` loads it. Streams: a few parts of 16 MiB are in memory at a time, whatever the model's size, and an
adapter that is merged, or experts that go back into their files' layout; needs no accelerator, and torch for a model of
transformers alone. What was written is read back and compared. A folder that a program wrote is exported as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, Literal

from muster.plan.model_size import is_embedding
from muster.recipe.adapter_config import Adapter
from muster.storage.opening import open_store
from muster.storage.readers import reading
from muster.storage.store import Store
from muster.trainer.arguments import ArgumentParser
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.folder_files import write_folder
from muster.trainer.convert import byte_tokenizer, hugging_face, peft, transformers_names
from muster.trainer.convert.merge import WeightDelta, deltas
from muster.trainer.convert.tensor_files import MODEL, OutputTensor, write_files
from muster.trainer.convert.transformers_names import TensorConversion, TransformersNames
from muster.trainer.errors import StorageError, UserError, exit_code
from muster.trainer.models.adapter import adapter_of, is_part
from muster.trainer.models.nf4_format import absmax_name, packed_name, weights_among
from muster.words.checkpoint import ITEM_BYTES, Commit, TensorEntry
from muster.words.text import size

Format = Literal["transformers", "peft"]
FORMATS: dict[str, Format] = {"transformers": "transformers", "hf": "transformers", "peft": "peft"}
BASE = "base"  # beside an adapter: the model that it belongs to, where it can't be had elsewhere
_EMA = "/ema"


def export(
    store: Store,
    step: int | Literal["best", "last"],
    directory: Path,
    dtype: Literal["keep", "bf16"] = "keep",
    progress: Callable[[int, int], None] = lambda done, total: None,
    form: Format = "transformers",
    ema: bool = False,
) -> dict[str, Any]:
    """Write a directory that must not exist yet; it appears whole or not at all.

    `form` is `transformers` for the whole model, with an adapter merged into it, or `peft` for the adapter, with the
    model that it belongs to in `base/` where that is no folder of this machine and no repository of the hub. `progress`
    is called with (bytes read, bytes of all). `ema` takes the mean of the weights over the last steps in their place.

    A folder that a program wrote is written as it is. Raises UserError, CheckpointError (also where the commit's bytes
    do not verify) or StorageError.
    """
    if directory.exists():
        raise UserError(f"{directory} is there already; choose another directory, or remove it")
    commit = commit_in(store, step)
    if commit.kind == "folder":
        return _export_folder(store, commit, directory, (form, dtype, ema), progress)
    adapter = adapter_of(commit)
    if ema:
        commit = with_mean_weights(commit, store.uri)
    if form == "peft" and adapter is None:
        raise UserError(
            f"the checkpoint at step {commit.step} in {store.uri} has no adapter: that job trained the whole model; "
            "leave --format out to get it"
        )
    unfinished = directory.with_name(f"{directory.name}.unfinished-{os.getpid()}")
    try:
        with _explained(unfinished), reading(store, commit.step):
            unfinished.mkdir(parents=True)
            if adapter is not None and form == "peft":
                report = _write_adapter(store, commit, adapter, unfinished, dtype, progress)
                base = peft.base_of(commit)
                if base is None:
                    _write_whole(store, commit, None, unfinished / BASE, "keep", progress)
                    base = peft.BaseModelName(str((directory / BASE).absolute()))
                tied = peft.has_tied_head(_weights(commit))
                document = peft.config(adapter, base, report.pop("names"), tied, "scores" in commit.architecture)
                _write_descriptions(commit, unfinished, {"adapter_config.json": document})
                report |= {"base": base.name}
            else:
                report = _write_whole(store, commit, adapter, unfinished, dtype, progress)
            os.rename(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {"step": commit.step, "directory": str(directory), "weights": "ema" if ema else "last", **report}


def _export_folder(
    store: Store,
    commit: Commit,
    directory: Path,
    form: tuple[Format, str, bool],
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write what a program left in its checkpoint folder, byte for byte. `form` is what was asked for beside it."""
    if form != ("transformers", "keep", False):
        raise UserError(
            f"the checkpoint of step {commit.step} in {store.uri} is a folder that a program wrote, and can be "
            "exported only as it is; leave out --format, --dtype and --ema"
        )
    unfinished = directory.with_name(f"{directory.name}.unfinished-{os.getpid()}")
    try:
        with _explained(unfinished), reading(store, commit.step):
            write_folder(store, commit, unfinished, progress)
            os.rename(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    report = {"files": len(commit.files), "bytes": commit.bytes, "dtype": "files as the program wrote them"}
    return {"step": commit.step, "directory": str(directory), "kind": "folder", **report}


def with_mean_weights(commit: Commit, where: str) -> Commit:
    """The same commit, with the mean of each trained weight in its place. `where` names the folder in messages. Raises
    UserError where the job kept no mean."""
    means = {
        f"{MODEL}{name.split('/', 1)[1].removesuffix(_EMA)}": e for name, e in commit.tensors.items() if _is_mean(name)
    }
    if not means:
        raise UserError(
            f"the checkpoint at step {commit.step} in {where} has no mean of its weights: the job that made it had no "
            "training.optimizer.ema; leave --ema out to get the weights as they were at that step"
        )
    return commit.model_copy(update={"tensors": {**commit.tensors, **means}})


def _is_mean(name: str) -> bool:
    return name.startswith("optimizer/") and name.endswith(_EMA)


def _write_whole(
    store: Store,
    commit: Commit,
    adapter: Adapter | None,
    directory: Path,
    dtype: str,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write a directory that transformers opens. `adapter` is merged where it is given; an adapter of the commit that
    is not given is left out.
    """
    directory.mkdir(exist_ok=True)
    report = _write_model(store, commit, adapter, directory, dtype, progress)
    _write_descriptions(commit, directory, {"config.json": _config(commit, report["dtype"])})
    return report


def _write_model(
    store: Store,
    commit: Commit,
    adapter: Adapter | None,
    directory: Path,
    dtype: str,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    weights = {n: e for n, e in _weights(commit).items() if adapter_of(commit) is None or not is_part(n)}
    weights = _decoded(commit, weights)
    if transformers_names.is_transformers(commit):
        names = transformers_names.names(commit, weights)
    else:
        names = TransformersNames(hugging_face.names({n: e.dtype for n, e in weights.items()}))
    added = deltas(store, commit, adapter) if adapter is not None else {}
    names = _with_conversions(commit, names, weights, added)
    outputs = _outputs(weights, names, dtype)
    groups = hugging_face.files({o.name: prod(o.shape) * ITEM_BYTES[o.dtype] for o in outputs.values()})
    files = {hugging_face.file_name(number, len(groups)): group for number, group in enumerate(groups)}
    report = write_files(store, commit, directory, files, outputs, names.conversions, added, progress)
    if len(groups) > 1:
        index = {name: file for file, group in files.items() for name in group}
        listing = {"metadata": {"total_size": report["bytes"]}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2, sort_keys=True))
    return report | ({"adapter": "merged"} if adapter is not None else {})


def _write_adapter(
    store: Store, commit: Commit, adapter: Adapter, directory: Path, dtype: str, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    weights = _weights(commit)
    parts = {name: weights[name] for name in peft.tensors_of(weights, adapter)}
    places = transformers_names.weight_places(commit) if adapter.target_parameters else ()
    names = peft.names(parts, transformers_names.is_transformers(commit), places)
    twice = [name for name in parts if is_embedding(name) and peft.has_tied_head(weights)]
    direct = {name: theirs for name, theirs in names.items() if name not in twice}
    tied = [peft.tied(name, names[name], parts[name], transformers_names.tied_to(commit)) for name in twice]
    outputs = _outputs(parts, TransformersNames(direct, tuple(tied)), dtype)
    report = write_files(store, commit, directory, {peft.FILE: list(outputs)}, outputs, tied, {}, progress)
    return report | {"adapter": "alone", "names": sorted(outputs)}


def _weights(commit: Commit) -> dict[str, TensorEntry]:
    return {n.removeprefix(MODEL): entry for n, entry in commit.tensors.items() if n.startswith(MODEL)}


def _decoded(commit: Commit, weights: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The same, with each weight that is held in four bits in the place of its bytes, in the dtype that it came in."""
    packed = weights_among(weights)
    bytes_of = {part for name in packed for part in (packed_name(name), absmax_name(name))}
    decoded = {name: entry for name, entry in weights.items() if name not in bytes_of}
    for name in packed:
        rows, half = weights[packed_name(name)].shape
        decoded[name] = TensorEntry(dtype=commit.architecture["storedDtype"], shape=(rows, 2 * half), slices=())
    return decoded


def _with_conversions(
    commit: Commit, names: TransformersNames, weights: dict[str, TensorEntry], added: dict[str, WeightDelta]
) -> TransformersNames:
    """Weights that are held in four bits, or that an adapter can't be added to in stretches, become conversions, for
    which they are in memory whole."""
    apart = [
        name
        for name in names.direct
        if MODEL + name not in commit.tensors or (MODEL + name in added and not added[MODEL + name].streams)
    ]

    def renamed(values: dict[str, Any]) -> dict[str, Any]:
        return {names.direct[name]: value for name, value in values.items()}

    merges = [TensorConversion((n,), {names.direct[n]: tuple(weights[n].shape)}, renamed) for n in apart]
    direct = {name: theirs for name, theirs in names.direct.items() if name not in apart}
    return TransformersNames(direct, (*names.conversions, *merges))


def _outputs(weights: dict[str, TensorEntry], names: TransformersNames, dtype: str) -> dict[str, OutputTensor]:
    """Everything that is to be written, by the name that it gets."""

    def output(name: str, shape: tuple[int, ...], stored: str, ours: str | None) -> OutputTensor:
        return OutputTensor(name, shape, "BF16" if dtype == "bf16" and stored == "F32" else stored, stored, ours)

    outputs = [output(names.direct[n], tuple(weights[n].shape), weights[n].dtype, n) for n in names.direct]
    for conversion in names.conversions:
        stored = weights[conversion.ours[0]].dtype
        outputs += [output(name, shape, stored, None) for name, shape in conversion.shapes.items()]
    return {entry.name: entry for entry in outputs}


def _config(commit: Commit, dtype: str) -> dict[str, Any]:
    if transformers_names.is_transformers(commit):
        return transformers_names.config(commit, dtype)
    return hugging_face.config(commit, dtype)


def _write_descriptions(commit: Commit, directory: Path, described: dict[str, dict[str, Any]]) -> None:
    for name, document in described.items():
        (directory / name).write_text(json.dumps(document, indent=2) + "\n")
    if commit.tokenizer.get("kind") == "huggingface":
        (directory / "tokenizer.json").write_text(commit.tokenizer["json"])
    elif hugging_face.reads_bytes(commit) and not transformers_names.is_transformers(commit):
        for name, text in byte_tokenizer.files(commit.architecture["maxPositions"]).items():
            (directory / name).write_text(text)
    if transformers_names.is_transformers(commit):
        for name, text in transformers_names.companions(commit).items():
            (directory / name).parent.mkdir(exist_ok=True)  # of further chat templates
            (directory / name).write_text(text)
    origin = {"job": commit.job, "jobUid": commit.job_uid, "step": commit.step, "metrics": commit.metrics}
    if "adapter" in commit.config:
        origin |= {"from": commit.config["model"].get("from")}
    (directory / "muster.json").write_text(json.dumps({**origin, "tokenizer": commit.tokenizer.get("kind")}, indent=2))


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path}: can't write the exported model: {error.strerror or error}") from error


def _checked(chosen: argparse.Namespace) -> tuple[Store, int | Literal["best", "last"]]:
    """Raises UserError for what argparse can't tell is wrong."""
    if chosen.format not in FORMATS:
        raise UserError(f"--format must be transformers (or hf) or peft, not {chosen.format!r}")
    if chosen.step not in ("best", "last") and not chosen.step.isdigit():
        raise UserError(f"--step must be best, last or a number, not {chosen.step!r}")
    # The API and the CLI run this with rights of their own on what a job has written.
    return open_store(chosen.checkpoint, links=False), int(chosen.step) if chosen.step.isdigit() else chosen.step


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m muster.trainer.convert.export", description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="<checkpoint.uri>/<job uid>")
    parser.add_argument("--to", required=True, type=Path, help="directory to make")
    parser.add_argument("--step", default="best", help="best, last or a number (default: best)")
    parser.add_argument("--dtype", choices=("keep", "bf16"), default="keep")
    parser.add_argument(
        "--format", default="transformers", help="transformers or hf: the whole model; peft: its adapter"
    )
    parser.add_argument("--ema", action="store_true", help="the mean of the weights, where the job kept one")
    parser.add_argument("--json", action="store_true", help="print one JSON document")

    parser.add_argument("--progress", action="store_true", help="write `progress DONE TOTAL` lines (bytes), to stderr")
    shown_percent = -1

    def show(done: int, total: int) -> None:
        nonlocal shown_percent
        if "--progress" in arguments:
            if (percent := 100 * done // max(total, 1)) != shown_percent:
                shown_percent = percent
                print(f"progress {done} {total}", file=sys.stderr, flush=True)
        elif "--json" not in arguments and sys.stderr.isatty():
            print(f"\r{size(done)} of {size(total)}", end="\n" if done == total else "", file=sys.stderr)

    try:
        chosen = parser.parse_args(arguments)
        store, step = _checked(chosen)
        report = export(store, step, chosen.to, chosen.dtype, show, FORMATS[chosen.format], chosen.ema)
    except Exception as error:
        code = exit_code(error)
        if code == 1:
            raise
        print(json.dumps({"error": str(error)}) if "--json" in arguments else f"error: {error}", file=sys.stderr)
        return code
    what = f"the mean of the weights at step {report['step']}" if chosen.ema else f"step {report['step']}"
    words = f"{what} exported to {report['directory']}: {size(report['bytes'])}, {report['dtype']}"
    print(json.dumps(report) if chosen.json else words)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
