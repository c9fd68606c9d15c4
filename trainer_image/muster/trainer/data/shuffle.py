"""A new order of n items for every epoch, from (seed, epoch) alone, in bounded memory and with random access.

Items stand in blocks of equal count. The blocks are shuffled by sorting them by a hash of (seed, epoch, block), and so
are the items inside a block when it is looked at. Up to BLOCKS_MAX items a block is one item, so the shuffle is
complete; beyond that the members of a block stay neighbours (they are random with respect to content, see store.py).

The hash is SplitMix64 (Steele, Lea & Flood, OOPSLA 2014) and not NumPy's generators, whose streams may change between
versions: an order must outlive an upgrade between two attempts of one job.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import numpy as np
import numpy.typing as npt

BLOCKS_MAX = 1 << 22  # 4 million blocks: 50 MB for an epoch's order
EPOCHS_KEPT = 2  # a step may cross from one epoch into the next

Int64s = npt.NDArray[np.int64]
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """SplitMix64's output function over value + its golden-ratio increment, in [0, 2**64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permutation(count: int, *key: int) -> Int64s:
    """The numbers 0 to count - 1 in the order that `key` gives."""
    salt = 0
    for part in key:
        salt = mix(salt ^ mix(part))
    value = np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        value = value * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(value ^ (value >> np.uint64(31)), kind="stable")


class EpochShuffle:
    """Items of known sizes, laid end to end in each epoch's order.

    `bounds` is int64 [items + 1], the running total of the sizes in item order, and may start above 0. `stream` tells
    apart the orders of several data sets with one seed.
    """

    def __init__(self, bounds: Int64s, seed: int, stream: int, blocks_max: int = BLOCKS_MAX) -> None:
        self._bounds, self._seed, self._stream = bounds, seed, stream
        self.items = len(bounds) - 1
        self.size = int(bounds[-1]) - int(bounds[0])
        self._block = -(-self.items // blocks_max)
        self._edges = np.append(np.arange(0, self.items, self._block, dtype=np.int64), self.items)
        self._block_sizes = np.diff(bounds[self._edges])
        self._epochs: OrderedDict[int, tuple[Int64s, Int64s]] = OrderedDict()
        self._lock = Lock()

    def window(self, epoch: int, begin: int, end: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return the stretches that lie in [begin, end) of the epoch: (item, first, last) of each, [first, last) within
        its item.

        O(log blocks + stretches), once the epoch's order is made.
        """
        order, ends = self._order(epoch)
        low = int(np.searchsorted(ends, begin, side="right"))
        high = int(np.searchsorted(ends, end, side="left")) + 1
        blocks = order[low:high]
        items = blocks if self._block == 1 else np.concatenate([self._members(epoch, int(block)) for block in blocks])
        sizes = self._bounds[items + 1] - self._bounds[items]
        stops = np.cumsum(sizes) + (int(ends[low - 1]) if low else 0)
        starts = stops - sizes
        inside = (stops > begin) & (starts < end)
        items, starts, stops = items[inside], starts[inside], stops[inside]
        return items, np.maximum(begin - starts, 0), np.minimum(end, stops) - starts

    def _order(self, epoch: int) -> tuple[Int64s, Int64s]:
        """(blocks in order, where each ends in the epoch)."""
        with self._lock:
            if epoch not in self._epochs:
                order = permutation(len(self._block_sizes), self._seed, self._stream, epoch)
                self._epochs[epoch] = order, np.cumsum(self._block_sizes[order])
                if len(self._epochs) > EPOCHS_KEPT:
                    self._epochs.popitem(last=False)
            self._epochs.move_to_end(epoch)
            return self._epochs[epoch]

    def _members(self, epoch: int, block: int) -> Int64s:
        first, last = int(self._edges[block]), int(self._edges[block + 1])
        return first + permutation(last - first, self._seed, self._stream, epoch, 1 + block)
