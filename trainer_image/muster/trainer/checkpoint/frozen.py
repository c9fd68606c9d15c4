"""Weights that are never trained, in files of their own: written with a job's first commit, named by all later ones.

A commit stays whole, for its COMMIT names these files beside its own; retention deletes a file when no COMMIT names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from muster.storage.store import Store
from muster.words.checkpoint import Commit, FileEntry, TensorEntry, is_frozen_key


class FrozenWeightsMissing(Exception):
    """The frozen weights are not where they were written; each rank must write its part again."""


@dataclass(frozen=True)
class FrozenFiles:
    """The files of a job's frozen weights, and what lies in them; slices count the files from 0."""

    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]

    def behind(self, files: int) -> dict[str, TensorEntry]:
        """The tensors for a COMMIT that names `files` others first."""
        places = {number: number + files for number in range(len(self.files))}
        return {name: _moved(entry, places) for name, entry in self.tensors.items()}


def frozen_in(commit: Commit) -> FrozenFiles | None:
    """Return the part of a commit that lies in files of frozen weights; None where it has none."""
    numbers = [number for number, file in enumerate(commit.files) if is_frozen_key(file.key)]
    places = {number: place for place, number in enumerate(numbers)}
    if not places:
        return None
    tensors = {
        name: _moved(entry, places)
        for name, entry in commit.tensors.items()
        if entry.slices and all(part.file in places for part in entry.slices)
    }
    return FrozenFiles(tuple(commit.files[number] for number in numbers), tensors)


def see_all(store: Store, files: Iterable[FileEntry]) -> None:
    """Return where all files are visible from here, whichever saves wrote them. Raises StoreError."""
    for folder, group in groupby(sorted(files, key=_folder), key=_folder):
        store.see_all(list(group), folder)


def _folder(file: FileEntry) -> str:
    return file.key.rpartition("/")[0] + "/"


def _moved(entry: TensorEntry, places: dict[int, int]) -> TensorEntry:
    return entry.model_copy(update={"slices": tuple(replace(part, file=places[part.file]) for part in entry.slices)})
