"""Where a stop string ends a row's text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest
from fakes import END, PIECES, decode
from hypothesis import given
from hypothesis import strategies as st

from outrider.workers.models.text_after import text_after
from outrider.workers.target.text_and_stop_strings import TextWriter

tokens = st.lists(st.integers(0, len(PIECES) - 2), max_size=60)


def feed(writer: TextWriter, row: Sequence[int]) -> int | None:
    """The number of tokens after which the writer stops, None where it does not."""
    for count, token in enumerate(row, start=1):
        if writer.stopped_by(token):
            return count
    return None


@given(tokens, st.lists(st.text("abcx \n", min_size=1, max_size=6), max_size=3))
def test_it_stops_with_the_first_token_that_completes_a_stop_string(row: list[int], stop: list[str]) -> None:
    writer = TextWriter(decode, stop, {END})
    expected = next((count for count in range(1, len(row) + 1) if any(word in decode(row[:count]) for word in stop)), None)
    assert feed(writer, row) == expected
    text = decode(row[:expected])
    assert writer.text() == text[: min((text.find(word) for word in stop if word in text), default=len(text))]


def test_end_tokens_are_no_text() -> None:
    writer = TextWriter(lambda row: "".join(str(token) for token in row), (), {7})
    assert feed(writer, [1, 2, 7]) is None
    assert writer.text() == "12"


@given(tokens, st.lists(st.text("abcx \n", min_size=1, max_size=6), max_size=3), st.integers(0, 20))
def test_a_stop_string_within_min_tokens_is_text(row: list[int], stop: list[str], least: int) -> None:
    writer = TextWriter(decode, stop, {END}, least)
    exempt = len(decode(row[:least]))

    def found(count: int) -> list[int]:
        text = decode(row[:count])
        ends = [(start, start + len(word)) for word in stop for start in range(len(text)) if text.startswith(word, start)]
        return [start for start, end in ends if end > exempt and count > least]

    expected = next((count for count in range(1, len(row) + 1) if found(count)), None)
    assert feed(writer, row) == expected
    assert writer.text() == decode(row[:expected])[: min(found(expected)) if expected else None]


def test_a_stop_string_may_lie_around_end_tokens() -> None:
    writer = TextWriter(decode, ("ab",), {END})
    assert feed(writer, [0, *[END] * 50, 1, 2]) == 52
    assert writer.text() == ""


def without_first_space(tokens: Sequence[int]) -> str:
    """As Llama 2's decoder has it."""
    return "".join((" ab", " cd", "e")[token] for token in tokens).removeprefix(" ")


def test_an_answer_goes_on_behind_its_prompt() -> None:
    """The space before its first word is no text's first one."""
    assert text_after((), (0, 0), without_first_space) == "ab ab"
    assert text_after((1,), (0, 0), without_first_space) == " ab ab"
    assert text_after((2,) * 100, (0,), without_first_space) == " ab"
    writer = TextWriter(without_first_space, (), (), prompt=(0, 1))
    feed(writer, [0, 1])
    assert writer.text() == " ab cd"
    writer = TextWriter(without_first_space, (" ab",), (), prompt=(0, 1))
    assert (feed(writer, [0, 1]), writer.text()) == (1, "")
    writer = TextWriter(without_first_space, (" ab",), (), min_tokens=1, prompt=(0, 1))
    assert (feed(writer, [0, 1, 0]), writer.text()) == (3, " ab cd")


def test_behind_half_a_character_an_answer_is_decoded_alone() -> None:
    halves = "é".encode()

    def decode_bytes(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    assert text_after((97, halves[0]), (halves[1], 98), decode_bytes) == "\ufffdb"


def by_runs_of_bytes(tokens: Sequence[int]) -> str:
    """As Llama 2's decoder: of bytes that are no UTF-8 as a whole each becomes a replacement character. 300 is a word."""
    text = ""
    for is_word, run in groupby(tokens, lambda token: token >= 256):
        given = list(run)
        try:
            text += " word" * len(given) if is_word else bytes(given).decode()
        except UnicodeDecodeError:
            text += len(given) * "\ufffd"
    return text


PARTY = tuple("\N{PARTY POPPER}".encode())


@pytest.mark.parametrize("least", range(2, 7))
def test_a_line_feed_within_min_tokens_is_text_before_half_a_character_too(least: int) -> None:
    writer = TextWriter(by_runs_of_bytes, ("\n",), (), min_tokens=least)
    assert feed(writer, [300, 10, *PARTY, 300, 10, 300]) == 8
    assert writer.text() == " word\n\N{PARTY POPPER} word"


def test_a_stop_string_that_is_a_special_token_ends_a_row() -> None:
    """Its text never shows in the row's."""
    writer = TextWriter(decode, ("<|im_end|>",), {END, 9}, 1, stop_tokens=(9,))
    assert feed(writer, [9, 0, 9, 1]) == 3
    assert writer.text() == decode([0])


def test_rows_without_stop_strings_are_decoded_once() -> None:
    calls: list[int] = []

    def counting(tokens: Sequence[int]) -> str:
        calls.append(len(tokens))
        return decode(tokens)

    writer = TextWriter(counting, (), {END})
    feed(writer, [1] * 100)
    assert calls == []
    writer.text()
    assert calls == [100]


def test_a_stop_string_is_looked_for_in_a_window() -> None:
    longest: list[int] = []

    def watched(tokens: Sequence[int]) -> str:
        longest.append(len(tokens))
        return "".join("abcdefgh"[token] for token in tokens)

    writer = TextWriter(watched, ("hhhh",), ())
    assert feed(writer, [index % 7 for index in range(300)]) is None
    assert max(longest) <= 4 * 4 + 8


def test_the_window_is_that_of_the_longest_stop_string() -> None:
    """A short one beside it must not make it too small: here a token is a character."""
    long = "abcdefghij" * 4
    writer = TextWriter(lambda tokens: "".join(map(chr, tokens)), ("!", long), ())
    assert feed(writer, list(map(ord, f"so {long} and on"))) == len(f"so {long}")
    assert writer.text() == "so "


@pytest.mark.parametrize("word", ["🚀", "é🚀", "日本語"])
def test_characters_that_take_several_tokens(word: str) -> None:
    """A byte a token, as byte-level vocabularies do it at worst."""

    def bytewise(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    text = f"héllo {word} and on"
    writer = TextWriter(bytewise, (word,), ())
    assert feed(writer, text.encode()) == len(f"héllo {word}".encode())
    assert writer.text() == "héllo "


@pytest.mark.parametrize("least", range(6))
def test_min_tokens_may_end_amid_a_character(least: int) -> None:
    """Each byte of it alone is spelled as a character, as byte fallback does it."""

    def bytewise(tokens: Sequence[int]) -> str:
        found, rest = "", bytes(tokens)
        while rest:
            size = next((size for size in (1, 2, 3, 4) if _is_character(rest[:size])), 0)
            found, rest = found + (rest[:size].decode() if size else "\ufffd"), rest[size or 1 :]
        return found

    writer = TextWriter(bytewise, ("\n",), (), least)
    row = "🚀\nab\na".encode()
    stops = 5 if least < 5 else 8
    assert feed(writer, row) == stops
    assert writer.text() == ("🚀" if least < 5 else "🚀\nab")


def _is_character(some: bytes) -> bool:
    try:
        return len(some.decode()) == 1
    except UnicodeDecodeError:
        return False
