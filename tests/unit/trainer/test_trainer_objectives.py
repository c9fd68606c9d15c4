"""Objectives of preferences: losses and gradients are those of TRL's trainers, in fp32, on the same pairs.

TRL's trainers are made whole and asked for the loss of a batch; ours computes it from rows that hold both sides of a
pair. TRL averages a cross-entropy over all tokens of a batch, ours over pairs: there, TRL gets each pair as a batch of
its own.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.plan.memory import LOGIT_CHUNK_BYTES
from muster.recipe.data_formats import FORMATS
from muster.recipe.training import TrainingConfig
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import PackedSample
from muster.trainer.models.logits import LogitTransform
from muster.trainer.models.pretrained import with_our_forward
from muster.trainer.models.token_losses import token_cross_entropies
from muster.trainer.train.tasks.answers import answers
from muster.trainer.train.tasks.choice import objective_of
from muster.trainer.train.tasks.objective import BatchLosses, LossTotals, means
from muster.words.base import parse

VOCABULARY, PAD = 259, 256
# Token ids of (prompt, chosen, rejected), of different lengths.
PAIRS = [
    ([11, 12, 13], [40, 41, 42, 43], [50, 51]),
    ([21, 22], [60, 61, 62], [70, 71, 72, 73, 74]),
    ([31, 32, 33, 34], [80], [90, 91, 92]),
]
LABELS = [True, False, True]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A model of transformers as it begins, and as it is after some training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        pad_token_id=PAD,
    )
    reference = LlamaForCausalLM(shape).float()
    policy = copy.deepcopy(reference)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return reference, policy


def rows(with_others: bool = False) -> list[PackedSample]:
    """The pairs as rows: the first two share one, and the last has padding. Of single answers, the chosen one stands
    beside its prompt with the next prompt's."""
    sides = [(p, c, PAIRS[n - 1][1] if with_others else r) for n, (p, c, r) in enumerate(PAIRS)]
    return [_row(sides[:2], LABELS[:2]), _row(sides[2:], LABELS[2:])]


def _row(pairs: list[tuple[list[int], list[int], list[int]]], labels: list[bool]) -> PackedSample:
    length = 32
    tokens, scored = np.full(length, PAD, np.int32), np.full(length, -100, np.int32)
    positions, documents = np.zeros(length, np.int32), np.full(length, -1, np.int32)
    at = 0
    for number, (prompt, answer) in enumerate((prompt, side) for prompt, *both in pairs for side in both):
        whole = [*prompt, *answer]
        here = slice(at, at + len(whole))
        tokens[here], positions[here], documents[here] = whole, range(len(whole)), number
        scored[at + len(prompt) - 1 : at + len(whole) - 1] = answer
        at += len(whole)
    return PackedSample(tokens, scored, positions, documents, np.repeat(np.float32(labels), 2))


def config(task: str, **settings: Any) -> TrainingConfig:
    document = {
        "task": task,
        "model": {"from": {"uri": "file:///base"}},
        "data": {"train": [{"source": "x", "format": FORMATS[task][0]}]},
        "batch": {"tokensPerStep": 512},
        "length": {"steps": 1},
        **({task: settings} if settings else {}),
    }
    return parse(TrainingConfig, document)


