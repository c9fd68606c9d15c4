"""Every family: the weights of a folder, read by ranges, give the logits and losses that transformers itself gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.model_families import BASE, FAMILIES, config_of, edit_json, write_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.recipe.training import TrainingConfig
from muster.storage import model_folder
from muster.storage.file_store import FileStore
from muster.storage.model_folder import open_folder
from muster.storage.model_source import model_facts
from muster.trainer.errors import UserError
from muster.trainer.models import load_balancing, loading, pretrained, self_test
from muster.trainer.models.architectures import trainable_config
from muster.trainer.models.named import named_by
from muster.trainer.models.transformers_model import TransformersModel, from_commit, from_folder

LENGTH = 24


def opened(folder: Path) -> TransformersModel:
    return from_folder(open_folder(FileStore(folder)), None)


def loaded(definition: TransformersModel) -> Any:
    model = definition.build(torch.float32, "none")
    definition.fill(model, torch.device("cpu"), 0, values=True)
    return model


def some_rows() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 128, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    return tokens, torch.arange(LENGTH)[None].expand(2, LENGTH)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_losses_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Two documents in a row against transformers with each alone, the chunked loss against its own, all gradients."""
    write_model(tmp_path, family)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    definition = opened(tmp_path)
    assert definition.packs
    ours = loaded(definition)
    tokens, positions = some_rows()
    with torch.no_grad():
        logits = theirs(input_ids=tokens, position_ids=positions, use_cache=False).logits
        assert (ours(tokens, positions, torch.zeros_like(tokens)) - logits).abs().max() <= 1e-5

    cut = 10
    restarting = torch.cat((torch.arange(cut), torch.arange(LENGTH - cut)))[None].expand(2, LENGTH)
    documents = (torch.arange(LENGTH) >= cut).long()[None].expand(2, LENGTH)
    labels = torch.roll(tokens, -1, dims=1)
    labels[:, cut - 1], labels[:, -1] = -100, -100
    loss = ours(tokens, restarting, documents, labels)
    loss.backward()
    expected = torch.zeros(())
    for piece in (slice(0, cut), slice(cut, LENGTH)):
        apart = theirs(input_ids=tokens[:, piece], use_cache=False).logits.float()
        wanted = labels[:, piece].reshape(-1)
        expected = expected + torch.nn.functional.cross_entropy(apart.flatten(0, 1), wanted, reduction="sum")
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)


def with_head(folder: Path, change: float) -> None:
    """A head of its own in a folder whose config.json ties it: the table of tokens, changed in its last row."""
    from safetensors.torch import load_file, save_file

    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    table = load_file(folder / names["model.embed_tokens.weight"])["model.embed_tokens.weight"].clone()
    table[-1] += change
    save_file({"lm_head.weight": table}, folder / "head.safetensors", {"format": "pt"})
    edit_json(folder / "model.safetensors.index.json", weight_map={**names, "lm_head.weight": "head.safetensors"})


