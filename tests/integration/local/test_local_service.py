"""The operator process: one per folder, clear about what it can't do, and talkative where machines and people look."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.integration.local.house import House
from tests.polling import WAIT_SECONDS_MAX, eventually

from muster.operator.local import processes
from muster.words.status import Phase

OPERATOR = (sys.executable, "-m", "muster.operator")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OPERATOR, *words],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS_MAX,
        env=dict(os.environ) | environment,
    )


def told(house: House) -> dict[str, object]:
    path = house.state.root / "operator.json"
    facts: dict[str, object] = json.loads(text) if path.exists() and (text := path.read_text()) else {}
    return facts


def url(house: House) -> str:
    return str(eventually(lambda: told(house).get("url"), "the operator to tell its address"))


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=WAIT_SECONDS_MAX) as reply:
        body: bytes = reply.read()
    return body.decode()


def test_a_second_operator_is_refused_and_told_who_is_there(house: House) -> None:
    operator = house.start()
    url(house)
    second = run("--state", str(house.state.root))
    assert second.returncode == 3
    assert second.stderr == (
        f"muster-operator: another operator (pid {operator.pid}) works on {house.state.root}; "
        "stop it first, or choose another folder with --state\n"
    )
    uid = house.submit(steps=5)
    house.becomes(uid, Phase.SUCCEEDED)
    house.signal(signal.SIGKILL)
    house.start()
    eventually(lambda: house.log.count("operator started") == 2, "the kernel to have dropped the dead one's lock")


@pytest.mark.parametrize("folder", ["/dev/null/state", "/proc/state", "{tmp}/file"])
def test_a_folder_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    refused = run("--state", folder.format(tmp=tmp_path))
    assert refused.returncode == 4
    assert refused.stderr.startswith(
        f"muster-operator: the state folder {folder.format(tmp=tmp_path)} can't be used: "
    ), refused.stderr
    assert refused.stderr.endswith("; choose another with --state, or make this one writable\n")


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = run("--state", str(tmp_path), "--port", str(port))
    assert refused.returncode == 5
    assert refused.stderr == (
        f"muster-operator: can't listen on 127.0.0.1:{port}: Address already in use; "
        "choose another with --port (0: any free one)\n"
    )


def test_bad_settings_are_named(tmp_path: Path) -> None:
    refused = run("--state", str(tmp_path), "--nodes", "0")
    assert (refused.returncode, refused.stderr) == (
        2,
        "muster-operator: nodes: Input should be greater than or equal to 1\n",
    )
    refused = run("--state", str(tmp_path), MUSTER_OPERATOR_WORKER_COMMAND="not json")
    assert refused.returncode == 2
    assert "worker_command" in refused.stderr
    assert run("--version").stdout.startswith("muster-operator 0.")


def test_a_job_that_does_not_fit_waits_and_says_why(house: House) -> None:
    house.start()
    running = [house.submit(f"job-{index}", steps=10_000) for index in range(2)]
    for uid in running:
        house.becomes(uid, Phase.RUNNING)
    third, large = house.submit("third", steps=5), house.submit("large", nodes=8, training=_eight_ways())
    waits = eventually(
        lambda: (why := house.status(third)).code == "AwaitingCapacity" and why.because, "the third to say why it waits"
    )
    assert waits.startswith("gang needs 2 nodes, none is free; held by default/job-")
    assert waits.count(" 2 nodes") == 3, "its own need, and what each of the two holds"
    eventually(lambda: house.status(large).code == "GangTooLarge", "the large one to say why it waits")
    assert house.status(large).because == "gang needs 8 nodes; the largest pool has 4 such nodes"
    house.set_spec(running[0], cancel=True)
    house.becomes(third, Phase.SUCCEEDED)


def _eight_ways() -> dict[str, object]:
    return {
        "model": {"preset": "muster-1m"},
        "data": {"train": [{"source": "x.txt"}]},
        "batch": {"tokensPerStep": 4096},
        "length": {"steps": 5},
    }


def test_suspend_resume_cancel_and_delete(house: House) -> None:
    house.start()
    uid = house.submit(steps=10_000)
    house.reaches(uid, 3)
    house.set_spec(uid, suspend=True)
    house.becomes(uid, Phase.SUSPENDED)
    eventually(lambda: not processes.scan(house.state), "the last process to be gone")
    committed = house.newest_step(uid)
    house.set_spec(uid, suspend=False)
    house.reaches(uid, committed + 3)
    status = house.status(uid)
    assert (status.attempt, status.resume_step, status.restarts.total) == (2, committed, 0)
    house.set_spec(uid, cancel=True)
    house.becomes(uid, Phase.CANCELLED)
    assert house.never_two(uid)
    house.cluster.delete(uid)
    eventually(lambda: house.is_gone(uid), "the object to be gone")
    eventually(lambda: not processes.scan(house.state), "the last process to be gone")
    assert (house.state.worker(uid, 1, 0) / "log").exists(), "logs outlive the job"


def test_rubbish_in_heartbeats_changes_nothing(house: House) -> None:
    house.start()
    uid = house.submit(steps=20, env={"FAKE_GARBAGE": "1"})
    assert house.becomes(uid, Phase.SUCCEEDED).attempt == 1


def test_a_user_error_ends_the_job_and_says_what_the_rank_said(house: House) -> None:
    house.start()
    uid = house.submit(env={"FAKE_EXIT": "1:3:80"})
    status = house.becomes(uid, Phase.FAILED)
    assert status.last_failure is not None
    assert (status.last_failure.cause, status.last_failure.exit_code, status.attempt) == ("user_error", 80, 1)


def test_metrics_and_health(house: House) -> None:
    house.start()
    uid = house.submit(env={"FAKE_EXIT": "1:8:1", "FAKE_HOLD_AT": "2:12"})
    # A recovery counts once its attempt is seen to train: it must not be over before the operator has looked.
    eventually(lambda: house.status(uid).attempt == 2 and house.status(uid).phase is Phase.RUNNING, "the recovery")
    house.goes_on(uid)
    house.becomes(uid, Phase.SUCCEEDED)
    assert json.loads(fetch(f"{url(house)}/healthz"))["status"] == "ok"
    wanted = (
        'muster_operator_jobs{phase="Succeeded"} 1.0',
        "muster_operator_attempts_total 2.0",
        'muster_operator_restarts_total{cause="unknown"} 1.0',
        'muster_operator_jobs_finished_total{phase="Succeeded"} 1.0',
        'muster_operator_actions_total{action="CreateWorker"} 4.0',
        "muster_operator_recovery_seconds_count 1.0",
        "muster_operator_reserved_nodes 0.0",
    )

    def all_counted() -> bool:
        metrics = fetch(f"{url(house)}/metrics")
        missing = [line for line in wanted if f"{line}\n" not in metrics]
        assert not missing, f"{missing} are not in {metrics}"
        return True

    # The job's status says Succeeded a moment before the ledger gives its nodes back and both are counted.
    eventually(all_counted, "every count")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(f"{url(house)}/nothing")


def test_what_is_seen_can_be_dumped_and_replayed(house: House, tmp_path: Path) -> None:
    house.start()
    uid = house.submit(steps=10_000)
    house.becomes(uid, Phase.RUNNING)
    for name in ("tiny", "default/tiny", uid):
        dumped = run("dump", "--state", str(house.state.root), name)
        assert dumped.returncode == 0, dumped.stderr
        assert json.loads(dumped.stdout)["uid"] == uid
    (tmp_path / "observed.json").write_text(dumped.stdout)
    replayed = run("replay", str(tmp_path / "observed.json"))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "training on 2 nodes of pool local" in replayed.stdout
    unknown = run("dump", "--state", str(house.state.root), "nobody")
    assert (unknown.returncode, unknown.stderr) == (1, f"muster-operator: no job nobody in {house.state.root}\n")
    nowhere = run("dump", "--state", str(tmp_path / "nowhere"), "tiny")
    assert nowhere.returncode == 4
    assert not (tmp_path / "nowhere").exists()


def test_no_secret_of_a_job_is_in_the_log_or_the_status(house: House) -> None:
    house.start("--log-level", "debug")
    uid = house.submit(env={"HF_TOKEN": "hunter2-hunter2", "FAKE_EXIT": "1:3:82", "FAKE_SAY": "hunter2-hunter2"})
    status = house.becomes(uid, Phase.SUCCEEDED)
    assert status.last_failure is not None
    assert "***" in status.last_failure.message
    assert "hunter2-hunter2" not in house.log + status.model_dump_json()