def ours(models: tuple[Any, Any], given: TrainingConfig) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """The loss, its gradients by name, and the named values."""
    reference, policy = (with_our_forward(copy.deepcopy(each), "none", "positions") for each in models)
    objective = objective_of(given)
    batch = TokenBatch.of([*rows(given.task == "kto"), _row([], [])._replace(targets=np.zeros(2, np.float32))])
    if objective.stored_reference:
        with torch.no_grad():
            batch.reference = answers(reference, batch).log_probs.flatten(1)
    losses = objective.loss(policy, batch)
    loss = losses.sum / losses.count
    loss.backward()  # type: ignore[no-untyped-call]
    totals = LossTotals(objective.names, torch.device("cpu"))
    totals.add(losses)
    return loss.detach(), _gradients(policy), means(objective.names, totals.vector().tolist()[2:])


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trl(
    models: tuple[Any, Any], task: str, folder: Path, alone: bool, **settings: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """TRL's loss and gradients; `alone` gives it each pair as a batch of its own."""
    trainer, compute = _trainer(models, task, folder, settings)
    batches = [[n] for n in range(len(PAIRS))] if alone else [list(range(len(PAIRS)))]
    total = torch.zeros(())
    for some in batches:
        loss = compute(trainer, some) / len(batches)
        loss.backward()
        total += loss.detach()
    return total, _gradients(trainer.model)


def _trainer(
    models: tuple[Any, Any], task: str, folder: Path, settings: dict[str, Any]
) -> tuple[Any, Callable[..., Tensor]]:
    from datasets import Dataset
    from transformers import AutoTokenizer

    home = {"dpo": "trl", "kto": "trl", "orpo": "trl.experimental.orpo", "simpo": "trl.experimental.cpo"}[task]
    name = {"simpo": "CPO"}.get(task, task.upper())
    module = importlib.import_module(home)
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "per_device_train_batch_size": 3,
        "bf16": False,
    }
    records = [{"prompt": "a ", "chosen": "b", "rejected": "c"}] * 3
    if task == "kto":
        records = [{"prompt": "a ", "completion": "b", "label": label} for label in LABELS]  # type: ignore[misc]
        given["train_sampling_strategy"] = "sequential"
    reference, policy = (copy.deepcopy(each) for each in models)
    references = {"ref_model": reference} if task in ("dpo", "kto") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = getattr(module, f"{name}Trainer")(
            model=policy,
            args=getattr(module, f"{name}Config")(gradient_checkpointing=False, **given, **settings),
            train_dataset=Dataset.from_list(records),
            processing_class=AutoTokenizer.from_pretrained("examples/tiny-model"),
            **references,
        )
    trainer.model.eval()  # there is no dropout; some trainers count what they train on
    return trainer, {"dpo": _dpo, "kto": _kto}.get(task, _without_reference)


def _dpo(trainer: Any, some: list[int]) -> Tensor:
    sides = [(PAIRS[n][0], PAIRS[n][1]) for n in some] + [(PAIRS[n][0], PAIRS[n][2]) for n in some]
    loss: Tensor = trainer.compute_loss(trainer.model, _padded(sides))
    return loss


def _kto(trainer: Any, some: list[int]) -> Tensor:
    inputs = _padded([(PAIRS[n][0], PAIRS[n][1]) for n in some])
    others = _padded([(PAIRS[n][0], PAIRS[n - 1][1]) for n in some])
    inputs |= {f"KL_{name}": value for name, value in others.items()}
    loss: Tensor = trainer.compute_loss(trainer.model, inputs | {"label": torch.tensor([LABELS[n] for n in some])})
    return loss


def _without_reference(trainer: Any, some: list[int]) -> Tensor:
    inputs: dict[str, Tensor] = {}
    for side, place in (("chosen", 1), ("rejected", 2)):
        padded = _padded([(PAIRS[n][0], PAIRS[n][place]) for n in some])
        mask = padded.pop("completion_mask")
        inputs |= {f"{side}_{name}": value for name, value in padded.items()}
        inputs[f"{side}_labels"] = padded["input_ids"].masked_fill(mask == 0, -100)
    loss, _ = trainer.get_batch_loss_metrics(trainer.model, inputs)
    return loss  # type: ignore[no-any-return]


def _padded(sides: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    longest = max(len(prompt) + len(answer) for prompt, answer in sides)
    found: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "completion_mask": []}
    for prompt, answer in sides:
        fill = longest - len(prompt) - len(answer)
        found["input_ids"].append([*prompt, *answer, *[PAD] * fill])
        found["attention_mask"].append([1] * (longest - fill) + [0] * fill)
        found["completion_mask"].append([0] * len(prompt) + [1] * len(answer) + [0] * fill)
    return {name: torch.tensor(lists) for name, lists in found.items()}


