"""Group relative policy optimisation: losses and gradients are TRL's, and answers are drawn as the model says."""

import copy
import itertools
import math
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.trainer.test_trainer_objectives import PAD, PAIRS
from tests.unit.trainer.test_trainer_objectives import models as models  # the fixture
from torch import Tensor

from muster.recipe.architecture import Architecture
from muster.recipe.training import TrainingConfig
from muster.trainer.config import DataParallel
from muster.trainer.data import StepBatch, load_tokenizer
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import unscored_row
from muster.trainer.data.prompts import ModelPrompt
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.pretrained import with_our_forward
from muster.trainer.train.answering import AnswerScoring
from muster.trainer.train.rollouts import SILENT_STEPS, RolloutMaker, advantages, drawn
from muster.trainer.train.tasks.answers import cross_entropies
from muster.trainer.train.tasks.grpo import GrpoObjective, RolloutBatch
from muster.trainer.train.tasks.objective import LossTotals, means
from muster.trainer.train.writing import TokenWriter
from muster.words.base import InvalidDocument, parse
from muster.words.checkpoint import DataCursor

CPU = torch.device("cpu")
# Prompts with their answers: two of each pair's sides, of different lengths.
ROWS = [(prompt, answer) for prompt, *sides in PAIRS[:2] for answer in sides]
ADVANTAGES = [0.7, -0.7, -1.2, 0.4]
DATA = {"train": [{"source": "x", "format": "prompt-completion"}], "sequenceLength": 32}


def config(**settings: Any) -> TrainingConfig:
    apart = ("adapter", "data", "labelSmoothing", "model", "parallel")
    top = {name: settings.pop(name) for name in apart if name in settings}
    document = {
        "task": "grpo",
        "model": {"from": {"uri": "file:///base"}},
        "data": DATA,
        "batch": {"tokensPerStep": 32 * 8, "microBatch": 2},
        "length": {"steps": 1},
        "grpo": {"verifiers": [{"exactMatch": {}}], "completions": 4, "maxTokens": 6, **settings},
        "seed": 11,
    }
    return parse(TrainingConfig, document | top, "training")


def rollout(before: Tensor | None = None) -> RolloutBatch:
    samples = []
    for prompt, answer in ROWS:
        row = unscored_row([*prompt, *answer], 12, PAD)
        row.labels[len(prompt) - 1 : len(prompt) + len(answer) - 1] = answer
        samples.append(row)
    made = RolloutBatch(TokenBatch.of(samples).values, torch.tensor(ADVANTAGES), torch.zeros(4, 6), torch.ones(4))
    made.before = before
    return made


