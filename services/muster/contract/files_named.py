"""The uploaded files that a job's document names by their ids where it takes an address. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from muster.contract.base import dump, parse
from muster.contract.names import FILE_ID
from muster.contract.spec import JobSpec


def files_named(spec: JobSpec) -> tuple[tuple[str, str], ...]:
    """Return (path, id) of each place of the job's work that holds a file's id: sources, tokenizer, chat template … A
    program's command is its own: a word in it that looks like an id is none."""
    program = None if spec.program is None else {**dump(spec.program), "command": []}
    work = {"training": dump(spec.training)} if spec.training is not None else {"program": program}
    return tuple(_found("spec", work))


def with_addresses(spec: JobSpec, addresses: Mapping[str, str]) -> JobSpec:
    """The job as its workers read it: with the address of each file in the place of its id."""
    return parse(JobSpec, _replaced(dump(spec), addresses)) if addresses else spec


def _found(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and FILE_ID.fullmatch(value):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _found(f"{path}.{key}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _found(f"{path}[{number}]", inner)


def _replaced(document: dict[str, Any], addresses: Mapping[str, str]) -> dict[str, Any]:
    def replaced(value: Any) -> Any:
        if isinstance(value, str):
            return addresses.get(value, value)
        if isinstance(value, dict):
            return {key: replaced(inner) for key, inner in value.items()}
        return [replaced(inner) for inner in value] if isinstance(value, list) else value

    if (program := document.get("program")) is not None:
        return {**document, "program": {**replaced(program), "command": program["command"]}}
    return {**document, "training": replaced(document["training"])}
