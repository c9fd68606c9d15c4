"""Actions for Xid errors: NVIDIA's catalogue as a table, refined by the message where it decides, and by repetition.

Table: xid.json, after the resolutions in https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html. What is
not in it is recorded. Repetition: NVSentinel's rule, five fatal Xids of one GPU within a day, calls for a person.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from muster.words.base import Spec
from muster.words.notices import Notice, Remedy
from muster.words.signals import SignalKind

FATAL_MAX, DAY_SECONDS = 5, 86_400.0
SUSPICIOUS = frozenset({13, 31})  # mostly the program's fault; on the same GPU again and again, the GPU's
SUSPICIOUS_MAX = 2
RESTART_SECONDS = 600.0  # how long a lost process is news; whoever started since is not concerned anyway
_FATAL = frozenset({Remedy.RESET, Remedy.REBOOT})

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")
_SXID = re.compile(r"nvidia-nvswitch\S*: SXid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")
# 144 to 150 say in their text whether the link is lost; 154 repeats what NVML calls the GPU's recovery action.
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)
_NVLINK5 = range(144, 151)
RECOVERY_ACTION_CHANGED = 154
_CHANGED_TO = re.compile(r"changed from .* to .*\(([^)]*)\)", re.IGNORECASE)
_RECOVERY_ACTIONS = (
    ("drain", Remedy.DRAIN),  # "Drain P2P", "Drain and Reset": the GPU works on, with less
    ("reboot", Remedy.REBOOT),
    ("reset", Remedy.RESET),
    ("none", Remedy.RECORD),
)


class XidEntry(Spec):
    name: str = ""
    remedy: Remedy


_TABLE = TypeAdapter(dict[int, XidEntry])


class BadTable(ValueError):
    """The table can't be read; the message says where."""


def read_table(override: Path | None = None) -> dict[int, XidEntry]:
    """The shipped table; entries of the override replace its own. Raises BadTable."""
    table = _parse((files("muster.agent") / "xid.json").read_text(), "xid.json")
    if override is None:
        return table
    try:
        text = override.read_text()
    except OSError as error:
        raise BadTable(f"{override}: {error.strerror}") from error
    return table | _parse(text, str(override))


def _parse(text: str, where: str) -> dict[int, XidEntry]:
    try:
        return _TABLE.validate_json(text)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise BadTable(f"{where}: {faults}") from error


@dataclass(frozen=True, slots=True)
class XidError:
    """An error that NVIDIA's driver wrote into the kernel log."""

    code: int
    device: str  # PCI address
    text: str
    switch: bool = False  # of an NVSwitch, which writes SXid


def parse(text: str) -> XidError | None:
    """The Xid in a line of the kernel log."""
    for pattern, switch in ((_XID, False), (_SXID, True)):
        if (match := pattern.search(text)) is not None:
            return XidError(int(match[2]), match[1].lower(), match[3].strip(), switch)
    return None


class XidSource:
    """The errors of this node's GPUs: counted (by device and code), judged, and kept as long as they matter."""

    def __init__(self, table: Mapping[int, XidEntry]) -> None:
        self._table = table
        self.counts: dict[tuple[str, int], int] = {}
        self._times: dict[tuple[str, int | None], deque[float]] = {}  # by code; None: all the fatal ones
        self._standing: list[Notice] = []

    def read(self, line: str, at: float, is_news: bool) -> None:
        xid = parse(line)
        if xid is None:
            return
        key = (xid.device, xid.code)
        self.counts[key] = self.counts.get(key, 0) + 1
        notice = self._judge(xid, at)
        if xid.code == RECOVERY_ACTION_CHANGED and _is_well_again(xid):
            self._standing = [old for old in self._standing if old.device != xid.device]
        elif is_news:
            self._standing = [*(old for old in self._standing if not _replaces(notice, old)), notice][-32:]

    def standing(self, now: float) -> tuple[Notice, ...]:
        """Return the Xids that still matter, oldest first. A restart expires after a while; others stand until the
        node is rebooted or a person says otherwise.
        """
        self._standing = [n for n in self._standing if n.keeps_out or now - n.at < RESTART_SECONDS]
        return tuple(notice for notice in self._standing if notice.remedy is not Remedy.RECORD)

    def acknowledge(self) -> None:
        self._standing = [notice for notice in self._standing if not notice.keeps_out]

    def _judge(self, xid: XidError, at: float) -> Notice:
        entry = self._table.get(xid.code) if not xid.switch else None
        remedy, name = self._remedy(xid, entry), entry.name if entry and entry.name else "not in the table"
        kind = "SXid" if xid.switch else "Xid"
        message = f"{kind} {xid.code} on {xid.device}: {name}: {xid.text}"[:400]
        if remedy in _FATAL and self._count(xid.device, None, at) >= FATAL_MAX:
            remedy, message = Remedy.EXCLUDE, f"{message}; {FATAL_MAX} fatal errors within a day: have it examined"
        if xid.code in SUSPICIOUS and self._count(xid.device, xid.code, at) >= SUSPICIOUS_MAX:
            message += "; again on the same GPU: if the program is innocent, run `dcgmi diag -r 3`"
        signal = SignalKind.NODE_DRAIN if remedy is Remedy.DRAIN else SignalKind.GPU_FAULT
        return Notice(kind=signal, remedy=remedy, at=at, message=message, source="xid", device=xid.device)

    def _remedy(self, xid: XidError, entry: XidEntry | None) -> Remedy:
        if xid.switch or xid.code in _NVLINK5:
            fatal = "fatal" in xid.text.lower() and not _NONFATAL.search(xid.text)
            return (entry.remedy if entry else Remedy.RESET) if fatal else Remedy.RECORD
        if xid.code == RECOVERY_ACTION_CHANGED and (match := _CHANGED_TO.search(xid.text)):
            return recovery_remedy(match[1])
        return entry.remedy if entry else Remedy.RECORD

    def _count(self, device: str, code: int | None, at: float) -> int:
        times = self._times.setdefault((device, code), deque(maxlen=64))
        times.append(at)
        return sum(0 <= at - time < DAY_SECONDS for time in times)


def recovery_remedy(words: str) -> Remedy:
    """Return the remedy for a recovery action in the driver's words; an unknown one is only recorded."""
    text = words.lower()
    return next((remedy for word, remedy in _RECOVERY_ACTIONS if word in text), Remedy.RECORD)


def _is_well_again(xid: XidError) -> bool:
    """The GPU was reset: its recovery action is none."""
    match = _CHANGED_TO.search(xid.text)
    return match is not None and match[1].strip().lower() == "none"


def _replaces(new: Notice, old: Notice) -> bool:
    """The newest of one kind is enough."""
    return (new.device, new.kind, new.remedy) == (old.device, old.kind, old.remedy)
