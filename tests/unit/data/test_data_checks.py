"""What is said of data that are there, but too few."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.trainer.test_trainer_grpo import config

from muster.trainer.data.checks import must_have_samples, warn_of_small_epoch
from muster.trainer.errors import UserError


def data(samples: int) -> Any:
    return SimpleNamespace(train=SimpleNamespace(samples_per_epoch=samples))


def test_fewer_samples_than_one_step_are_told_and_none_refused() -> None:
    given, said = config(), list[str]()
    step = given.samples_per_step()
    assert step > 1
    warn_of_small_epoch(given, data(step), said.append)
    assert said == []
    warn_of_small_epoch(given, data(step - 1), said.append)
    assert len(said) == 1
    assert f"an epoch has fewer samples than one step: {step - 1} of {step}" in said[0]
    assert "lower batch.tokensPerStep" in said[0]
    with pytest.raises(UserError, match="less than one sample of 32 tokens"):
        must_have_samples(given, data(0))
