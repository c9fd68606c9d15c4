"""Linear layers in float8, emulated on the CPU by torchao: near bf16, sharded by FSDP2, refused where they can't be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.model_families import write_model

from muster.plan.layouts import ModelLayout
from muster.plan.memory import estimate
from muster.plan.model_size import decoder_size
from muster.recipe.architecture import PRESETS
from muster.recipe.document import JobSpec
from muster.recipe.training import TrainingConfig
from muster.storage.file_store import FileStore
from muster.storage.model_folder import open_folder
from muster.trainer.errors import UserError
from muster.trainer.models.float8 import must_compute_float8, use_float8
from muster.trainer.models.transformers_model import TransformersModel, from_folder
from muster.words.base import InvalidDocument, parse


@pytest.fixture(scope="module")
def definition(tmp_path_factory: pytest.TempPathFactory) -> TransformersModel:
    folder = tmp_path_factory.mktemp("float8")
    write_model(folder, "qwen2.5")
    return from_folder(open_folder(FileStore(folder)), None)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def passed(model: Any) -> tuple[float, torch.Tensor]:
    tokens = torch.randint(3, 250, (2, 32), generator=torch.Generator().manual_seed(1))
    positions, labels = torch.arange(32).expand(2, 32), torch.roll(tokens, -1, dims=1)
    loss = model(tokens, positions, torch.zeros_like(tokens), labels) / labels.numel()
    loss.backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return loss.item(), torch.cat([grad.float().flatten() for grad in grads])


def test_float8_is_near_bf16_also_where_it_is_sharded(definition: TransformersModel, one_rank: None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def model(multiply: bool) -> Any:
        made = definition.build(torch.bfloat16, "none")
        names = [name for name, _ in made.named_parameters()]
        if multiply:
            layers = use_float8(made, emulate=True)
            assert [name for name, _ in made.named_parameters()] == names
            assert len(layers) == 14, "seven in each of two layers, and not the head"
        return made

    def filled(made: Any) -> Any:
        definition.fill(made, torch.device("cpu"), 0, values=True)
        return made

    expected, reference = passed(filled(model(multiply=False)).to(torch.bfloat16))
    loss, gradients = passed(filled(model(multiply=True)).to(torch.bfloat16))
    cosine = torch.nn.functional.cosine_similarity(gradients, reference, dim=0).item()
    assert loss == pytest.approx(expected, rel=1e-2)
    assert 0.98 < cosine < 1 - 1e-6
    sharded = model(multiply=True)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in (*definition.layers(sharded), sharded):
        fully_shard(layer, mp_policy=policy)
    shared, by_shards = passed(filled(sharded))
    assert shared == pytest.approx(loss, rel=1e-3)
    assert torch.nn.functional.cosine_similarity(by_shards, gradients, dim=0).item() > 0.995  # reduced in fp32


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        (None, r"computes on its CPU, which has no float8"),
        ((8, 0), r"has compute capability 8\.0, and float8 needs 8\.9"),
    ],
)
def test_a_device_without_float8_is_told(
    capability: tuple[int, int] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UserError, match=message):
        must_compute_float8(torch.device("cpu" if capability is None else "cuda"))


def test_a_model_without_fit_layers_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no linear layer whose inputs and outputs are multiples of 16"):
        use_float8(torch.nn.Sequential(torch.nn.Linear(24, 24)), emulate=True)


DOCUMENT: dict[str, Any] = {
    "model": {"source": "s3://models/x"},
    "data": {"train": [{"source": "file:///x"}], "sequenceLength": 64},
    "batch": {"tokensPerStep": 128},
    "length": {"steps": 1},
    "precision": "fp8",
}


@pytest.mark.parametrize(
    ("training", "gang", "message"),
    [
        ({}, {"gpusPerNode": 0}, r"gang.gpusPerNode 0 trains on CPUs, which have no float8"),
        ({"adapter": {}}, {"gpusPerNode": 1}, r"not beside an adapter of lora; use bf16"),
        (
            {"data": {**DOCUMENT["data"], "sequenceLength": 8}},
            {"gpusPerNode": 1},
            r"sequenceLength × microBatch = 8 must be a multiple of 16",
        ),
    ],
)
def test_jobs_that_float8_is_not_for(training: dict[str, Any], gang: dict[str, Any], message: str) -> None:
    assert parse(JobSpec, {"training": DOCUMENT, "gang": {"gpusPerNode": 1}}).training.precision == "fp8"
    with pytest.raises(InvalidDocument, match=message):
        parse(JobSpec, {"training": DOCUMENT | training, "gang": gang})


def test_the_estimate_counts_what_is_cast() -> None:
    size, length = decoder_size(PRESETS["llama-1b"], None), 8192

    def total(precision: str) -> int:
        document = DOCUMENT | {
            "data": {**DOCUMENT["data"], "sequenceLength": length},
            "batch": {"tokensPerStep": 8 * length},
            "parallel": {"activationCheckpointing": "full"},
            "precision": precision,
        }
        config = parse(TrainingConfig, document, "training")
        return estimate(size, config, ModelLayout.of("fsdp", 8), 1, "cuda", casts_itself=False).total

    assert total("fp8") - total("bf16") == length * (size.dim + size.ffn_dim) + size.dim * size.ffn_dim