def trl(policy: Any, before: Any, reference: Any, folder: Path, **settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """TRL's loss and gradients; `before` and `reference` are the models that give the other log-probabilities."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    beta = settings.pop("beta", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            args=GRPOConfig(
                output_dir=str(folder),
                use_cpu=True,
                report_to=[],
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=4,
                num_generations=2,
                max_completion_length=6,
                **settings,
            ),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
            processing_class=AutoTokenizer.from_pretrained("examples/tiny-model"),
        )
    trainer.beta = beta  # given to the constructor it would load the reference from where the model came from
    trainer.model.eval()  # there is no dropout, and one batch is all
    prompts, answers = max(len(prompt) for prompt, _ in ROWS), max(len(answer) for _, answer in ROWS)
    inputs: dict[str, Any] = {
        "prompt_ids": torch.tensor([[PAD] * (prompts - len(p)) + p for p, _ in ROWS]),
        "prompt_mask": torch.tensor([[0] * (prompts - len(p)) + [1] * len(p) for p, _ in ROWS]),
        "completion_ids": torch.tensor([a + [PAD] * (answers - len(a)) for _, a in ROWS]),
        "completion_mask": torch.tensor([[1] * len(a) + [0] * (answers - len(a)) for _, a in ROWS]),
        "advantages": torch.tensor(ADVANTAGES),
        "num_items_in_batch": torch.tensor(sum(len(a) for _, a in ROWS)),
    }
    whole = [torch.cat([inputs[f"{part}_{kind}"] for part in ("prompt", "completion")], 1) for kind in ("ids", "mask")]
    with torch.no_grad():
        for name, other in (("old", before), ("ref", reference)):
            if other is not None:
                logits = other(*whole).logits[:, -answers - 1 : -1] / settings.get("temperature", 1.0)
                chances = torch.log_softmax(logits, dim=-1)
                inputs[f"{name}_per_token_logps"] = chances.gather(2, inputs["completion_ids"][..., None])[..., 0]
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("loss", "beta", "updated", "temperature"),
    [
        *itertools.product(["dapo", "grpo", "dr_grpo"], [0.0, 0.3], [False, True], [1.0]),
        ("dapo", 0.3, True, 0.7),
    ],
)
def test_losses_and_their_gradients_are_those_of_trl(
    models: tuple[Any, Any],
    tmp_path: Path,
    loss: str,
    beta: float,
    updated: bool,
    temperature: float,
) -> None:
    """At the first update, and at a later one, where ratios are clipped."""
    reference, policy = models
    given = config(loss=loss, epsilon=0.1, epsilonHigh=0.15, temperature=temperature).grpo
    assert given is not None
    given = given.model_copy(update={"beta": beta})
    before = reference if updated else None
    ours, other = (with_our_forward(copy.deepcopy(each), "none", "positions") for each in (policy, reference))
    with torch.no_grad():
        known = -cross_entropies(other, rollout(), rollout().labels, temperature) if updated else None
    beside: Any = SimpleNamespace(module=other.eval())  # as a ForwardModel has it
    objective = GrpoObjective(given, beside)
    losses = objective.loss(ours, rollout(known))
    found = losses.sum / losses.count
    found.backward()  # type: ignore[no-untyped-call]
    settings = {"loss_type": loss, "epsilon": 0.1, "epsilon_high": 0.15, "beta": beta, "temperature": temperature}
    expected, gradients = trl(copy.deepcopy(policy), before, reference if beta else None, tmp_path, **settings)
    assert float(found.detach()) == pytest.approx(float(expected), abs=1e-5)
    mine = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert mine.keys() == gradients.keys()
    for name, gradient in mine.items():
        assert (gradient - gradients[name]).abs().max() <= 1e-5, name
    totals = LossTotals(objective.names, CPU)
    totals.add(losses)
    values = means(objective.names, totals.vector().tolist()[2:])
    assert (values["clip_ratio"] > 0) == updated
    assert not beta or values["kl"] > 0


def test_advantages_are_by_group() -> None:
    given = config().grpo
    assert given is not None
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3], dtype=torch.float64)
    found, std = advantages(rewards, given)
    deviation = math.sqrt(4 * 0.25 / 3)  # as TRL's: divided by one less than there are
    assert found[:4].tolist() == pytest.approx([s * 0.5 / (deviation + 1e-4) for s in (1, -1, -1, 1)])
    assert found[4:].tolist() == pytest.approx([0.0] * 4, abs=1e-9)
    assert std[:4].tolist() == pytest.approx([deviation] * 4)
    raw, _ = advantages(rewards, given.model_copy(update={"scale_rewards": False}))
    assert raw[:4].tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize(("temperature", "top_p", "drawable"), [(1.0, 1.0, 4), (0.5, 1.0, 4), (2.0, 0.8, 2)])
def test_tokens_are_drawn_by_their_probabilities(temperature: float, top_p: float, drawable: int) -> None:
    """The likeliest two of the four have 0.8 together at temperature 2, and the likeliest alone has not."""
    logits = torch.tensor([[2.0, -1.0, 0.5, -30.0]])
    count = 4_000
    seen = Counter(drawn([number], temperature, top_p)(logits, 0, 3)[0] for number in range(count))
    chances = torch.softmax(logits[0] / temperature, 0)
    chances[chances.argsort(descending=True)[drawable:]] = 0.0
    for token, chance in enumerate((chances / chances.sum()).tolist()):
        assert abs(seen[token] - count * chance) <= 4 * math.sqrt(count * chance * (1 - chance)) + (chance > 0)
    assert drawn([5, 6, 7])(logits.expand(2, 4), 1, 9) == [drawn([each])(logits, 0, 9)[0] for each in (6, 7)]


SHAPE = Architecture(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=264, max_positions=64)
TOKENIZER = load_tokenizer("bytes")
ENDS = frozenset({256, *range(0, 256, 9)})


class Data:
    """Prompts of different lengths, answered well by a byte below 128."""

    def prompt(self, sample_id: int) -> ModelPrompt:
        return ModelPrompt(
            list(f"prompt {sample_id} {'x' * (sample_id % 5)}".encode()), {"answer": "no answer is this"}
        )


def rollouts(
    division: DataParallel, micro_batch: int = 2, judge: Any = None, **settings: Any
) -> tuple[RolloutMaker, StepBatch]:
    """With the prompts of a rank of a step of two prompts."""
    definition = DecoderModel(SHAPE, None)
    module = definition.build(torch.float32, "none")
    definition.fill(module, CPU, 3, values=True)
    verifiers = [{"regex": {"pattern": "^[\\x00-\\x7f]"}, "name": "ascii"}]
    given = config(**{"verifiers": verifiers} | settings)
    given = given.model_copy(update={"batch": given.batch.model_copy(update={"micro_batch": micro_batch})})
    assert given.grpo is not None
    writer = TokenWriter(module, definition, TOKENIZER, ENDS, CPU)
    scoring = AnswerScoring(given.grpo.verifiers, TOKENIZER)
    data: Any = Data()
    ids = tuple(number for number in (40, 43) if (number - 40) // 3 % division.size in division.shares)
    blank = TokenBatch.of([unscored_row([1], 32, PAD)])
    rows = len(ids) + division.blank_shares
    step = StepBatch((blank,) * rows, DataCursor(seed=11, epoch=0, sample=44), ids, 9, tuple(range(rows)))
    return RolloutMaker(given, data, scoring, module, writer, PAD, judge), step


def written(batch: StepBatch) -> list[tuple[list[int], list[int], float]]:
    """Of each answer prompt and answer, the answer, and its advantage."""
    found = []
    for micro in batch.micro:
        assert isinstance(micro, RolloutBatch)
        for row in range(len(micro.tokens)):
            if micro.counted[row]:
                whole = micro.tokens[row][micro.documents[row] >= 0].tolist()
                labels = micro.labels[row]
                found.append((whole, labels[labels != -100].tolist(), float(micro.advantages[row])))
    return found


def test_every_prompt_is_answered_alike_on_however_many_ranks() -> None:
    made, step = rollouts(DataParallel(1, (0,)))
    whole = made.of(step)
    answers = written(whole)
    assert len(answers) == 8
    assert len({tuple(tokens) for tokens, _, _ in answers}) == 8, "each is drawn by luck of its own"
    assert written(rollouts(DataParallel(1, (0,)), micro_batch=8)[0].of(step)) == answers
    parts = [rollouts(DataParallel(2, (share,))) for share in (0, 1)]
    assert [each for maker, own in parts for each in written(maker.of(own))] == answers
    assert whole.tokens >= sum(len(tokens) for tokens, _, _ in answers) - 8
    for prompt, some in ((40, answers[:4]), (43, answers[4:])):
        asked = Data().prompt(prompt).ids
        for tokens, labels, _ in some:
            assert tokens == [*asked, *labels]
            assert len(labels) == 6 or labels[-1] in ENDS
        assert sum(advantage for _, _, advantage in some) == pytest.approx(0.0, abs=1e-5)
    assert any(advantage for _, _, advantage in answers), "else the rewards say little"


class LengthJudge:
    """Scores an answer by its tokens, and counts what it is asked."""

    asked = 0

    def of(self, prompts: Any, written: Any) -> Tensor:
        self.asked += len(written)
        return torch.tensor([float(len(row.tokens)) for row in written], dtype=torch.float64)


def test_a_reward_models_score_is_added_by_its_weight() -> None:
    scorer = {"from": {"uri": "file:///judge"}, "weight": 0.5}
    made, step = rollouts(DataParallel(1, (0,)), judge=LengthJudge(), rewardModel=scorer, scaleRewards=False)
    for micro in made.of(step).micro:
        assert isinstance(micro, RolloutBatch)
        names = GrpoObjective(made._config).reported
        told = dict(zip(names, micro.reported.unbind(1), strict=True))
        lengths = told["answer_tokens"] - told["finished"]
        assert told["rewards/reward_model"].tolist() == lengths.tolist()
        assert told["reward"].tolist() == (told["rewards/ascii"] + 0.5 * lengths).tolist()


def test_programs_stopped_at_a_limit_are_reported_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name in the step's values. What the model writes here is no program: one that hangs stands for it."""
    monkeypatch.setattr("muster.trainer.verify.scorers._block", lambda _: "while True: pass")
    limits = {"unitTests": {"column": "answer", "timeoutSeconds": 0.2}}
    made, step = rollouts(DataParallel(1, (0,)), verifiers=[limits])
    objective = GrpoObjective(made._config)
    told = torch.cat([micro.reported for micro in made.of(step).micro if isinstance(micro, RolloutBatch)])
    values = dict(zip(objective.reported, told.mean(0).tolist(), strict=True))
    assert (values["rewards/unit_tests"], values["reward"]) == (0, 0)
    assert (values["unit_tests/out_of_time"], values["unit_tests/out_of_memory"]) == (1, 0)


def test_a_rank_without_prompts_makes_the_others_passes() -> None:
    judge = LengthJudge()
    scorer = {"from": {"uri": "file:///judge"}}
    made, step = rollouts(DataParallel(2, (), shares_per_rank=1), judge=judge, rewardModel=scorer)
    batch = made.of(step)
    assert judge.asked == 4
    assert [len(micro.tokens) for micro in batch.micro] == [2, 2]
    assert written(batch) == []
    assert all((micro.labels == -100).all() for micro in batch.micro)


def test_nothing_is_learnt_from_what_was_cut_off_where_that_is_asked() -> None:
    made, step = rollouts(DataParallel(1, (0,)))
    plain = written(made.of(step))
    masked = written(rollouts(DataParallel(1, (0,)), maskTruncated=True)[0].of(step))
    cut = [not labels[-1:] or labels[-1] not in ENDS for _, labels, _ in plain]
    assert any(cut)
    assert [not labels for _, labels, _ in masked] == cut


def test_rewards_that_never_vary_are_said() -> None:
    made, _ = rollouts(DataParallel(1, (0,)))
    said: list[str] = []
    for _ in range(SILENT_STEPS - 1):
        made.watch({"zero_variance": 1.0, "reward": 0.0}, said.append)
    made.watch({"zero_variance": 0.9}, said.append)
    assert said == []
    for _ in range(SILENT_STEPS):
        made.watch({"zero_variance": 1.0, "reward": 0.25}, said.append)
    assert len(said) == 1
    assert f"in the last {SILENT_STEPS} steps all answers to each prompt had the same reward (mean 0.25)" in said[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"completions": 3}, "= 8 answers does not divide into prompts of grpo.completions 3 answers"),
        ({"completions": 1}, "grpo.completions: must be at least 2"),
        ({"maxTokens": 32}, "leaves no room for a prompt in data.sequenceLength 32"),
        (
            {"beta": 0.1, "model": {"source": "file:///base"}, "data": DATA | {"addTokens": ["<a>"]}},
            "grpo.beta compares a whole model with the one that it started from, which doesn't know the tokens of",
        ),
        ({"verifiers": []}, "nothing rewards the answers: give verifiers, rewardModel or both"),
        ({"parallel": {"compile": True}}, "can't do so with parallel.compile"),
        ({"labelSmoothing": 0.1}, "can't do so with labelSmoothing"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidDocument) as refused:
        config(**changes)
    assert words in str(refused.value)
