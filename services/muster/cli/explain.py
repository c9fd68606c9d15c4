"""`muster explain`: the keys of a job's document, from the contract itself; needs no server."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.cli.errors import usage
from muster.cli.options import Json
from muster.cli.output import answers, json_wanted, print_json
from muster.cli.table import StyledCell, TextTable

if TYPE_CHECKING:
    from muster.recipe.reference import DocumentKey


def explain(
    path: Annotated[
        str,
        typer.Argument(
            metavar="[PATH]", help="A key, such as training.batch or warmupSteps, or its name in another tool."
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Explain a key of a job's document: its type, unit, default and meaning, with an example.

    Of a section all keys are listed; without PATH, those of `spec`. A name of TRL, Axolotl, Hugging Face's Trainer,
    PEFT, Kubeflow or SkyPilot (`learning_rate`, `lora_alpha`) is answered by the key that does the same here.
    """
    from muster.recipe.foreign_names import in_muster
    from muster.recipe.reference import job_reference, look_up

    every = job_reference()
    if path.strip(". ") in ("", "spec"):
        keys: Sequence[DocumentKey] = [key for key in every.values() if "." not in key.path]
        _show_list("spec", "A job: `training` or `program`, and how it runs.", keys)
        return
    # A name without its path first means what other tools call so: of the keys here, only gpus is one.
    keys, words = () if in_muster(path) else look_up(path), ""
    if not keys and (foreign := in_muster(path.rpartition(".")[2])) is not None:
        words = f"{path} of other tools is this key here{f': {foreign.note}' if foreign.note else ''}"
        if not foreign.path:
            _show_nothing(f"{path} of other tools has no key here: {foreign.note}")
            return
        keys = (every[foreign.path],)
    if not keys:
        raise _no_such_key(path, [key.path for key in every.values()])
    if len(keys) > 1:
        _show_list(path, f"{len(keys)} keys have this name.", keys)
    else:
        _show_key(keys[0], words, [every[f"{_inside(keys[0], every)}.{name}"] for name in _names(keys[0], every)])


def _inside(key: DocumentKey, every: dict[str, DocumentKey]) -> str:
    """Return the path of the section that the key holds: its own, or that of its items."""
    return next((path for path in (f"{key.path}[]", f"{key.path}.*") if path in every), key.path)


def _names(key: DocumentKey, every: dict[str, DocumentKey]) -> tuple[str, ...]:
    return every[_inside(key, every)].keys


def _show_key(key: DocumentKey, words: str, below: Sequence[DocumentKey]) -> None:
    from rich.text import Text

    from muster.recipe.reference import example_lines

    if json_wanted():
        print_json(_document(key) | ({"note": words} if words else {}) | {"keys": [_document(each) for each in below]})
        return
    console = answers()
    if words:
        console.print(Text(f"{words}\n"), soft_wrap=True)
    console.print(Text(key.path, style="bold"), soft_wrap=True)
    console.print(Text(key.facts, style="dim"), soft_wrap=True)
    console.print(Text(f"\n{key.meaning}"))
    if below:
        console.print()
        console.print(_table(below))
    console.print(Text("\n".join(["", *example_lines(key)]), style="cyan"), soft_wrap=True)


def _show_list(title: str, meaning: str, keys: Sequence[DocumentKey]) -> None:
    from rich.text import Text

    if json_wanted():
        print_json({"path": title, "meaning": meaning, "keys": [_document(key) for key in keys]})
        return
    console = answers()
    console.print(Text.assemble((title, "bold"), f"\n{meaning}\n"))
    console.print(_table(keys, whole_paths=title != "spec"))


def _show_nothing(words: str) -> None:
    if json_wanted():
        print_json({"path": None, "note": words, "keys": []})
    else:
        answers().print(words, soft_wrap=True)


def _table(keys: Sequence[DocumentKey], whole_paths: bool = False) -> TextTable:
    """A line of the meaning for each key: all of it would hide the other keys."""
    table = TextTable("KEY", "TYPE", "DEFAULT", "MEANING")
    for key in keys:
        table.add_row(
            StyledCell(key.path if whole_paths else key.name, "bold"), _kind(key), _default(key), _first_sentence(key)
        )
    return table


def _kind(key: DocumentKey) -> str:
    """Return the type for a column; a long list of choices stands in the key's own explanation."""
    return "choice" if key.kind.startswith("one of") else key.kind.replace("`", "")


def _default(key: DocumentKey) -> str:
    from muster.recipe.reference import flow

    if key.required:
        return "required"
    return "" if key.default in (None, "", [], {}) else flow(key.default)


def _first_sentence(key: DocumentKey) -> str:
    return key.meaning.partition(". ")[0].rstrip(".") + "."


def _document(key: DocumentKey) -> dict[str, Any]:
    return {
        "path": key.path,
        "type": key.kind,
        "limits": key.limits or None,
        "unit": key.unit or None,
        "required": key.required,
        "default": key.default,
        "meaning": key.meaning,
        "example": key.example,
    }


def _no_such_key(path: str, paths: Sequence[str]) -> Exception:
    by_end = {each.rpartition(".")[2].lower(): each for each in paths}
    near = difflib.get_close_matches(path, paths, n=1) or [
        by_end[end] for end in difflib.get_close_matches(path.rpartition(".")[2].lower(), by_end, n=1)
    ]
    next_step = f"did you mean {near[0]}? `muster explain {near[0]}`" if near else "`muster explain` lists the sections"
    return usage(f"a job's document has no key {path!r}", next_step, code="no-such-key")
