"""The agent's word on its Node: taints once each, conditions with heartbeats, what a reboot settles and what not."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from typing import Any

import pytest
from tests.polling import eventually

from muster.agent import watching
from muster.agent.board import NoticeBoard
from muster.agent.node import NodeObject
from muster.kube.client import MERGE, STRATEGIC
from muster.kube.errors import ApiError
from muster.words.base import dump_json
from muster.words.notices import (
    AGENT_CONDITION,
    FAULT_CONDITION,
    NOTICES,
    TAINTS,
    NodeNotices,
    Notice,
    Remedy,
)
from muster.words.signals import SignalKind

SPOT, FAULT, DRAIN = (TAINTS[kind] for kind in (SignalKind.SPOT_NOTICE, SignalKind.GPU_FAULT, SignalKind.NODE_DRAIN))
OTHERS = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}


class FakeApi:
    """One Node with the API server's rules: a merge patch, and a version that must be the one that was read."""

    def __init__(self, *taints: dict[str, str], annotation: str | None = None) -> None:
        annotations = {} if annotation is None else {NOTICES: annotation}
        self.item: dict[str, Any] = {
            "metadata": {"resourceVersion": "1", "annotations": annotations},
            "spec": {"taints": [OTHERS, *taints]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }
        self.conflicts = 0
        self.down = False
        self.writes: list[dict[str, Any]] = []

    async def get(self, path: str) -> dict[str, Any]:
        if self.down:
            raise ConnectionRefusedError("connection refused")
        return copy.deepcopy(self.item)

    async def patch(self, path: str, change: dict[str, Any], kind: str = MERGE) -> dict[str, Any]:
        if path.endswith("/status"):
            assert kind == STRATEGIC, "conditions are merged by their type"
            return await self._patch_status(path, change)
        meta = self.item["metadata"]
        if self.conflicts and "spec" in change:
            self.conflicts -= 1
            self._bump()
        wanted = change["metadata"].get("resourceVersion", meta["resourceVersion"])
        if self.down or wanted != meta["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        self.writes.append(change)
        for key, value in change["metadata"].get("annotations", {}).items():
            if value is None:
                meta["annotations"].pop(key, None)
            else:
                meta["annotations"][key] = value
        self.item["spec"]["taints"] = change.get("spec", self.item["spec"])["taints"]
        self._bump()
        return await self.get(path)

    async def _patch_status(self, path: str, change: dict[str, Any]) -> dict[str, Any]:
        if self.down:
            raise ConnectionRefusedError("connection refused")
        kept = {entry["type"]: entry for entry in self.item["status"]["conditions"]}
        kept |= {entry["type"]: entry for entry in change["status"]["conditions"]}
        self.item["status"]["conditions"] = list(kept.values())
        return await self.get(path)

    @property
    def taints(self) -> set[str]:
        return {taint["key"] for taint in self.item["spec"]["taints"]}

    def condition(self, kind: str) -> dict[str, Any]:
        return next(entry for entry in self.item["status"]["conditions"] if entry["type"] == kind)

    def _bump(self) -> None:
        meta = self.item["metadata"]
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)


def notice(kind: SignalKind, remedy: Remedy, source: str = "xid") -> Notice:
    return Notice(kind=kind, remedy=remedy, at=5.0, message="because", source=source)


GPU = notice(SignalKind.GPU_FAULT, Remedy.REBOOT)
GOING = notice(SignalKind.SPOT_NOTICE, Remedy.DRAIN, "imds")


def told(*notices: Notice, boot: str = "boot-1") -> NodeNotices:
    return NodeNotices(node="n", at=6.0, boot_id=boot, notices=notices)


async def begun(api: FakeApi, boot: str = "boot-1") -> NodeObject:
    node = NodeObject(api, "n", boot)  # type: ignore[arg-type]
    await node.begin()
    return node


async def test_a_notice_becomes_taint_annotation_and_condition_and_goes_again() -> None:
    api = FakeApi()
    node = await begun(api)
    await node.write(told(GOING, GPU))
    assert api.taints == {"nvidia.com/gpu", SPOT, FAULT}
    ours = [taint for taint in api.item["spec"]["taints"] if taint["key"] == FAULT]
    assert ours == [{"key": FAULT, "value": "reboot", "effect": "NoSchedule"}]
    assert json.loads(api.item["metadata"]["annotations"][NOTICES])["bootId"] == "boot-1"
    fault = api.condition(FAULT_CONDITION)
    assert (fault["status"], fault["reason"], fault["message"]) == ("True", "Drain", "because; because")
    assert api.condition(AGENT_CONDITION)["status"] == "True"
    assert api.condition("Ready")["status"] == "True"
    await node.write(told())
    assert api.taints == {"nvidia.com/gpu"}
    assert NOTICES not in api.item["metadata"]["annotations"]
    assert api.condition(FAULT_CONDITION)["status"] == "False"


@pytest.mark.parametrize(
    "found",
    [
        notice(SignalKind.GPU_FAULT, Remedy.RESTART),
        notice(SignalKind.REBALANCE, Remedy.RECORD),
        notice(SignalKind.GPU_FAULT, Remedy.RECORD),
    ],
)
async def test_what_keeps_nobody_out_is_no_taint(found: Notice) -> None:
    api = FakeApi()
    await (await begun(api)).write(told(found))
    assert api.taints == {"nvidia.com/gpu"}
    assert NOTICES in api.item["metadata"]["annotations"]


async def test_somebody_else_may_write_at_the_same_time() -> None:
    api = FakeApi()
    api.conflicts = 2
    node = await begun(api)
    await node.write(told(GPU))
    assert api.taints == {"nvidia.com/gpu", FAULT}
    api.conflicts = 3
    with pytest.raises(ApiError):
        await node.write(told())


async def test_a_taint_that_a_person_removes_stays_removed() -> None:
    api = FakeApi()
    node = await begun(api)
    await node.write(told(GPU))
    assert not await node.settled()
    api.item["spec"]["taints"] = [OTHERS]
    await node.confirm(told(GPU))
    assert api.taints == {"nvidia.com/gpu"}, "a heartbeat does not bring it back"
    assert await node.settled()
    assert not await node.settled()


@pytest.mark.parametrize(
    ("left", "boot", "inherited"),
    [
        (GPU, "boot-1", (GPU,)),
        (GPU, "boot-2", ()),
        (notice(SignalKind.GPU_FAULT, Remedy.EXCLUDE), "boot-2", (notice(SignalKind.GPU_FAULT, Remedy.EXCLUDE),)),
        (notice(SignalKind.GPU_FAULT, Remedy.EXCLUDE, "nvml"), "boot-1", ()),  # asked again anyway
        (GOING, "boot-1", ()),
        (notice(SignalKind.GPU_FAULT, Remedy.RESTART), "boot-1", ()),
    ],
)
async def test_what_an_agent_before_us_left(left: Notice, boot: str, inherited: tuple[Notice, ...]) -> None:
    taints = [{"key": TAINTS[left.kind], "effect": "NoSchedule"}] if left.keeps_out else []
    api = FakeApi(*taints, annotation=dump_json(told(left)))
    node = await begun(api, boot)
    assert node.inherited == inherited
    await node.write(told(*node.inherited))
    assert api.taints == {"nvidia.com/gpu"} | {TAINTS[found.kind] for found in inherited}


async def test_a_taint_removed_while_nobody_watched_is_settled() -> None:
    assert (await begun(FakeApi(annotation=dump_json(told(GPU))))).inherited == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"node": 1}'])
