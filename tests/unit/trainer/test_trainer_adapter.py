"""What an adapter is before it has learnt anything, and what it asks of a rank."""

from typing import Any

import pytest
import torch

from muster.plan import memory
from muster.plan.layouts import ModelLayout
from muster.recipe.adapter_config import Adapter
from muster.recipe.architecture import PRESETS, Architecture
from muster.recipe.optimizer_config import OptimizerConfig
from muster.recipe.training import TrainingConfig
from muster.trainer.checkpoint.staging import _HEADER_BYTES, reserve_bytes
from muster.trainer.config import RankPosition
from muster.trainer.models import sharding
from muster.trainer.models.adapter import is_part
from muster.trainer.models.decoder import Decoder, build
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.init import initialize, initialize_adapter
from muster.trainer.models.lora import attach
from muster.trainer.train.optimizer import make_optimizer
from muster.words.base import dump

SHAPE = Architecture(
    dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=96, vocab_size=131, max_positions=64, tied_head=False
)
ADAPTER = Adapter(rank=4, alpha=8.0, targets=("k_proj", "o_proj", "down_proj"), dropout=0.5)
GIB = 2**30


def made(adapter: Adapter | None, **options: Any) -> Decoder:
    model = build(SHAPE, torch.float32, **options)
    if adapter is not None:
        attach(model, adapter)
    model.to_empty(device="cpu")
    initialize(model, SHAPE, 7)
    initialize_adapter(model, 7)
    return model


def summed_loss(model: Decoder) -> torch.Tensor:
    tokens = torch.randint(0, 131, (2, 24), generator=torch.Generator().manual_seed(1))
    loss: torch.Tensor = model(tokens, torch.arange(24).expand(2, 24), torch.zeros_like(tokens), tokens.roll(-1, 1))
    return loss


def config(**changes: Any) -> TrainingConfig:
    document: dict[str, Any] = {
        "model": {"from": {"uri": "file:///c/base"}},
        "data": {"train": [{"source": "x"}], "sequenceLength": 2048},
        "batch": {"tokensPerStep": 2**15, "microBatch": 1},
        "precision": "bf16",
        "parallel": {"activationCheckpointing": "full"},
        "length": {"steps": 5},
    }
    return TrainingConfig.model_validate(document | changes)


def test_it_begins_as_nothing_and_learns_alone() -> None:
    plain, adapted = made(None), made(ADAPTER)
    own = dict(adapted.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, own.pop(name)), name
    assert sum(parameter.numel() for parameter in own.values()) == ADAPTER.parameters(SHAPE)
    for name, part in own.items():
        if name.endswith("lora_B.weight"):
            assert not part.any()
        else:
            bound = part.shape[1] ** -0.5
            assert bound * 0.9 < part.abs().max().item() <= bound
    assert torch.equal(summed_loss(adapted.eval()), summed_loss(plain))
    summed_loss(adapted.train()).backward()
    assert {n for n, p in adapted.named_parameters() if p.grad is not None} == own.keys()
    assert all(is_part(name) for name in own)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_repeated_pass_leaves_out_the_same_inputs(recompute: str) -> None:
    def gradients(kind: str) -> list[torch.Tensor]:
        model = made(ADAPTER, recompute=kind)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora_B.weight"):
                    parameter.fill_(0.1)
        torch.manual_seed(3)
        summed_loss(model).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, repeated = gradients("none"), gradients(recompute)
    assert len(plain) == 2 * 3 * SHAPE.layers
    assert all(torch.equal(one, other) for one, other in zip(plain, repeated, strict=True))


def test_frozen_weights_have_neither_gradients_nor_moments() -> None:
    """Llama-3.1-8B over 8: its weights, and of the adapter's 6.8 M alone gradients and moments."""
    training = config(adapter={"rank": 16})
    need = memory.estimate(
        DecoderModel(PRESETS["llama-8b"], training.adapter).size(), training, ModelLayout.of("fsdp", 8), 1
    )
    own = 32 * 16 * (2 * 4096 + 4096 + 1024)
    assert need.optimizer == pytest.approx(8 * own / 8, rel=1e-6)
    assert need.adapters == pytest.approx(4 * own / 8, abs=8)
    assert need.gradients <= 4 * own / 8
    whole = memory.estimate(DecoderModel(PRESETS["llama-8b"]).size(), config(), ModelLayout.of("fsdp", 8), 1)
    assert need.weights == pytest.approx(whole.weights, abs=8)


def test_auto_shards_less_where_less_learns() -> None:
    ranks = RankPosition(rank=0, local_rank=0, world=8, local_world=8)

    def shard(training: TrainingConfig) -> str:
        return sharding.plan(DecoderModel(PRESETS["llama-8b"], training.adapter), training, ranks, 60 * GIB).shard

    assert shard(config()) == "fsdp"
    assert shard(config(adapter={"rank": 16})) == "ddp"


def test_memory_for_saves_is_taken_for_what_learns() -> None:
    """Three values of a trained weight, none of a frozen one, which is not in every save; some room for the names."""

    def beside_names(model: Decoder) -> int:
        learning = sum(1 for parameter in model.parameters() if parameter.requires_grad)
        reserved = reserve_bytes(model, make_optimizer(model, OptimizerConfig()))
        return reserved - (4 * learning + 8) * _HEADER_BYTES - 4 * learning  # and each has a count of its steps

    assert beside_names(made(ADAPTER)) == 3 * 4 * ADAPTER.parameters(SHAPE)
    assert beside_names(made(None)) == 3 * 4 * SHAPE.parameters


def test_the_resolved_configuration_names_every_default() -> None:
    assert dump(config(adapter={}))["adapter"] == {
        "kind": "lora", "rank": 16, "alpha": 32.0, "targets": ["q_proj", "v_proj"], "dropout": 0.0,
        "targetParameters": [], "modulesToSave": [],
    }  # fmt: skip
    assert "adapter" not in dump(config())
