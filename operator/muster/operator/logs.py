"""The operator's own log: one line per thing that happened, JSON for machines, colours for a terminal."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

from muster.operator.core.decision import Action, JobDecision
from muster.operator.core.observed import NodeReservation, ObservedJob
from muster.operator.runner import RunnerListener

log: structlog.stdlib.BoundLogger = structlog.get_logger("muster.operator")


def set_up_logs(format: Literal["auto", "console", "json"], level: str) -> None:
    """Log to standard error; format `auto` is for a console where that is a terminal, and JSON elsewhere."""
    console = format == "console" or (format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if console else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


class LogListener(RunnerListener):
    """Words only, never a variable of a job: `because` and names hold no secret, environments do."""

    def __init__(self) -> None:
        self._tells_actions = log.is_enabled_for(logging.DEBUG)  # else they are not even put together

    def wrote(self, seen: ObservedJob, decision: JobDecision) -> None:
        before, after = seen.status, decision.status
        if (before.phase, before.attempt, before.code) == (after.phase, after.attempt, after.code):
            return  # progress, which the metrics and the history show
        log.info(
            "status", job=seen.name, uid=seen.uid, attempt=after.attempt, phase=after.phase, was=before.phase,
            code=after.code, because=after.because,
        )  # fmt: skip

    def applied(self, uid: str, action: Action) -> None:
        if self._tells_actions:
            facts = {name: getattr(action, name) for name in action.__slots__}
            log.debug("applied", uid=uid, action=type(action).__name__, **facts)

    def reserved(self, before: tuple[NodeReservation, ...], after: tuple[NodeReservation, ...]) -> None:
        log.info("reserved", uids=[entry.uid for entry in after], nodes=sum(len(entry.nodes) for entry in after))

    def failed(self, key: str, error: Exception, retry_seconds: float) -> None:
        log.warning(
            "pass failed, trying again", uid=key or "fleet", retry_seconds=round(retry_seconds, 2),
            error=f"{type(error).__name__}: {error}",
        )  # fmt: skip


class ListenerGroup(RunnerListener):
    """Tells several."""

    def __init__(self, *listeners: RunnerListener) -> None:
        self._listeners = listeners

    def decided(self, seen: ObservedJob, decision: JobDecision) -> None:
        for listener in self._listeners:
            listener.decided(seen, decision)

    def wrote(self, seen: ObservedJob, decision: JobDecision) -> None:
        for listener in self._listeners:
            listener.wrote(seen, decision)

    def applied(self, uid: str, action: Action) -> None:
        for listener in self._listeners:
            listener.applied(uid, action)

    def reserved(self, before: tuple[NodeReservation, ...], after: tuple[NodeReservation, ...]) -> None:
        for listener in self._listeners:
            listener.reserved(before, after)

    def failed(self, key: str, error: Exception, retry_seconds: float) -> None:
        for listener in self._listeners:
            listener.failed(key, error, retry_seconds)
