"""The checksum of a whole file follows from those of its parts."""

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.storage.checksum import combine, crc32, crc32_value, parts_of, whole_file


@given(data=st.binary(max_size=2_000), part_bytes=st.integers(1, 300))
def test_parts_combine_to_the_whole(data: bytes, part_bytes: int) -> None:
    parts = parts_of(len(data), part_bytes)
    checksums = [(crc32(data[start : start + length]), length) for start, length in parts]
    assert sum(length for _, length in parts) == len(data)
    assert combine(checksums) == f"{zlib.crc32(data):08x}"


@pytest.mark.parametrize("size", [0, 1, 63, 64, 4_095, 70_001, 3_000_017])
def test_it_is_the_crc_32_that_servers_and_older_commits_know(size: int) -> None:
    """Of each length at which a vectorised implementation goes another way, at an odd address too."""
    data = memoryview(random.Random(size).randbytes(size + 1))
    for view in (data[:size], data[1:]):
        assert crc32_value(view) == zlib.crc32(view)
        assert crc32_value(view, 0xDEADBEEF) == zlib.crc32(view, 0xDEADBEEF)


def test_an_empty_file_has_one_empty_part() -> None:
    assert parts_of(0) == [(0, 0)]
    assert combine([(crc32(b""), 0)]) == "00000000"


@given(data=st.binary(min_size=1, max_size=500), where=st.integers(min_value=0), bit=st.integers(0, 7))
@pytest.mark.parametrize("algorithm", ["crc32", "sha256", "blake2b"])
def test_every_flipped_bit_is_seen(algorithm: str, data: bytes, where: int, bit: int) -> None:
    flipped = bytearray(data)
    flipped[where % len(data)] ^= 1 << bit
    assert whole_file(memoryview(flipped), algorithm) != whole_file(memoryview(data), algorithm)


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(ValueError, match="'md5'; this version knows crc32, sha256, blake2b"):
        whole_file(memoryview(b""), "md5")
