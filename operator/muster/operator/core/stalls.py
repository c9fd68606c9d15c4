"""Is the gang hung? Told from heartbeats alone, with a deadline for each thing that a rank may be doing.

Five kinds of evidence, the strongest first: a process that job control holds; a rank that falls silent while its peers
do not; one rank for which all others wait; a gang that beats and does not progress; a gang of which nothing is heard.
The stronger it is, the sooner it is believed (docs/decisions/0040).

A clock that jumps must not kill a healthy gang. So a stall is first suspected, in the status, and believed only when
the very same heartbeat is still the newest a while later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.operator.core.observed import ObservedJob, WorkerState
from muster.operator.core.rank_reports import RankReport, behind, rank_reports, where
from muster.operator.core.worker_summary import WorkerSummary
from muster.words.hangs import LIMIT_SECONDS, LIMIT_SECONDS_MIN, STANDING_SHARE, WAITS_FOR_DATA, limit
from muster.words.names import FIRST_INCARNATION
from muster.words.signals import Heartbeat, TrainerPhase
from muster.words.status import Suspicion

CONFIRM_SHARE = 0.5  # of the limit, between suspicion and belief
CONFIRM_SECONDS_MIN = 3.0
# A rank rewrites its heartbeat every second, whatever it does.
STOPPED_CONFIRM_SECONDS = 2.0
MUTE_SECONDS = 15.0  # one rank, while others of its worker (and so of its disk) are heard
MUTE_CONFIRM_SECONDS = 10.0
SILENT_SECONDS = 60.0  # a whole worker: its disk, its node or the way to it may have paused
SILENT_CONFIRM_SECONDS = 30.0
STARTING_SECONDS = 600.0  # DLRover's pending time-out
# A kubelet tries to start a container again after 10 to 15 s (its first back-off; later ones are longer). Half of it
# would fail a job whose Secret was applied a moment after it; twice as long would only keep the nodes.
REFUSED_CONFIRM_SECONDS = 20.0
# Two readings of one heartbeat differ by what lies between two clocks, two heartbeats by more.
SAME_BEAT_SECONDS = 0.5
# When the last progress was is told by when it was heard of; a gang that progressed since would not look hung so soon.
SAME_PROGRESS_SECONDS = 5.0

# Here a rank may keep its interpreter to itself for long, and be silent without harm: imports, tokenizing, reading.
_MAY_BE_MUTE = frozenset({TrainerPhase.INIT, TrainerPhase.DATA, TrainerPhase.LOAD, TrainerPhase.DONE})


@dataclass(frozen=True, slots=True)
class StallDetector:
    """Detection of a hung gang."""

    suspicion: Suspicion | None
    """Suspicion that the status should remember; None clears it."""
    confirmed: bool = False
    """The suspicion has lasted long enough to be acted upon."""
    wake_after: float | None = None
    """Seconds until the gang should be looked at again."""


@dataclass(frozen=True, slots=True)
class HangEvidence:
    """Ranks that look hung at this moment."""

    why: str
    confirm_seconds: float
    """Time for which it must persist before it is acted upon."""
    heard: Heartbeat | None = None
    """Heartbeat that must not be followed by another, if silence is the evidence."""
    suspect: RankReport | None = None


def check_running(summary: WorkerSummary) -> StallDetector:
    """Collective training moves together, so the gang is as alive as the rank that moved last."""
    if _is_well(summary):
        return StallDetector(None)
    gang = tuple(report for report in rank_reports(summary) if report.beat.watched)
    newest = max((w.beat for w in gang), key=lambda beat: beat.progressed_at)
    knows = summary.seen.spec.program is None  # whether the ranks themselves say what they do and how long it may take
    evidence = (
        _stopped(gang) or _mute(gang, newest) or _idle(gang, newest, knows) or _silent(gang, newest, summary.seen.now)
    )
    return _weigh(summary.seen, evidence, newest.progressed_at) if evidence else StallDetector(None)


def _is_well(summary: WorkerSummary) -> bool:
    """Return whether no kind of evidence can exist (or no rank is watched yet). That is almost always so, and cheap
    to check."""
    heard, progressed, oldest = 0.0, 0.0, float("inf")
    for worker in summary.mine:
        for beat in worker.heartbeats:
            if not worker.wrote(beat) or not beat.watched:
                continue
            if beat.stopped:
                return False
            at = beat.at
            heard, oldest = max(heard, at), min(oldest, at)
            progressed = max(progressed, beat.progressed_at)
    if not heard:
        return True
    return (
        heard - oldest <= MUTE_SECONDS
        and heard - progressed <= LIMIT_SECONDS_MIN * STANDING_SHARE
        and summary.seen.now - heard <= SILENT_SECONDS
    )


def check_starting(summary: WorkerSummary, created_at: float) -> StallDetector:
    """A gang whose ranks have not met when the time for it is up; or one of them is held."""
    seen = summary.seen
    waited = seen.now - created_at
    gang = tuple(report for report in rank_reports(summary) if report.beat.watched)
    if gang and (evidence := _stopped(gang)):
        return _weigh(seen, evidence, 0.0)
    # A program's source, inputs and checkpoint lie on the node before its worker is up; Muster's trainer loads later.
    patience = STARTING_SECONDS + (LIMIT_SECONDS[TrainerPhase.LOAD] if seen.spec.program is not None else 0.0)
    if waited <= patience:
        return StallDetector(None, wake_after=max(1.0, patience - waited) if waited >= 0 else patience)
    why = f"the ranks did not meet within {patience:.0f} s{_who_is_missing(summary)}"
    return _weigh(seen, HangEvidence(why, SILENT_CONFIRM_SECONDS), 0.0)


def check_refused(summary: WorkerSummary) -> StallDetector | None:
    """A worker that its node can't start as the job describes it (an image that does not exist, a missing Secret), and
    still can't once the node has tried again. None where there is none.
    """
    refused = next((worker for worker in summary.mine if worker.refusal and not worker.removing), None)
    if refused is None:
        return None
    why = f"worker {refused.worker} on {refused.node} can't be started: {refused.refusal}"
    suspicion = Suspicion(
        at=summary.seen.now, why=why, worker=refused.worker, incarnation=refused.incarnation, node=refused.node
    )
    return _confirm(summary.seen, suspicion, REFUSED_CONFIRM_SECONDS)


def alarming(beats: Sequence[Heartbeat], now: float) -> tuple[bool, bool, bool, bool]:
    """Return whether some ranks of one worker call for a look: one is held, one fell silent, none progresses, none does
    so for long. Worlds hold this against what it was before, so that no pass has to be made just to see that time went
    by.
    """
    beats = [beat for beat in beats if beat.watched]
    if not beats:
        return False, False, False, False
    stopped = any(beat.stopped for beat in beats)
    silent = any(now - beat.at > MUTE_SECONDS for beat in beats)
    # As it will be judged: by what the ranks last said, not by how late it is.
    idle = max(beat.at for beat in beats) - max(beat.progressed_at for beat in beats)
    bound = max(limit(beat) for beat in beats)
    return stopped, silent, idle > bound * STANDING_SHARE, idle > bound


# --- the evidence ---


def _stopped(gang: Sequence[RankReport]) -> HangEvidence | None:
    """Held by SIGSTOP or a debugger. All of several at once: the machine is being paused, and will go on."""
    ranks = [w for w in gang if w.beat.stopped]
    if not ranks or (len(ranks) == len(gang) > 1):
        return None
    beat = ranks[0].beat
    why = f"{ranks[0].name} is stopped (SIGSTOP or a debugger) {where(beat)}"
    return HangEvidence(why, STOPPED_CONFIRM_SECONDS, beat, ranks[0])


def _mute(gang: Sequence[RankReport], newest: Heartbeat) -> HangEvidence | None:
    """Return the evidence that one rank is silent while others on the same disk are not, and nobody has moved since: it
    hangs in the kernel, or in C code that does not release the interpreter."""
    heard = _heard(gang)
    for w in gang:
        beat = w.beat
        silent, idle = heard[w.worker] - beat.at, heard[w.worker] - newest.progressed_at
        patience = MUTE_SECONDS if beat.limit_seconds is not None else limit(beat) / 2
        if silent > patience and idle > patience and beat.phase not in _MAY_BE_MUTE:
            why = f"{w.name} gave no sign of life for {silent:.0f} s while its peers did, {where(beat)}"
            return HangEvidence(why, MUTE_CONFIRM_SECONDS, beat, w)
    return None


def _idle(gang: Sequence[RankReport], newest: Heartbeat, knows: bool) -> HangEvidence | None:
    """The gang beats, and does not progress. A rank in a phase that may last long keeps the others waiting. Ranks of a
    program are counted from outside (`knows` is False): that one is a step behind says little, so that it is named, and
    believed no sooner."""
    heard = max(w.beat.at for w in gang)
    # Both times are of the worker's own clock, so a skew between machines cancels out.
    idle = heard - newest.progressed_at
    bound, confirm = max(limit(w.beat) for w in gang), 0.0
    lags = behind(gang)
    if lags is not None and knows and _says_it_stands(lags.beat, bound * STANDING_SHARE):
        bound *= STANDING_SHARE
    if any(heard - last > MUTE_SECONDS for last in _heard(gang).values()):
        bound, confirm = max(bound, SILENT_SECONDS), SILENT_CONFIRM_SECONDS
    if idle <= bound:
        return None
    suspect = lags or _only_silent(gang)
    stands = f", {where(newest)}"
    if suspect:
        stands = f": {suspect.name} is {'behind' if lags else 'silent'}, {where(suspect.beat)}"
    why = f"no progress for {idle:.0f} s (limit {bound:.0f} s){stands}"
    return HangEvidence(why, max(CONFIRM_SECONDS_MIN, bound * CONFIRM_SHARE, confirm), None, suspect)


def _says_it_stands(beat: Heartbeat, seconds: float) -> bool:
    """Return whether the rank's own heartbeat, as of its writing (it may be old), says that the rank makes no progress
    and is not just waiting for data."""
    learnt = beat.limit_seconds is not None and beat.doing != WAITS_FOR_DATA
    return learnt and beat.at - beat.progressed_at > seconds


def _heard(gang: Sequence[RankReport]) -> dict[int, float]:
    """Return when each worker was last heard of, by any of its ranks."""
    heard: dict[int, float] = {}
    for w in gang:
        heard[w.worker] = max(heard.get(w.worker, 0.0), w.beat.at)
    return heard


def _only_silent(gang: Sequence[RankReport]) -> RankReport | None:
    """The one rank that its own worker's others have outlived; None if there are several."""
    heard = _heard(gang)
    silent = [w for w in gang if heard[w.worker] - w.beat.at > MUTE_SECONDS]
    return silent[0] if len(silent) == 1 else None


