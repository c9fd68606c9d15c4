"""Mixing: exact shares at every moment, every source in its own order, an epoch when all has been seen."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.trainer.data.mixture import Mixture

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=5)
WEIGHTS = st.fractions(Fraction(1, 50), 10, max_denominator=50)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[int], list[Fraction]]:
    sizes = draw(SIZES)
    return sizes, draw(st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))


@given(mixtures())
def test_an_epoch_gives_every_sample_of_every_source_and_no_fewer_would(
    made: tuple[list[int], list[Fraction]],
) -> None:
    sizes, weights = made
    mixture = Mixture(sizes, weights)
    found = [mixture.find(number) for number in range(mixture.samples_per_epoch)]
    everything = {(source, index) for source, size in enumerate(sizes) for index in range(size)}
    assert {(source, index) for source, _, index in found} == everything
    assert {(source, index) for source, _, index in found[:-1]} != everything


@settings(max_examples=40)
@given(mixtures())
def test_each_source_goes_through_its_own_epochs_in_order(made: tuple[list[int], list[Fraction]]) -> None:
    sizes, weights = made
    mixture = Mixture(sizes, weights)
    seen: Counter[int] = Counter()
    for number in range(2 * mixture.samples_per_epoch):
        source, epoch, index = mixture.find(number)
        assert (epoch, index) == divmod(seen[source], sizes[source])
        seen[source] += 1


@given(mixtures(), st.integers(0, 10**15))
def test_shares_hold_at_every_moment(made: tuple[list[int], list[Fraction]], number: int) -> None:
    sizes, weights = made
    counts = Mixture(sizes, weights).counts(number)
    assert sum(counts) == number
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - number * weight / sum(weights)) < len(sizes)


@given(SIZES)
def test_weights_like_the_sizes_give_everything_exactly_once(sizes: list[int]) -> None:
    mixture = Mixture(sizes, [Fraction(size) for size in sizes])
    assert mixture.samples_per_epoch == sum(sizes)
    found = [mixture.find(number) for number in range(sum(sizes))]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([Fraction(1), Fraction(1)], "0101010101"),
        ([Fraction(3), Fraction(1)], "0010001000"),
        ([Fraction("0.7"), Fraction("0.2"), Fraction("0.1")], "0100020010"),
    ],
)
def test_sources_are_interleaved_evenly(weights: list[Fraction], expected: str) -> None:
    mixture = Mixture([100] * len(weights), weights)
    assert "".join(str(mixture.find(number)[0]) for number in range(10)) == expected
