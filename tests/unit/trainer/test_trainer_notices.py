"""The launcher hears its node's end from a file or from the node's agent, and does as on SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.polling import WAIT_SECONDS_MAX
from tests.ports import free_port

from muster.agent.board import NoticeBoard
from muster.agent.folder import write
from muster.agent.server import serve
from muster.words.names import Env
from muster.words.notices import NOTICES_ENV, NodeNotices, Notice, Remedy
from muster.words.signals import SignalKind
from muster.worker.notices import NOTICE_SECONDS, read, seconds_left

GOING = Notice(
    kind=SignalKind.SPOT_NOTICE, remedy=Remedy.DRAIN, at=1000.0, message="taken back", source="imds", until=1120.0
)
OTHERS = [
    Notice(kind=SignalKind.REBALANCE, remedy=Remedy.RECORD, at=1000.0, message="maybe", source="imds"),
    Notice(kind=SignalKind.GPU_FAULT, remedy=Remedy.REBOOT, at=1000.0, message="Xid 79", source="xid"),
    Notice(kind=SignalKind.GPU_FAULT, remedy=Remedy.RESTART, at=1000.0, message="Xid 31", source="xid"),
]
LISTENER = """
import signal, sys, time
from muster.trainer.launch.worker import leave_node, watch_notices
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
watch_notices(leave_node)
print("listens", flush=True)
time.sleep(600)
"""


def said(folder: Path, *notices: Notice) -> str:
    write(folder, NodeNotices(node="n", at=1.0, notices=notices))
    return str(folder / "n.json")


def listener(address: str, host: str = "") -> subprocess.Popen[str]:
    environment = os.environ | {NOTICES_ENV: address, Env.HOST_IP: host}
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listens\n"
    return process


def test_a_notice_in_the_file_ends_the_wait_and_says_why(tmp_path: Path) -> None:
    process = listener(said(tmp_path, *OTHERS))
    said(tmp_path, *OTHERS, GOING)
    _, told = process.communicate(timeout=WAIT_SECONDS_MAX)
    assert process.returncode == 85
    assert "the node announces its end: taken back" in told


def test_what_is_no_announcement_ends_nothing(tmp_path: Path) -> None:
    address = said(tmp_path, *OTHERS)
    process = listener(address)
    for text in ("", "{", '{"node": 1}'):
        (tmp_path / "n.json").write_text(text)
        assert read(address) is None
    said(tmp_path)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=WAIT_SECONDS_MAX)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_agent_of_the_node_is_asked(host: str) -> None:
    board = NoticeBoard("n")
    try:
        server = serve(host, 0, board.now, lambda: b"", lambda: "")
    except OSError as error:
        pytest.skip(f"no {host} on this machine: {error}")
    try:
        process = listener(f"http://{{host}}:{server.server_address[1]}/notices", host)
        board.put("imds", (GOING,))
        _, told = process.communicate(timeout=WAIT_SECONDS_MAX)
        assert (process.returncode, "taken back" in told) == (85, True)
    finally:
        server.shutdown()
        server.server_close()


def test_where_no_agent_answers_training_goes_on() -> None:
    process = listener(f"http://127.0.0.1:{free_port()}/notices")
    assert read(f"http://127.0.0.1:{free_port()}/notices") is None
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=WAIT_SECONDS_MAX)


@pytest.mark.parametrize(
    ("notices", "left"),
    [
        ([], None),
        (OTHERS, None),
        ([GOING], 100.0),
        ([GOING.model_copy(update={"until": None})], NOTICE_SECONDS - 20),
        ([GOING, GOING.model_copy(update={"until": 1030.0})], 10.0),
        ([GOING.model_copy(update={"until": 900.0})], 0.0),
    ],
)
def test_how_long_a_rank_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: list[Notice], left: float | None
) -> None:
    monkeypatch.setenv(NOTICES_ENV, said(tmp_path, *notices))
    assert seconds_left(now=1020.0) == left


def test_a_worker_that_was_told_nothing_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NOTICES_ENV, raising=False)
    assert seconds_left(now=1020.0) is None
