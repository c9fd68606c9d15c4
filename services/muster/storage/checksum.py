"""The checksum of a file, in parts: computed in any order and in parallel, and combined without reading again.

CRC-32 (the one of zlib, PNG and S3's `ChecksumCRC32`) over parts of 16 MiB: every one- and two-bit error in a part is
found, and every burst of up to 32 bits; anything else slips through once in 2^32. It guards against accidents, not
against whoever may write to the bucket. The choice and its measurements: docs/decisions/0007-crc32-in-parts.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

from zlib_ng import zlib_ng

PART_BYTES: Final = 16 << 20
_POLYNOMIAL: Final = 0xEDB88320  # reflected; bit 31 is x^0


def crc32(data: memoryview | bytes) -> str:
    """Return the CRC-32 in hex, eight digits. Releases the GIL while it counts."""
    return f"{crc32_value(data):08x}"


def crc32_value(data: memoryview | bytes, before: int = 0) -> int:
    """The CRC-32 of what had `before` as its CRC-32, and then `data`."""
    return zlib_ng.crc32(data, before)


def whole_file(data: memoryview, algorithm: str) -> str:
    """The checksum of a file's bytes in any algorithm that a commit may name. Raises ValueError for another."""
    return running_checksum((data,), algorithm)


def running_checksum(blocks: Iterable[memoryview], algorithm: str) -> str:
    """Return the `whole_file` checksum of successive blocks, without holding them all. Raises ValueError for an unknown
    algorithm."""
    if algorithm == "crc32":
        value = 0
        for block in blocks:
            value = crc32_value(block, value)
        return f"{value:08x}"
    if algorithm not in ("sha256", "blake2b"):
        raise ValueError(f"unknown checksum algorithm {algorithm!r}; this version knows crc32, sha256, blake2b")
    state = hashlib.new(algorithm)
    for block in blocks:
        state.update(block)
    return state.hexdigest()


def parts_of(size: int, part_bytes: int = PART_BYTES) -> list[tuple[int, int]]:
    """Return (start, length) of each part of a file of `size` bytes; an empty file has one empty part."""
    return [(start, min(part_bytes, size - start)) for start in range(0, max(size, 1), part_bytes)]


def combine(parts: Sequence[tuple[str, int]]) -> str:
    """The CRC-32 of the whole from (CRC-32, length) of its successive parts."""
    total = 0
    for checksum, length in parts:
        total = _multiply(_x_to_the(8 * length), total) ^ int(checksum, 16)
    return f"{total:08x}"


def _multiply(a: int, b: int) -> int:
    """a·b modulo the CRC polynomial (as zlib's crc32_combine does it)."""
    product, bit = 0, 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


def _x_to_the(power: int) -> int:
    """x^power modulo the CRC polynomial, by squaring."""
    result, square = 1 << 31, 1 << 30
    while power:
        if power & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        power >>= 1
    return result
