"""The suffix index: matches, learned probabilities, bounds of memory, and any order of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.library import KernelError
from outrider.kernels.suffixes import Found, Gain, Suffixes

ROOM = 1 << 16
SONG = list(range(10, 40))


def found(suffixes: Suffixes, key: int, tokens: Sequence[int], most: int = 8, prompt: int = 0, least: float = 0.0) -> Found:
    [one] = suffixes.advance([Gain(key, tokens, prompt, most)], least)
    return one


def test_a_row_goes_on_like_its_own_text() -> None:
    suffixes = Suffixes(0)
    one = found(suffixes, 1, [1, 2, 3, 4, 9, 1, 2, 3], 3)
    assert (one.tokens, one.from_others) == ([4, 9, 1], [0, 0, 0])
    assert one.reaches == sorted(one.reaches, reverse=True)
    assert found(Suffixes(0), 1, [1, 2, 1, 2], 6).tokens == [1, 2, 1, 2, 1, 2], "beyond the end of what is there"
    assert found(Suffixes(0), 1, [1, 2, 3, 4]).tokens == ()
    assert found(Suffixes(0), 1, [7]).tokens == ()


def test_a_row_goes_on_like_what_others_wrote_while_they_write_it() -> None:
    suffixes = Suffixes(ROOM)
    found(suffixes, 1, [1, *SONG[:20]], prompt=1)
    one = found(suffixes, 2, [2, 3, *SONG[:10]], prompt=12)
    assert (one.tokens, one.from_others) == (SONG[10:18], [1] * 8)
    suffixes.end(1, SONG[20:])
    assert found(suffixes, 2, SONG[10:19]).tokens == SONG[19:27], "behind its end, too"
    assert found(suffixes, 3, [5, *SONG[:6]], prompt=7).tokens == SONG[6:14], "an ended row stays"


def test_prompts_of_others_are_not_what_they_wrote() -> None:
    suffixes = Suffixes(ROOM)
    found(suffixes, 1, [*SONG, 1, 2, 3, 4, 5, 6, 7, 8, 9], prompt=38)
    assert found(suffixes, 2, SONG[:12], prompt=12).tokens == ()
    # But an answer is known by what it begins behind.
    assert found(suffixes, 3, [6, 7, 8], prompt=3).tokens == [9]
    alone = Suffixes(0)
    found(alone, 1, [1, *SONG], prompt=1)
    assert found(alone, 2, [1, *SONG[:12]], prompt=1).tokens == (), "nothing is kept where nothing is to be"


def test_the_likelier_of_two_continuations_is_proposed() -> None:
    suffixes = Suffixes(ROOM)
    for last in (50, 50, 51, 50, 52):
        suffixes.learn([1, 2, 3, last, 60])
    one = found(suffixes, 1, [1, 2, 3], prompt=3)
    assert one.tokens == [50, 60]
    assert 0.1 < one.reaches[0] < 0.5 * one.reaches[1] / one.reaches[0] + 0.5


def test_chances_are_learned_from_guesses_that_nobody_verified() -> None:
    random_like = np.random.default_rng(3).integers(0, 9, size=600).tolist()
    hopeful, wrong = Suffixes(0), Suffixes(0)
    found(hopeful, 1, SONG)
    found(wrong, 1, random_like[:30])
    for at in range(120):
        sure = found(hopeful, 1, [SONG[at % len(SONG)]], most=0)
        assert sure.tokens == (), "none is wanted"
    assert found(hopeful, 1, [SONG[0]]).reaches[0] > 0.9
    for token in random_like[30:]:
        unsure = found(wrong, 1, [token])
    assert not unsure.reaches or unsure.reaches[0] < 0.5


def test_the_oldest_answers_leave_and_nothing_grows() -> None:
    suffixes = Suffixes(256)
    suffixes.learn(SONG)
    assert found(suffixes, 1, SONG[:9], prompt=9).tokens
    for number in range(40):
        suffixes.learn([1000 + 40 * number + at for at in range(30)])
    assert found(suffixes, 2, SONG[:9], prompt=9).tokens == ()
    assert found(suffixes, 3, [2560 + at for at in range(9)], prompt=9).tokens == [2560 + at for at in range(9, 17)]
    assert 60 << 20 > Suffixes(1 << 21).bytes > Suffixes(1 << 20).bytes


def test_an_answer_longer_than_all_room_keeps_its_end() -> None:
    suffixes = Suffixes(64)
    long = [at * 3 for at in range(500)]
    found(suffixes, 1, [1, *long], prompt=1)
    assert found(suffixes, 2, long[475:485], prompt=10).tokens == long[485:493]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 3), max_size=40), st.booleans(), st.integers(0, 20)),
        max_size=40,
    ),
    st.sampled_from([0, 32, 64, 200, 4096]),
)
def test_whatever_rows_come_candidates_are_a_hint_with_falling_chances(
    steps: list[tuple[int, list[int], bool, int]], room: int
) -> None:
    suffixes = Suffixes(room)
    for key, tokens, ends, most in steps:
        if ends:
            suffixes.end(key, tokens)
            suffixes.learn(tokens)
            continue
        both = suffixes.advance([Gain(key, tokens, len(tokens) // 2, most), Gain(key + 10, tokens[:2], 0, 3)], 0.02)
        for one, wanted in zip(both, (most, 3), strict=True):
            assert len(one.tokens) == len(one.reaches) == len(one.from_others) <= wanted
            assert all(0 <= token <= 3 for token in one.tokens)
            assert list(one.reaches) == sorted(one.reaches, reverse=True)
            assert all(0.02 <= reach < 1.0 for reach in one.reaches)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(KernelError, match="tokens of answers"):
        Suffixes(-1)
    assert Suffixes(5).advance([], 0.0) == []
