"""Mixing: exact shares at every moment, every source in its own order, an epoch when all has been seen."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.recipe.data_config import Source
from muster.trainer.data.mixture import SourceMixture, shares_of

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
    mixture = SourceMixture(sizes, weights)
    found = [mixture.find(number) for number in range(mixture.samples_per_epoch)]
    everything = {(source, index) for source, size in enumerate(sizes) for index in range(size)}
    assert {(source, index) for source, _, index in found} == everything
    assert {(source, index) for source, _, index in found[:-1]} != everything


@settings(max_examples=40)
@given(mixtures())
def test_each_source_goes_through_its_own_epochs_in_order(made: tuple[list[int], list[Fraction]]) -> None:
    sizes, weights = made
    mixture = SourceMixture(sizes, weights)
    seen: Counter[int] = Counter()
    for number in range(2 * mixture.samples_per_epoch):
        source, epoch, index = mixture.find(number)
        assert (epoch, index) == divmod(seen[source], sizes[source])
        seen[source] += 1


@given(mixtures(), st.integers(0, 10**15))
def test_shares_hold_at_every_moment(made: tuple[list[int], list[Fraction]], number: int) -> None:
    sizes, weights = made
    counts = SourceMixture(sizes, weights).counts(number)
    assert sum(counts) == number
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - number * weight / sum(weights)) < len(sizes)


@given(SIZES)
def test_weights_like_the_sizes_give_everything_exactly_once(sizes: list[int]) -> None:
    mixture = SourceMixture(sizes, [Fraction(size) for size in sizes])
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
    mixture = SourceMixture([100] * len(weights), weights)
    assert "".join(str(mixture.find(number)[0]) for number in range(10)) == expected


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=4), st.integers(0, 3))
def test_epochs_say_how_often_each_sample_is_seen(counted: list[tuple[int, int]], replayed: int) -> None:
    """Exactly so often where nothing stands beside them; with sources that are replayed, to within the rounding."""
    sources = [Source(source="/a", epochs=float(times)) for _, times in counted]
    sources += [Source(source="/b", weight=0.25)] * replayed
    sizes = [size for size, _ in counted] + [1000] * replayed
    shares = shares_of(sources, sizes, None)
    mixture = SourceMixture(sizes, shares.weights, shares.per_epoch)
    found = Counter((s, i) for s, _, i in map(mixture.find, range(mixture.samples_per_epoch)))
    total = sum(size * times for size, times in counted)
    for source, (size, times) in enumerate(counted):
        seen = [found[source, index] for index in range(size)]
        assert sum(seen) >= size * times
        assert sum(seen) <= size * times + len(sizes)
        assert replayed or seen == [times] * size
    assert mixture.samples_per_epoch == pytest.approx(total * (1 + 0.25 * replayed), abs=len(sizes) + 1)


def test_half_an_epoch_goes_on_with_the_other_half() -> None:
    shares = shares_of([Source(source="/a", epochs=0.5), Source(source="/b", epochs=1.0)], [10, 3], None)
    mixture = SourceMixture([10, 3], shares.weights, shares.per_epoch)
    assert mixture.samples_per_epoch == 8
    first, second = (
        {index for source, _, index in map(mixture.find, range(at, at + 8)) if source == 0} for at in (0, 8)
    )
    assert (len(first), len(second), first | second) == (5, 5, set(range(10)))
