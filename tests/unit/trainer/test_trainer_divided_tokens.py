"""Every objective that ranks with parts of rows may have is, on each of them, that of whole rows. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.model_families import config_of
from tests.unit.models.test_models_token_split import decoder, on_ranks
from tests.unit.trainer.test_trainer_objectives import PAIRS, config, rows
from tests.unit.trainer.test_trainer_stateless import VARIANTS
from torch import Tensor, nn

from muster.recipe.adapter_config import Adapter
from muster.trainer.data.batch import TokenBatch
from muster.trainer.models import load_balancing, pretrained
from muster.trainer.models.init import initialize_adapter
from muster.trainer.models.lora import attach
from muster.trainer.models.scoring import ScoreHead
from muster.trainer.parallel.thread_group import ThreadGroup
from muster.trainer.parallel.token_split import TokenSplit
from muster.trainer.train.tasks.choice import objective_of
from muster.trainer.train.tasks.objective import BatchLosses, TrainingObjective

Computed = tuple[BatchLosses, dict[str, Tensor]]


def learnt(model: nn.Module, objective: TrainingObjective, batch: TokenBatch) -> Computed:
    losses = objective.loss(model, batch)
    losses.sum.backward()  # type: ignore[no-untyped-call]
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def must_be_of_whole_rows(
    made: Callable[[], nn.Module],
    divide: Callable[[Any, TokenSplit], None],
    objective: TrainingObjective,
    batch: TokenBatch,
) -> None:
    alone, gradients = learnt(made(), objective, batch)
    models = [made(), made()]  # before the threads begin: to make a model of transformers changes the whole process

    def rank(group: ThreadGroup) -> Computed:
        model = models[group.index]
        divide(model, TokenSplit(group))
        return learnt(model, objective, batch)

    ranks = on_ranks(2, rank)
    for losses, _ in ranks:
        torch.testing.assert_close(losses.sum, alone.sum, rtol=1e-5, atol=1e-5)
        assert torch.equal(losses.count, alone.count)
        if alone.values is not None:
            torch.testing.assert_close(losses.values, alone.values, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        parts = torch.stack([each[name] for _, each in ranks])
        assert (parts.sum(0) - gradient).abs().max() <= 1e-5 * max(1.0, float(gradient.abs().max())), name


def of_decoder(model: Any, split: TokenSplit) -> None:
    model.split = split


def batch_of(task: str) -> TokenBatch:
    batch = TokenBatch.of(rows(task == "kto"))
    dice = torch.Generator().manual_seed(4)
    batch.reference = -torch.rand(2, 4, generator=dice) * len(PAIRS)
    return batch


@pytest.mark.parametrize(("task", "settings"), VARIANTS)
def test_each_objective_is_that_of_whole_rows(task: str, settings: dict[str, Any]) -> None:
    scores = ScoreHead(1, pad=256) if task == "reward" else None
    objective = objective_of(config(task, **settings))
    must_be_of_whole_rows(lambda: decoder(scores=scores), of_decoder, objective, batch_of(task))


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_an_adapter_is_held_against_the_model_without_it(kind: str) -> None:
    """The reference of dpo is then computed by the ranks together, too."""
    adapter = Adapter(kind=kind, rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))  # type: ignore[arg-type]

    def made() -> nn.Module:
        model = decoder()
        attach(model, adapter)
        initialize_adapter(model, 7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(5))
        return model

    batch = batch_of("dpo")
    batch.reference = None
    must_be_of_whole_rows(made, of_decoder, objective_of(config("dpo")), batch)


def test_the_experts_of_a_mixture_are_balanced_over_whole_rows() -> None:
    shape = config_of("qwen3-moe", attn_implementation="sdpa")
    torch.manual_seed(3)
    whole = pretrained.build(shape)
    pretrained.materialize(whole, torch.device("cpu"))
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(0.0, 0.2) if parameter.ndim > 1 else parameter.fill_(1.0)

    def made() -> nn.Module:
        model: Any = pretrained.build(shape)
        pretrained.materialize(model, torch.device("cpu"))
        model.load_state_dict(whole.state_dict())
        load_balancing.set_weight(model, 0.5)
        return model  # type: ignore[no-any-return]

    must_be_of_whole_rows(made, pretrained.split_tokens, objective_of(config("sft")), batch_of("sft"))
