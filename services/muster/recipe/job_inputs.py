"""Inputs that a job names in its document, whatever kind of work it does: commits, and uploaded files. Pure.

Commits are named by the paths below `spec` of the fields that hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from muster.recipe.commits_read import with_folder
from muster.recipe.document import JobSpec
from muster.words.base import dump, parse
from muster.words.names import FILE_ID

_TRAINING, _INPUTS = "training.", "program.inputs."


def with_input_folder(spec: JobSpec, path: str, uri: str, step: int | None = None) -> JobSpec:
    """The same job where the commit that the field `path` names lies in the folder `uri`, and is of that step, if one
    is given."""
    if spec.training is not None:
        training = with_folder(spec.training, path.removeprefix(_TRAINING), uri, step)
        return spec.model_copy(update={"training": training})
    assert spec.program is not None, "a job is a training or a program"
    name = path.removeprefix(_INPUTS)
    update = {"uri": uri} | ({} if step is None else {"step": step})
    inputs = {**spec.program.inputs, name: spec.program.inputs[name].model_copy(update=update)}
    return spec.model_copy(update={"program": spec.program.model_copy(update={"inputs": inputs})})


def files_named(spec: JobSpec) -> tuple[tuple[str, str], ...]:
    """Return (path, id) of each place of the job's work that holds a file's id: sources, tokenizer, chat template … A
    program's command is its own: a word in it that looks like an id is none."""
    program = None if spec.program is None else {**dump(spec.program), "command": []}
    work = {"training": dump(spec.training)} if spec.training is not None else {"program": program}
    return tuple(_files("spec", work))


def with_addresses(spec: JobSpec, addresses: Mapping[str, str]) -> JobSpec:
    """The job as its workers read it: with the address of each file in the place of its id."""
    return parse(JobSpec, _with_addresses(dump(spec), addresses)) if addresses else spec


def _files(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and FILE_ID.fullmatch(value):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _files(f"{path}.{key}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _files(f"{path}[{number}]", inner)


def _with_addresses(document: dict[str, Any], addresses: Mapping[str, str]) -> dict[str, Any]:
    def replaced(value: Any) -> Any:
        if isinstance(value, str):
            return addresses.get(value, value)
        if isinstance(value, dict):
            return {key: replaced(inner) for key, inner in value.items()}
        return [replaced(inner) for inner in value] if isinstance(value, list) else value

    if (program := document.get("program")) is not None:
        return {**document, "program": {**replaced(program), "command": program["command"]}}
    return {**document, "training": replaced(document["training"])}
