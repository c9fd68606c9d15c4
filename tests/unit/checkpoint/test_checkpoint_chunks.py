"""Chunks meet where their elements do: checked against a brute-force count."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from muster.trainer.checkpoint.chunks import TensorChunk


def chunks(dimensions: int) -> st.SearchStrategy[TensorChunk]:
    size = st.integers(0, 5)
    return st.builds(
        lambda pairs: TensorChunk(tuple(o for o, _ in pairs), tuple(e for _, e in pairs)),
        st.lists(st.tuples(size, size), min_size=dimensions, max_size=dimensions),
    )


def elements(chunk: TensorChunk) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + e) for o, e in zip(chunk.offset, chunk.extent, strict=True))))


@given(pair=st.integers(0, 3).flatmap(lambda n: st.tuples(chunks(n), chunks(n))))
def test_the_shared_part_is_what_both_have(pair: tuple[TensorChunk, TensorChunk]) -> None:
    one, other = pair
    shared = one.meets(other)
    assert (elements(shared) if shared else set()) == elements(one) & elements(other)
    assert len(elements(one)) == one.elements
    if shared:
        cut = shared.within(one)
        assert all(0 <= s.start <= s.stop <= e for s, e in zip(cut, one.extent, strict=True))
