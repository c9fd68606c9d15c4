"""The launcher runs in images that know nothing of Muster: an old Python, no packages. And it spells what it shares
with the rest of Muster alike."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.unit.worker.foreign_image import write_launcher

import muster.worker
from muster.operator.core.causes import UNEVEN_END_SECONDS
from muster.words import names as contract
from muster.words.notices import NOTICES_ENV, Notice, Remedy
from muster.words.signals import Heartbeat, SignalKind, StepRecord, WorkerExit
from muster.worker import fence, heartbeats, names, notices, ranks

FOLDER = Path(muster.worker.__path__[0])
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_a_module_needs_an_old_python_and_nothing_else(name: str) -> None:
    tree = ast.parse((FOLDER / name).read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found = [node.module or ""]
        for each in found:
            room, own = each.partition(".")[0], each.startswith("muster.worker.") or each == "muster.worker"
            assert own or room in sys.stdlib_module_names, f"{name} imports {each}"


def constants(module: type | ModuleType) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, str | int)}


def test_names_and_codes_are_those_of_the_contract() -> None:
    theirs = {**constants(contract.Env), "WORKER_DIR": contract.Env.WORKER_DIR}
    for name, value in constants(names.WorkerVariables).items():
        assert theirs.get(name, value) == value
    assert constants(names.ExitCode).items() <= {code.name: int(code) for code in contract.ExitCode}.items()
    for name in ("EXIT_RECORD", "HEARTBEAT", "HEARTBEATS_PATH", "LAST_HEARTBEAT"):
        assert getattr(names, name) == getattr(contract, name)
    assert names.NOTICES_ENV == NOTICES_ENV
    assert names.SAVER == contract.SAVER
    assert names.FIRST_INCARNATION == contract.FIRST_INCARNATION
    assert names.UNEVEN_END_SECONDS == UNEVEN_END_SECONDS
    assert names.rank_mark(3) == contract.rank_mark(3)
    assert (fence.TOKEN_FILE, fence.CA_FILE) == (contract.Env.FENCE_TOKEN_FILE, contract.Env.FENCE_CA_FILE)
    pets = contract.Rendezvous
    assert (ranks.NODES, ranks.NODE_RANK, ranks.RANKS_PER_NODE) == (pets.NODES, pets.NODE_RANK, pets.RANKS_PER_NODE)
    assert (ranks.HOST, ranks.PORT) == (pets.HOST, pets.PORT)


@pytest.mark.parametrize("kind", list(SignalKind))
@pytest.mark.parametrize("remedy", list(Remedy))
def test_the_same_notices_ask_to_leave(kind: SignalKind, remedy: Remedy) -> None:
    notice = Notice(kind=kind, remedy=remedy, at=1.0, message="", source="")
    assert notices.asks_to_leave(notice.model_dump(mode="json", by_alias=True)) == notice.asks_to_leave


def test_what_it_writes_are_records_of_the_contract(tmp_path: Path) -> None:
    from muster.worker import exit_record
    from muster.worker.output import RankOutput

    (tmp_path / "rank-0.progress.json").write_text(
        '{"pid": 7, "step": 12, "steps": 30, "at": 5.0, "progressedAt": 4.0, "loss": 1.5, "tokens": 640,'
        ' "values": {"learning_rate": 0.1, "accuracy": 0.5}, "source": "run"}'
    )
    beats = heartbeats.HeartbeatWriter(
        str(tmp_path),
        2,
        3,
        {0: 7},
        RankOutput([0]),
        heartbeats.HangPolicy(),
        steps=None,
        resume_step=10,
        metrics_port=9,
    )
    beats.write()
    beat = Heartbeat.model_validate_json((tmp_path / "rank-0.json").read_text())
    assert (beat.attempt, beat.incarnation, beat.rank, beat.step) == (2, 3, 0, 12)
    assert (beat.watched, beat.metrics_port) == (True, 9)
    assert isinstance(beat.last_step, StepRecord)
    assert (beat.last_step.loss, beat.last_step.lr, beat.last_step.steps) == (1.5, 0.1, 30)
    assert beat.last_step.values == {"accuracy": 0.5}
    end = WorkerExit.model_validate(exit_record.record(80, "why", rank=1, signal=None, step=3))
    assert (end.exit_code, end.rank, end.message) == (80, 1, "why")


def old_python(version: str) -> str | None:
    """Return a Python of that version on this machine: on the path, or beside the one that runs the tests."""
    beside = Path(sys.base_prefix).parent.glob(f"{version}*/bin/python{version}")
    for python in filter(None, [shutil.which(f"python{version}"), *map(str, sorted(beside))]):
        if subprocess.run([python, "-c", "pass"], capture_output=True).returncode == 0:
            return python
    return None


@pytest.mark.parametrize("version", ["3.8", "3.9"])
def test_an_old_python_starts_it_or_is_refused_in_a_sentence(version: str, tmp_path: Path) -> None:
    if (python := old_python(version)) is None:
        pytest.skip(f"this machine has no Python {version}")
    write_launcher(tmp_path / "launcher")
    environ = {"MUSTER_WORKER_DIR": str(tmp_path), "MUSTER_CONFIG": '{"program": {"command": ["nothing.py"]}}'}
    done = subprocess.run([python, "-I", str(tmp_path / "launcher")], env=environ, capture_output=True, text=True)
    end = WorkerExit.model_validate_json((tmp_path / "exit.json").read_text())
    assert (done.returncode, end.exit_code) == (80, 80), done.stderr
    expected = "no file nothing.py" if version != "3.8" else "the image's python3 is 3.8, and programs need Python 3.9"
    assert expected in end.message


def test_the_newest_python_s_words_about_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("launcher_main", FOLDER / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("MUSTER_WORKER_DIR", str(tmp_path))
    monkeypatch.setattr(module, "PYTHON_MIN", (9, 9))
    assert module.refuse_old_python() == contract.ExitCode.USER_ERROR
    end = WorkerExit.model_validate_json((tmp_path / "exit.json").read_text())
    assert "programs need Python 9.9 or newer; use a newer image" in end.message
