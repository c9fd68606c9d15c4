"""Several sources mixed by weight, with random access: which source gives sample n, and which of its samples.

Of the first n samples, source k gives n times its share, to within one per level of the split: the first source takes
n · share of all, rounded, the second its share of what is left, and so on. Shares are exact fractions, so the answer is
the same on every machine, however large n.

Each source counts its own epochs. An epoch of the mixture ends when every sample of every source has been given at
least once; a source whose weight is large for its size has gone round several times by then. Where sources say how
often they are to be seen (`epochs`), it ends when each of those has given just so many samples. The count runs on from
one epoch of the mixture into the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from muster.recipe.data_config import Source


@dataclass(frozen=True)
class SourceShares:
    """Shares of the sources in a mixture."""

    weights: tuple[Fraction, ...]
    per_epoch: tuple[int, ...]  # the samples of each source that an epoch must have given; 0: it waits for none


def shares_of(sources: Sequence[Source], sizes: Sequence[int], temperature: float | None) -> SourceShares:
    """Return the shares that the configuration requests, for sources with these numbers of samples."""
    # A number is written in decimals: 0.1 means a tenth, not the nearest double.
    own = [Fraction(repr(source.weight)) for source in sources]
    if all(source.epochs is None for source in sources):
        scales = [_by_size(size, temperature) for size in sizes]
        return SourceShares(tuple(weight * scale for weight, scale in zip(own, scales, strict=True)), tuple(sizes))
    given = [
        0 if source.epochs is None else max(1, round(Fraction(repr(source.epochs)) * size))
        for source, size in zip(sources, sizes, strict=True)
    ]
    beside = sum(given)
    return SourceShares(
        tuple(Fraction(n) or weight * beside for n, weight in zip(given, own, strict=True)), tuple(given)
    )


def _by_size(samples: int, temperature: float | None) -> Fraction:
    """Return the factor of a source's weight for its size. It is rounded, because the last digits of a power differ
    between machines."""
    return Fraction(1) if temperature is None else Fraction(f"{samples ** (1 / temperature):.6g}")


class SourceMixture:
    """Mixture of sources, which finds the source and its sample for each position.

    `sizes` holds the samples of one epoch of each source, `weights` the relative weight of each, above 0. `per_epoch`
    is as in Shares; left out, the sizes.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[Fraction], per_epoch: Sequence[int] = ()) -> None:
        self._sizes = tuple(sizes)
        left = sum(weights, Fraction(0))
        self._shares: list[tuple[int, int]] = []  # numerator, denominator of each source's share of what is left for it
        for weight in weights:
            share = weight / left
            self._shares.append((share.numerator, share.denominator))
            left -= weight
        self.samples_per_epoch = max(
            self._first_with(k, count) for k, count in enumerate(per_epoch or self._sizes) if count
        )

    def find(self, number: int) -> tuple[int, int, int]:
        """(source, its epoch, its sample) of the mixture's sample `number`, counted from the start of training."""
        now, before = self.counts(number + 1), self.counts(number)
        source = next(k for k, (high, low) in enumerate(zip(now, before, strict=True)) if high > low)
        return source, *divmod(before[source], self._sizes[source])

    def counts(self, number: int) -> list[int]:
        """Return how many of the first `number` samples each source gives."""
        counts = []
        for numerator, denominator in self._shares:
            counts.append((2 * number * numerator + denominator) // (2 * denominator))
            number -= counts[-1]
        return counts

    def _first_with(self, source: int, count: int) -> int:
        """The smallest number of samples of which `source` gives `count`."""
        low, high = 0, count
        while self.counts(high)[source] < count:
            high *= 2
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.counts(middle)[source] >= count else (middle + 1, high)
        return low
