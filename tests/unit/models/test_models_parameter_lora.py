"""Adapters beside experts that are held together: the losses and gradients of peft's `target_parameters`, and names
that can't be meant."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model_families import config_of, write_model

from muster.plan.model_size import dimensions_of, size_of
from muster.recipe.adapter_config import Adapter
from muster.storage.file_store import FileStore
from muster.storage.model_folder import open_folder
from muster.trainer.convert import peft
from muster.trainer.errors import UserError
from muster.trainer.models.lora import adapter_off
from muster.trainer.models.transformers_model import TransformersModel, from_folder

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
KINDS = {
    "mixtral": Adapter(rank=3, alpha=6.0, targets=("q_proj",), target_parameters=EXPERTS),
    "qwen3-moe": Adapter(kind="rslora", rank=2, targets=(), target_parameters=("experts.down_proj", "mlp.gate.weight")),
    "gpt-oss": Adapter(rank=2, alpha=4.0, targets=("q_proj",), target_parameters=EXPERTS),
}


def opened(folder: Path, adapter: Adapter) -> TransformersModel:
    return from_folder(open_folder(FileStore(folder)), adapter)


def theirs_beside(folder: Path, adapter: Adapter) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    about = LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.targets),
        target_parameters=list(adapter.target_parameters),
        use_rslora=adapter.kind == "rslora",
    )
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), about).train()


@pytest.mark.parametrize("family", KINDS)
def test_losses_and_gradients_are_those_of_peft(family: str, tmp_path: Path) -> None:
    write_model(tmp_path, family)
    adapter = KINDS[family]
    definition = opened(tmp_path, adapter)
    model: Any = definition.build(torch.float32, "full")
    definition.fill(model, torch.device("cpu"), 0, values=True)
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    theirs = theirs_beside(tmp_path, adapter)
    values = {name.replace(".default", ""): p for name, p in theirs.named_parameters() if p.requires_grad}
    names = peft.names(own, True, [name for name, _ in model.named_parameters()])
    assert sorted(names.values()) == sorted(values)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in own.items():
            assert parameter.shape == values[names[name]].shape
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            values[names[name]].copy_(parameter)
    tokens = torch.randint(3, 250, (2, 24), generator=generator)
    positions, labels = torch.arange(24).expand(2, 24), torch.roll(tokens, -1, dims=1)
    loss = model(tokens, positions, torch.zeros_like(tokens), labels) / labels.numel()
    logits = theirs(input_ids=tokens, use_cache=False).logits.float()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    loss.backward()
    expected.backward()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.grad, values[names[name]].grad, rtol=1e-4, atol=1e-5, msg=name)
    with adapter_off(model), theirs.disable_adapter(), torch.no_grad():
        without = model(tokens, positions, torch.zeros_like(tokens))
        assert (without - theirs(input_ids=tokens, use_cache=False).logits).abs().max() <= 1e-5
        assert (without - logits).abs().max() > 1e-2
    assert definition.size().learning == sum(parameter.numel() for parameter in own.values())


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_the_size_of_a_folder_is_that_of_its_modules(family: str, tmp_path: Path) -> None:
    """An estimate reads names from files, where experts lie apart."""
    write_model(tmp_path, family)
    adapter = Adapter(rank=3, targets=("q_proj",), target_parameters=EXPERTS)
    folder = open_folder(FileStore(tmp_path))
    shapes = {name: tensor.shape for name, tensor in folder.tensors.items()}
    found = size_of(shapes, dimensions_of(config_of(family).to_dict()), adapter)
    assert found == opened(tmp_path, adapter).size()
    experts = [shape for name, shape in shapes.items() if "layers.0." in name and ".experts." in name]
    assert found.summed == sum(prod(shape) for shape in experts if len(shape) == 3 or family != "gpt-oss")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "near": ({"target_parameters": ("gate_up_prj",)}, r"'gate_up_prj' matches no weight of this model; did you mean "),
    "a linear layer": (
        {"target_parameters": ("q_proj.weight",)},
        r"'q_proj.weight' is model.layers.0.self_attn.q_proj.weight, the weight of a linear layer: name the layer in",
    ),
    "a norm": ({"target_parameters": ("input_layernorm.weight",)}, r"which is no matrix: train its module whole"),
    "a table": ({"target_parameters": ("embed_tokens.weight",)}, r"a table that is looked up: train it whole"),
    "twice": (
        {"target_parameters": ("down_proj", "experts.down_proj")},
        r"down_proj and experts.down_proj both match model.layers.0.mlp.experts.down_proj; leave one of them out",
    ),
    "trained whole": (
        {"target_parameters": ("experts.down_proj",), "modules_to_save": ("mlp.experts",)},
        r"'experts.down_proj' is model.layers.0.mlp.experts.down_proj, which adapter.modulesToSave trains whole",
    ),
    "as a layer": (
        {"targets": ("gate_up_proj",)},
        r"held together, and no linear layer; name it in adapter.targetParam",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_parameters_that_can_not_be_meant(fault: str, tmp_path: Path) -> None:
    given, message = WRONG[fault]
    write_model(tmp_path, "qwen3-moe")
    with pytest.raises(UserError, match=message):
        opened(tmp_path, Adapter(**{"targets": ("q_proj",), **given})).build(torch.float32, "none")


def test_a_model_without_experts_has_none_to_name(tmp_path: Path) -> None:
    write_model(tmp_path, "llama-2")
    with pytest.raises(UserError, match=r"matches no weight of this model; all its matrices are of linear layers"):
        opened(tmp_path, Adapter(target_parameters=("experts.down_proj",))).build(torch.float32, "none")
