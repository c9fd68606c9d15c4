"""The limits by which trainer and operator judge that a gang hangs."""

from __future__ import annotations

from collections.abc import Mapping

from muster.words.signals import Heartbeat, TrainerPhase

# Without progress, at most, until the run has taught its ranks better (Heartbeat.limit_seconds).
LIMIT_SECONDS: Mapping[TrainerPhase, float] = {
    TrainerPhase.INIT: 600.0,  # until the ranks have met; torchrun, too, waits for the others for 600 s
    TrainerPhase.DATA: 3600.0,  # tokenizing a corpus
    TrainerPhase.LOAD: 1800.0,  # ByteCheckpoint (arXiv 2407.20143) reads 405B in 129 s; slow buckets take longer
    TrainerPhase.STEP: 300.0,  # the first steps compile, and meet an empty page cache
    TrainerPhase.EVALUATION: 900.0,
    TrainerPhase.CHECKPOINT: 900.0,  # blocked by a save; 30 minutes were seen when a barrier was stranded (marin#9213)
    TrainerPhase.DRAIN: 600.0,
    TrainerPhase.DONE: 300.0,
}
LIMIT_SECONDS_MIN = 15.0  # whatever ranks have learnt
# Of the limit (ten times what was usual), where one rank stands still and the way to it is well: all others wait for
# it, or its own launcher sees it.
STANDING_SHARE = 1 / 3
WAITS_FOR_DATA = "data"  # Heartbeat.doing
DATA_SECONDS = 120.0  # storage that stops for a minute starves a rank and hangs nobody


def limit(beat: Heartbeat) -> float:
    """Return the seconds without progress that are normal for a rank that does what its heartbeat says."""
    learnt = beat.limit_seconds
    seconds = LIMIT_SECONDS[beat.phase] if learnt is None else max(learnt, LIMIT_SECONDS_MIN)
    return max(seconds, DATA_SECONDS) if beat.doing == WAITS_FOR_DATA else seconds
