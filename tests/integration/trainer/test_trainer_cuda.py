"""The same promises on a GPU. Skipped where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.trainer.gangs import ARCHITECTURE, Job, Part, train_many, training, write_corpus

from muster.recipe.architecture import Architecture
from muster.trainer.models.decoder import build
from muster.trainer.models.init import initialize
from muster.words.names import ExitCode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = {**ARCHITECTURE, "dim": 128, "maxPositions": 128}


def variant(root: Path, source: str, name: str, device: str = "cuda", **changes: Any) -> Job:
    document = training(
        source,
        model={"architecture": SHAPE},
        data={"train": [{"source": source}], "sequenceLength": 128},
        batch={"tokensPerStep": 2048, "microBatch": 8},
        length={"steps": 30},
        **changes,
    )
    return Job(root / name, document, uid=name, device=device)


def test_every_precision_and_sharding_trains_like_the_cpu(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus", documents=300)
    cpu = variant(tmp_path, source, "cpu", device="cpu")
    jobs = [
        variant(tmp_path, source, f"{shard}-{precision}-{compiled}", precision=precision, parallel=parallel)
        for shard in ("ddp", "fsdp")
        for precision in ("fp32", "bf16", "fp16")
        for compiled in (False, True)
        for parallel in [{"shard": shard, "compile": compiled}]
    ]
    assert train_many(tmp_path, 1, [Part(cpu)]) == [ExitCode.DONE]
    assert train_many(tmp_path, 1, [Part(job) for job in jobs]) == [ExitCode.DONE] * len(jobs)
    for job in jobs:
        records = job.steps(1)
        assert records[-1].loss == pytest.approx(cpu.steps(1)[-1].loss, rel=0.05), job.uid
        assert records[-1].mfu is None or 0 < records[-1].mfu < 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_deterministic_run_goes_on_bit_for_bit(tmp_path: Path, precision: str) -> None:
    source = write_corpus(tmp_path / "corpus", documents=300)
    calm, job = (
        variant(tmp_path, source, name, precision=precision, deterministic=True, parallel={"shard": "fsdp"})
        for name in ("calm", "stopped")
    )
    parts = [Part(calm), Part(job, 1, 0, stop_after=11), Part(job, 2, 11)]
    assert train_many(tmp_path, 1, parts) == [ExitCode.DONE, ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE]
    assert [(r.loss, r.grad_norm) for r in job.steps(1, 2)] == [(r.loss, r.grad_norm) for r in calm.steps(1)]


def test_flex_attention_sees_what_the_mask_allows() -> None:
    architecture = Architecture.model_validate(SHAPE)
    half, full = build(architecture, torch.bfloat16), build(architecture)
    for model in (half, full):
        model.to_empty(device="cuda")
        initialize(model, architecture, 3)
    tokens = torch.randint(0, 260, (2, 128), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    positions = torch.arange(128, device="cuda").expand(2, 128)
    documents = (positions // 50).long()
    flexible, masked = half(tokens, positions, documents), full(tokens, positions, documents)
    assert (flexible - masked).abs().max().item() < 0.05 * masked.abs().max().item()
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 260
    assert torch.equal(half(changed, positions, documents)[:, 50:], flexible[:, 50:])
