"""The same failure twice in a row, at the same step: a third try would end the same way."""

from __future__ import annotations

import re

from muster.contract.names import ExitCode
from muster.contract.signals import Cause
from muster.contract.status import Failure, JobStatus

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")
# The program's own word (`ValueError: …`), or a signal that only the program itself brings about.
_EXCEPTION_NAME = re.compile(r"[A-Za-z_][\w.]*: ")
_OWN_SIGNAL = re.compile(r"killed by SIG(SEGV|ABRT|BUS|FPE|ILL)\b")
# Of the world around it: the network and the devices may be well again.
_PASSING = re.compile(
    r"(Connection|Timeout|HTTP|URL|OS|IO|SSL|BrokenPipe|Dist|Interrupted|Blocking|socket|gai)\w*: "
    r"|.*(NCCL|CUDA error(?!.*assert))",
    re.DOTALL,
)
_CAUSES = frozenset({Cause.UNKNOWN, Cause.USER_ERROR, Cause.OUT_OF_MEMORY, Cause.INFRASTRUCTURE})
_ACTS_OF_OTHERS = frozenset(
    {ExitCode.PREFLIGHT_FAILED, ExitCode.STALE_ATTEMPT, ExitCode.PEER_LOST, ExitCode.HUNG, 128 + 9, 128 + 15}
)


def is_repeated(status: JobStatus, failure: Failure) -> bool:
    """Return whether the previous attempt failed after the same step with the same words (numbers aside)."""
    closed = [a for a in status.attempts if a.number < failure.attempt and a.ended_at is not None]
    if not closed or failure.step is None or not _of_the_program(failure):
        return False
    before = closed[-1]
    return (
        before.cause == failure.cause
        and before.failed_step == failure.step
        and _NUMBER.sub("#", before.message) == _NUMBER.sub("#", failure.message)
    )


def _of_the_program(failure: Failure) -> bool:
    if failure.cause not in _CAUSES or failure.exit_code is None or failure.exit_code in _ACTS_OF_OTHERS:
        return False
    words = failure.message
    return bool(_OWN_SIGNAL.search(words) or (_EXCEPTION_NAME.match(words) and not _PASSING.match(words)))
