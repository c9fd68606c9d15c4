"""The decoder against an independent implementation, and the promises that its parts make."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from muster.plan.memory import LOGIT_CHUNK_BYTES
from muster.recipe.architecture import PRESETS, Architecture
from muster.trainer.convert import hugging_face
from muster.trainer.models import head
from muster.trainer.models.attention import rotary
from muster.trainer.models.decoder import Decoder, build
from muster.trainer.models.head import summed_cross_entropy
from muster.trainer.models.init import initialize


def shape(**changes: Any) -> Architecture:
    base = {
        "dim": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "ffn_dim": 96,
        "vocab_size": 131,
        "max_positions": 64,
        "tied_head": False,
    }
    return Architecture(**(base | changes))


def made(architecture: Architecture, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    model = build(architecture, dtype, **options)
    model.to_empty(device="cpu")
    initialize(model, architecture, 7)
    return model


def one_document(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(length).expand(batch, length), torch.zeros(batch, length, dtype=torch.int64)


def tokens_like(architecture: Architecture, batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, architecture.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


RENAMED = (
    ("embed.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("attention_norm", "input_layernorm"),
    ("attention.", "self_attn."),
    ("feed_forward_norm", "post_attention_layernorm"),
    ("feed_forward.", "mlp."),
    ("head.", "lm_head."),
)


def as_llama(model: Decoder) -> LlamaForCausalLM:
    a = model.architecture
    config = LlamaConfig(
        vocab_size=a.vocab_size,
        hidden_size=a.dim,
        intermediate_size=a.ffn_dim,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        max_position_embeddings=a.max_positions,
        rms_norm_eps=a.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": a.rope_theta},
        tie_word_embeddings=a.tied_head,
    )
    llama = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        for ours, theirs in RENAMED:
            name = name.replace(ours, theirs)
        llama.get_parameter("model.norm.weight" if name == "norm.weight" else name).data.copy_(parameter.data)
    return llama


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_logits_are_those_of_transformers(tied: bool, heads: int, kv_heads: int) -> None:
    architecture = shape(tied_head=tied, heads=heads, kv_heads=kv_heads, rope_theta=500_000.0)
    model = made(architecture)
    tokens = tokens_like(architecture, 2, 48)
    ours = model(tokens, *one_document(2, 48))
    theirs = as_llama(model)(tokens).logits
    assert (ours - theirs).abs().max().item() <= 1e-5


@pytest.mark.parametrize("preset", ["llama-1b", "llama-8b"])
def test_positions_are_stretched_as_llama_3_stretches_them(preset: str) -> None:
    architecture = PRESETS[preset]
    described = hugging_face.rope_scaling(architecture)
    assert described is not None
    config = LlamaConfig(
        hidden_size=architecture.dim,
        num_attention_heads=architecture.heads,
        max_position_embeddings=architecture.max_positions,
        rope_parameters={"rope_theta": architecture.rope_theta, **described},
    )
    theirs = LlamaRotaryEmbedding(config).inv_freq
    # The angles at position 1 are the frequencies; beyond it fp32 rounds them.
    cos, sin = (part[0, 0, 0, : len(theirs)] for part in rotary(architecture, torch.ones(1, 1, dtype=torch.long)))
    torch.testing.assert_close(torch.atan2(sin, cos), theirs, rtol=1e-5, atol=1e-9)
    plain = architecture.rope_theta ** (-torch.arange(0, 1, 1 / len(theirs)))
    torch.testing.assert_close(theirs[:10], plain[:10])
    assert (plain[-5:] / theirs[-5:]).tolist() == pytest.approx([described["factor"]] * 5, rel=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_those_of_the_whole_logits(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, tied: bool
) -> None:
    architecture = shape(tied_head=tied)
    monkeypatch.setitem(LOGIT_CHUNK_BYTES, "cpu", 4 * architecture.vocab_size * 10)  # ten rows a chunk
    model, tokens = made(architecture), tokens_like(architecture, 2, 33)
    labels = tokens_like(architecture, 2, 33).roll(1)
    labels[0, :9] = -100
    where = one_document(2, 33)

    loss = model(tokens, *where, labels, smoothing)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = F.cross_entropy(
        model(tokens, *where).flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="sum"
    )
    expected.backward()

    torch.testing.assert_close(loss, expected)
    assert ours.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_logits_of_a_whole_batch_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = head._chunk

    def watched(logits: torch.Tensor, *rest: Any) -> Any:
        seen.append(logits.numel())
        return real(logits, *rest)

    monkeypatch.setitem(LOGIT_CHUNK_BYTES, "cpu", 4 * 50 * 8)
    monkeypatch.setattr(head, "_chunk", watched)
    hidden, weight = torch.randn(100, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    summed_cross_entropy(hidden, weight, torch.zeros(100, dtype=torch.int64)).backward()
    assert max(seen) == 50 * 8
    assert sum(seen) == 50 * 100


def test_nothing_scored_is_a_loss_of_zero_without_gradient() -> None:
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    loss = summed_cross_entropy(hidden, weight, torch.full((6,), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert hidden.grad.abs().max().item() == 0.0


def test_packed_documents_do_not_see_each_other() -> None:
    """A document packed behind another gives the logits that it gives alone."""
    architecture = shape()
    model = made(architecture)
    tokens = tokens_like(architecture, 1, 40)
    positions = torch.cat((torch.arange(13), torch.arange(27)))[None]
    documents = torch.cat((torch.zeros(13), torch.ones(27))).long()[None]
    packed = model(tokens, positions, documents)
    first, second = model(tokens[:, :13], *one_document(1, 13)), model(tokens[:, 13:], *one_document(1, 27))
    torch.testing.assert_close(packed, torch.cat((first, second), dim=1), rtol=1e-4, atol=1e-5)

    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % architecture.vocab_size
    assert torch.equal(model(changed, positions, documents)[:, 13:], packed[:, 13:])
    assert not torch.equal(model(changed, positions, documents)[:, 3:13], packed[:, 3:13])


def test_padding_behind_a_document_changes_nothing() -> None:
    architecture = shape()
    model = made(architecture)
    tokens, documents = tokens_like(architecture, 2, 30), torch.zeros(2, 30, dtype=torch.int64)
    documents[0, 21:] = -1
    logits = model(tokens, torch.arange(30).expand(2, 30), documents)
    torch.testing.assert_close(logits[:1, :21], model(tokens[:1, :21], *one_document(1, 21)), rtol=1e-4, atol=1e-5)
    packed = documents.clone()
    packed[1, 10:] = 1  # now the rows need a mask
    masked = model(tokens, torch.arange(30).expand(2, 30), packed)
    torch.testing.assert_close(logits[0, :21], masked[0, :21], rtol=1e-4, atol=1e-5)


def test_no_token_sees_the_future() -> None:
    architecture = shape()
    model = made(architecture)
    tokens = tokens_like(architecture, 1, 20)
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % architecture.vocab_size
    before, after = model(tokens, *one_document(1, 20)), model(changed, *one_document(1, 20))
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.equal(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_activation_checkpointing_changes_no_bit(recompute: Any) -> None:
    architecture = shape(layers=3)
    tokens = tokens_like(architecture, 2, 24)
    documents = torch.arange(24).expand(2, 24) // 10

    def gradients(kind: Any) -> list[torch.Tensor]:
        model = made(architecture, recompute=kind)
        model(tokens, torch.arange(24).expand(2, 24), documents, tokens.roll(-1)).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for plain, repeated in zip(gradients("none"), gradients(recompute), strict=True):
        assert torch.equal(plain, repeated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_full(dtype: torch.dtype) -> None:
    architecture = shape()
    tokens = tokens_like(architecture, 2, 24)
    where = (*one_document(2, 24), tokens.roll(-1))
    full, half = made(architecture), made(architecture, dtype)
    loss = half(tokens, *where)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(full(tokens, *where).item(), rel=0.01)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in half.parameters() if p.grad is not None)


def test_master_weights_and_cast_weights_compute_the_same() -> None:
    """One rank casts fp32 weights where they are used; FSDP hands over weights that are cast already."""
    architecture = shape()
    tokens = tokens_like(architecture, 2, 24)
    masters = made(architecture, torch.bfloat16)
    cast = made(architecture, torch.bfloat16).to(torch.bfloat16)
    where = (*one_document(2, 24), tokens.roll(-1))
    assert torch.equal(masters(tokens, *where), cast(tokens, *where))


def test_initial_weights_depend_on_seed_and_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows or columns a rank holds, they are those of the whole."""
    from muster.trainer.models import init

    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 64 * 7)  # blocks that no shard's edge falls on
    architecture = shape()
    model = build(architecture).to_empty(device="cpu")
    initialize(model, architecture, 7)
    for rank, dim in itertools.product(range(3), range(2)):
        other = build(architecture).to_empty(device="cpu")

        def third(parameter: torch.Tensor, rank: int = rank, dim: int = dim) -> tuple[torch.Tensor, tuple[int, ...]]:
            dim = min(dim, parameter.dim() - 1)
            each = -(-parameter.shape[dim] // 3)
            offset = [0] * parameter.dim()
            offset[dim] = rank * each
            return parameter.data.narrow(dim, rank * each, min(each, parameter.shape[dim] - rank * each)), (*offset,)

        initialize(other, architecture, 7, third)
        for mine, whole in zip(other.parameters(), model.parameters(), strict=True):
            part, offset = third(mine)
            assert torch.equal(part, whole[tuple(map(slice, offset, map(sum, zip(offset, part.shape, strict=True))))])


def test_initial_weights_are_spread_as_documented() -> None:
    architecture = shape(dim=256, ffn_dim=512, layers=8, vocab_size=999)
    model = made(architecture)
    assert model.embed.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.head.weight is not None
    assert model.head.weight.std().item() == pytest.approx(256**-0.5, rel=0.02)
    assert model.layers[3].attention.o_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert torch.equal(model.norm.weight, torch.ones(256))
    other = made(architecture)
    initialize(other, architecture, 8)
    assert not torch.equal(other.embed.weight, model.embed.weight)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_presets_have_the_parameters_that_the_contract_counts(preset: str) -> None:
    architecture = PRESETS[preset]
    model = build(architecture)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == architecture.parameters
