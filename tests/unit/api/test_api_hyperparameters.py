"""The numbers that `"auto"` stands for."""

from __future__ import annotations

import pytest

from muster.api.openai.fine_tuning.hyperparameters import GivenHyperparameters, choose


@pytest.mark.parametrize(
    ("examples", "multiple", "epochs", "batch"),
    [
        (None, 8, 3, 8),
        (10, 1, 10, 1),  # a hundred examples in all
        (3, 1, 25, 1),  # no more than 25 times each
        (1_000, 1, 3, 2),
        (1_000, 16, 3, 16),
        (9_000, 3, 2, 18),  # 25,000 examples in all
        (1_000_000, 48, 1, 288),  # 256, rounded up to what the gang computes in whole passes
    ],
)
def test_auto(examples: int | None, multiple: int, epochs: int, batch: int) -> None:
    chosen = choose(GivenHyperparameters(), examples, multiple)
    assert (chosen.n_epochs, chosen.batch_size, chosen.learning_rate_multiplier, chosen.beta) == (
        epochs,
        batch,
        1.0,
        None,
    )
    assert len(chosen.choices) == 3


def test_numbers_are_taken_as_they_are_and_not_told() -> None:
    chosen = choose(GivenHyperparameters(2, 6, 0.5, "auto"), 100, 4)
    assert (chosen.n_epochs, chosen.batch_size, chosen.learning_rate_multiplier, chosen.beta) == (2, 6, 0.5, 0.1)
    assert chosen.choices == ("beta 0.1",)
