"""Longest times that each phase may go without progress, learnt from this run itself; the operator judges by them."""

from __future__ import annotations

from collections import deque

from muster.words.signals import TrainerPhase

REMEMBERED = 64  # of each phase
STEPS_MIN = 3  # before that, steps compile and fill caches
# So many times what was usual. NVIDIA's resiliency extension suggests 5 for its calculated time-outs; a step that
# waits for a busy machine takes more than that, and a false alarm costs a restart.
FACTOR = 10.0
# Whatever was learnt, nothing shorter is called a hang: storage and busy machines do stop for seconds.
FLOOR_SECONDS = {TrainerPhase.STEP: 15.0, TrainerPhase.EVALUATION: 60.0, TrainerPhase.CHECKPOINT: 300.0}
COMPILED_STEP_SECONDS = 120.0  # the floor where a step may meet a new shape and compile once more


class PhaseDeadlines:
    """Each time that a phase took goes in by `took`. Only phases with a floor are learnt."""

    def __init__(self) -> None:
        self._floors = dict(FLOOR_SECONDS)
        self._took: dict[TrainerPhase, deque[float]] = {phase: deque(maxlen=REMEMBERED) for phase in FLOOR_SECONDS}

    def took(self, phase: TrainerPhase, seconds: float) -> None:
        if phase in self._took:
            self._took[phase].append(seconds)

    def expect_compilation(self) -> None:
        self._floors[TrainerPhase.STEP] = COMPILED_STEP_SECONDS

    def limit(self, phase: TrainerPhase) -> float | None:
        """Seconds; None until enough is known. The slowest of each twenty is taken for an accident."""
        seen = sorted(self._took.get(phase, ()))
        if len(seen) < (STEPS_MIN if phase is TrainerPhase.STEP else 1):
            return None
        return max(self._floors[phase], FACTOR * seen[-1 - len(seen) // 20])