# (task, our settings, TRL's settings, whether TRL gets each pair alone)
SAME = [
    ("dpo", {}, {"loss_type": ["sigmoid"]}, False),
    ("dpo", {"beta": 0.3, "loss": "ipo"}, {"loss_type": ["ipo"], "beta": 0.3}, False),
    ("dpo", {"lengthNormalized": True, "beta": 0.7}, {"loss_type": ["sigmoid_norm"], "beta": 0.7}, False),
    ("dpo", {"sftWeight": 0.4}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.4]}, True),
    # Of a single pair, there is nothing to sort: TRL's aot is then its sigmoid with smoothed labels.
    (
        "dpo",
        {"beta": 0.4, "labelSmoothing": 0.2},
        {"loss_type": ["aot"], "beta": 0.4, "label_smoothing": 0.2},
        True,
    ),
    ("orpo", {"beta": 0.2}, {"beta": 0.2}, True),
    (
        "simpo",
        {"beta": 1.5, "gamma": 0.8},
        {"loss_type": "simpo", "beta": 1.5, "simpo_gamma": 0.8, "cpo_alpha": 0.0},
        False,
    ),
    (
        "simpo",
        {"beta": 1.5, "gamma": 0.8, "labelSmoothing": 0.1},
        {"loss_type": "simpo", "beta": 1.5, "simpo_gamma": 0.8, "cpo_alpha": 0.0, "label_smoothing": 0.1},
        False,
    ),
    (
        "simpo",
        {"beta": 1.5, "gamma": 0.8, "sftWeight": 0.3},
        {"loss_type": "simpo", "beta": 1.5, "simpo_gamma": 0.8, "cpo_alpha": 0.3},
        True,
    ),
    ("kto", {"beta": 0.3, "undesirableWeight": 1.5}, {"beta": 0.3, "undesirable_weight": 1.5}, False),
]


@pytest.mark.parametrize(("task", "settings", "theirs", "alone"), SAME)
def test_losses_and_gradients_are_those_of_trl(
    models: tuple[Any, Any], tmp_path: Path, task: str, settings: dict[str, Any], theirs: dict[str, Any], alone: bool
) -> None:
    expected, gradients = trl(models, task, tmp_path, alone, **theirs)
    loss, found, _ = ours(models, config(task, **settings))
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5, msg=name)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3  # there is something to compare


def test_the_loss_of_answers_and_its_gradients_are_those_of_trl(models: tuple[Any, Any], tmp_path: Path) -> None:
    """Task sft, on six conversations of which the answers are learnt: three rows here, six with padding there."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=copy.deepcopy(models[1]),
        args=SFTConfig(str(tmp_path), use_cpu=True, report_to=[], bf16=False, gradient_checkpointing=False),
        train_dataset=Dataset.from_list([{"prompt": "a ", "completion": "b"}] * 3),
        processing_class=AutoTokenizer.from_pretrained("examples/tiny-model"),
    )
    inputs = _padded([(prompt, side) for prompt, *both in PAIRS for side in both])
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs.pop("completion_mask") == 0, -100)
    expected = trainer.compute_loss(trainer.model, inputs)
    expected.backward()
    loss, found, _ = ours(models, config("sft"))
    torch.testing.assert_close(loss, expected.detach(), atol=1e-5, rtol=1e-5)
    gradients = _gradients(trainer.model)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5, msg=name)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3


def test_rewards_and_their_gradients_are_those_of_trl(tmp_path: Path) -> None:
    """A head that scores, Bradley-Terry's loss with margins, and the weight that centres rewards."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    margins = torch.tensor([0.5, 0.0, -0.25])
    torch.manual_seed(4)
    model = scoring_model()
    trainer = RewardTrainer(
        model=copy.deepcopy(model),
        args=RewardConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            report_to=[],
            bf16=False,
            gradient_checkpointing=False,
            center_rewards_coefficient=0.03,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a ", "chosen": "b", "rejected": "c"}] * 3),
        processing_class=AutoTokenizer.from_pretrained("examples/tiny-model"),
    )
    trainer.model.config.pad_token_id = PAD
    trainer.model.eval()  # there is no dropout; it counts what it trains on
    sides = [(PAIRS[n][0], PAIRS[n][1]) for n in range(3)] + [(PAIRS[n][0], PAIRS[n][2]) for n in range(3)]
    inputs = _padded(sides)
    del inputs["completion_mask"]
    expected = trainer.compute_loss(trainer.model, inputs | {"margin": margins})
    expected.backward()
    ours = with_our_forward(model, "none", "positions")
    samples = [
        row._replace(targets=np.repeat(margins.numpy()[some], 2))
        for row, some in zip(rows(), ([0, 1], [2]), strict=True)
    ]
    batch = TokenBatch.of([*samples, samples[1]], unscored=1)
    objective = objective_of(config("reward", centerRewardsCoefficient=0.03))
    losses = objective.loss(ours, batch)
    (losses.sum / losses.count).backward()
    torch.testing.assert_close(losses.sum.detach() / losses.count, expected.detach(), atol=1e-5, rtol=1e-5)
    gradients = _gradients(trainer.model)
    assert _gradients(ours).keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(_gradients(ours)[name], gradient, atol=1e-5, rtol=1e-5, msg=name)
    assert float(gradients["score.weight"].abs().max()) > 1e-3
    totals = LossTotals(objective.names, torch.device("cpu"))
    totals.add(losses)
    values = means(objective.names, totals.vector().tolist()[2:])
    with torch.no_grad():
        chosen, rejected = trainer.model(**inputs).logits.view(2, 3)
    assert values["rewards/margins"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-4)
    assert values["rewards/accuracies"] == pytest.approx(float((chosen > rejected).float().mean()))


