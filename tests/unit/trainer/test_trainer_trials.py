"""Runs that find something out: the learning-rate range test, and learning a few samples by heart."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.unit.data.making import config, opened, write_jsonl

from muster.recipe.optimizer_config import OptimizerConfig
from muster.trainer.train.reduction import StepRequests
from muster.trainer.train.schedule import learning_rate
from muster.trainer.train.step import StepOutcome
from muster.trainer.train.trials import OverfitTrial, RangeTest, report_verdict, trial_of
from muster.words.checkpoint import DataCursor

STEPS = 100
TESTED = OptimizerConfig.model_validate({"rangeTest": {"lowest": 1e-6, "highest": 1.0}})


def outcome(number: int, loss: float, rate: float = 0.0, skipped: str = "") -> StepOutcome:
    return StepOutcome(
        number=number,
        loss=loss,
        grad_norm=1.0,
        learning_rate=rate,
        tokens=1,
        seconds=0.1,
        data_wait_seconds=0.0,
        skipped=skipped,
        cursor=DataCursor(seed=0, epoch=0, sample=0),
        requests=StepRequests(False, False, False),
        work_seconds=(0.1,),
        values={},
    )


def made(best: float = 1e-3, steps: int = STEPS) -> RangeTest:
    """Of a loss that falls most steeply (by the rate's logarithm) at `best`, and explodes a hundred times above it."""
    test = RangeTest()
    for step in range(1, steps + 1):
        rate = learning_rate(TESTED, step, STEPS)
        fall = 4.0 / (1 + math.exp(-2 * math.log(rate / best)))
        rise = math.exp(min(20.0, 3 * max(0.0, math.log(rate / best / 100))))
        test.saw(outcome(step, 5.0 - fall + rise - 1, rate))
        if test.over:
            break
    return test


def test_rates_grow_evenly_by_their_logarithm() -> None:
    rates = [learning_rate(TESTED, step, STEPS) for step in range(1, STEPS + 1)]
    assert (rates[0], rates[-1]) == (1e-6, pytest.approx(1.0))
    steps = [later / earlier for earlier, later in pairwise(rates)]
    assert steps == pytest.approx([steps[0]] * (STEPS - 1))


@pytest.mark.parametrize("best", [1e-4, 1e-3, 3e-3])
def test_the_steepest_descent_is_suggested_and_divergence_ends_the_test(best: float) -> None:
    test = made(best)
    assert test.over
    assert test.rates[-1] < 1.0
    suggested = test.suggested()
    assert suggested is not None
    assert abs(math.log10(suggested / best)) < 0.7  # the mean lags behind by some steps
    words = test.verdict()
    assert f"optimizer.lr {suggested:.1e}" in words
    assert "it diverges at the last rate" in words


def test_a_resumed_test_goes_on_as_if_it_had_never_stopped() -> None:
    whole, first, second = made(), made(steps=40), RangeTest()
    second.restore(json.loads(json.dumps(first.state())))
    for number in range(40, len(whole.rates)):
        second.saw(outcome(number + 1, whole.losses[number], whole.rates[number]))
    assert second.state() == whole.state()
    assert second.verdict() == whole.verdict()


def test_unsound_numbers_end_the_test_and_a_flat_loss_suggests_nothing() -> None:
    test = RangeTest()
    for step in range(1, 31):
        test.saw(outcome(step, 3.0 + step / 100, 1e-6 * 1.2**step))
    assert not test.over
    assert test.suggested() is None
    assert "the loss falls at no rate" in test.verdict()
    test.saw(outcome(31, 3.0, 1e-3, skipped="the loss is nan"))
    assert test.over
    few = RangeTest()
    few.saw(outcome(1, 3.0, 1e-6))
    assert "too few steps" in few.verdict()


def test_overfitting_is_judged_by_the_last_pass(tmp_path: Path) -> None:
    test = OverfitTrial(samples=8, steps_per_pass=2)
    for step, loss in enumerate((5.0, 4.0, 0.3, 0.1), start=1):
        test.saw(outcome(step, loss))
    assert "8 samples went from 5.0000 to 0.2000: they are learnt by heart" in test.verdict()
    other = OverfitTrial(8, 2)
    other.restore(json.loads(json.dumps(test.state())))
    other.saw(outcome(5, 1.0))
    assert "went from 5.0000 to 0.5500, which is not near 0 (at most 0.2500)" in other.verdict()
    lines: list[str] = []
    report_verdict(other, f"file://{tmp_path}", lines.append)
    assert json.loads((tmp_path / "trial.json").read_text())["verdict"] == lines[0] == other.verdict()


def test_overfitting_repeats_the_first_samples(tmp_path: Path) -> None:
    lines = [{"text": f"{number:015d}"} for number in range(50)]
    source = {"source": str(write_jsonl(tmp_path / "a.jsonl", lines)), "format": "jsonl"}
    few = opened(config([source], packing=False, overfit=5), tmp_path / "cache")
    whole = opened(config([source], packing=False), tmp_path / "cache")
    assert (few.train.samples_per_epoch, whole.train.samples_per_epoch) == (5, 50)
    first = [whole.train.sample(0, number).tokens.tobytes() for number in range(5)]
    for epoch in (0, 1, 7):
        assert [few.train.sample(epoch, number).tokens.tobytes() for number in range(5)] == first
    assert few.fingerprint != whole.fingerprint


def test_one_trial_at_a_time() -> None:
    plain = config([{"source": "/a.jsonl", "format": "jsonl"}])
    assert trial_of(plain) is None
    document: dict[str, Any] = json.loads(plain.model_dump_json(by_alias=True))
    document["optimizer"]["rangeTest"] = {"lowest": 1e-3, "highest": 1e-4}
    with pytest.raises(ValidationError, match=r"lowest 0.001 is not below highest 0.0001"):
        type(plain).model_validate(document)
    document["optimizer"]["rangeTest"] = {}
    document["data"]["overfit"] = 4
    with pytest.raises(ValidationError, match="are two trials; make one after the other"):
        type(plain).model_validate(document)
    document["optimizer"]["rangeTest"] = None
    assert isinstance(trial_of(type(plain).model_validate(document)), OverfitTrial)
