"""Commands against an API alone, which no operator carries on for: sweeps, and the question before an upload."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests import forked
from tests.integration.api.platform import Platform, document, served
from tests.integration.api.test_api_sweep_jobs import ended, started, sweep_document
from tests.integration.cli.house import MUSTER
from tests.polling import WAIT_SECONDS_MAX

from muster.words.status import Phase

TOKEN = f"muster_{'5c' * 20}"


@dataclass
class Desk:
    """Where somebody sits who types commands."""

    here: Platform
    folder: Path
    environ: dict[str, str]

    async def muster(self, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        done = await asyncio.to_thread(forked.run, "muster.cli", words, self.environ, folder=self.folder)
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    async def typed(self, answers: dict[str, str], *words: str) -> tuple[int, str]:
        """The same on a terminal, where each question that ends in a key of `answers` is answered: exit code, and all
        that was shown."""
        return await asyncio.to_thread(_on_terminal, [*MUSTER, *words], self.environ, self.folder, answers)


def _on_terminal(words: list[str], environ: dict[str, str], folder: Path, answers: dict[str, str]) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, cwd=folder)
    os.close(theirs)
    shown, told = "", 0
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while data := os.read(ours, 4096):
            shown += data.decode(errors="replace")
            for question, answer in answers.items():
                if (at := shown.find(question, told)) >= 0:
                    told = at + len(question)
                    os.write(ours, f"{answer}\n".encode())
    os.close(ours)
    return process.wait(WAIT_SECONDS_MAX), shown


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with served(tmp_path / "state", auth=True, bootstrap_token=TOKEN) as (here, _):
        here.client.headers["authorization"] = f"Bearer {TOKEN}"
        home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
        terminal = {"TERM": "xterm", "COLUMNS": "200", "NO_COLOR": "1"}
        server = {"MUSTER_SERVER": str(here.client.base_url).rstrip("/"), "MUSTER_TOKEN": TOKEN}
        yield Desk(here, tmp_path, {**os.environ, **home, **terminal, **server})


async def test_a_sweep_is_created_listed_shown_followed_and_cancelled_or_refused_with_its_line(desk: Desk) -> None:
    path = desk.folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep_document("first", concurrency=1)))
    made = await desk.muster("sweep", str(path))
    assert "Created first (" in made.stderr
    assert "4 trials" in made.stderr
    other = json.loads((await desk.muster("sweep", "create", str(path), "--name", "second", "--json")).stdout)
    assert (other["name"], other["trials"]) == ("second", 4)
    (trial,) = await started(desk.here, other["id"], 1)

    listed = (await desk.muster("sweep", "ls")).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["name", "second", "first"]
    shown = (await desk.muster("sweep", "get", "second")).stdout
    assert trial["job"] in shown
    assert "why it stopped" in shown

    assert "second is being cancelled" in (await desk.muster("sweep", "cancel", "second")).stderr
    await desk.here.finish(trial["jobId"], Phase.CANCELLED)
    await ended(desk.here, other["id"])
    followed = await desk.muster("sweep", "get", "second", "--follow", expect=1)
    assert "Cancelled: " in followed.stderr

    path.write_text(yaml.safe_dump(sweep_document("wrong", parameters={"training.optimizer.rate": {"values": [1, 2]}})))
    refused = (await desk.muster("sweep", str(path), expect=2)).stderr
    assert "sweep.parameters.training.optimizer.rate: is no field of the job's spec" in refused
    line = next(n for n, words in enumerate(path.read_text().splitlines(), 1) if "optimizer.rate" in words)
    assert f"sweep.yaml:{line}:5" in refused


def job_with_data(folder: Path) -> Path:
    (folder / "texts.jsonl").write_text(f"{json.dumps({'text': 'once upon a time'})}\n" * 50_000)
    job = document("told")
    job["spec"]["training"]["data"] = {"train": [{"source": "texts.jsonl"}], "sequenceLength": 64}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


async def test_files_are_sent_to_another_machine_when_the_person_says_so(desk: Desk) -> None:
    """127.1 is 127.0.0.1 to the network, and some machine that shares no folder with this one to the command."""
    path = job_with_data(desk.folder)
    far = desk.environ["MUSTER_SERVER"] = desk.environ["MUSTER_SERVER"].replace("127.0.0.1", "127.1")
    asks = f"Upload 1 file of this machine to {far}? [Y/n] "
    code, shown = await desk.typed({asks: "n"}, "submit", str(path))
    assert (code, "texts.jsonl  1.4 MiB" in shown) == (1, True), shown
    assert "nothing was uploaded, and nothing submitted" in shown
    assert (await desk.here.get("/files"))["items"] == []

    code, shown = await desk.typed({asks: "", "Submit? [Y/n] ": "y"}, "submit", str(path))
    assert code == 0, shown
    assert "texts.jsonl ━" in shown, "a bar with its name"
    assert "50,000 samples" in shown
    (file,) = (await desk.here.get("/files"))["items"]
    (line,) = (await desk.here.get("/jobs"))["items"]
    job = await desk.here.get(f"/jobs/{line['id']}")
    assert job["spec"]["training"]["data"]["train"][0]["source"] == file["id"]
