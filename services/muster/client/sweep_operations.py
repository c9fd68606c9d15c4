"""Operations on sweeps, as steps: written once for threads, asyncio and the command line."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from muster.client.errors import NotFound, WaitTimeout
from muster.client.operations import POLL_SECONDS, POLL_SECONDS_MAX, ask
from muster.client.steps import PauseStep, Steps
from muster.recipe.sweep import SweepPhase

ENDED = frozenset(phase.value for phase in SweepPhase if phase.terminal)


def create(document: Any, key: str) -> Steps[dict[str, Any]]:
    """The sweep. However often this is sent again under the same key, there is one sweep."""
    sweep: dict[str, Any] = yield from ask("POST", "sweeps", document, key)
    return sweep


def find(name: str) -> Steps[str]:
    """The id of the newest sweep of that name, or of that id. Raises NotFound for none."""
    try:
        return str(uuid.UUID(name))
    except ValueError:
        pass
    listed = yield from ask("GET", "sweeps", name=name, limit=1)
    if not listed["items"]:
        raise NotFound(f"there is no sweep {name!r}", "sweep_not_found")
    return str(listed["items"][0]["id"])


def get(name: str) -> Steps[dict[str, Any]]:
    sweep_id = yield from find(name)
    sweep: dict[str, Any] = yield from ask("GET", f"sweeps/{sweep_id}")
    return sweep


def wait(
    sweep_id: str, timeout_seconds: float | None, show: Callable[[dict[str, Any]], None] = lambda _: None
) -> Steps[dict[str, Any]]:
    """The sweep once it has ended, shown at every look. Raises WaitTimeout."""
    deadline = time.monotonic() + timeout_seconds if timeout_seconds is not None else None
    pause = POLL_SECONDS
    while True:
        sweep: dict[str, Any] = yield from ask("GET", f"sweeps/{sweep_id}")
        show(sweep)
        if sweep["phase"] in ENDED:
            return sweep
        if deadline is not None and time.monotonic() + pause > deadline:
            what = f"{sweep['name']} has not ended within {timeout_seconds:g} s: {sweep['because']}"
            next_step = "the sweep goes on: wait() again, or cancel() it"
            raise WaitTimeout(what, "wait-timeout", next_step=next_step, details={"id": sweep_id})
        yield PauseStep(pause)
        pause = min(pause * 1.5, POLL_SECONDS_MAX)
