"""The row's own text as a draft: the same as searching it anew each time."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outrider.workers.draft.lookup import NgramIndex


def naive_lookup(tokens: Sequence[int], limit: int) -> tuple[int, ...]:
    for size in (4, 3, 2, 1):
        places = [
            start for start in range(len(tokens) - size) if list(tokens[start : start + size]) == list(tokens[-size:])
        ]
        if places and size < len(tokens):
            return tuple(tokens[places[-1] + size :][:limit])
    return ()


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 6), st.integers(1, 5))
def test_lookup_continues_the_longest_last_match(tokens: list[int], limit: int, step: int) -> None:
    index = NgramIndex()
    for length in range(0, len(tokens) + 1, step):
        assert index.propose(tokens[:length], limit) == naive_lookup(tokens[:length], limit)


def test_lookup_by_example() -> None:
    assert NgramIndex().propose([1, 2, 3, 4, 1, 2, 3], 2) == (4, 1)
    assert NgramIndex([1, 2, 3, 4]).propose([9, 2, 3], 2) == (4, 9)
    assert NgramIndex([1, 2, 3, 4]).propose([9, 8], 2) == ()
    assert NgramIndex().propose([1, 2, 3], 4) == ()
    assert NgramIndex().propose([5, 5], 3) == (5,)
    assert NgramIndex().propose([1, 2, 1], 0) == ()
    assert NgramIndex().propose([], 3) == ()
