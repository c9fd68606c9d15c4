"""docs/client.md is run, block after block, against an API whose jobs end by themselves."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, served, until
from tests.integration.client.test_client_jobs import step

from muster.recipe.document import TrainingJob
from muster.words.status import Phase, Progress

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


async def _operate(here: Platform, name: str) -> None:
    """Stand in for the operator: the job of that name trains a step and succeeds once it is handed over."""

    async def handed_over() -> TrainingJob | None:
        return next((job for job in here.cluster.jobs() if job.metadata.name == name), None)

    uid = (await until(handed_over, name)).metadata.uid
    folder = here.state.worker(uid, 1, 0)
    folder.mkdir(parents=True)
    (folder / "log").write_text("a line\n")
    (folder / "steps.jsonl").write_text(step(1, 5.0) + "\n")
    ended = {"phase": Phase.SUCCEEDED, "because": "done", "finished_at": time.time()}
    here.operate(uid, attempt=1, progress=Progress(step=1, steps=1), **ended)


async def test_every_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "client.md").read_text())
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("MUSTER_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MUSTER_STATE", str(tmp_path / "none"))
    names: dict[str, Any] = {}
    async with served(tmp_path / "state") as (here, _):
        monkeypatch.setenv("MUSTER_SERVER", str(here.client.base_url).rstrip("/"))
        operating = asyncio.create_task(_operate(here, "from-python"))
        try:
            for block in blocks:
                await asyncio.to_thread(exec, compile(block, "docs/client.md", "exec"), names)
            await operating
        finally:
            operating.cancel()
            names["client"].close()
    said = capsys.readouterr().out
    assert len(blocks) >= 7
    assert "line 2, column 8: spec.trainin: unknown key. Did you mean 'training'?" in said
    assert "0 a line" in said, "the log, line by line"