def scoring_model() -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        pad_token_id=PAD,
    )
    shape.num_labels = 1
    return LlamaForSequenceClassification(shape).float()


def test_smoothed_dpo_mixes_both_ways_round(models: tuple[Any, Any]) -> None:
    """cDPO against its formula, and the values that are reported."""
    plain, _, values = ours(models, config("dpo", beta=0.4))
    smoothed, _, _ = ours(models, config("dpo", beta=0.4, labelSmoothing=0.2))
    reference, policy = (with_our_forward(copy.deepcopy(each), "none", "positions") for each in models)
    batch = TokenBatch.of(rows())
    with torch.no_grad():
        gains = answers(policy, batch).log_probs - answers(reference, batch).log_probs
    margins = 0.4 * (gains[..., 0] - gains[..., 1]).flatten()[[0, 1, 2]]
    torch.testing.assert_close(plain, -F.logsigmoid(margins).mean())
    torch.testing.assert_close(smoothed, (-0.8 * F.logsigmoid(margins) - 0.2 * F.logsigmoid(-margins)).mean())
    assert values["rewards/margins"] == pytest.approx(float(margins.mean()), rel=1e-5)
    assert values["rewards/accuracies"] == pytest.approx(float((margins > 0).float().mean()))
    assert values["rewards/margins"] == pytest.approx(values["rewards/chosen"] - values["rewards/rejected"], abs=1e-5)


def test_values_of_labels_are_means_over_their_own_answers(models: tuple[Any, Any]) -> None:
    _, _, values = ours(models, config("kto", beta=1.0))
    reference, policy = (with_our_forward(copy.deepcopy(each), "none", "positions") for each in models)
    batch = TokenBatch.of(rows(with_others=True))
    with torch.no_grad():
        gains = answers(policy, batch).log_probs - answers(reference, batch).log_probs
    own, other = gains.view(-1, 2)[[0, 1, 2]].unbind(1)
    good = torch.tensor(LABELS)
    assert values["rewards/chosen"] == pytest.approx(float(own[good].mean()), rel=1e-4)
    assert values["rewards/rejected"] == pytest.approx(float(own[~good].mean()), rel=1e-4)
    assert values["kl"] == pytest.approx(max(0.0, float(other.mean())), rel=1e-4)


def test_a_value_of_nothing_is_left_out() -> None:
    totals = LossTotals(("a", "b", "c"), torch.device("cpu"))
    totals.add(
        BatchLosses(torch.tensor(1.0), torch.tensor(1), torch.tensor([[3.0, 2.0], [0.0, 0.0], [float("nan"), 1.0]]))
    )
    totals.add(BatchLosses(torch.tensor(1.0), torch.tensor(1), torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 1.0]])))
    loss, count, *values = totals.vector().tolist()
    assert (loss, count) == (2.0, 2.0)
    assert means(totals.names, values) == {"a": 1.0}


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, 3.0), LogitTransform(0.5, 3.0, 0.7)])
def test_the_losses_of_tokens_and_their_gradients_are_autograds(
    transform: LogitTransform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGIT_CHUNK_BYTES, "cpu", 4 * 17 * 3)  # three rows at a time
    torch.manual_seed(1)
    hidden, weight, bias = torch.randn(2, 5, 8), torch.randn(17, 8), torch.randn(17)
    labels = torch.randint(0, 17, (2, 5))
    labels[0, 1] = labels[1, 4] = -100
    by_token = torch.randn(2, 5)
    parts = [each.requires_grad_() for each in (hidden, weight, bias)]
    found = token_cross_entropies(hidden, weight, labels, bias, transform)
    gradients = torch.autograd.grad((found * by_token).sum(), parts)
    logits = transform.scale * (hidden @ weight.t() + bias)
    logits = logits if transform.cap is None else transform.cap * torch.tanh(logits / transform.cap)
    logits = logits / transform.temperature
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients, torch.autograd.grad((expected * by_token).sum(), parts), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
