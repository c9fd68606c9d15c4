"""PriorityClasses: a job's place in the builtin queue is by the same class that orders its pods in other schedulers."""

from __future__ import annotations

from collections.abc import Callable

from muster.kube.client import Object


class PriorityClasses:
    """The cluster's PriorityClasses. `on_change` is called when a class comes, goes or has another value."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._names: dict[str, str] = {}  # uid → name
        self.values: dict[str, int] = {}  # name → value

    def put(self, item: Object) -> None:
        name, value = item["metadata"]["name"], int(item.get("value") or 0)
        self._names[item["metadata"]["uid"]] = name
        if self.values.get(name) != value:
            self.values = self.values | {name: value}
            self._on_change()

    def drop(self, item: Object) -> None:
        self.keep_only(self._names.keys() - {item["metadata"]["uid"]})

    def keep_only(self, uids: set[str]) -> None:
        self._names = {uid: name for uid, name in self._names.items() if uid in uids}
        kept = {name: self.values[name] for name in self._names.values()}
        if kept != self.values:
            self.values = kept
            self._on_change()
