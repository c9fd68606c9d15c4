"""Programs by the command line: a folder is packed, uploaded once, for a job that is taken, and named by its id."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, served
from typer.testing import CliRunner

from muster.cli.main import app
from muster.client.errors import MusterError


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Platform]:
    async with served(tmp_path / "state") as (running, _):
        monkeypatch.setenv("MUSTER_SERVER", str(running.client.base_url).rstrip("/"))
        monkeypatch.setenv("MUSTER_STATE", str(tmp_path / "no-state"))
        yield running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    (made / "train.py").write_text("print('hello')\n")
    (made / ".gitignore").write_text("*.log\n")
    (made / "a.log").write_text("not sent\n")
    (made / ".env").write_text("TOKEN=1\n")
    monkeypatch.chdir(made)
    return made


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        document: dict[str, Any] = json.loads(self.out)
        return document


async def muster(*arguments: str) -> Ended:
    """A process of its own, for the API writes its log to this one's output."""
    command = (sys.executable, "-m", "muster.cli", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    return Ended(process.returncode or 0, out.decode(), err.decode())


async def refused(*arguments: str) -> MusterError:
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments])
    assert isinstance(result.exception, MusterError), result.output
    return result.exception


async def sources(here: Platform) -> list[dict[str, Any]]:
    listed = await here.client.get("/api/v1/files", params={"purpose": "source"})
    items: list[dict[str, Any]] = listed.json()["items"]
    return items


async def test_a_command_is_submitted_with_the_folder_around_it(here: Platform, folder: Path) -> None:
    arguments = (
        "run",
        "--detach",
        "--json",
        "--nodes",
        "2",
        "--processes",
        "3",
        "--",
        "python",
        "train.py",
        "--lr",
        "1",
    )
    first = await muster(*arguments)
    job = first.json()
    (file,) = await sources(here)
    program = job["spec"]["program"]
    assert (program["command"], program["source"]) == (["train.py", "--lr", "1"], file["id"])
    assert job["spec"]["gang"]["nodes"] == {"min": 2, "max": 2}
    assert job["spec"]["gang"]["processesPerNode"] == 3
    assert job["metadata"]["name"].startswith("train-")
    assert "3 files" in first.err
    assert "warning: .env may hold secrets" in first.err
    assert (await muster(*arguments)).json()["spec"]["program"]["source"] == file["id"]
    assert len(await sources(here)) == 1, "the same content is uploaded once"
    gone = await here.client.delete(f"/api/v1/files/{file['id']}")
    assert gone.json()["code"] == "file_in_use"


async def test_a_document_names_its_folder_relative_to_itself(here: Platform, folder: Path) -> None:
    path = folder.parent / "job.yaml"
    path.write_text("metadata: {name: mine}\nspec: {program: {command: [train.py], source: project}}\n")
    planned = await muster("submit", str(path), "--dry-run")
    assert (planned.code, "train.py" in planned.out) == (0, True), planned.err
    assert await sources(here) == []
    job = (await muster("submit", str(path), "--yes", "--json")).json()
    (file,) = await sources(here)
    assert job["spec"]["program"]["source"] == file["id"]


async def test_nothing_is_uploaded_for_a_job_that_is_refused(here: Platform, folder: Path) -> None:
    error = await refused("run", "--set", "gang.nodes=0", "--", "python", "train.py")
    assert [problem.path for problem in error.problems] == ["spec.gang.nodes"]
    assert await sources(here) == []


async def test_a_gang_is_held_for_a_stated_time(here: Platform, folder: Path) -> None:
    spec = (await muster("run", "--hold", "2h", "--nodes", "2", "--name", "mine", "--json")).json()["spec"]
    program = spec["program"]
    assert (program["command"], program["launcher"], program["hang"]["off"]) == (["sleep", "7200"], "none", True)
    assert spec["activeDeadlineSeconds"] == 7200 + 600
    assert program["source"] == (await sources(here))[0]["id"]


async def test_a_wrong_command_says_what_to_write(here: Platform, folder: Path) -> None:
    for arguments, words in (
        ("", "give a command after `--`, or --hold TIME"),
        ("--hold 2d", "--hold must be a number with a unit s, m or h"),
        ("--gpus 2 -- torchrun --nproc-per-node 4 train.py", "4 ranks of a worker with 2 GPUs"),
        ("-- torchrun --nnodes 2", "torchrun has no script to start"),
        ("--source none -- train.py", "none is not there"),
    ):
        assert words in str(await refused("run", *arguments.split()))


JOB = {"metadata": {"name": "a"}, "spec": {"program": {"command": ["train.py"]}}}


async def test_the_api_refuses_a_source_that_no_worker_can_read(here: Platform) -> None:
    made = await here.client.post("/api/v1/files", params={"name": "a.tar.gz", "purpose": "user_data"}, content=b"x")
    for source, words in (
        ("./project", "`muster submit` uploads a folder by itself"),
        ("/home/me/project", "must be an uploaded file's id or an archive's address (.tar.gz), not '/home/me/project'"),
        ("file-" + "0" * 24, "there is no file file-000000000000000000000000 in project 'default'"),
        (made.json()["id"], "was uploaded for user_data, and a program's source is one for source"),
    ):
        document = {**JOB, "spec": {"program": {"command": ["train.py"], "source": source}}}
        reply = await here.client.post("/api/v1/jobs", json=document)
        (fault,) = reply.json()["errors"]
        assert (reply.status_code, fault["path"]) == (422, "spec.program.source")
        assert words in fault["message"]


async def test_an_input_is_a_job_of_the_project_that_has_a_checkpoint(here: Platform) -> None:
    (await here.client.post("/api/v1/jobs", json=JOB)).raise_for_status()
    inputs = {"base": {"job": "nobodys", "step": "best"}, "own": {"job": "a"}}
    document = {"metadata": {"name": "b"}, "spec": {"program": {"command": ["x"], "inputs": inputs}}}
    faults = (await here.client.post("/api/v1/jobs", json=document)).json()["errors"]
    assert {fault["path"]: fault["message"].partition(";")[0] for fault in faults} == {
        "spec.program.inputs.base.job": "there is no job 'nobodys' in namespace 'default'",
        "spec.program.inputs.own.job": f"job 'a' ({await newest(here)}) has no checkpoint yet",
    }


async def newest(here: Platform) -> str:
    return str((await here.client.get("/api/v1/jobs")).json()["items"][0]["id"])


async def test_a_job_has_a_training_or_a_program_and_not_both(here: Platform) -> None:
    for spec in ({}, {"program": {"command": ["a"]}, "training": {}}):
        reply = await here.client.post("/api/v1/jobs", json={"metadata": {"name": "a"}, "spec": spec})
        assert reply.status_code == 422
