"""Weights that learn in another way than the rest, or not at all, and noise on the embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.model_families import write_model

from muster.plan import memory
from muster.plan.layouts import ModelLayout
from muster.recipe.architecture import PRESETS, Architecture
from muster.recipe.optimizer_config import OptimizerConfig
from muster.recipe.parameter_names import matches
from muster.recipe.training import TrainingConfig
from muster.trainer.errors import UserError
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.embedding_noise import add_noise
from muster.trainer.models.named import freeze
from muster.trainer.train import origin
from muster.trainer.train.optimizer import make_optimizer, set_rate

SHAPE = Architecture(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=64, max_positions=64)


def config(**changes: Any) -> TrainingConfig:
    document: dict[str, Any] = {
        "model": {"from": {"uri": "file:///commits", "step": "last"}},
        "data": {"train": [{"source": "x"}], "sequenceLength": 64},
        "batch": {"tokensPerStep": 64},
        "length": {"steps": 2},
    }
    return TrainingConfig.model_validate(document | changes)


def decoder() -> torch.nn.Module:
    return DecoderModel(SHAPE).build(torch.float32, "none")


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("embed_tokens", "model.embed_tokens.weight", True),
        ("embed", "model.embed_tokens.weight", False),
        ("embed*", "model.embed_tokens.weight", True),
        ("layers.1", "model.layers.1.mlp.up_proj.weight", True),
        ("layers.1", "model.layers.11.mlp.up_proj.weight", False),
        ("layers.[0-3]", "model.layers.3.mlp.up_proj.weight", True),
        ("layers.[0-3]", "model.layers.13.mlp.up_proj.weight", False),
        ("layers.*.bias", "model.layers.3.bias", True),
        ("layers.weight", "layers.3.weight", False),
        ("model.norm.weight", "model.norm.weight", True),
        ("a.b.c.d", "b.c", False),
    ],
)
def test_a_pattern_means_whole_parts_of_a_name(pattern: str, name: str, found: bool) -> None:
    assert matches(pattern, name) is found


def test_each_group_follows_the_schedule_at_its_own_rate() -> None:
    """Against torch's AdamW with the groups written out, over a warm-up."""
    torch.manual_seed(1)
    ours, theirs = (DecoderModel(SHAPE).build(torch.float32, "none").to_empty(device="cpu") for _ in range(2))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.nn.init.normal_(one.data)
        other.data.copy_(one.data)
    groups = [
        {"parameters": ["embed"], "lr": 1e-4, "weightDecay": 0.0},
        {"parameters": ["layers.1"], "weightDecay": 0.5},
    ]
    optimizer = make_optimizer(ours, OptimizerConfig.model_validate({"lr": 1e-2, "weightDecay": 0.1, "groups": groups}))

    def of(name: str, parameter: torch.nn.Parameter) -> dict[str, Any]:
        decay = 0.0 if name.startswith("embed") else 0.5 if ".1." in name else 0.1
        rate = 1e-4 if name.startswith("embed") else 1e-2
        return {"params": [parameter], "weight_decay": decay if parameter.ndim > 1 else 0.0, "peak": rate}

    reference = torch.optim.AdamW(
        [of(n, p) for n, p in theirs.named_parameters()], lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True
    )
    for share in (0.25, 0.5, 1.0):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        set_rate(optimizer, 1e-2 * share)
        for group in reference.param_groups:
            group["lr"] = group["peak"] * share
        optimizer.step()
        reference.step()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([["embd"]], r"optimizer.groups\[0\]: 'embd' matches no weight of this model; did you mean embed or head\?"),
        ([["layers.7"]], r"'layers.7' matches no weight of this model; (There are|its parts|did you)"),
        ([["norm.layers"]], "its parts stand in no name in this order; names are such as embed.weight"),
        ([["layers.0"], ["q_proj"]], r"optimizer.groups\[1\] and optimizer.groups\[0\] both match layers.0.attention"),
    ],
)
def test_groups_that_mean_nothing_or_the_same_twice_are_refused(groups: list[list[str]], words: str) -> None:
    given = [{"parameters": patterns, "lr": 1e-3} for patterns in groups]
    with pytest.raises(UserError, match=words):
        make_optimizer(decoder(), OptimizerConfig.model_validate({"groups": given}))


def test_a_group_of_frozen_weights_alone_is_refused() -> None:
    model = decoder()
    freeze(model, ["embed"])
    with pytest.raises(UserError, match=r"optimizer.groups\[0\]: embed match only weights that are not trained"):
        make_optimizer(model, OptimizerConfig.model_validate({"groups": [{"parameters": ["embed"], "lr": 1e-3}]}))


