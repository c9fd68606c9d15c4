"""A reward model for task grpo: it reads answers as task reward showed it answers, scores them as transformers does,
and one that can't score them is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.checkpoint.one_rank import identity, outcomes, state
from tests.model_families import write_model
from tests.unit.trainer.test_trainer_grpo import CPU, config

from muster.plan.layouts import ModelLayout
from muster.plan.memory import estimate
from muster.plan.model_size import decoder_size
from muster.recipe.architecture import Architecture
from muster.recipe.commits_read import REWARD_MODEL, commits_read, second_models, with_folder
from muster.recipe.training import TrainingConfig
from muster.trainer.checkpoint import CheckpointSaver
from muster.trainer.config import RankPosition
from muster.trainer.data import chat_prompt, load_tokenizer
from muster.trainer.data.answers import ends_of_turn
from muster.trainer.data.preference import pair, parts
from muster.trainer.data.prompts import ModelPrompt
from muster.trainer.errors import UserError
from muster.trainer.models import sharding
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.scoring import ScoreHead
from muster.trainer.train.origin import fresh_origin
from muster.trainer.train.reward_model import RewardScores
from muster.trainer.train.second_model import LoadedSecond, find_second_models
from muster.trainer.train.writing import WrittenTokens
from muster.words.base import InvalidDocument, dump
from muster.words.job import Keep

SHAPE = Architecture(dim=24, layers=2, heads=2, kv_heads=2, ffn_dim=32, vocab_size=260, max_positions=64)
RANKS = RankPosition(rank=0, world=1, local_rank=0, local_world=1)
SAID = [("Hello, I am Ada.", "Hello Ada!"), ("2 + 2?", "4"), ("a", "It depends, é.")]


def committed(folder: Path, scores: ScoreHead | None = None, step: int = 5, seed: int = 9) -> dict[str, Any]:
    """A job's commit, of task reward where it scores."""
    definition = DecoderModel(SHAPE, scores=scores)
    model = definition.build(torch.float32, "none")
    definition.fill(model, CPU, seed, True)
    about = replace(
        identity(folder.as_uri()),
        architecture=definition.describe(),
        config={"task": "reward" if scores else "sft"},
        tokenizer=load_tokenizer("bytes").describe(),
    )
    saving = CheckpointSaver(about, Keep(), {})
    try:
        saving.save(state(model, torch.optim.AdamW(model.parameters()), step))
        assert outcomes(saving) == [(step, True, None)]
    finally:
        saving.close()
    return {"uri": folder.as_uri(), "step": "last"}


def training(policy: dict[str, Any], scorer: dict[str, Any], **settings: Any) -> TrainingConfig:
    given = config(verifiers=[], rewardModel=scorer, **settings)
    return given.model_copy(update={"model": type(given.model).model_validate(policy)})


def loaded(given: TrainingConfig) -> LoadedSecond:
    origin = fresh_origin(given)
    (found,) = find_second_models(given, origin).values()
    layout = sharding.plan(origin.model, given, RANKS, 1 << 34, CPU, (found.model.size(),))
    return LoadedSecond.load(found, given, layout, CPU)


@pytest.mark.parametrize("source", ["bytes", "examples/tiny-model"])
def test_an_answer_is_read_as_the_data_of_task_reward_writes_it(source: str) -> None:
    tokenizer = load_tokenizer(source)
    beside: Any = None
    scorer = RewardScores(beside, tokenizer, 1)
    (end,) = ends_of_turn(tokenizer) - {tokenizer.eos} or {tokenizer.eos}
    for asked, said in SAID:
        messages = [{"role": "user", "content": asked}]
        answers = {
            "chosen": [{"role": "assistant", "content": said}],
            "rejected": [{"role": "assistant", "content": "-"}],
        }
        side = parts(pair({"prompt": messages, **answers}), tokenizer)[0]
        expected = [token for part in side for token in (part.ids or tokenizer.encode(part.text))]
        prompt = ModelPrompt(chat_prompt(tokenizer, messages), {})
        assert scorer._text(prompt, WrittenTokens(tokenizer.encode(said), end)) == expected
        assert scorer._text(prompt, WrittenTokens(tokenizer.encode(said), None)) == [
            *prompt.ids,
            *tokenizer.encode(said),
        ]


