"""Marks of the commits that a person wants kept, whatever the retention policy says."""

from __future__ import annotations

from muster.contract.checkpoint import PINS, step_name
from muster.storage.store import Store


def pin(store: Store, step: int) -> bool:
    """Keep this commit until the pin is taken back. Returns False where it was pinned already. Raises StoreError."""
    return store.create(f"{PINS}/{step_name(step)}", b"{}")


def unpin(store: Store, step: int) -> bool:
    """Take the pin back. Returns False where there was none. Raises StoreError."""
    there = step in pinned(store)
    store.delete(f"{PINS}/{step_name(step)}")
    return there


def pinned(store: Store) -> frozenset[int]:
    """The steps that are pinned. Raises StoreError."""
    names = (entry.key.rpartition("-")[2] for entry in store.objects(f"{PINS}/"))
    return frozenset(int(name) for name in names if name.isdigit())
