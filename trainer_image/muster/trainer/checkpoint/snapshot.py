"""Snapshot of a rank in shared memory: its file as a save would write it, followed by the order to save it.

The order is there only while the bytes before it are whole. So any process that finds an order can save the bytes, also
when the rank that wrote them is dead.
"""

from __future__ import annotations

import struct
from typing import Final

from muster.trainer.checkpoint.memory import SharedMemory
from muster.trainer.checkpoint.messages import SaveOrder, decode

ORDER_BYTES: Final = 1 << 18  # at the end of the memory
LAYOUTS_KEPT: Final = 2  # of files: the next copy may have another than the one before, which is still whole
_LENGTH = struct.Struct("<Q")


def begin(memory: SharedMemory) -> None:
    """The bytes are about to change: there is no order for them."""
    _LENGTH.pack_into(memory.map, memory.size - ORDER_BYTES, 0)


def complete(memory: SharedMemory, order: bytes) -> None:
    """The bytes are whole, and the encoded `order` saves them. One too long to be left is not."""
    start = memory.size - ORDER_BYTES
    if len(order) <= ORDER_BYTES - _LENGTH.size:
        memory.map[start + _LENGTH.size : start + _LENGTH.size + len(order)] = order
        _LENGTH.pack_into(memory.map, start, len(order))  # last: it says that the rest is there


def left_in(memory: SharedMemory) -> SaveOrder | None:
    """The order for the bytes in `memory`; None where they are not whole."""
    start = memory.size - ORDER_BYTES
    (length,) = _LENGTH.unpack_from(memory.map, start)
    if not 0 < length <= ORDER_BYTES - _LENGTH.size:
        return None
    order = decode(memory.map[start + _LENGTH.size : start + _LENGTH.size + length])
    assert isinstance(order, SaveOrder)
    return order
