"""Documents that are equal, or nearly so, in all training sources together: found once, dropped or kept together.

Near duplicates are found by MinHash (Broder 1997) and locality-sensitive hashing: documents whose sketches agree in all
values of some band are compared, and those whose sketches agree in enough of all values belong together. Which one of a
group is kept is decided by the order of the sources and by content, never by files or processes.

    <cache>/curated/<key>/<number of the source>/   a new index over the source's tokens, as in store.py
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from muster.recipe.curation import Curation, NearDuplicates
from muster.trainer.data.lock import locked
from muster.trainer.data.rendering import excerpt
from muster.trainer.data.rules import CURATION_VERSION
from muster.trainer.data.shuffle import Int64s
from muster.trainer.data.store import META, SKETCH_VALUES, Array, TokenStore, sync
from muster.trainer.data.tokenizer import Tokenizer
from muster.words.data_report import EXAMPLES_MAX

Report = Callable[[str], None]
Bools = npt.NDArray[np.bool_]

RECALL_MIN: Final = 0.9  # of pairs that are just as similar as was asked for; of closer ones it is soon above 0.99
LEADERS_MAX: Final = 16  # documents that all others of a bucket are compared with: a bucket costs no square of its size
AT_ONCE: Final = 1 << 16  # sketches in memory: 32 MB


@dataclass(frozen=True)
class _DuplicateGroups:
    """Groups of duplicates: for each document of all sources the first of its group, which may be itself."""

    first: Int64s

    @property
    def kept(self) -> Bools:
        kept: Bools = self.first == np.arange(len(self.first))
        return kept


def without_duplicates(
    opened: Sequence[TokenStore], curation: Curation | None, tokenizer: Tokenizer, cache: Path, report: Report
) -> tuple[TokenStore, ...]:
    """The stores without what `curation` drops. Where near duplicates are kept, a group has one hash, so that it falls
    on one side of a hold-out."""
    if curation is None or not (curation.exact_duplicates or curation.near_duplicates):
        return tuple(opened)
    near = curation.near_duplicates
    recipe = [CURATION_VERSION, [store.meta.key for store in opened], curation.exact_duplicates]
    recipe += [near.model_dump(mode="json") if near else None]
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
    folder = cache / "curated" / key
    for place in (folder.parent, cache / "locks"):
        place.mkdir(parents=True, exist_ok=True)
    with locked(cache / "locks" / key[:32], "duplicates", report) as say:
        for left in folder.parent.glob(f".building-{key}-*"):
            shutil.rmtree(left, ignore_errors=True)
        if not (folder / META).exists():
            say(f"data: looking for duplicates among {sum(store.meta.documents for store in opened):,} documents")
            building = folder.with_name(f".building-{key}-{uuid.uuid4().hex}")
            try:
                _write(building, opened, curation, tokenizer)
                building.rename(folder)
                sync(folder.parent)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    return tuple(_selected(store, folder / str(number)) for number, store in enumerate(opened))


def _write(folder: Path, opened: Sequence[TokenStore], curation: Curation, tokenizer: Tokenizer) -> None:
    hashes = np.concatenate([store.hashes for store in opened])
    equal = _DuplicateGroups(_first_of_equal(hashes))
    near = curation.near_duplicates
    alike = _alike(opened, near, equal) if near else equal
    drops_near = near is not None and near.drop
    dropped_as_equal = ~equal.kept & (curation.exact_duplicates or drops_near)
    dropped_as_near = ~alike.kept & ~dropped_as_equal & drops_near
    reasons = [("equal to another document", dropped_as_equal)]
    if near:
        reasons.append((f"nearly equal to another document (similarity {near.similarity:g})", dropped_as_near))
    kept = ~dropped_as_equal & ~dropped_as_near
    grouped = hashes[alike.first] if near else hashes
    spell = _TextSpeller(opened, tokenizer)
    start = 0
    for number, store in enumerate(opened):
        here = slice(start, start + store.meta.documents)
        start += store.meta.documents
        left_out, examples = dict[str, int](), dict[str, list[str]]()
        for reason, dropped in reasons:
            items = np.flatnonzero(dropped[here]) + here.start
            if len(items):
                left_out[reason] = len(items)
                examples[reason] = [
                    f"{spell(int(item))} (as: {spell(int(alike.first[item]))})" for item in items[:EXAMPLES_MAX]
                ]
        chosen = np.flatnonzero(kept[here])
        order = chosen[np.argsort(grouped[here][chosen], kind="stable")]
        _write_index(folder / str(number), store, order, grouped[here][order], left_out, examples)
    (folder / META).write_text("{}\n")
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def _first_of_equal(hashes: Array) -> Int64s:
    order = np.argsort(hashes, kind="stable")
    begins = np.concatenate([[True], hashes[order][1:] != hashes[order][:-1]]) if len(order) else np.zeros(0, np.bool_)
    first = np.empty(len(hashes), np.int64)
    first[order] = order[np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return first


def bands(similarity: float) -> tuple[int, int]:
    """(bands, values of each): as many values as leave RECALL_MIN of the pairs of this similarity to be compared."""
    for values in (32, 16, 8, 4, 2):
        count = SKETCH_VALUES // values
        if 1 - (1 - similarity**values) ** count >= RECALL_MIN:
            return count, values
    return SKETCH_VALUES, 1


def _alike(opened: Sequence[TokenStore], near: NearDuplicates, equal: _DuplicateGroups) -> _DuplicateGroups:
    sketches = _AllSketches(opened)
    parent = equal.first.copy()

    def root(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = int(parent[item])
        return item

    count, values = bands(near.similarity)
    candidates = np.flatnonzero(equal.kept)
    for band in range(count):
        keys = np.concatenate([_keys(part[:, band * values : (band + 1) * values]) for part in sketches.parts()])
        keys = keys[candidates]
        order = np.argsort(keys, kind="stable")
        edges = np.flatnonzero(np.concatenate([[True], keys[order][1:] != keys[order][:-1], [True]]))
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if last - first > 1:
                for one, other in _pairs(candidates[order[first:last]], sketches, near.similarity):
                    low, high = sorted((root(one), root(other)))
                    parent[high] = low
    return _DuplicateGroups(np.array([root(item) for item in range(len(parent))], np.int64))


def _keys(values: Array) -> Array:
    """uint64 [documents]: equal for equal values of a band."""
    key = np.zeros(len(values), np.uint64)
    with np.errstate(over="ignore"):
        for column in values.T:
            key = (key ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)
    return key


def _pairs(members: Int64s, sketches: _AllSketches, similarity: float) -> Iterator[tuple[int, int]]:
    """Pairs of a bucket that are as similar; `members` ascend. Each is compared with the first, those that are not like
    it with the first of them, and so on."""
    for _ in range(LEADERS_MAX):
        if len(members) < 2:
            return
        leader, others = members[0], members[1:]
        sketch = sketches.of(members[:1])
        parts = (others[at : at + AT_ONCE] for at in range(0, len(others), AT_ONCE))
        shares = np.concatenate([(sketches.of(part) == sketch).mean(axis=1) for part in parts])
        like = shares >= similarity
        yield from ((int(leader), int(other)) for other in others[like])
        members = others[~like]


class _AllSketches:
    """The sketches of all documents, one source after the other."""

    def __init__(self, opened: Sequence[TokenStore]) -> None:
        self._arrays = [store.sketches for store in opened if store.sketches is not None]
        assert len(self._arrays) == len(opened), "stores that are compared have sketches"
        self._edges = np.cumsum([0, *(len(each) for each in self._arrays)])

    def parts(self) -> Iterator[Array]:
        for array in self._arrays:
            yield from (array[at : at + AT_ONCE] for at in range(0, len(array), AT_ONCE))

    def of(self, items: Int64s) -> Array:
        """uint32 [items, SKETCH_VALUES]. `items` ascend."""
        source = np.searchsorted(self._edges, items, side="right") - 1
        return np.concatenate(
            [self._arrays[number][items[source == number] - self._edges[number]] for number in np.unique(source)]
        )


class _TextSpeller:
    """Function that spells the beginning of a document, by the document's number among all."""

    def __init__(self, opened: Sequence[TokenStore], tokenizer: Tokenizer) -> None:
        self._opened, self._tokenizer = opened, tokenizer
        self._edges = np.cumsum([0, *(store.meta.documents for store in opened)])

    def __call__(self, item: int) -> str:
        number = int(np.searchsorted(self._edges, item, side="right")) - 1
        return excerpt(self._opened[number], item - int(self._edges[number]), self._tokenizer)


