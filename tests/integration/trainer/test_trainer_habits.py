"""Frozen layers, rates of their own and noise on the embeddings: through stops, other numbers of ranks and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.trainer.gangs import Job, Part, samples, train_many, training, write_corpus
from tests.model_families import write_model

from muster.storage.file_store import FileStore
from muster.trainer.convert.export import export
from muster.words.checkpoint import is_frozen_key
from muster.words.names import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 6
GROUPS = [{"parameters": ["lm_head"], "lr": 1e-4, "weightDecay": 0.0}]


def test_frozen_weights_own_rates_and_noise_go_on_bit_for_bit(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus")
    write_model(tmp_path / "model", "llama-3.1", dtype=torch.bfloat16)

    def job(name: str, shard: str) -> Job:
        document: dict[str, Any] = training(
            source,
            model={"source": (tmp_path / "model").as_uri()},
            freeze=["embed_tokens", "layers.0"],
            optimizer={"lr": 1e-3, "groups": GROUPS},
            neftuneNoiseAlpha=5.0,
            batch={"tokensPerStep": 256, "microBatch": 2},
            length={"steps": STEPS},
            parallel={"shard": shard},
            deterministic=True,
        )
        return Job(tmp_path / name, document, {"every": 2}, uid=name)

    calm, stopped, whole = job("calm", "fsdp"), job("stopped", "fsdp"), job("whole", "ddp")
    moved = job("moved", "fsdp")
    parts = [Part(calm), Part(whole), Part(stopped, 1, 0, stop_after=3), Part(stopped, 2, 3), Part(moved, 1, 0, 2)]
    done, kept = ExitCode.DONE, ExitCode.PREEMPTED_COMMITTED
    assert train_many(tmp_path / "two", 2, parts) == [done, done, kept, done, kept]
    assert train_many(tmp_path / "one", 1, [Part(moved, 2, 2, stop_after=4)]) == [kept]
    assert train_many(tmp_path / "two-again", 2, [Part(moved, 3, 4)]) == [done]

    def computed(found: Job, *attempts: int) -> list[tuple[Any, ...]]:
        return [(r.step, r.loss, r.grad_norm, r.lr, r.tokens) for r in found.steps(*attempts)]

    assert computed(stopped, 1, 2) == computed(calm, 1)
    assert [r.loss for r in whole.steps(1)] == pytest.approx([r.loss for r in calm.steps(1)], abs=1e-4)
    # The noise of a sample is the same on two ranks and on one.
    assert [r.loss for r in moved.steps(1, 2, 3)] == pytest.approx([r.loss for r in calm.steps(1)], rel=1e-5)
    every = {**samples(moved, 1, 2, 2), **samples(moved, 2, 1, 2), **samples(moved, 3, 2, 2)}
    assert every == samples(calm, 1, 2, 2)

    newest, first = calm.commit(STEPS), calm.commit(2)
    frozen = [file["key"] for file in newest["files"] if is_frozen_key(file["key"])]
    assert frozen
    assert frozen == [file["key"] for file in first["files"] if is_frozen_key(file["key"])]  # written once
    state = {name.split("/")[1] for name in newest["tensors"] if name.startswith("optimizer/")}
    assert state == {
        name.removeprefix("model/")
        for name in newest["tensors"]
        if name.startswith("model/") and "embed_tokens" not in name and "layers.0." not in name
    }

    export(FileStore(calm.folder), STEPS, tmp_path / "exported")
    before, after = (
        {name: weight for path in (tmp_path / folder).glob("*.safetensors") for name, weight in load_file(path).items()}
        for folder in ("model", "exported")
    )
    assert before.keys() == after.keys()
    for name, weight in before.items():
        stays = "embed_tokens" in name or "layers.0." in name
        assert torch.equal(weight.float(), after[name].float()) is stays, name
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


def test_trials_end_with_a_verdict_and_go_on_after_a_stop(tmp_path: Path) -> None:
    """The rate that a range test suggests learns a few samples by heart."""
    source = write_corpus(tmp_path / "corpus")

    def job(name: str, **changes: Any) -> Job:
        document = training(source, deterministic=True, length={"steps": 60}, **changes)
        return Job(tmp_path / name, document, uid=name)

    tested = {"rangeTest": {"lowest": 1e-5, "highest": 3.0}}
    calm, stopped = job("calm", optimizer=tested), job("stopped", optimizer=tested)
    parts = [Part(calm), Part(stopped, 1, 0, stop_after=20), Part(stopped, 2, 20)]
    done, kept = ExitCode.DONE, ExitCode.PREEMPTED_COMMITTED
    assert train_many(tmp_path / "two", 2, parts) == [done, kept, done]
    found = [json.loads((each.folder / "trial.json").read_text()) for each in (calm, stopped)]
    assert found[0] == found[1]
    rate = float(found[0]["verdict"].rpartition("optimizer.lr ")[2])
    assert 1e-4 < rate < 0.3

    heart = Job(
        tmp_path / "heart",
        training(
            source,
            data={"train": [{"source": source}], "sequenceLength": 32, "overfit": 4},
            batch={"tokensPerStep": 128, "microBatch": 2},
            optimizer={"lr": 1e-2, "weightDecay": 0.0, "schedule": {"warmupSteps": 3}},
            length={"steps": 150},
        ),
        uid="heart",
    )
    assert train_many(tmp_path / "heart-ranks", 1, [Part(heart)]) == [done]
    assert "they are learnt by heart" in json.loads((heart.folder / "trial.json").read_text())["verdict"]
