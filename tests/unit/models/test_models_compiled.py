"""Layers that are compiled one by one: the model's layers differ in their weights alone, and are compiled once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.model_families import config_of
from torch import Tensor, library, nn
from torch._dynamo.utils import counters

from muster.plan.layouts import ModelLayout
from muster.plan.memory import estimate
from muster.recipe.adapter_config import Adapter
from muster.recipe.architecture import Architecture
from muster.recipe.training import TrainingConfig
from muster.trainer.models import nf4, pretrained
from muster.trainer.models.decoder import Recompute
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.self_test import examine
from muster.trainer.models.transformers_model import TransformersModel
from muster.words.base import parse

LAYERS = 12  # more than the eight ways in which torch compiles one function before it gives up


@pytest.mark.parametrize(
    ("kind", "recompute", "graphs"),
    # Beside an adapter the first layer's input is the one that needs no gradient.
    [("", "none", 1), ("", "selective", 1), ("lora", "none", 2), ("lora", "full", 2), ("dora", "none", 2)],
)
def test_all_layers_are_compiled(kind: str, recompute: Recompute, graphs: int) -> None:
    adapter = parse(Adapter, {"kind": kind, "rank": 4, "targets": ["q_proj", "v_proj"]}) if kind else None
    config = config_of("llama-3.1", num_hidden_layers=LAYERS)
    definition = TransformersModel(config, {}, examine(config), adapter)
    _expect_one_compilation(definition, recompute, graphs)


def test_adapters_of_experts_that_are_held_together_are_compiled_once() -> None:
    document = {"rank": 4, "targets": ["q_proj"], "targetParameters": ["gate_up_proj"]}
    config = config_of("qwen3-moe", num_hidden_layers=LAYERS)
    definition = TransformersModel(config, {}, examine(config), parse(Adapter, document))
    _expect_one_compilation(definition, "none", 2)


def _expect_one_compilation(definition: TransformersModel, recompute: Recompute, graphs: int) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = definition.build(torch.float32, recompute)
    pretrained.materialize(model, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02)
    for layer in definition.layers(model):
        layer.compile(backend="eager")
    tokens = torch.randint(3, 128, (2, 24))
    positions = torch.arange(24).expand(2, 24)
    for _ in range(2):
        model(tokens, positions, torch.zeros_like(tokens), torch.roll(tokens, -1, dims=1)).backward()
    assert counters["stats"]["unique_graphs"] == graphs


ALL_LINEAR = ("all-linear",)


@pytest.mark.parametrize(
    ("family", "targets", "precision"),
    [
        ("llama-2", None, "bf16"),
        ("llama-2", ALL_LINEAR, "bf16"),
        ("llama-2", ALL_LINEAR, "fp32"),
        ("", None, "bf16"),  # our own decoder
        ("", ("q_proj", "v_proj"), "fp32"),
    ],
)
def test_a_compiled_layer_keeps_as_much_less_as_the_estimate_says(
    family: str, targets: tuple[str, ...] | None, precision: str
) -> None:
    adapter = None if targets is None else Adapter(kind="lora", rank=2, targets=targets)

    def of_one_layer(count: Callable[[DecoderModel | TransformersModel, str, bool], int]) -> tuple[int, int]:
        one, two = (_wide_model(family, layers, adapter) for layers in (1, 2))
        eager, compiled = (count(two, precision, how) - count(one, precision, how) for how in (False, True))
        return eager, compiled

    (eager, compiled), (said_eager, said_compiled) = of_one_layer(_kept_bytes), of_one_layer(_estimated_bytes)
    assert 0 < said_eager - said_compiled <= eager - compiled


TOKENS = 512


def _wide_model(family: str, layers: int, adapter: Adapter | None) -> DecoderModel | TransformersModel:
    """Its layers keep more than they weigh."""
    if not family:
        shape = {"dim": 256, "layers": layers, "heads": 4, "kvHeads": 2, "ffnDim": 768, "vocabSize": 288}
        return DecoderModel(parse(Architecture, shape | {"maxPositions": TOKENS}), adapter)
    config = config_of(family, hidden_size=256, intermediate_size=768, head_dim=64, num_hidden_layers=layers)
    return TransformersModel(config, {}, examine(config), adapter)


def _kept_bytes(definition: DecoderModel | TransformersModel, precision: str, compiled: bool) -> int:
    """What the forward pass of two documents keeps for the backward pass, besides the weights."""
    torch._dynamo.reset()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = definition.build(dtype, "none").to_empty(device="cpu")
    for parameter in model.parameters():
        of_theirs = isinstance(definition, TransformersModel)  # FSDP casts their weights; ours cast themselves
        parameter.data = parameter.data.normal_(0.0, 0.02).to(dtype if of_theirs else parameter.dtype)
    for layer in definition.layers(model) if compiled else ():
        layer.compile(backend="aot_eager_decomp_partition")
    held: dict[int, Tensor] = {}
    tokens, places = torch.randint(3, 128, (1, TOKENS)), torch.arange(TOKENS)[None]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: held.setdefault(each.untyped_storage().data_ptr(), each), lambda each: each
    ):
        model(tokens, places % (TOKENS // 2), places // (TOKENS // 2), tokens)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(each.untyped_storage().nbytes() for place, each in held.items() if place not in weights)


def _estimated_bytes(definition: DecoderModel | TransformersModel, precision: str, compiled: bool) -> int:
    document = {
        "model": {"source": "file:///nowhere"},
        "data": {"train": [{"source": "x"}], "sequenceLength": TOKENS},
        "batch": {"tokensPerStep": TOKENS, "microBatch": 1},
        "precision": precision,
        "parallel": {"compile": compiled},
        "length": {"steps": 1},
    }
    own = isinstance(definition, DecoderModel)
    return estimate(
        definition.size(), parse(TrainingConfig, document), ModelLayout.of("ddp", 1), 1, casts_itself=own
    ).activations


@pytest.mark.parametrize("batch", [(6,), (2, 3)])
def test_a_compiled_layer_keeps_its_weights_in_four_bits_for_the_backward_pass(batch: tuple[int, ...]) -> None:
    """Unlike the backend "aot_eager", this one decides what is kept as inductor does."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.Sequential(_in_four_bits(128, 256), nn.SiLU(), _in_four_bits(256, 64))
    x = torch.randn(*batch, 128)
    (eager, kept_eager), compiled = (
        _input_gradient(layer, x),
        torch.compile(layer, backend="aot_eager_decomp_partition"),
    )
    gradient, kept = _input_gradient(compiled, x)
    torch.testing.assert_close(gradient, eager)
    weights = {held.shape for part in layer for held in part.parameters()}
    for found in (kept_eager, kept):
        assert weights <= {each.shape for each in found}
        assert all(each.dtype == torch.uint8 or each.numel() <= x.numel() * 2 for each in found)


def test_the_operator_of_the_backward_pass_is_what_torch_takes_it_for() -> None:
    layer = _in_four_bits(128, 24)
    for grad in (torch.randn(2, 24), torch.randn(2, 24, 3).transpose(1, 2), torch.ones(()).expand(2, 3, 24)):
        library.opcheck(nf4.input_gradient, (grad, layer.weight_nf4, layer.weight_absmax))
    none = torch.empty(0, 64, dtype=torch.uint8), torch.empty(0, 8, dtype=torch.uint8)
    assert torch.equal(nf4.input_gradient(torch.empty(2, 0), *none), torch.zeros(2, 128))


def _in_four_bits(inputs: int, outputs: int) -> nf4.NF4Linear:
    nf4.need_kernels()
    layer = nf4.NF4Linear(inputs, outputs, None)
    with torch.no_grad():
        for held, made in zip(layer.parameters(), nf4.encode(0.05 * torch.randn(outputs, inputs)), strict=True):
            held.copy_(made)
    return layer


def _input_gradient(layer: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The gradient of x [..., inputs], and what was kept for the backward pass."""
    kept: list[Tensor] = []
    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        out = layer(x)
    out.square().sum().backward()
    assert x.grad is not None
    return x.grad, kept
