"""What task grpo holds a whole model against: a second model, of the weights that the job started from."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.trainer.test_trainer_grpo import CPU, config, rollout
from tests.unit.trainer.test_trainer_reward_model import RANKS, SHAPE, committed

from muster.plan.layouts import ModelLayout
from muster.plan.memory import estimate
from muster.plan.model_size import decoder_size
from muster.plan.throughput import setup_of
from muster.recipe.commits_read import REFERENCE, REWARD_MODEL, commits_read, second_models, with_folder
from muster.recipe.training import TrainingConfig
from muster.storage.model_source import model_facts
from muster.trainer.errors import UserError
from muster.trainer.models import sharding
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.scoring import ScoreHead
from muster.trainer.train.origin import RunOrigin, fresh_origin
from muster.trainer.train.second_model import LoadedSecond, find_second_models
from muster.trainer.train.tasks.answers import cross_entropies
from muster.trainer.train.tasks.choice import objective_of

LORA = {"kind": "lora", "rank": 2, "alpha": 4.0, "targets": ["q_proj"]}


def loaded(given: TrainingConfig, origin: RunOrigin) -> dict[str, LoadedSecond]:
    found = find_second_models(given, origin)
    layout = sharding.plan(origin.model, given, RANKS, 1 << 34, CPU, tuple(m.model.size() for m in found.values()))
    return {path: LoadedSecond.load(each, given, layout, CPU) for path, each in found.items()}


def policy(seed: int) -> Any:
    model = DecoderModel(SHAPE).build(torch.float32, "none")
    DecoderModel(SHAPE).fill(model, CPU, seed, True)
    return model


def test_the_divergence_is_that_from_what_the_job_started_from(tmp_path: Path) -> None:
    """Beside a reward model: each is found by its own field."""
    scorer = committed(tmp_path / "scorer", ScoreHead(1, 258))
    given = config(model={"from": committed(tmp_path / "base")}, beta=0.3, rewardModel={"from": scorer}, verifiers=[])
    beside = loaded(given, fresh_origin(given))
    assert list(beside) == [REWARD_MODEL, REFERENCE]
    objective = objective_of(given, {path: each.model for path, each in beside.items()})
    batch = rollout()
    batch.reported = torch.zeros(4, len(objective.reported))  # type: ignore[attr-defined]
    same = objective.loss(policy(9), batch)
    assert same.values is not None
    assert dict(zip(objective.names, same.values[:, 0].tolist(), strict=True))["kl"] == 0.0
    ours, base = policy(4), policy(9)
    batch.before = None
    found = objective.loss(ours, batch)
    found.sum.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
    ours.zero_grad()
    mask = batch.labels != -100
    now = -cross_entropies(ours, batch, batch.labels)[mask]
    apart = -cross_entropies(base, batch, batch.labels)[mask].detach() - now
    ratio = torch.exp(now - now.detach())
    advantages = batch.advantages[:, None].expand(mask.shape)[mask]
    expected = (-ratio * advantages + 0.3 * (apart.exp() - apart - 1) * ratio).sum()
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found.sum, expected)
    torch.testing.assert_close(gradients, [p.grad for p in ours.parameters() if p.grad is not None])
    assert not any(p.requires_grad or p.grad is not None for p in beside[REFERENCE].model.module.parameters())


def test_a_resumed_job_has_the_weights_that_it_started_from(tmp_path: Path) -> None:
    """Also where the job that it started from has committed since."""
    source = committed(tmp_path / "base")
    given = config(model={"from": source}, beta=0.3)
    origin = fresh_origin(given)
    before = loaded(given, origin)[REFERENCE]
    assert before.described["step"] == 5
    committed(tmp_path / "base", step=6, seed=8)
    late = loaded(given, replace(origin, weights=(source["uri"], 5)))[REFERENCE]
    assert late.described == before.described, "what the job itself has read"
    commit: Any = SimpleNamespace(state={**before.state})
    resumed = loaded(given, replace(origin, weights=None, resume=commit))[REFERENCE]
    resumed.must_be(commit.state)
    torch.testing.assert_close(list(resumed.model.module.parameters()), list(policy(9).parameters()))
    newer = loaded(given, replace(origin, weights=(source["uri"], 6)))[REFERENCE]
    with pytest.raises(UserError, match=r"model file:.*base step last: has other weights than when the job began"):
        newer.must_be(commit.state)


def test_the_platform_knows_of_it(tmp_path: Path) -> None:
    plain = config(model={"from": {"job": "base"}})
    held = config(model={"from": {"job": "base"}}, beta=0.1)
    assert second_models(plain) == {} == second_models(config(beta=0.1, adapter=LORA))
    assert list(commits_read(held)) == ["model.from"]
    resolved = with_folder(held, "model.from", "file:///base/uid")
    assert second_models(resolved)[REFERENCE].words == "file:///base/uid step best"
    assert setup_of(held) != setup_of(plain)
    here = config(model={"from": committed(tmp_path / "base")}, beta=0.1)
    size = decoder_size(SHAPE, None)
    assert model_facts(here).size.second == (size,)
    one, two = (
        estimate(replace(size, second=(size,) * count), here, ModelLayout.of("fsdp", 2), 1).second_model
        for count in (1, 2)
    )
    assert one > 4 * size.parameters / 2
    assert one < two < 2 * one, "they hold their weights together, and compute one after the other"
