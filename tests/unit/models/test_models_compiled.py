"""Layers that are compiled one by one: the model's layers differ in their weights alone, and are compiled once."""

from __future__ import annotations

import pytest
import torch
from tests.model_families import config_of
from torch._dynamo.utils import counters

from muster.contract.adapter_config import Adapter
from muster.contract.base import parse
from muster.trainer.models import pretrained
from muster.trainer.models.decoder import Recompute
from muster.trainer.models.self_test import examine
from muster.trainer.models.transformers_model import TransformersModel

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