def test_scores_are_those_of_transformers_whatever_shares_a_pass(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    write_model(tmp_path / "policy", "llama-3.1")
    write_model(tmp_path / "scorer", "llama-3.1", seed=3)
    torch.manual_seed(2)
    settings = AutoConfig.from_pretrained(tmp_path / "scorer", num_labels=1, pad_token_id=0)
    theirs = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32).eval()
    for file in (tmp_path / "scorer").glob("model*"):  # of the model that it was
        file.unlink()
    theirs.save_pretrained(tmp_path / "scorer")
    given = training({"source": (tmp_path / "policy").as_uri()}, {"source": (tmp_path / "scorer").as_uri()})
    second = loaded(given)
    assert set(second.described) >= {"address", "files", "crc32"}
    second.must_be(second.state)
    with pytest.raises(UserError, match=r"grpo\.rewardModel file:.* has other weights than when the job began"):
        second.must_be({"rewardModel": second.described | {"files": {}}})
    tokenizer = fresh_origin(given).tokenizer
    prompts = [ModelPrompt(tokenizer.encode(asked), {}) for asked, _ in SAID]
    written = [WrittenTokens(tokenizer.encode(said), None) for _, said in SAID]
    found = RewardScores(second.model, tokenizer, 8).of(prompts, written)
    torch.testing.assert_close(
        RewardScores(second.model, tokenizer, 2).of(prompts, written), found, atol=1e-6, rtol=1e-5
    )
    with torch.no_grad():
        texts = [torch.tensor([[*prompt.ids, *row.tokens]]) for prompt, row in zip(prompts, written, strict=True)]
        expected = torch.cat([theirs(input_ids=text).logits[0] for text in texts]).double()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not any(p.requires_grad for p in second.model.module.parameters())


def test_what_can_not_score_is_refused(tmp_path: Path) -> None:
    policy = {"from": committed(tmp_path / "policy")}
    scorer = committed(tmp_path / "scorer", ScoreHead(1, 258))
    assert loaded(training(policy, {"from": scorer})).described["step"] == 5
    with pytest.raises(UserError, match=r"grpo\.rewardModel .*predicts tokens and scores no texts; name the "):
        loaded(training(policy, policy))
    with pytest.raises(UserError, match="a text 2 scores, and a reward is one"):
        loaded(training(policy, {"from": committed(tmp_path / "two", ScoreHead(2, 258))}))
    write_model(tmp_path / "folder", "llama-3.1")
    with pytest.raises(UserError, match="its tokenizer is not that of the model that learns"):
        loaded(training({"source": (tmp_path / "folder").as_uri()}, {"from": scorer}))
    with pytest.raises(UserError, match=r"grpo\.rewardModel\.from\.job 'judge' was not resolved"):
        loaded(training(policy, {"from": {"job": "judge"}}))
    with pytest.raises(InvalidDocument, match="name the reward model by exactly one of source"):
        training(policy, {"weight": 2.0})
    with pytest.raises(InvalidDocument, match="name reward_model is that of rewardModel's score"):
        config(verifiers=[{"exactMatch": {}, "name": "reward_model"}], rewardModel={"from": scorer})


def test_the_platform_knows_of_it() -> None:
    """Its commit is resolved and held, its memory planned for."""
    given = training({"from": {"uri": "file:///base"}}, {"from": {"job": "judge", "step": 7}, "weight": 0.5})
    assert given.grpo is not None
    assert given.grpo.rewards == ("reward_model",)
    assert list(commits_read(given)) == ["model.from", "grpo.rewardModel.from"]
    resolved = with_folder(given, "grpo.rewardModel.from", "file:///judge/uid")
    assert {path: each.words for path, each in second_models(resolved).items()} == {
        REWARD_MODEL: "file:///judge/uid step 7"
    }
    assert dump(resolved)["grpo"]["rewardModel"]["weight"] == 0.5
    policy, judge = decoder_size(SHAPE, None), decoder_size(SHAPE, None, scores=1)
    alone, beside = (
        estimate(size, given, ModelLayout.of("ddp", 1), 1) for size in (policy, replace(policy, second=(judge,)))
    )
    assert beside.total - alone.total == beside.second_model >= 4 * judge.parameters