@pytest.mark.parametrize("change", [0.0, 2.0])
def test_a_head_that_config_calls_tied_is_kept_where_it_has_other_values(
    change: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers does: logits, what a commit and an export say, and what an estimate counts."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(model_folder, "COMPARED_BYTES", 1_000)  # the difference is in the last of several reads
    write_model(tmp_path, "qwen3")
    with_head(tmp_path, change)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    definition = opened(tmp_path)
    tokens, positions = some_rows()
    with torch.no_grad():
        logits = theirs(input_ids=tokens, position_ids=positions, use_cache=False).logits
        assert (loaded(definition)(tokens, positions, torch.zeros_like(tokens)) - logits).abs().max() <= 1e-5
    tied = change == 0
    again = from_commit(definition.describe(), None, "the checkpoint")
    parameters = sum(p.numel() for p in theirs.parameters())
    facts = model_facts(
        TrainingConfig.model_validate(
            {
                "model": {"source": str(tmp_path)},
                "data": {"train": [{"source": "x"}], "sequenceLength": 64},
                "batch": {"tokensPerStep": 64},
                "length": {"steps": 1},
            }
        )
    )
    for found in (definition.size(), again.size(), facts.size):
        assert found.parameters == parameters
    assert json.loads(again.companions["config.json"])["tie_word_embeddings"] is tied


def test_gpt_neox_head_has_the_name_of_the_folder_too(tmp_path: Path) -> None:
    from transformers import AutoConfig

    model = pretrained.build(AutoConfig.for_model("gpt_neox", **{**BASE, "num_key_value_heads": None}))
    head = model.get_output_embeddings().weight
    for pattern in ("embed_out", "lm_head", "embed_out.weight"):
        assert list(named_by(model, [pattern], "freeze")) == [head]
    with pytest.raises(UserError, match="matches no weight of this model; did you mean embed_out"):
        named_by(model, ["embed_outs"], "freeze")


HYBRIDS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "num_local_experts": 0,
        "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"],
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_config_of_transformers_5_with_an_infinite_float_is_read(kind: str, tmp_path: Path) -> None:
    """It writes `{"__float__": "Infinity"}`, which JSON's readers take for an object."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **{**BASE, **HYBRIDS[kind]})
    config.architectures = ["ForCausalLM"]
    config.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    assert "__float__" in json.dumps(document)
    found = trainable_config(document, "the folder")
    assert found.time_step_limit == AutoConfig.from_pretrained(tmp_path).time_step_limit


@pytest.mark.parametrize("kind", ["bart", "marian", "mvp"])
def test_the_self_test_s_copy_is_shallow_whatever_the_field_for_its_depth_is_called(kind: str) -> None:
    """`decoder_layers: 12` stayed twelve, and so many random layers hid that documents see each other."""
    from transformers import AutoConfig

    sizes = {"d_model": 64, "decoder_ffn_dim": 96, "decoder_attention_heads": 4, "decoder_layers": 12}
    config = AutoConfig.for_model(kind, vocab_size=128, is_decoder=True, is_encoder_decoder=False, **sizes)
    assert len(pretrained.layers(pretrained.build(self_test.shrunken(config)))) == 2
    assert not self_test.examine(config).packs


@pytest.mark.parametrize(("ranks", "rank"), [(3, 2), (5, 4), (16, 15), (16, 3)])
def test_a_rank_that_holds_no_expert_loads_a_mixture(ranks: int, rank: int, tmp_path: Path) -> None:
    """Four experts are cut by rows: with three ranks, or five and more, some rank has none."""
    write_model(tmp_path, "mixtral")
    whole = {name: parameter.detach() for name, parameter in loaded(opened(tmp_path)).named_parameters()}
    definition = opened(tmp_path)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        # A name of its own, or torch takes the mesh of the rank before, which it remembers, for the same.
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(f"rank{rank}of{ranks}",))
        model: Any = definition.build(torch.float32, "none")
        for layer in definition.layers(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        folder = definition.folder
        assert folder is not None
        loading.load(model, folder, torch.device("cpu"))
        own = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    finally:
        dist.destroy_process_group()
    for name, parameter in whole.items():
        rows = parameter.chunk(ranks)
        expected = rows[rank] if rank < len(rows) else parameter[:0]
        assert torch.equal(own[name], expected), name
    assert any(not rows.numel() for name, rows in own.items() if ".experts." in name) == (rank != 3 or ranks < 16)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_is_recomputed_gives_the_same_gradients(recompute: str, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3")
    definition = opened(tmp_path)
    tokens, positions = some_rows()

    def gradients(kind: Any) -> list[torch.Tensor]:
        model = definition.build(torch.float32, kind)
        definition.fill(model, torch.device("cpu"), 0, values=True)
        model(tokens, positions, torch.zeros_like(tokens), tokens).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, repeated = gradients("none"), gradients(recompute)
    assert len(plain) > 20
    assert all(torch.equal(one, other) for one, other in zip(plain, repeated, strict=True))


def test_sizes_count_what_learns_and_what_a_token_meets(tmp_path: Path) -> None:
    theirs = write_model(tmp_path, "qwen3-moe")
    size = opened(tmp_path).size()
    assert size.parameters == size.learning == sum(p.numel() for p in theirs.parameters())
    experts = sum(p.numel() for name, p in theirs.named_parameters() if ".experts." in name)
    embedding = theirs.get_input_embeddings().weight.numel()
    assert size.active == size.parameters - embedding - experts // 2  # two of four experts
    assert size.layers == 2


def test_a_commit_describes_the_model_and_what_was_loaded(tmp_path: Path) -> None:
    write_model(tmp_path, "llama-3.1")
    definition = opened(tmp_path)
    described = definition.describe()
    assert described["source"]["address"] == f"file://{tmp_path}"
    assert described["source"]["files"] == {p.name: p.stat().st_size for p in tmp_path.glob("*.safetensors")}
    again = from_commit(described, None, "the checkpoint")
    assert again.config.to_dict() == definition.config.to_dict()
    assert again.companions == definition.companions
    assert again.config.rope_parameters["rope_type"] == "llama3"


# By how much packed documents differ from separate ones is in docs/models.md; what counts is that none is packed.
LEAKING: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("falcon", {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "opt": (
        "opt",
        {
            "vocab_size": 128,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention"],
        },
    ),
}


@pytest.mark.parametrize("family", LEAKING)
def test_what_leaks_between_packed_documents_is_not_packed(family: str) -> None:
    from transformers import AutoConfig

    kind, own = LEAKING[family]
    found = self_test.examine(AutoConfig.for_model(kind, **own))
    assert not found.packs
    assert "see each other" in found.why_not or "carry a state over" in found.why_not


def test_gpt_oss_is_packed_by_masks_for_each_kind_of_layer() -> None:
    """It hands no positions to the making of its masks, so by positions alone it leaks."""
    assert self_test.examine(config_of("gpt-oss")) == self_test.PackingFindings(packs=True, masks="by_layer_type")


def test_the_self_test_leaves_random_numbers_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    self_test.examine(config_of("llama-2"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_that_is_not_the_class_s_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that transforms its logits in a way that the table does not know."""
    from muster.trainer.errors import UserError
    from muster.trainer.models import pretrained
    from muster.trainer.models.logits import PLAIN

    monkeypatch.setattr(pretrained, "logit_transform", lambda config: PLAIN)
    with pytest.raises(UserError, match=r"granite computes its logits in a way that Muster does not know"):
        self_test.examine(config_of("granite"))


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_the_load_balancing_loss_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    """With its gradients, recomputed or not, where the config asks for it; what is evaluated is free of it."""
    from transformers import AutoModelForCausalLM

    write_model(tmp_path, family, output_router_logits=True, router_aux_loss_coef=0.5)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    tokens, positions = some_rows()
    labels = torch.roll(tokens, -1, dims=1)
    labels[:, -1] = -100
    scored = int((labels != -100).sum())
    expected = theirs(input_ids=tokens, labels=tokens, use_cache=False)
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    definition = opened(tmp_path)
    for recompute in ("none", "full"):
        model: Any = definition.build(torch.float32, recompute)
        definition.fill(model, torch.device("cpu"), 0, values=True)
        loss = model(tokens, positions, torch.zeros_like(tokens), labels) / scored
        assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
        assert load_balancing.last(model) == pytest.approx(expected.aux_loss.item(), abs=1e-5)
        assert expected.aux_loss.item() > 1  # half of which the loss would lack
        loss.backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad - gradients[name]).abs().max() <= 1e-5, (name, recompute)
    alone = model.eval()(tokens, positions, torch.zeros_like(tokens), labels) / scored
    assert alone.item() == pytest.approx((expected.loss - 0.5 * expected.aux_loss).item(), abs=1e-5)
    pad = torch.nn.functional.pad
    documents, again = pad(torch.zeros_like(tokens), (0, 6), value=-1), pad(positions, (0, 6))
    behind = model.train()(pad(tokens, (0, 6)), again, documents, pad(labels, (0, 6), value=-100)) / scored
    assert behind.item() == pytest.approx(expected.loss.item(), abs=1e-5)


def test_a_job_s_own_weight_of_the_balance_comes_first(tmp_path: Path) -> None:
    write_model(tmp_path / "mixtral", "mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    model = opened(tmp_path / "mixtral").build(torch.float32, "none")
    assert load_balancing.weight_of(model) == 0.5
    load_balancing.set_weight(model, 0.25)
    assert load_balancing.weight_of(model) == 0.25
    load_balancing.set_weight(model, 0.0)
    assert load_balancing.weight_of(model) == 0.0
    for family in ("mixtral", "qwen3-moe", "gpt-oss"):
        write_model(tmp_path / family, family)  # whose config.json does not ask for it
        assert load_balancing.weight_of(opened(tmp_path / family).build(torch.float32, "none")) == 0.0, family
    write_model(tmp_path / "llama", "llama-2")
    with pytest.raises(UserError, match=r"routerAuxLossCoef 0.1: a LlamaForCausalLM has no load-balancing loss"):
        load_balancing.set_weight(opened(tmp_path / "llama").build(torch.float32, "none"), 0.1)
