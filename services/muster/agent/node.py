"""The agent's word on its Node object: an annotation with all that it found, taints against new work, conditions.

Taints are set when a notice comes and removed when it goes, each once: whoever removes one by hand says that the matter
is settled, and is not contradicted. After a reboot only what a person must settle still stands.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.contract.base import dump_json
from muster.contract.notices import AGENT_CONDITION, FAULT_CONDITION, NOTICES, TAINTS, NodeNotices, Notice, Remedy

CALL_SECONDS = 10.0
Object = dict[str, Any]


class ApiError(OSError):
    """The API server could not be asked, or refused; status 0 where there was no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class NodeApi:
    """One Node of a cluster. folder: the service account's; its token is read anew each time, for it is rotated."""

    server: str
    node: str
    token: Path | None = None
    authority: Path | None = None

    def get(self) -> Object:
        return self._call("GET", f"/api/v1/nodes/{self.node}")

    def patch(self, change: Object) -> Object:
        return self._call("PATCH", f"/api/v1/nodes/{self.node}", change, "application/merge-patch+json")

    def patch_status(self, change: Object) -> Object:
        """Conditions are merged by their type, so those of others stay as they are."""
        kind = "application/strategic-merge-patch+json"
        return self._call("PATCH", f"/api/v1/nodes/{self.node}/status", change, kind)

    def _call(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
        headers = {"Accept": "application/json", "Content-Type": kind}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token.read_text().strip()}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.server + path, data, headers, method=method)  # noqa: S310
        context = None
        if self.server.startswith("https:"):
            context = ssl.create_default_context(cafile=str(self.authority) if self.authority else None)
        try:
            with urllib.request.urlopen(request, timeout=CALL_SECONDS, context=context) as reply:  # noqa: S310
                return dict(json.loads(reply.read()))
        except urllib.error.HTTPError as error:
            raise ApiError(error.code, f"{method} {path}: {error.code}: {_words(error.read())}") from error
        except OSError as error:
            raise ApiError(0, f"{method} {path}: {error}") from error


class NodeObject:
    """Keeps one Node's annotation, taints and conditions up with the board. Every method raises ApiError."""

    def __init__(self, api: NodeApi, boot_id: str) -> None:
        self._api, self._boot_id = api, boot_id
        self._tainted: set[str] = set()
        self._since: dict[str, tuple[str, str]] = {}  # type of a condition → its status, and since when
        self.inherited: tuple[Notice, ...] = ()

    def begin(self) -> None:
        """What an agent before us left: `inherited` is what of it still holds."""
        item = self._api.get()
        self._tainted = _ours(item)
        left = _left(item)
        same_boot = left is not None and left.boot_id == self._boot_id
        self.inherited = tuple(
            notice
            for notice in (left.notices if left else ())
            if notice.source not in _ASKED_AGAIN
            and TAINTS.get(notice.kind) in self._tainted
            and (notice.remedy is Remedy.EXCLUDE or (same_boot and notice.keeps_out))
        )

    def settled(self) -> bool:
        """Whether somebody has removed a taint of ours by hand."""
        gone = self._tainted - _ours(self._api.get())
        self._tainted -= gone
        return bool(gone)

    def write(self, notices: NodeNotices) -> None:
        """Make the Node say so. A conflict with somebody else's write is tried again at once, three times."""
        wanted = {TAINTS[notice.kind]: notice for notice in notices.notices if notice.keeps_out}
        for last in (False, False, True):
            try:
                self._write(notices, wanted)
                break
            except ApiError as error:
                if error.status != 409 or last:
                    raise
        self.confirm(notices)

    def confirm(self, notices: NodeNotices, ready: bool = True) -> None:
        """The conditions, with a heartbeat. ready: false as the last word of an agent that stops."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
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
        conditions = [self._stamped(each, now) for each in (fault, agent)]
        self._api.patch_status({"status": {"conditions": conditions}})

    def _write(self, notices: NodeNotices, wanted: dict[str, Notice]) -> None:
        item = self._api.get()
        there = item["spec"].get("taints") or []
        known = {taint["key"] for taint in there}
        coming, going = wanted.keys() - self._tainted, self._tainted - wanted.keys()
        taints = [taint for taint in there if taint["key"] not in going] + [
            {"key": key, "value": str(wanted[key].remedy), "effect": "NoSchedule"}
            for key in sorted(coming)
            if key not in known
        ]
        text = dump_json(notices) if notices.notices else None
        change: Object = {"metadata": {"annotations": {NOTICES: text}}}
        if taints != there:
            # The list is replaced whole, so it must be the one that was read.
            change["metadata"]["resourceVersion"] = item["metadata"]["resourceVersion"]
            change["spec"] = {"taints": taints}
        self._api.patch(change)
        self._tainted = set(wanted)

    def _stamped(self, condition: Object, now: str) -> Object:
        status, since = self._since.get(condition["type"], ("", now))
        since = since if status == condition["status"] else now
        self._since[condition["type"]] = (condition["status"], since)
        return condition | {"lastHeartbeatTime": now, "lastTransitionTime": since}


_ASKED_AGAIN = frozenset({"imds", "nvml", "disk"})  # what these find now is all that there is


def in_cluster(node: str, folder: Path, host: str, port: str) -> NodeApi:
    """host, port: as Kubernetes tells every container of its API server."""
    name = f"[{host}]" if ":" in host else host
    return NodeApi(f"https://{name}:{port}", node, folder / "token", folder / "ca.crt")


def _ours(item: Object) -> set[str]:
    return {taint["key"] for taint in item["spec"].get("taints") or ()} & set(TAINTS.values())


def _left(item: Object) -> NodeNotices | None:
    text = (item["metadata"].get("annotations") or {}).get(NOTICES)
    try:
        return NodeNotices.model_validate_json(text) if text else None
    except ValidationError:
        return None


def _words(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
