"""The agent's word on its Node object: an annotation with all that it found, taints against new work, conditions.

Taints are set when a notice comes and removed when it goes, each once: whoever removes one by hand says that the matter
is settled, and is not contradicted. After a reboot only what a person must settle still stands.
"""

from __future__ import annotations

from pydantic import ValidationError

from muster.kube import paths
from muster.kube.client import STRATEGIC, ApiClient, Object
from muster.kube.errors import ApiError
from muster.kube.timestamps import now
from muster.words.base import dump_json
from muster.words.notices import AGENT_CONDITION, FAULT_CONDITION, NOTICES, TAINTS, NodeNotices, Notice, Remedy


class NodeObject:
    """Writer of one Node's annotation, taints and conditions, which follow the board. Every method raises OSError."""

    def __init__(self, client: ApiClient, node: str, boot_id: str) -> None:
        self._client, self._path, self._boot_id = client, paths.node(node), boot_id
        self._tainted: set[str] = set()
        self._since: dict[str, tuple[str, str]] = {}  # type of a condition → its status, and since when
        self.inherited: tuple[Notice, ...] = ()

    async def begin(self) -> None:
        """Take over the taints of an earlier agent: `inherited` are those that still hold."""
        item = await self._client.get(self._path)
        self._tainted = _ours(item)
        left = _left(item)
        same_boot = left is not None and left.boot_id == self._boot_id
        self.inherited = tuple(
            notice
            for notice in (left.notices if left else ())
            if notice.source not in _POLLED_SOURCES
            and TAINTS.get(notice.kind) in self._tainted
            and (notice.remedy is Remedy.EXCLUDE or (same_boot and notice.keeps_out))
        )

    async def settled(self) -> bool:
        """Return whether somebody has removed one of our taints by hand."""
        gone = self._tainted - _ours(await self._client.get(self._path))
        self._tainted -= gone
        return bool(gone)

    async def write(self, notices: NodeNotices) -> None:
        """Make the Node say so. A conflict with somebody else's write is tried again at once, three times."""
        taints = {TAINTS[notice.kind]: notice for notice in notices.notices if notice.keeps_out}
        for last in (False, False, True):
            try:
                await self._write(notices, taints)
                break
            except ApiError as error:
                if error.status != 409 or last:
                    raise
        await self.confirm(notices)

    async def confirm(self, notices: NodeNotices, ready: bool = True) -> None:
        """Write the node's conditions with a new heartbeat. An agent that stops says so with `ready` False."""
        worst = [notice for notice in notices.notices if notice.keeps_out or notice.remedy is Remedy.RESTART]
        word = "; ".join(notice.message for notice in worst)[:1000]
        fault = {
            "type": FAULT_CONDITION,
            "status": "True" if worst else "False",
            "reason": "".join(part.title() for part in worst[0].remedy.split("_")) if worst else "Healthy",
            "message": word or "the agent found nothing wrong",
        }
        agent = {
            "type": AGENT_CONDITION,
            "status": "True" if ready else "Unknown",
            "reason": "Watching" if ready else "Stopped",
            "message": "the node agent watches this node" if ready else "the node agent was stopped",
        }
        conditions = [self._stamped(each, now()) for each in (fault, agent)]
        # Merged by their type, so those of others stay as they are.
        await self._client.patch(f"{self._path}/status", {"status": {"conditions": conditions}}, STRATEGIC)

    async def _write(self, notices: NodeNotices, taint_notices: dict[str, Notice]) -> None:
        item = await self._client.get(self._path)
        there = item["spec"].get("taints") or []
        tainted = {taint["key"] for taint in there}
        coming, going = taint_notices.keys() - self._tainted, self._tainted - taint_notices.keys()
        taints = [taint for taint in there if taint["key"] not in going] + [
            {"key": key, "value": str(taint_notices[key].remedy), "effect": "NoSchedule"}
            for key in sorted(coming)
            if key not in tainted
        ]
        text = dump_json(notices) if notices.notices else None
        change: Object = {"metadata": {"annotations": {NOTICES: text}}}
        if taints != there:
            # The list is replaced whole, so it must be the one that was read.
            change["metadata"]["resourceVersion"] = item["metadata"]["resourceVersion"]
            change["spec"] = {"taints": taints}
        await self._client.patch(self._path, change)
        self._tainted = set(taint_notices)

    def _stamped(self, condition: Object, at: str) -> Object:
        status, since = self._since.get(condition["type"], ("", at))
        since = since if status == condition["status"] else at
        self._since[condition["type"]] = (condition["status"], since)
        return condition | {"lastHeartbeatTime": at, "lastTransitionTime": since}


_POLLED_SOURCES = frozenset({"imds", "nvml", "disk"})  # whatever these find anew is all that there is


def _ours(item: Object) -> set[str]:
    return {taint["key"] for taint in item["spec"].get("taints") or ()} & set(TAINTS.values())


def _left(item: Object) -> NodeNotices | None:
    text = (item["metadata"].get("annotations") or {}).get(NOTICES)
    try:
        return NodeNotices.model_validate_json(text) if text else None
    except ValidationError:
        return None
