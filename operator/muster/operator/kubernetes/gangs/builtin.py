"""Muster's own: nodes are reserved before a pod exists; a gang that can't exist whole holds none of them."""

from __future__ import annotations

from muster.kube.client import Object
from muster.operator.kubernetes.gangs.protocol import GangObject, GangRef
from muster.operator.kubernetes.pods import PodState
from muster.words.names import GROUP


class BuiltinScheduler:
    kind = "builtin"
    places = True
    gate: str | None = f"{GROUP}/gang"

    def objects(self, gang: GangRef) -> tuple[GangObject, ...]:
        return ()

    def decorate(self, pod: Object, gang: GangRef) -> None:
        """Do nothing: the node affinity alone places the pod."""

    def refusal(self, pod: Object) -> str:
        return ""

    def status_path(self, gang: GangRef) -> str | None:
        return None

    def waiting(self, pods: tuple[PodState, ...], group: Object | None) -> str:
        return ""  # the nodes are held; what is missing then is told by the pods themselves

    def lost(self, group: Object | None) -> str:
        return ""

    def remains(self, gang: GangRef) -> tuple[str, ...]:
        return ()
