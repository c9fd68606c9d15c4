"""Watches for the announcement that this node is about to go, as trainer/launch/notices.py does: then the program
should save and leave at once, without waiting for the operator to say so."""

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
BYTES_MAX = 1_000_000
_LEAVING = ("spot_notice", "node_drain")


def watch_notices(leave: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> None:
    """Call `leave` with the announcement's words, once, from a thread of our own."""
    address, host = environ.get(NOTICES_ENV, ""), environ.get(WorkerVariables.HOST_IP, "")
    if address:
        where = address.replace("{host}", f"[{host}]" if ":" in host else host)
        threading.Thread(target=_watch, args=(where, leave), name="notices", daemon=True).start()


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
    return notice.get("remedy") == "drain" and notice.get("kind") in _LEAVING


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