def _write_index(
    folder: Path, store: TokenStore, order: Int64s, hashes: Array, left_out: dict[str, int], examples: dict[str, Any]
) -> None:
    folder.mkdir(parents=True)
    sizes = np.diff(store.bounds)[order]
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    arrays: dict[str, Array] = {"hashes": hashes, "starts": store.starts[order], "bounds": bounds}
    for name in ("firsts", "splits", "values", "spans"):
        if (column := getattr(store, name)) is not None:
            arrays[name] = column[order]
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    state = hashlib.sha256(np.ascontiguousarray(hashes).data)
    state.update(np.ascontiguousarray(store.hashes[order]).data)
    document = {
        "documents": len(order),
        "tokens": int(bounds[-1]),
        "contents": state.hexdigest(),
        "left_out": left_out,
        "examples": examples,
    }
    (folder / META).write_text(json.dumps(document) + "\n")


def _selected(store: TokenStore, folder: Path) -> TokenStore:
    given = json.loads((folder / META).read_text())
    meta = replace(
        store.meta,
        documents=given["documents"],
        tokens=given["tokens"],
        contents=given["contents"],
        learnt=store.meta.learnt if given["documents"] == store.meta.documents else None,
        left_out=store.meta.left_out | given["left_out"],
        examples=store.meta.examples | given["examples"],
    )
    arrays: dict[str, Any] = {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in folder.glob("*.npy")}
    return replace(store, meta=meta, sketches=None, **arrays)
