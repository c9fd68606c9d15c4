"""The same failure twice in a row, at the same step: a third try would end the same way."""

from __future__ import annotations

import re

from muster.words.job import JobSpec
from muster.words.names import ExitCode
from muster.words.signals import Cause
from muster.words.status import Attempt, Failure, GoodputState, JobStatus

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")
# The program's own word (`ValueError: …`), or a signal that only the program itself brings about.
_EXCEPTION_NAME = re.compile(r"[A-Za-z_][\w.]*: ")
_OWN_SIGNAL = re.compile(r"killed by SIG(SEGV|ABRT|BUS|FPE|ILL)\b")
# What a program's launcher says of its rank's end; then come the rank's own last words, if it had any.
_RANK_ENDED = re.compile(r"rank \d+ ended with exit code (\d+)(?:: )?")
# Of the world around it: the network and the devices may be well again.
_PASSING = re.compile(
    r"(Connection|Timeout|HTTP|URL|OS|IO|SSL|BrokenPipe|Dist|Interrupted|Blocking|socket|gai)\w*: "
    r"|.*(NCCL|CUDA error(?!.*assert))",
    re.DOTALL,
)
_CAUSES = frozenset({Cause.UNKNOWN, Cause.USER_ERROR, Cause.OUT_OF_MEMORY, Cause.INFRASTRUCTURE})
# A program that ends so soon has looked at little more than its arguments, modules and files. Half of it would leave
# out imports from a slow disk; in twice of it, it may have waited in vain for something that comes back.
AT_ONCE_SECONDS = 60.0
_ACTS_OF_OTHERS = frozenset(
    {ExitCode.PREFLIGHT_FAILED, ExitCode.STALE_ATTEMPT, ExitCode.PEER_LOST, ExitCode.HUNG, 128 + 9, 128 + 15}
)


def is_repeated(spec: JobSpec, status: JobStatus, failure: Failure) -> bool:
    """Return whether the previous attempt failed after the same step with the same words (numbers aside)."""
    before = _attempt_before(status, failure)
    if before is None or failure.step is None or before.failed_step != failure.step:
        return False
    if _NUMBER.sub("#", before.message) != _NUMBER.sub("#", failure.message):
        return False
    return ends_at_once(spec, status, failure) or (before.cause == failure.cause and _of_the_program(failure))


def ends_at_once(spec: JobSpec, status: JobStatus, failure: Failure) -> bool:
    """Return whether a program ended twice in a row with the same exit code and the same words, before any step and
    the first time within AT_ONCE_SECONDS. Its command, arguments or files are wrong, also where it says no error that
    would show it. A connection that fails may come back."""
    before = _attempt_before(status, failure)
    if spec.program is None or before is None or before.cause is not Cause.UNKNOWN or before.first_step_at is not None:
        return False
    if (
        status.attempts[-1].first_step_at is not None
        or before.seconds.get(GoodputState.PRODUCTIVE, 0) > AT_ONCE_SECONDS
    ):
        return False
    said, says = _RANK_ENDED.match(before.message), _RANK_ENDED.match(failure.message)
    if said is None or says is None or said[1] != says[1] or failure.exit_code in _ACTS_OF_OTHERS:
        return False
    words = failure.message[says.end() :]
    return _NUMBER.sub("#", before.message[said.end() :]) == _NUMBER.sub("#", words) and not _PASSING.match(words)


def _attempt_before(status: JobStatus, failure: Failure) -> Attempt | None:
    closed = [a for a in status.attempts if a.number < failure.attempt and a.ended_at is not None]
    return closed[-1] if closed else None


def _of_the_program(failure: Failure) -> bool:
    if failure.cause not in _CAUSES or failure.exit_code is None or failure.exit_code in _ACTS_OF_OTHERS:
        return False
    words = _RANK_ENDED.sub("", failure.message, count=1)
    return bool(_OWN_SIGNAL.search(words) or (_EXCEPTION_NAME.match(words) and not _PASSING.match(words)))
