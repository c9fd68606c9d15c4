"""Time that a program may go without a step, learnt from its own pace, or without output where its user says so.

The argument for the numbers. Of a program only its optimizer's steps and its output are seen. Between two steps it may
evaluate, save, compile or shuffle. Where it writes meanwhile (a bar of progress, losses), it does not hang, for a
process that waits in a collective or in the kernel writes nothing; where it is quiet, nothing tells these from a hang
but how long they last. A false alarm restarts a healthy
job, and does so again at the same place: it can cost the whole job. A hang that is found late costs the time until then
once. So the limit is generous: ten times the longest pause that the program has made and come back from, and never
less than half an hour. At a quarter of an hour an ordinary evaluation of a large model would be taken for a hang the
first time it comes; at an hour a night's hang costs more than most evaluations take. (The operator lets half of the
limit pass again before it believes what it suspects. And NCCL's own watchdog ends a stuck collective after ten minutes,
which is a failure like any other, and waits for none of this.) Whoever knows better says `hang.stepSeconds`: then
steps alone count, whatever it writes.

Before the first step there is nothing to learn from: programs read and tokenize for hours, and a program without an
optimizer (an evaluation) never takes one. After the last of `program.steps` it saves and converts, and so may a rank
whose process that took the steps has ended. None of these is watched.
"""

from __future__ import annotations

FLOOR_SECONDS = 1800.0
FACTOR = 10.0


class RankWatch:
    """Judgement of a rank: whether it is watched, since when it has not moved, and how long it may be so."""

    def __init__(self, watched: bool, progressed_at: float, limit_seconds: float | None) -> None:
        self.watched = watched
        self.progressed_at = progressed_at
        self.limit_seconds = limit_seconds


class StepPace:
    """Pace of one rank. Times are in seconds since the epoch, of one clock."""

    def __init__(
        self,
        started_at: float,
        step_seconds: float | None = None,
        silent_seconds: float | None = None,
        off: bool = False,
        steps: int | None = None,
    ) -> None:
        self._step_seconds, self._silent_seconds, self._off, self._steps = step_seconds, silent_seconds, off, steps
        self._step: int | None = None
        self._stepped_at = self._wrote_at = started_at
        self._longest = 0.0
        self.first_step_at: float | None = None

    def stepped(self, step: int, at: float) -> None:
        """Note that the rank was at this step at that time; it may be told the same more than once."""
        if step == self._step:
            return
        if self._step is None:
            self.first_step_at = at
        else:
            self._longest = max(self._longest, at - self._stepped_at)
        self._step, self._stepped_at = step, at

    def wrote(self, at: float) -> None:
        """Note that the program wrote something."""
        self._wrote_at = max(self._wrote_at, at)

    def watch(self, now: float, counted: bool = True) -> RankWatch:
        """Return what is known now. Where steps and output are both bounded, the one that is nearer to its bound.
        `counted` says that there is still somebody who counts the steps."""
        bounds = []
        if self._silent_seconds is not None:
            bounds.append((self._wrote_at, float(self._silent_seconds)))
        steps_on = counted and not (self._steps is not None and self._step is not None and self._step >= self._steps)
        if self._step is not None and steps_on:
            learnt = max(FLOOR_SECONDS, FACTOR * self._longest)
            if self._step_seconds is not None:
                bounds.append((self._stepped_at, float(self._step_seconds)))
            elif self._silent_seconds is None:
                bounds.append((max(self._stepped_at, self._wrote_at), learnt))
        if self._off or not bounds:
            return RankWatch(False, max(self._stepped_at, self._wrote_at), None)
        since, limit = max(bounds, key=lambda each: (now - each[0]) / each[1])
        return RankWatch(True, since, limit)
