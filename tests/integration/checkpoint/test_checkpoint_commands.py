"""python -m muster.trainer.checkpoint: what it prints, what it refuses, and that it starts without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.checkpoint.one_rank import trained

from muster.trainer.checkpoint import list_commits
from muster.trainer.checkpoint.__main__ import main
from muster.words.names import ExitCode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    trained((tmp_path / "uid").as_uri(), steps=3)
    return tmp_path / "uid"


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict:
    assert main([*map(str, arguments), "--json"]) == code
    printed = capsys.readouterr()
    return json.loads(printed.out or printed.err)


def test_a_life_of_commits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = run(capsys, "ls", folder)
    assert [(row["step"], row["pinned"], row["attempt"]) for row in listed["commits"]] == [
        (1, False, 1), (2, False, 1), (3, False, 1),
    ]  # fmt: skip
    assert run(capsys, "pin", folder, 1) == {"step": 1, "pinned": True, "changed": True}
    assert run(capsys, "pin", folder, 1)["changed"] is False
    assert [row["pinned"] for row in run(capsys, "ls", folder)["commits"]] == [True, False, False]
    refused = run(capsys, "rm", folder, 1, code=ExitCode.USER_ERROR)
    assert refused["error"] == "step 1 is not removed: it is pinned; --force removes it all the same"
    assert run(capsys, "unpin", folder, 1)["changed"] is True
    assert run(capsys, "rm", folder, 1)["removed"] is True
    assert not (folder / "step-00000001").exists()
    assert "it is the newest checkpoint" in run(capsys, "rm", folder, 3, code=ExitCode.USER_ERROR)["error"]
    assert run(capsys, "rm", folder, 3, "--force")["removed"] is True
    assert list_commits(folder.as_uri()) == (2,)
    assert "step 9 is not committed" in run(capsys, "pin", folder, 9, code=ExitCode.STORAGE)["error"]


def test_inspect_names_every_tensor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "inspect", folder)
    assert (said["step"], said["worldSize"], said["cursor"]["sample"]) == (3, 1, 3)
    assert said["tensors"]["model/embedding.weight"] == {"dtype": "F32", "shape": [37, 16], "slices": 1}
    assert said["tensorBytes"] < said["bytes"]
    assert main(["inspect", str(folder), "2"]) == 0
    assert "model/embedding.weight: F32 [37, 16]" in capsys.readouterr().out


def test_verify_finds_what_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["verified"] for row in run(capsys, "verify", folder)["commits"]] == [True, True, True]
    shard = next(folder.glob("step-00000002/*/*"))
    shard.write_bytes(shard.read_bytes()[:-9])
    said = run(capsys, "verify", folder, code=1)
    assert [row["verified"] for row in said["commits"]] == [True, False, True]
    assert str(shard) in said["commits"][1]["error"]
    assert run(capsys, "verify", folder, 3)["commits"][0]["verified"] is True


def test_people_get_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(folder)]) == 0
    assert "step         3" in capsys.readouterr().out
    assert main(["ls", "gs://somewhere"]) == ExitCode.USER_ERROR
    assert capsys.readouterr().err.startswith("error: 'gs://somewhere': nothing reads gs://")


def test_it_starts_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; sys.argv = ['x', 'ls', sys.argv[1]]\n"
        "try: runpy.run_module('muster.trainer.checkpoint', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "import muster.trainer.checkpoint.uploader\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