def _silent(gang: Sequence[RankReport], newest: Heartbeat, now: float) -> HangEvidence | None:
    """Return the evidence that no rank is heard of, if so."""
    last = max((w.beat for w in gang), key=lambda beat: beat.at)
    silent = now - last.at
    if silent <= SILENT_SECONDS:
        return None
    why = f"no sign of life from any rank for {silent:.0f} s; last seen {where(newest)}"
    return HangEvidence(why, SILENT_CONFIRM_SECONDS, last)


def _weigh(seen: ObservedJob, evidence: HangEvidence, progressed_at: float) -> StallDetector:
    """Confirmed when it already looked so, with the same heartbeat, that long ago."""
    suspect = evidence.suspect
    suspicion = Suspicion(
        at=seen.now,
        beat_at=evidence.heard.at if evidence.heard else 0.0,
        progressed_at=progressed_at,
        why=evidence.why,
        worker=suspect.worker if suspect else None,
        incarnation=suspect.incarnation if suspect else FIRST_INCARNATION,
        rank=suspect.beat.rank if suspect else None,
        node=suspect.node if suspect else None,
    )
    return _confirm(seen, suspicion, evidence.confirm_seconds)


def _confirm(seen: ObservedJob, now: Suspicion, confirm_seconds: float) -> StallDetector:
    before = seen.status.suspicion
    if before is None or seen.now < before.at or not _same(before, now):
        return StallDetector(now, wake_after=confirm_seconds)
    left = before.at + confirm_seconds - seen.now
    if left > 0:
        return StallDetector(before, wake_after=max(0.1, left))
    return StallDetector(now.model_copy(update={"at": before.at}), confirmed=True)


def _same(before: Suspicion, now: Suspicion) -> bool:
    return (
        abs(before.beat_at - now.beat_at) < SAME_BEAT_SECONDS
        and abs(before.progressed_at - now.progressed_at) < SAME_PROGRESS_SECONDS
        and (before.worker, before.incarnation, before.rank) == (now.worker, now.incarnation, now.rank)
    )


def _who_is_missing(summary: WorkerSummary) -> str:
    """Names the first worker that is not up, and the world's word for why."""
    up = {worker.worker for worker in summary.mine if worker.state is WorkerState.RUNNING}
    absent = [index for index in range(summary.gang.wanted) if index not in up]
    if not absent:
        return ""
    first = next((worker for worker in summary.mine if worker.worker == absent[0]), None)
    reason = f" ({first.reason})" if first and first.reason else ""
    node = summary.gang.nodes[absent[0]] if absent[0] < len(summary.gang.nodes) else "its node"
    others = f", nor are {len(absent) - 1} more" if len(absent) > 1 else ""
    return f": worker {absent[0]} on {node}{reason} is not up{others}"