def test_what_is_frozen_has_no_state_and_takes_no_memory_for_it() -> None:
    model = DecoderModel(SHAPE).freezing(["embed", "layers.0"])
    module = model.build(torch.float32, "none")
    names = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert names == {n for n, _ in module.named_parameters() if n.startswith(("embed.", "layers.0."))}
    own = {id(p) for group in make_optimizer(module, OptimizerConfig()).param_groups for p in group["params"]}
    assert own == {id(p) for n, p in module.named_parameters() if n not in names}
    size = model.size()
    assert size.parameters == SHAPE.parameters
    assert size.learning == sum(p.numel() for p in module.parameters() if p.requires_grad)

    llama = DecoderModel(PRESETS["llama-8b"])
    frozen = ["embed", "head", "layers.[0-9]", "layers.1?", "layers.2?"]
    whole = memory.estimate(llama.size(), config(), ModelLayout.of("ddp", 1), 1)
    part = memory.estimate(llama.freezing(frozen).size(), config(freeze=frozen), ModelLayout.of("ddp", 1), 1)
    learning = 2 * sum(o * i for o, i in PRESETS["llama-8b"].projections.values()) + (2 * 2 + 1) * 4096
    assert part.optimizer == 8 * learning
    assert part.weights == whole.weights
    assert part.adapters == 0


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["embed_tokens"], "freeze: 'embed_tokens' matches no weight of this model; did you mean embed"),
        (["layers", "embed", "norm", "head"], "match all weights of this model, so nothing would be trained"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(patterns: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        freeze(decoder(), patterns)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"freeze": ["embed"], "adapter": {}}, "beside an adapter of lora all of them stay so already"),
        ({"freeze": ["embed"], "model": {"preset": "muster-1m"}}, "a new model has none worth keeping"),
        ({"freeze": ["embed"], "precision": "fp8"}, "freeze is not for precision fp8"),
        ({"freeze": ["a..b"]}, "'a..b' is no pattern of names"),
        ({"freeze": ["embed", "embed"]}, "names a pattern twice: embed"),
        ({"optimizer": {"groups": [{"parameters": ["embed"]}]}}, "neither lr nor weightDecay"),
        ({"task": "dpo", "neftuneNoiseAlpha": 5.0}, "neftuneNoiseAlpha is for pretrain and sft, not for task dpo"),
    ],
)
def test_what_contradicts_itself_is_refused_when_submitted(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**changes)


def test_a_tied_head_is_known_by_both_its_names_before_data_are_prepared(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen2.5", dtype=torch.bfloat16)
    training = config(model={"source": tmp_path.as_uri()}, freeze=["lm_head", "layers.0"])
    model = origin.fresh_origin(training).model
    module = model.build(torch.float32, "none")
    frozen = {name: p.dtype for name, p in module.named_parameters() if not p.requires_grad}
    assert {name.split(".")[1] for name in frozen} == {"embed_tokens", "layers"}
    assert set(frozen.values()) == {torch.bfloat16}  # as they came
    assert model.size().learning == sum(p.numel() for p in module.parameters() if p.requires_grad)
    model.fill(module, torch.device("cpu"), 0, True)
    assert {name for name, p in module.named_parameters() if not p.requires_grad} == frozen.keys()
    with pytest.raises(UserError, match=r"freeze: 'embed_token' matches no weight .* did you mean embed_tokens"):
        origin.fresh_origin(training.model_copy(update={"freeze": ("embed_token",)}))


def test_noise_on_embeddings_is_that_of_transformers() -> None:
    from transformers.integrations.neftune import neftune_post_forward_hook

    class Tables(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours, self.theirs = torch.nn.Embedding(50, 16), torch.nn.Embedding(50, 16)

    tables = Tables()
    tables.theirs.load_state_dict(tables.ours.state_dict())
    add_noise(tables.ours, 5.0)
    tables.theirs.neftune_noise_alpha = 5.0
    tables.theirs.register_forward_hook(neftune_post_forward_hook)
    tokens = torch.randint(0, 50, (3, 20))
    torch.manual_seed(7)
    found = tables.ours(tokens)
    torch.manual_seed(7)
    assert torch.equal(found, tables.theirs(tokens))
    bound = 5.0 / (20 * 16) ** 0.5
    noise = (found - torch.nn.functional.embedding(tokens, tables.ours.weight)).abs().max()
    assert 0.9 * bound < noise <= bound * (1 + 1e-5)
    tables.eval()
    assert torch.equal(tables.ours(tokens), tables.theirs(tokens))
    assert torch.equal(tables.ours(tokens), torch.nn.functional.embedding(tokens, tables.ours.weight))
