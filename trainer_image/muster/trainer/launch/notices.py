"""Watches for the node's announcement that it is about to go: then all ranks should commit and leave, at once.

MUSTER_NOTICES says where: a file, or `http://{host}:29502/notices` with the node's address from MUSTER_HOST_IP. The
operator hears it too and stops the whole gang; this only spares the seconds of that way, and works without it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path

from pydantic import ValidationError

from muster.words.names import Env
from muster.words.notices import NOTICES_ENV, NodeNotices, Notice

FILE_SECONDS, POLL_SECONDS = 0.25, 1.0  # between two looks
ABSENT_SECONDS = 15.0  # there is no agent: it may come later
ANSWER_SECONDS = 2.0
NOTICE_SECONDS = 110.0  # where no end was told: AWS gives two minutes, of which some were needed to learn of it
BYTES_MAX = 1_000_000


def watch_notices(address: str | None = None) -> None:
    """Send ourselves SIGTERM when the node announces its end: what the launcher does then is the same, whoever asks."""
    address = os.environ.get(NOTICES_ENV, "") if address is None else address
    if not address:
        return
    threading.Thread(target=_watch, args=(_where(address),), name="notices", daemon=True).start()


def seconds_left(now: float | None = None) -> float | None:
    """Until this node is taken away; None where nobody announced it."""
    notices = read(_where(os.environ.get(NOTICES_ENV, ""))) or ()
    leaving = [notice for notice in notices if notice.asks_to_leave]
    if not leaving:
        return None
    now = time.time() if now is None else now
    return max(0.0, min(notice.until or notice.at + NOTICE_SECONDS for notice in leaving) - now)


def _where(address: str) -> str:
    host = os.environ.get(Env.HOST_IP, "")
    return address.replace("{host}", f"[{host}]" if ":" in host else host)


def _watch(where: str) -> None:
    while True:
        notices = read(where)
        leave = next((notice for notice in notices or () if notice.asks_to_leave), None)
        if leave is not None:
            print(f"the node announces its end: {leave.message}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        asks = "://" in where
        time.sleep(FILE_SECONDS if not asks else POLL_SECONDS if notices is not None else ABSENT_SECONDS)


def read(where: str) -> tuple[Notice, ...] | None:
    """Read the node's current notices; None where there is no valid reply."""
    try:
        if "://" not in where:
            return NodeNotices.model_validate_json(Path(where).read_bytes()).notices
        with urllib.request.urlopen(where, timeout=ANSWER_SECONDS) as reply:  # noqa: S310 - http on purpose
            return NodeNotices.model_validate_json(reply.read(BYTES_MAX)).notices
    except (OSError, ValueError, ValidationError):
        return None
