"""Adapters beside experts that are held together: jobs with the losses of peft's `target_parameters` in a plain loop,
resumed bit for bit, exported to peft and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.trainer.gangs import Job, Part, train_many, training, write_corpus
from tests.integration.trainer.plain_loop import plain_losses
from tests.integration.trainer.test_trainer_adapters import open_exports, peft_model
from tests.model_families import write_model

from muster.recipe.training import TrainingConfig
from muster.trainer.data import load_tokenizer, open_data
from muster.words.base import parse
from muster.words.names import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 20
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"kind": "lora", "rank": 3, "alpha": 6.0, "targets": ["q_proj"], "targetParameters": EXPERTS},
    "qwen3-moe": {"kind": "rslora", "rank": 2, "alpha": 4.0, "targets": ["q_proj"], "targetParameters": EXPERTS},
    "gpt-oss": {"kind": "lora", "rank": 2, "alpha": 4.0, "targets": ["v_proj"], "targetParameters": EXPERTS[:1]},
}


def test_experts_have_adapters(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus")
    jobs: dict[tuple[str, str], Job] = {}
    for family, adapter in KINDS.items():
        write_model(tmp_path / family, family)
        for shard in ("fsdp", "ddp") if family == "mixtral" else ("fsdp",):
            document = training(
                source,
                model={"source": (tmp_path / family).as_uri()},
                adapter=adapter,
                batch={"tokensPerStep": 256, "microBatch": 2},
                optimizer={"lr": 1e-2, "schedule": {"warmupSteps": 3}},
                length={"steps": STEPS},
                parallel={"shard": shard},
                deterministic=True,
            )
            jobs[family, shard] = Job(tmp_path / f"{family}-{shard}", document, uid=f"{family}-{shard}")
    stopped = Job(tmp_path / "stopped", jobs["gpt-oss", "fsdp"].training, uid="stopped")
    after = training(
        source,
        model={"from": {"uri": jobs["mixtral", "fsdp"].folder.as_uri(), "step": STEPS}},
        batch={"tokensPerStep": 256, "microBatch": 2},
        length={"steps": 1},
        parallel={"shard": "fsdp"},
    )
    onward = Job(tmp_path / "onward", after, uid="onward")
    parts = [*map(Part, jobs.values()), Part(stopped, 1, 0, stop_after=6), Part(stopped, 2, 6), Part(onward)]
    expected = [*[ExitCode.DONE] * len(jobs), ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE, ExitCode.DONE]
    assert train_many(tmp_path / "two", 2, parts) == expected
    for (family, shard), job in jobs.items():
        config = parse(TrainingConfig, job.training, "training")
        tokenizer = load_tokenizer(str(tmp_path / family / "tokenizer.json"))
        data = open_data(config, tokenizer, job.root / "cache", lambda line: None)
        theirs = plain_losses(peft_model(config, tmp_path / family), config, data.train, STEPS)
        assert [r.loss for r in job.steps(1)] == pytest.approx(theirs, abs=1e-5), (family, shard)
        assert theirs[-1] < theirs[0] - 0.05
        open_exports(job, family, tmp_path / f"{family}-{shard}-exports", apart=1e-5)
    calm, seen = jobs["gpt-oss", "fsdp"].steps(1), stopped.steps(1, 2)
    assert [(r.step, r.loss, r.grad_norm) for r in seen] == [(r.step, r.loss, r.grad_norm) for r in calm]
    tensors = jobs["mixtral", "fsdp"].commit(STEPS)["tensors"]
    moments = [name for name in tensors if name.startswith("optimizer/") and ".experts." in name]
    assert moments
    assert all(".lora_" in name for name in moments)
    # What follows begins with the experts as they were at the last step, merged row by row on two ranks.
    last = jobs["mixtral", "fsdp"].steps(1)[-1].loss
    assert abs(onward.steps(1)[0].loss - last) < abs(jobs["mixtral", "fsdp"].steps(1)[0].loss - last) / 2
    assert torch.isfinite(torch.tensor(onward.steps(1)[0].loss))
