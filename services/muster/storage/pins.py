"""Marks of the commits that a person wants kept, whatever the retention policy says."""

from __future__ import annotations

from collections.abc import Iterable

from muster.storage.errors import NotFound
from muster.storage.store import Store
from muster.words.checkpoint import PINS, step_name


def pin(store: Store, step: int) -> bool:
    """Keep this commit until the pin is taken back. Returns False where it was pinned already. Raises StoreError."""
    return store.create(f"{PINS}/{step_name(step)}", b"{}")


def unpin(store: Store, step: int) -> bool:
    """Take the pin back. Returns False where there was none. Raises StoreError."""
    there = is_pinned(store, step)
    store.delete(f"{PINS}/{step_name(step)}")
    return there


def is_pinned(store: Store, step: int) -> bool:
    """Asks for the pin itself, and not for a listing, which may be an old one. Raises StoreError."""
    try:
        store.about(f"{PINS}/{step_name(step)}")
    except NotFound:
        return False
    return True


def pinned(store: Store) -> frozenset[int]:
    """The steps that are pinned. Raises StoreError."""
    return steps_of_pins(entry.key for entry in store.objects(f"{PINS}/"))


def steps_of_pins(keys: Iterable[str]) -> frozenset[int]:
    """The steps whose pins are among the keys of a folder."""
    names = (key.rpartition("-")[2] for key in keys if key.startswith(f"{PINS}/"))
    return frozenset(int(name) for name in names if name.isdigit())
