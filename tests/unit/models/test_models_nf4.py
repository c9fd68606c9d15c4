"""Weights in four bits: the numbers of bitsandbytes, by rows that decode alone, and what can't be held so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional as kernels
import pytest
import torch
from tests.model_families import write_model
from torch import nn

from muster.plan.model_size import NF4_BYTES
from muster.recipe.adapter_config import Adapter
from muster.storage.file_store import FileStore
from muster.storage.model_folder import open_folder
from muster.trainer.errors import UserError
from muster.trainer.models import nf4, nf4_format
from muster.trainer.models.transformers_model import from_folder

QLORA = Adapter(kind="qlora", rank=2, alpha=4.0, targets=("all-linear",))
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_decode_alone_to_what_bitsandbytes_decodes_the_whole_to(dtype: torch.dtype) -> None:
    weight = torch.randn(97, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[5] = 0
    theirs = kernels.dequantize_4bit(*kernels.quantize_4bit(weight, blocksize=64, quant_type="nf4")).float()
    packed, absmax = nf4.encode(weight)
    ours = torch.cat([nf4.decode(packed[a:b], absmax[a:b], dtype) for a, b in ((0, 33), (33, 33), (33, 97))]).float()
    assert torch.equal(ours, theirs)
    exported = torch.from_numpy(nf4_format.decode(packed.numpy(), absmax.numpy()))
    assert torch.equal(exported, nf4.decode(packed, absmax, torch.float32))
    assert (packed.numel() + absmax.numel()) / weight.numel() == NF4_BYTES


def test_a_layer_gives_the_gradients_of_its_decoded_weight() -> None:
    layer = nf4.NF4Linear(128, 24, nn.Parameter(torch.randn(24)))
    with torch.no_grad():
        for held, made in zip((layer.weight_nf4, layer.weight_absmax), nf4.encode(torch.randn(24, 128)), strict=True):
            held.copy_(made)
    weight = nf4.decode(layer.weight_nf4, layer.weight_absmax, torch.float32)
    x, other = torch.randn(2, 5, 128, requires_grad=True), torch.randn(2, 5, 24)
    (layer(x) * other).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, other @ weight)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, layer.bias))
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("family", ["llama-3.1", "phi-3", "gemma-3", "mixtral", "qwen3-moe"])
def test_a_folder_is_read_into_four_bits_a_layer_at_a_time(tmp_path: Path, family: str) -> None:
    theirs = write_model(tmp_path, family, torch.bfloat16, **SIZES)
    definition = from_folder(open_folder(FileStore(tmp_path)), QLORA)
    ours = definition.build(torch.float32, "none")
    whole = 0

    def watched(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal whole
        whole = max(
            whole, sum(p.numel() for n, p in ours.named_parameters() if n.endswith("_proj.weight") and not p.is_meta)
        )
        return encode(rows)

    encode = nf4.encode
    nf4.encode = watched
    try:
        definition.fill(ours, torch.device("cpu"), 0, values=True)
    finally:
        nf4.encode = encode
    values = dict(ours.named_parameters())
    linear = {n: m for n, m in theirs.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    for name, layer in linear.items():
        expected = kernels.quantize_4bit(layer.weight.data, blocksize=64, quant_type="nf4")[0]
        assert torch.equal(values[f"{name}.weight_nf4"].reshape(-1, 1), expected), name
        assert f"{name}.weight" not in values
    everything = sum(layer.weight.numel() for layer in linear.values())
    assert 0 < whole <= everything / 2, "one of two layers"
    assert {p.dtype for n, p in values.items() if not p.requires_grad} == {torch.bfloat16, torch.uint8}
    for name, parameter in theirs.named_parameters():
        if name.removesuffix(".weight") not in linear and name in values:
            assert torch.equal(values[name], parameter), name


def test_layers_whose_rows_are_no_whole_blocks_are_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path, "llama-2")
    definition = from_folder(open_folder(FileStore(tmp_path)), QLORA)
    with pytest.raises(UserError, match=r"blocks of 64 inputs.*layers\.0\.self_attn\.q_proj \(32\).*use lora"):
        definition.build(torch.float32, "none")


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    with torch.no_grad():
        model = write_model(tmp_path, "llama-2", **SIZES)
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    definition = from_folder(open_folder(FileStore(tmp_path)), QLORA)
    with pytest.raises(UserError, match="no numbers"):
        definition.fill(definition.build(torch.float32, "none"), torch.device("cpu"), 0, values=True)


def test_memory_is_planned_by_what_the_bytes_take(tmp_path: Path) -> None:
    write_model(tmp_path, "llama-2", torch.bfloat16, **SIZES)
    folder = open_folder(FileStore(tmp_path))
    definition = from_folder(folder, QLORA)
    built = definition.build(torch.bfloat16, "none")
    held = sum(p.numel() * p.element_size() for p in built.parameters() if not p.requires_grad)
    size = definition.size()
    assert size.frozen_total == pytest.approx(held)
    assert size.parameters == from_folder(folder, QLORA.model_copy(update={"kind": "lora"})).size().parameters
