"""The examples that Muster brings: where they lie, and each as a text to start from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# In a checkout beside the source roots; in an installed package within it (pyproject.toml says where).
_PLACES = ("examples", "cli/examples")
_SIGN = "pretrain-stdlib.yaml"
_SOURCE = re.compile(r"(?<=source: )[\w-]+(?:\.[\w-]+)?(?=[\s,}])")


@dataclass(frozen=True)
class ExampleJob:
    """A job's document. `about` is what its first comment says in its first sentence."""

    name: str
    about: str
    text: str


@cache
def examples_folder() -> Path | None:
    """Return the folder of the examples, or None if the installation left them out."""
    bases = Path(__file__).resolve().parents
    places = (base / place for base in bases for place in _PLACES)
    return next((place for place in places if (place / _SIGN).is_file()), None)


@cache
def examples() -> dict[str, ExampleJob]:
    """Return all examples by name, in alphabetical order."""
    folder = examples_folder()
    files = sorted(folder.glob("*.yaml")) if folder is not None else []
    texts = {file.stem: file.read_text() for file in files}
    return {name: ExampleJob(name, _about(text), text) for name, text in texts.items()}


def on_this_machine(example: ExampleJob) -> str:
    """The text in which the data and models next to it are named by their full paths, as `muster submit` sends it."""
    folder = examples_folder()
    if folder is None:
        return example.text
    return _SOURCE.sub(lambda match: str(_beside(folder, match[0])), example.text)


def _beside(folder: Path, name: str) -> Path | str:
    return folder / name if (folder / name).exists() else name


def _about(text: str) -> str:
    lines = [line.removeprefix("#").strip() for line in text[: text.index("apiVersion")].splitlines()]
    return re.split(r"(?<=[.:]) ", " ".join(lines))[0].rstrip(".:")
