"""A sweep as a program has it: what the API said of it, and its trials as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.client.answers import parsed
from muster.client.sweep_operations import ENDED
from muster.recipe.sweep import Sweep as SweepSpec
from muster.replies.sweeps import SweepBest, SweepTrial
from muster.words.base import known_part


class SweepView:
    """A sweep as it was when it was last asked for; `refresh()` asks anew. `document` is the API's own JSON."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = dict(document)

    @property
    def id(self) -> str:
        return str(self.document["id"])

    @property
    def name(self) -> str:
        return str(self.document["name"])

    @property
    def phase(self) -> str:
        """A word of `SweepPhase`, or of a newer server."""
        return str(self.document["phase"])

    @property
    def because(self) -> str:
        return str(self.document["because"])

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def sweep(self) -> SweepSpec:
        """Return the parameters of the trials, with all defaults."""
        return parsed(SweepSpec, known_part(SweepSpec, self.document["sweep"]))

    @property
    def trials(self) -> tuple[SweepTrial, ...]:
        """Return the trials that were started, in their order."""
        return tuple(parsed(SweepTrial, each) for each in self.document["table"])

    @property
    def best(self) -> SweepBest | None:
        """The best trial so far; its `commit` can be the `model.from` of a job. None before the first evaluation."""
        document = self.document["best"]
        return parsed(SweepBest, document) if document is not None else None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} ({self.id}): {self.phase}, {self.because}>"
