"""What computes otherwise on a GPU, held against a plain reference: on the device that is given, a CPU among them.

Each check returns what it saw in a few words, or raises AssertionError. The rehearsal runs them on CUDA; a test of
`make test` runs at toy size what torch can do on a CPU (test_gpu_checks_on_cpu.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from muster.recipe.architecture import Architecture
from muster.trainer.models import attention
from muster.trainer.models.decoder import build
from muster.trainer.models.init import initialize

SHAPE = Architecture(
    dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=128, vocab_size=260, max_positions=256, tied_head=True
)
LENGTH = 160


def _model(dtype: torch.dtype, device: str) -> Any:
    """The same weights on every device, whose own generators draw others."""
    model = build(SHAPE, dtype)
    model.to_empty(device="cpu")
    initialize(model, SHAPE, 3)
    return model.to(device)


def _rows(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and documents of two rows, each of three documents."""
    generator = torch.Generator("cpu").manual_seed(1)
    tokens = torch.randint(0, 256, (2, LENGTH), generator=generator).to(device)
    positions = torch.arange(LENGTH, device=device).expand(2, LENGTH)
    documents = (positions // 60).long()
    return tokens, positions - 60 * documents, documents


def _pass(model: Any, device: str) -> tuple[float, Tensor]:
    """The loss of the rows, and the gradients as one vector."""
    tokens, positions, documents = _rows(device)
    loss = model(tokens, positions, documents, torch.roll(tokens, -1, dims=1))
    loss.backward()
    gradients = torch.cat([p.grad.detach().float().flatten().cpu() for p in model.parameters()])
    return float(loss.detach()), gradients


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def same_as_on_a_cpu(device: str) -> str:
    """Loss and gradients in fp32, TF32 off, within what another order of additions makes."""
    loss, gradients = _pass(_model(torch.float32, device), device)
    expected, reference = _pass(_model(torch.float32, "cpu"), "cpu")
    assert abs(loss / expected - 1) < 1e-5, (loss, expected)
    apart = _apart(gradients, reference)
    assert apart < 1e-4, apart
    return f"loss {abs(loss / expected - 1):.1e}, gradients {apart:.1e} apart"


def block_masked_attention(device: str) -> str:
    """The block mask of packed documents lets pass what the additive mask does, logits and isolation."""
    full, tokens = _model(torch.float32, device), _rows(device)
    with torch.no_grad():
        masked = full(*tokens)
        context = attention.attention_context(SHAPE, tokens[1], tokens[2], torch.float32)
        query, key, value = (torch.randn(2, heads, LENGTH, 16, device=device) for heads in (4, 2, 2))
        plain = attention.attend(query, key, value, context.mask)
        flexible = _flexible(device)(query, key, value, block_mask=attention._block_mask(tokens[2]), enable_gqa=True)
    assert masked.isfinite().all()
    apart = _apart(flexible, plain)
    assert apart < (2e-2 if device == "cuda" else 1e-5), apart  # TF32 within the kernel
    return f"{apart:.1e} from the additive mask"


def _flexible(device: str) -> Callable[..., Tensor]:
    if device == "cuda":
        compiled: Callable[..., Tensor] = attention._flex()
        return compiled
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention  # not compiled, it is its own reference implementation, on a CPU too


def block_masks_of_other_models(device: str) -> str:
    """Packed rows of transformers' models in half precision, which a GPU attends to by blocks: near fp32, and no
    document sees another."""
    from muster.trainer.models import pretrained
    from muster.trainer.models.self_test import examine
    from muster.trainer.models.transformers_model import TransformersModel
    from tests.model_families import config_of

    tokens, positions, documents = _rows(device)
    other = tokens.clone()
    other[:, 10] = (other[:, 10] + 1) % 256  # in the first document of each row
    found = []
    for family in ("llama-2", "gemma-2"):  # the second has soft caps, and a window in every other layer
        config = config_of(family, hidden_size=64, head_dim=32)
        definition, sides = TransformersModel(config, {}, examine(config)), []
        for dtype in (torch.float32, torch.bfloat16):
            model: Any = definition.build(dtype, "none")
            pretrained.materialize(model, torch.device(device))
            generator = torch.Generator("cpu").manual_seed(4)
            for parameter in model.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.ndim == 1))
            model.to(dtype)
            loss = model(tokens, positions, documents, torch.roll(tokens, -1, dims=1))
            loss.backward()
            gradients = torch.cat([p.grad.float().flatten() for p in model.parameters()])
            # With gradients, so that no kernels are compiled for going without.
            seen = model(tokens, positions, documents)[:, 60:], model(other, positions, documents)[:, 60:]
            assert torch.equal(*seen), f"{family}: the second document sees the first"
            sides.append((float(loss.detach()), gradients))
        (expected, reference), (loss, gradients) = sides
        assert abs(loss / expected - 1) < 1e-2, (family, loss, expected)
        cosine = float(torch.nn.functional.cosine_similarity(gradients, reference, dim=0))
        assert cosine > 0.95, (family, cosine)
        found.append(cosine)
    return f"gradients' cosine to fp32's {min(found):.4f} or more, in {len(found)} families"


def compiled_layers(device: str) -> str:
    """Layers compiled one by one give the eager loss and gradients."""
    torch._dynamo.reset()
    model = _model(torch.float32, device)
    for layer in model.layers:
        layer.compile()
    loss, gradients = _pass(model, device)
    expected, reference = _pass(_model(torch.float32, device), device)
    assert abs(loss / expected - 1) < 1e-5, (loss, expected)
    apart = _apart(gradients, reference)
    assert apart < 1e-4, apart
    return f"gradients {apart:.1e} from eager"


