"""A stand-in for the hardware: what a person or a drill says has happened, for a virtual node of `muster up`."""

from __future__ import annotations

import time
from pathlib import Path

from muster.agent import folder as folders
from muster.agent.xid import XidEntry, XidSource
from muster.words.notices import NodeNotices, Notice, Remedy
from muster.words.signals import SignalKind

SPOT_SECONDS = 120.0
_DEVICE = "0000:00:00"


def announce(folder: Path, node: str, what: str, table: dict[int, XidEntry]) -> NodeNotices:
    """Write the notice that a person announces for a node into its file, and return all that stands there now.

    `what` is spot, rebalance, drain, xid:<code> (judged by the table) or clear. Raises ValueError for anything else.
    """
    now = time.time()
    notices = NodeNotices(node=node, at=now, notices=_notices(what, table, now))
    folders.write(folder, notices)
    return notices


def _notices(what: str, table: dict[int, XidEntry], now: float) -> tuple[Notice, ...]:
    word, _, code = what.partition(":")
    if word == "xid" and code.isdecimal():
        xids = XidSource(table)
        xids.read(f"NVRM: Xid (PCI:{_DEVICE}): {code}, announced by hand, fatal", now, is_news=True)
        return xids.standing(now)
    if what == "clear":
        return ()
    said = {
        "spot": (SignalKind.SPOT_NOTICE, Remedy.DRAIN, "the instance is taken back", now + SPOT_SECONDS),
        "rebalance": (SignalKind.REBALANCE, Remedy.RECORD, "the instance may be taken back", None),
        "drain": (SignalKind.NODE_DRAIN, Remedy.DRAIN, "the node is to be drained", None),
    }.get(what)
    if said is None:
        raise ValueError(f"{what!r} is none of spot, rebalance, drain, xid:<code>, clear")
    kind, remedy, message, until = said
    return (Notice(kind=kind, remedy=remedy, at=now, message=message, source="announced", until=until),)
