"""Reports of a gang's ranks, compared: which rank keeps the others waiting, and what each one does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.operator.core.worker_summary import WorkerSummary
from muster.words.signals import Heartbeat, TrainerPhase

EVIDENCE_LENGTH_MAX = 4_000  # a status must fit in etcd
_RANKS_NAMED_MAX = 8


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's newest heartbeat, and where the rank lives."""

    worker: int
    node: str
    beat: Heartbeat
    incarnation: int

    @property
    def name(self) -> str:
        return f"rank {self.beat.rank} (worker {self.worker} on {self.node})"


def rank_reports(summary: WorkerSummary) -> tuple[RankReport, ...]:
    return tuple(
        RankReport(worker.worker, worker.node, beat, worker.incarnation)
        for worker in summary.mine
        for beat in worker.heartbeats
        if worker.wrote(beat)
    )


def behind(gang: Sequence[RankReport]) -> RankReport | None:
    """The one rank that stands where no other does any more; None if several do. Ranks that wait for it have gone on to
    the collective in which it is missing.
    """
    training = [w for w in gang if w.beat.phase is TrainerPhase.STEP]
    if len(gang) < 2 or len(training) < len(gang):
        return None
    first = min(_place(w.beat) for w in training)
    last = [w for w in training if _place(w.beat) == first]
    return last[0] if len(last) == 1 else None


def where(beat: Heartbeat) -> str:
    """Describe the rank's place, as in `in backward of step 7`."""
    if beat.phase is TrainerPhase.STEP:
        return f"in {beat.doing or 'a part'} of step {beat.step + 1}"
    return f"in phase {beat.phase} after step {beat.step}"


def describe_positions(gang: Sequence[RankReport]) -> str:
    """Return the ranks by activity, those with the same one in one line, the smallest groups first."""
    alike: dict[str, list[int]] = {}
    for w in gang:
        beat = w.beat
        stands = "stopped" if beat.stopped else beat.stands
        alike.setdefault(f"{where(beat)}{f': {stands}' if stands else ''}", []).append(beat.rank)
    lines = [f"{_ranks(ranks)} {words}" for words, ranks in sorted(alike.items(), key=lambda item: len(item[1]))]
    return "\n".join(lines)[:EVIDENCE_LENGTH_MAX]


def _place(beat: Heartbeat) -> tuple[int, int]:
    return beat.step, beat.moves


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(str(rank) for rank in sorted(ranks)[:_RANKS_NAMED_MAX])
    more = len(ranks) - _RANKS_NAMED_MAX
    return f"ranks {named}{f' and {more} more' if more > 0 else ''}"