async def test_an_annotation_that_makes_no_sense_is_replaced(text: str) -> None:
    api = FakeApi({"key": FAULT, "effect": "NoSchedule"}, annotation=text)
    node = await begun(api)
    assert node.inherited == ()
    await node.write(told())
    assert api.taints == {"nvidia.com/gpu"}


def test_an_api_server_that_is_away_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(watching, "HEARTBEAT_SECONDS", 0.05)
    api, board, stop, acknowledged = FakeApi(), NoticeBoard("n", "boot-1"), threading.Event(), threading.Event()
    api.down = True
    node = NodeObject(api, "n", "boot-1")  # type: ignore[arg-type]
    keeper = threading.Thread(target=asyncio.run, args=(watching.publish_on_node(node, board, stop, acknowledged.set),))
    keeper.start()
    try:
        board.put("xid", (GPU,))
        eventually(lambda: "connection refused" in caplog.text, "the trouble to be told")
        api.down = False
        eventually(lambda: FAULT in api.taints, "the taint")
        api.item["spec"]["taints"] = [OTHERS]
        eventually(acknowledged.is_set, "the sources to be told that a person settled it")
    finally:
        stop.set()
        keeper.join()
    assert api.condition(AGENT_CONDITION)["status"] == "Unknown", "its last word"
    assert caplog.text.count("connection refused") == 1