def half_precision(device: str) -> str:
    """bf16 with fp32 masters is near fp32, and its gradients are fp32."""
    half = _model(torch.bfloat16, device)
    loss, gradients = _pass(half, device)
    expected, reference = _pass(_model(torch.float32, device), device)
    assert all(parameter.grad.dtype == torch.float32 for parameter in half.parameters())
    assert abs(loss / expected - 1) < 5e-3, (loss, expected)
    cosine = float(torch.nn.functional.cosine_similarity(gradients, reference, dim=0))
    assert cosine > 0.99, cosine
    return f"loss {abs(loss / expected - 1):.1e}, gradients' cosine {cosine:.5f}"


def fused_update(device: str) -> str:
    """Our AdamW on the device, against torch's plain one on the CPU."""
    from muster.recipe.optimizer_config import OptimizerConfig
    from muster.trainer.train.optimizer import make_optimizer

    model, reference = _model(torch.float32, device), _model(torch.float32, "cpu")
    ours = make_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.0))
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    generator = torch.Generator("cpu").manual_seed(5)
    for _ in range(3):
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            other.grad = torch.randn(other.shape, generator=generator)
            one.grad = other.grad.to(device)
        ours.step()
        plain.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    apart = max(_apart(one.detach().cpu(), other.detach()) for one, other in pairs)
    assert apart < 1e-5, apart
    return f"weights {apart:.1e} apart after three steps"


def small_state(device: str) -> str:
    """AdamW in eight bits on the device against the CPU's, also with its state in host memory; rounding at random."""
    from muster.recipe.optimizer_config import OptimizerConfig
    from muster.trainer.train.optimizer import make_optimizer

    def trained(where: str, dtype: torch.dtype, **changes: Any) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(5)
        model = torch.nn.ParameterList([torch.randn(64, 512, generator=generator).to(where, dtype)])
        config = OptimizerConfig(lr=1e-2, weight_decay=0.0, name="adamw8bit", **changes)
        optimizer = make_optimizer(model, config)
        for _ in range(5):
            model[0].grad = torch.randn(64, 512, generator=generator).to(where, dtype)
            optimizer.step()
        return model[0].detach().float().cpu()

    here = trained(device, torch.float32)
    apart = float((here - trained("cpu", torch.float32)).norm() / 5e-2 / here.numel() ** 0.5)
    assert apart < 2e-2, apart  # of the way: a code may be the next one where two are as near
    assert torch.equal(here, trained(device, torch.float32, offload=True))
    rounded = trained(device, torch.bfloat16)
    assert torch.equal(rounded, trained(device, torch.bfloat16))
    bias = abs(float((rounded - here).mean()))
    assert bias < 1e-3, bias
    return f"weights {apart:.1e} of their way apart, offloaded alike; bf16 alone off by {bias:.1e} in the mean"


def four_bits(device: str) -> str:
    """bitsandbytes' NF4 decodes on the device to what it decodes to on the CPU, and near what was put in."""
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    except ImportError:
        raise NotHere("bitsandbytes is not installed: QLoRA is no part of this Muster yet") from None
    values = torch.randn(64, 128, generator=torch.Generator("cpu").manual_seed(2))
    packed, state = quantize_4bit(values.to(device), blocksize=64, quant_type="nf4")
    decoded = dequantize_4bit(packed, state).cpu().float()
    again, their_state = quantize_4bit(values, blocksize=64, quant_type="nf4")
    reference = dequantize_4bit(again, their_state).float()
    apart = _apart(decoded, reference)
    assert apart < 1e-3, apart
    error = float((decoded - values).norm() / values.norm())
    assert error < 0.15, error
    return f"{apart:.1e} from the CPU's, {error:.3f} from the values"


def float8(device: str) -> str:
    """Linear layers in float8 are near those in bf16, and on a GPU what torchao's emulation gives."""
    from muster.trainer.models.float8 import CAPABILITY_MIN, use_float8

    if device == "cuda" and torch.cuda.get_device_capability() < CAPABILITY_MIN:
        raise NotHere("the GPU has no float8: it needs compute capability 8.9 or more")

    def passed(multiply: bool, emulate: bool) -> tuple[float, Tensor]:
        model = _model(torch.bfloat16, device).to(torch.bfloat16)
        if multiply:
            assert len(use_float8(model, emulate)) == 14, "seven linear layers in each of two layers"
        return _pass(model, device)

    expected, reference = passed(multiply=False, emulate=False)
    emulated, by_emulation = passed(multiply=True, emulate=True)
    loss, gradients = passed(multiply=True, emulate=False) if device == "cuda" else (emulated, by_emulation)
    cosine = float(torch.nn.functional.cosine_similarity(gradients, reference, dim=0))
    assert abs(loss / expected - 1) < 1e-2, (loss, expected)
    assert 0.98 < cosine < 1 - 1e-6, cosine
    alike = float(torch.nn.functional.cosine_similarity(gradients, by_emulation, dim=0))
    assert alike > 0.999, alike
    return (
        f"loss {abs(loss / expected - 1):.1e} from bf16's, gradients' cosine {cosine:.5f}, {alike:.5f} to the emulation"
    )


class NotHere(Exception):
    """A check that can't be made on this machine, and why."""


CHECKS: tuple[Callable[[str], str], ...] = (
    same_as_on_a_cpu,
    block_masked_attention,
    block_masks_of_other_models,
    compiled_layers,
    half_precision,
    fused_update,
    small_state,
    four_bits,
    float8,
)
