"""Lines of what `muster doctor` finds, on a cluster and on a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "warning", "failure"]
Line = tuple[State, str] | tuple[State, str, str]  # a Finding without its check
Lines = Iterator[Line]


@dataclass(frozen=True)
class Finding:
    """One line. `next_step` is empty where nothing needs to be done."""

    check: str
    state: State
    message: str
    next_step: str = ""

    def document(self) -> dict[str, str]:
        line = asdict(self)
        return {"check": line["check"], "state": line["state"], "message": line["message"], "next": line["next_step"]}
