"""prepare and the keeper as the processes that they are, on a store of files and on S3."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.s3_servers import moto_server
from tests.unit.programs.gang_of_keepers import environment_of

from muster.storage.small_files import write_whole
from muster.words.names import KEEPER_STATE, PREPARED, RANKS_ENDED, SAVE_REQUEST, Env


def run(module: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        f"muster.trainer.programs.{module}",
        *(["--parent", str(os.getpid())] * (module == "keeper")),
    ]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)


def save_prepare_and_compare(root: Path, more: dict[str, str]) -> None:
    """One attempt writes a checkpoint and ends; the next finds it."""
    environ = environment_of(root) | more
    worker_dir = Path(environ[Env.WORKER_DIR])
    folder = worker_dir / "checkpoints" / "mine"
    (folder / "empty").parent.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 100_000)
    (folder / "empty").touch()
    write_whole(worker_dir / SAVE_REQUEST.format(step=7), json.dumps({"step": 7, "folder": str(folder)}))
    write_whole(worker_dir / RANKS_ENDED, json.dumps({"ranks": [{"rank": 0, "exitCode": 0}]}))
    kept = run("keeper", environ)
    assert (kept.returncode, kept.stderr) == (0, "checkpoints: step 7 is published: 2 files\n")
    state = json.loads((worker_dir / KEEPER_STATE).read_text())
    assert (state["state"], state["committedStep"], state["fault"]) == ("done", 7, None)
    environ = environment_of(root, attempt="2", resume_step="7") | more
    prepared = run("prepare", environ)
    assert prepared.returncode == 0, prepared.stderr
    document = json.loads((Path(environ[Env.WORKER_DIR]) / PREPARED).read_text())
    assert (document["resumeStep"], document["entry"]) == (7, "mine")
    resumed = Path(document["resumeDir"])
    assert {path.name: path.read_bytes() for path in resumed.iterdir()} == {"weights": b"w" * 100_000, "empty": b""}


@pytest.mark.long
def test_a_store_of_files(tmp_path: Path) -> None:
    save_prepare_and_compare(tmp_path, {})


@pytest.mark.long
def test_s3(tmp_path: Path) -> None:
    with moto_server() as server:
        store = {Env.CHECKPOINT_URI: f"s3://{server.bucket}/team/uid"}
        save_prepare_and_compare(tmp_path, {**server.environment(), **store})


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "code", "says"),
    [
        ('{"checkpoint": {}}', 80, "MUSTER_CONFIG has no program"),
        ('{"checkpoint": {}, "program": {"command": []}}', 80, "program.command"),
    ],
)
def test_what_is_no_program_is_refused(tmp_path: Path, config: str, code: int, says: str) -> None:
    for module in ("keeper", "prepare"):
        ended = run(module, environment_of(tmp_path) | {Env.CONFIG: config})
        assert ended.returncode == code
        assert says in ended.stderr
        assert "Traceback" not in ended.stderr
