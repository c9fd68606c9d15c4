"""Notices of a node: faults and announcements, from its agent to the workers there and to the operator."""

from __future__ import annotations

from enum import StrEnum

from muster.words.base import Many, Record
from muster.words.names import GROUP
from muster.words.signals import SignalKind

NOTICES = f"{GROUP}/notices"  # annotation of a node: NodeNotices, as JSON
FAULT_CONDITION = "MusterNodeFault"  # True: something here is broken, or the node will go
AGENT_CONDITION = "MusterAgentReady"  # its heartbeat is the agent's
NOTICES_ENV = "MUSTER_NOTICES"  # set in a worker: where its node's notices are, a file or an address
MACHINE = "machine"  # as the name of a node: of all virtual nodes of this machine
NOTICES_PATH = "/notices"  # of the agent: answers with NodeNotices
AGENT_PORT = 29_502  # of the agent's /notices, /metrics and /healthz, on the node's own address


class Remedy(StrEnum):
    """Action that a finding asks for, the weakest first."""

    RECORD = "record"  # nothing: it is counted and told
    RESTART = "restart"  # the processes on the device are lost, the device is not: restart in place
    DRAIN = "drain"  # the node still works: commit, then leave it
    RESET = "reset"  # leave it now; it may be used again when the device was reset
    REBOOT = "reboot"  # leave it now; it may be used again after a reboot
    EXCLUDE = "exclude"  # leave it now; a person says when it may be used again


# The taint that keeps new work away as long as a notice stands, by the kind of the notice; the others need none.
TAINTS = {
    SignalKind.SPOT_NOTICE: f"{GROUP}/spot-notice",
    SignalKind.NODE_DRAIN: f"{GROUP}/drain",
    SignalKind.GPU_FAULT: f"{GROUP}/gpu-fault",
}
_KEEPS_OUT = frozenset({Remedy.DRAIN, Remedy.RESET, Remedy.REBOOT, Remedy.EXCLUDE})


class Notice(Record):
    """Something that a node found out about itself. Times are in seconds since the epoch."""

    kind: SignalKind
    remedy: Remedy
    at: float  # when it happened
    message: str
    source: str
    device: str = ""  # a GPU's PCI address, or the name of another part of the node
    until: float | None = None  # when the node goes, where that is announced

    @property
    def keeps_out(self) -> bool:
        """Return whether new work must stay away while this stands."""
        return self.remedy in _KEEPS_OUT and self.kind in TAINTS

    @property
    def asks_to_leave(self) -> bool:
        """Return whether workers here should commit and end, without waiting for the operator's request."""
        return self.remedy is Remedy.DRAIN and self.kind in (SignalKind.SPOT_NOTICE, SignalKind.NODE_DRAIN)

    def concerns(self, worker_created_at: float) -> bool:
        """Return whether a worker of that age is affected: processes that started after the loss are not."""
        return self.keeps_out or (self.remedy is Remedy.RESTART and worker_created_at <= self.at)


class NodeNotices(Record):
    """Current notices of a node."""

    node: str
    at: float  # seconds since the epoch
    boot_id: str = ""  # of the kernel under which it was found: a reboot settles most of it
    notices: Many[Notice] = ()
