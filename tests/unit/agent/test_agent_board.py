"""From findings to those who are told: the board, the file, the page, the metrics."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.polling import eventually

from muster.agent import folder
from muster.agent.board import NoticeBoard
from muster.agent.disks import DiskSource
from muster.agent.fabric import FabricSource
from muster.agent.gpus import GpuSource
from muster.agent.metrics import AgentMetrics
from muster.agent.server import serve
from muster.agent.watching import SourcePoller, keep_file
from muster.agent.xid import XidSource, read_table
from muster.words.notices import NodeNotices, Notice, Remedy
from muster.words.signals import SignalKind


def notice(at: float = 5.0, kind: SignalKind = SignalKind.SPOT_NOTICE, remedy: Remedy = Remedy.DRAIN) -> Notice:
    return Notice(kind=kind, remedy=remedy, at=at, message="because", source="test")


class Fake:
    """A source that says what it is told to."""

    name = "fake"
    pause_seconds = 0.01

    def __init__(self) -> None:
        self.found: tuple[Notice, ...] = ()
        self.error: Exception | None = None
        self.looks = 0

    def look(self) -> tuple[Notice, ...]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.found

    def acknowledge(self) -> None:
        self.found = ()


def test_the_board_keeps_when_a_finding_was_first_seen() -> None:
    board = NoticeBoard("n", "boot", clock=lambda: 9.0)
    board.put("a", (notice(at=5.0),))
    board.put("b", (notice(at=7.0, kind=SignalKind.REBALANCE, remedy=Remedy.RECORD),))
    board.put("a", (notice(at=8.0),))
    assert [(found.kind, found.at) for found in board.now().notices] == [
        (SignalKind.SPOT_NOTICE, 5.0),
        (SignalKind.REBALANCE, 7.0),
    ]
    assert (board.now().node, board.now().boot_id, board.now().at) == ("n", "boot", 9.0)
    board.put("a", ())
    assert [found.kind for found in board.now().notices] == [SignalKind.REBALANCE]


def test_a_process_that_is_lost_again_is_lost_again() -> None:
    board = NoticeBoard("n")
    for at in (5.0, 8.0):
        board.put("a", (notice(at, SignalKind.GPU_FAULT, Remedy.RESTART),))
    assert [found.at for found in board.now().notices] == [8.0]


def test_only_news_wakes_who_waits() -> None:
    board = NoticeBoard("n")
    board.put("a", (notice(),))
    version = board.wait(0, 5.0)
    board.put("a", (notice(at=6.0),))
    assert board.wait(version, 0.0) == version
    board.put("a", ())
    assert board.wait(version, 5.0) == version + 1


def test_a_source_that_fails_keeps_its_word_and_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    source, board = Fake(), NoticeBoard("n")
    source.found = (notice(),)
    watching = SourcePoller([source], board)
    watching.start()
    try:
        eventually(lambda: board.now().notices, "the first finding")
        source.error = OSError("driver gone")
        eventually(lambda: "driver gone" in caplog.text, "the error to be told")
        seen = source.looks
        eventually(lambda: source.looks > seen + 3, "more looks")
        assert caplog.text.count("driver gone") == 1
        assert board.now().notices == (notice(),)
        source.error, source.found = None, ()
        eventually(lambda: not board.now().notices, "it to be over")
        assert watching.stuck() == ""
    finally:
        watching.stop.set()


def test_a_source_that_does_not_come_back_is_named() -> None:
    watching = SourcePoller([Fake()], NoticeBoard("n"))
    watching._looked["fake"] -= 3600
    assert "fake" in watching.stuck()


def test_the_file_is_there_while_there_is_something_to_say(tmp_path: Path) -> None:
    board, stop = NoticeBoard("local-1"), threading.Event()
    keeper = threading.Thread(target=keep_file, args=(tmp_path / "notices", board, stop))
    keeper.start()
    path = tmp_path / "notices" / "local-1.json"
    try:
        board.put("a", (notice(),))
        eventually(path.exists, "the file")
        assert NodeNotices.model_validate_json(path.read_text()).notices == (notice(),)
        board.put("a", ())
        eventually(lambda: not path.exists(), "the file to go")
    finally:
        stop.set()
        keeper.join()
    assert os.listdir(tmp_path / "notices") == []


def test_a_full_disk_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "notices"
    blocked.write_text("a file where the folder should be")
    board, stop = NoticeBoard("n"), threading.Event()
    board.put("a", (notice(),))
    keeper = threading.Thread(target=keep_file, args=(blocked, board, stop))
    keeper.start()
    try:
        eventually(lambda: "can't write" in caplog.text, "the trouble to be told")
        blocked.unlink()
        eventually((blocked / "n.json").exists, "the file")
    finally:
        stop.set()
        keeper.join()


@pytest.fixture
def page() -> Iterator[Callable[[str], tuple[int, bytes]]]:
    why = {"stuck": ""}
    board = NoticeBoard("n")
    board.put("a", (notice(),))
    server = serve("127.0.0.1", 0, board.now, lambda: b"metric 1\n", lambda: why["stuck"])

    def get(path: str) -> tuple[int, bytes]:
        why["stuck"] = "nvml" if path.endswith("?stuck") else ""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}{path}") as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    yield get
    server.shutdown()
    server.server_close()


def test_the_pages(page: Callable[[str], tuple[int, bytes]]) -> None:
    status, body = page("/notices")
    assert status == 200
    assert NodeNotices.model_validate_json(body).notices == (notice(),)
    assert page("/metrics") == (200, b"metric 1\n")
    assert page("/healthz") == (200, b'{"status": "ok"}')
    assert page("/healthz?stuck")[0] == 503
    assert page("/anything")[0] == 404


def test_disks_and_counters_and_links_are_metrics(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/rdmap0s6/ports/1"
    (port / "hw_counters").mkdir(parents=True)
    for name, text in {"rx_drops": "7\n", "retrans_pkts": "x\n", "lifespan": "12\n"}.items():
        (port / "hw_counters" / name).write_text(text)
    (port / "state").write_text("4: ACTIVE\n")
    for name, state, flags in (("eth0", "up", "0x1003"), ("eth1", "down", "0x1003"), ("eth2", "down", "0x1002")):
        (tmp_path / "class/net" / name / "device").mkdir(parents=True)
        (tmp_path / "class/net" / name / "operstate").write_text(f"{state}\n")
        (tmp_path / "class/net" / name / "flags").write_text(f"{flags}\n")
    (tmp_path / "class/net/lo").mkdir()
    fabric, disks = FabricSource(tmp_path), DiskSource((tmp_path, tmp_path / "absent"))
    assert (fabric.look(), disks.look()) == ((), ())
    assert fabric.counters == {("rdmap0s6", "1", "rx_drops"): 7.0}
    assert fabric.links == {"rdmap0s6/1": True, "eth0": True, "eth1": False}
    xids = XidSource(read_table())
    xids.read("NVRM: Xid (PCI:0000:3b:00): 79, gone", 1.0, is_news=True)
    board = NoticeBoard("n")
    board.put("a", (notice(),))
    text = AgentMetrics(board.now, lambda: {"imds": 0.5}, GpuSource(), xids, fabric, disks).text().decode()
    samples: dict[tuple[Any, ...], float] = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert all(name.startswith("muster_agent_") for name, *_ in samples)
    assert samples[("muster_agent_xid_errors_total", ("device", "0000:3b:00"), ("xid", "79"))] == 1
    assert samples[("muster_agent_link_up", ("link", "eth1"))] == 0
    assert samples[("muster_agent_disk_read_only", ("path", str(tmp_path)))] == 0
    assert samples[("muster_agent_disk_bytes_free", ("path", str(tmp_path)))] > 0
    assert samples[("muster_agent_source_age_seconds", ("source", "imds"))] == 0.5
    notices = ("kind", "spot_notice"), ("remedy", "drain"), ("source", "test")
    assert samples[("muster_agent_notices", *notices)] == 1


def test_a_file_system_that_turned_read_only_is_left(tmp_path: Path) -> None:
    found = list(os.statvfs(tmp_path))
    found[8] |= os.ST_RDONLY
    (told,) = DiskSource((tmp_path,), lambda path: os.statvfs_result(found)).look()
    assert (told.kind, told.remedy) == (SignalKind.NODE_DRAIN, Remedy.DRAIN)
    assert told.asks_to_leave


def test_a_file_of_notices_is_one_document(tmp_path: Path) -> None:
    folder.write(tmp_path, NodeNotices(node="n", at=1.0, notices=(notice(),)))
    document = json.loads((tmp_path / "n.json").read_text())
    assert document["notices"][0]["kind"] == "spot_notice"
    assert {"node", "at", "bootId", "notices"} == document.keys()
