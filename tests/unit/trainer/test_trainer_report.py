"""What a worker tells an operator that can't read its files, and what it looks at before it begins."""

import json
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from tests.polling import eventually
from tests.ports import free_port

from muster.trainer.launch import preflight, report
from muster.trainer.launch.preflight import PreflightFault, verdict
from muster.words.signals import WorkerExit
from muster.worker.heartbeats import heartbeats_in
from muster.worker.reports import TERMINATION_BYTES_MAX, _handler, _server_of, metrics_page


def test_heartbeats_are_served_and_rubbish_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank-0.json").write_text('{"rank": 0}')
    (tmp_path / "rank-1.json").write_text('{"rank')
    (tmp_path / "rank-2.failure.json").write_text('{"rank": 2}')
    port = free_port()
    monkeypatch.setenv("MUSTER_REPORT_PORT", str(port))
    monkeypatch.setenv("MUSTER_POD_IP", "127.0.0.1")
    monkeypatch.setenv("MUSTER_JOB_UID", "uid")
    report.serve_reports(tmp_path)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/heartbeats") as reply:
        assert json.load(reply) == {"jobUid": "uid", "heartbeats": [{"rank": 0}]}


def test_the_ranks_metrics_are_served_at_the_one_port_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = {}
    for rank in range(2):
        registry = CollectorRegistry()
        Gauge("loss", "Loss", registry=registry).set(rank)
        server, _ = start_http_server(0, "127.0.0.1", registry)
        ports[rank] = server.server_port
    for rank, port in {**ports, 2: free_port()}.items():  # rank 2 is gone
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "metricsPort": port}))
    (tmp_path / "rank-3.json").write_text('{"rank": 3}')  # does not serve yet
    port = free_port()
    place = {"REPORT_PORT": str(port), "POD_IP": "127.0.0.1", "JOB": "llama", "JOB_UID": "uid", "ATTEMPT": "2"}
    for name, value in (place | {"WORKER": "1"}).items():
        monkeypatch.setenv(f"MUSTER_{name}", value)
    report.serve_reports(tmp_path)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
        (family,) = text_string_to_metric_families(reply.read().decode())
    labels = {"job_name": "llama", "job_uid": "uid", "attempt": "2", "worker": "1"}
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        (labels | {"rank": "0"}, 0.0),
        (labels | {"rank": "1"}, 1.0),
    ]


def test_a_rank_that_is_stopped_cannot_say_so_itself(tmp_path: Path) -> None:
    held, free = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    try:
        for rank, process in enumerate((held, free)):
            (tmp_path / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "pid": process.pid}))
        held.send_signal(signal.SIGSTOP)

        def told() -> dict[int, bool]:
            return {beat["rank"]: beat.get("stopped", False) for beat in heartbeats_in(str(tmp_path))}

        eventually(lambda: told() == {0: True, 1: False}, "the stopped one to be told")
        held.send_signal(signal.SIGCONT)
        eventually(lambda: told() == {0: False, 1: False}, "neither to be told")
    finally:
        for process in (held, free):
            process.kill()
            process.wait()


def test_a_taken_port_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MUSTER_REPORT_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("MUSTER_POD_IP", "127.0.0.1")
        report.serve_reports(tmp_path)
    assert "can't report heartbeats" in capsys.readouterr().err


@pytest.mark.parametrize("letter", ["a", "é", "\x00", '"'])
def test_a_long_record_fits_into_a_termination_message(
    letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = WorkerExit(exit_code=82, at=1.0, rank=3, message=letter * 9_000, log_tail=letter * 90_000)
    path = tmp_path / "termination-log"
    monkeypatch.setenv("MUSTER_TERMINATION_LOG", str(path))
    monkeypatch.setenv("MUSTER_WORKER_DIR", str(tmp_path))
    report.write_termination_message(end)
    text = path.read_text()
    assert len(text.encode()) <= TERMINATION_BYTES_MAX
    kept = WorkerExit.model_validate_json(text)
    assert (kept.exit_code, kept.rank) == (82, 3)
    assert set(kept.message) <= {letter}
    assert kept.message


def test_the_record_is_filled_into_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "termination-log"
    path.touch()
    inode = path.stat().st_ino
    monkeypatch.setenv("MUSTER_TERMINATION_LOG", str(path))
    report.write_termination_message(WorkerExit(exit_code=83, at=1.0, message="the bucket is gone"))
    assert WorkerExit.model_validate_json(path.read_text()).message == "the bucket is gone"
    assert path.stat().st_ino == inode


def test_the_last_heartbeat_goes_with_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "termination-log"
    monkeypatch.setenv("MUSTER_TERMINATION_LOG", str(path))
    monkeypatch.setenv("MUSTER_WORKER_DIR", str(tmp_path))
    for rank in (1, 0):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "step": 7}))
    report.write_termination_message(WorkerExit(exit_code=82, at=1.0, message="x" * 9_000, log_tail="y" * 9_000))
    text = path.read_text()
    assert json.loads(text)["lastHeartbeat"] == {"rank": 0, "step": 7}
    assert len(text.encode()) <= TERMINATION_BYTES_MAX


@pytest.mark.parametrize(("answer", "code"), [("warn", 0), ("retry", 84), ("exclude", 90), ("stop", 80)])
def test_each_answer_of_the_preflight(answer: str, code: int) -> None:
    end = verdict([PreflightFault("disk", "is full")], {"disk": answer})
    assert end.exit_code == code
    assert ("disk: is full" in end.message) == bool(code)


def test_the_worst_answer_decides() -> None:
    faults = [PreflightFault("network", "no name"), PreflightFault("disk", "is full"), PreflightFault("gpus", "7 of 8")]
    end = verdict(faults, {"network": "warn", "disk": "retry", "gpus": "stop"})
    assert (end.exit_code, end.message) == (80, "preflight failed (stop): gpus: 7 of 8")


def test_a_disk_that_can_not_be_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MUSTER_WORKER_DIR", str(blocked / "worker"))
    assert "can't be written" in (preflight.disk() or "")
    monkeypatch.setenv("MUSTER_WORKER_DIR", str(tmp_path / "worker"))
    monkeypatch.setattr(preflight, "DISK_BYTES_MIN", 0)
    assert preflight.disk() is None


@pytest.mark.parametrize(
    ("error", "words"), [(BrokenPipeError(), ""), (ConnectionResetError(), ""), (ValueError("a bug"), "a bug")]
)
def test_an_operator_that_gives_up_a_question_leaves_no_traceback_in_the_log(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _server_of("")(("127.0.0.1", 0), _handler(".", {}, metrics_page)) as server:
        try:
            raise error
        except Exception:
            server.handle_error(None, ("127.0.0.1", 1))
    told = capsys.readouterr().err
    assert words in told
    assert bool(told) == bool(words)
