"""The examples that no demonstration trains, as they stand but for where they begin and end: QLoRA and DPO."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.integration.trainer.gangs import ARCHITECTURE, Job, Part, train_many

from muster.documents.reader import load_yaml
from muster.storage.file_store import FileStore
from muster.trainer.convert.export import export
from muster.words.names import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[3] / "examples"


def training_of(name: str, data: str, **changes: Any) -> dict[str, Any]:
    """An example's training, whose data lies beside it."""
    document = load_yaml((EXAMPLES / name).read_text())["spec"]["training"]
    document["data"]["train"][0]["source"] = str(EXAMPLES / data)
    return {**document, **changes}


def test_the_examples_of_qlora_and_dpo_learn(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLES / "make_model.py"))["write"](tmp_path / "tiny-model")
    source = {"source": (tmp_path / "tiny-model").as_uri()}
    begun = training_of("qlora-folder.yaml", "chat.jsonl", model=source, length={"steps": 40})
    qlora = Job(tmp_path / "qlora", begun, uid="qlora")
    shape = {**ARCHITECTURE, "maxPositions": 256}
    begun = training_of(
        "sft-chat.yaml", "chat.jsonl", model={"architecture": shape}, length={"steps": 20}, optimizer={"lr": 5e-3}
    )
    chat = Job(tmp_path / "chat", begun, uid="chat")
    after = {"from": {"uri": chat.folder.as_uri(), "step": "best"}}
    dpo = Job(
        tmp_path / "dpo",
        training_of("dpo-chat.yaml", "preferences.jsonl", model=after, length={"steps": 40}),
        uid="dpo",
    )
    assert train_many(tmp_path / "two", 2, [*map(Part, (qlora, chat, dpo))]) == [ExitCode.DONE] * 3
    for job in (qlora, dpo):
        losses = [record.loss for record in job.steps(1)]
        assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.05, losses
    assert export(FileStore(qlora.folder), "best", tmp_path / "adapter", form="peft")["adapter"] == "alone"
    assert export(FileStore(dpo.folder), "best", tmp_path / "merged")["adapter"] == "merged"
