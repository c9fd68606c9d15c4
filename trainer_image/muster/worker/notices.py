"""Watches for the announcement that this node is about to go: then all ranks should save and leave, at once.

MUSTER_NOTICES says where: a file, or `http://{host}:29502/notices` with the node's address from MUSTER_HOST_IP. The
operator hears it too and stops the whole gang; this only spares the seconds of that way, and works without it.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from muster.worker.files import read_regular
from muster.worker.names import NOTICES_ENV, WorkerVariables

FILE_SECONDS, POLL_SECONDS, ABSENT_SECONDS = 0.25, 1.0, 15.0  # between two looks; the last where there is no agent
ANSWER_SECONDS = 2.0
NOTICE_SECONDS = 110.0  # where no end was told: AWS gives two minutes, of which some were needed to learn of it
BYTES_MAX = 1_000_000
_LEAVING = ("spot_notice", "node_drain")


def watch_notices(leave: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> None:
    """Call `leave` with the announcement's words, once, from a thread of our own."""
    if where := _where(environ):
        threading.Thread(target=_watch, args=(where, leave), name="notices", daemon=True).start()


def seconds_left(now: float, environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds until this node is taken away; None where nobody announced it."""
    leaving = [notice for notice in read(_where(environ)) or () if asks_to_leave(notice)]
    ends = [float(notice.get("until") or notice["at"] + NOTICE_SECONDS) for notice in leaving]
    return max(0.0, min(ends) - now) if ends else None


def _where(environ: Mapping[str, str]) -> str:
    host = environ.get(WorkerVariables.HOST_IP, "")
    return environ.get(NOTICES_ENV, "").replace("{host}", f"[{host}]" if ":" in host else host)


def _watch(where: str, leave: Callable[[str], None]) -> None:
    while True:
        current = read(where)
        for notice in current or ():
            if asks_to_leave(notice):
                leave(str(notice.get("message") or "this node is about to go"))
                return
        time.sleep(FILE_SECONDS if "://" not in where else POLL_SECONDS if current is not None else ABSENT_SECONDS)


def asks_to_leave(notice: Mapping[str, Any]) -> bool:
    """Return whether workers here should save and end."""
    is_whole = isinstance(notice.get("at"), (int, float))
    return is_whole and notice.get("remedy") == "drain" and notice.get("kind") in _LEAVING


def read(where: str) -> list[dict[str, Any]] | None:
    """Read the node's current notices; None where there is no valid reply."""
    try:
        if "://" not in where:
            text = read_regular(where)
        else:
            with urllib.request.urlopen(where, timeout=ANSWER_SECONDS) as reply:  # noqa: S310 - http on purpose
                text = reply.read(BYTES_MAX)
        notices = json.loads(text).get("notices")
    except (OSError, ValueError, AttributeError):
        return None
    return [each for each in notices if isinstance(each, dict)] if isinstance(notices, list) else None
