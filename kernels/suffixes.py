"""The Python binding of suffix decoding: candidates from earlier texts in which a row's last tokens occur."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import byref, c_void_p
from typing import NamedTuple

from outrider.kernels.library import SuffixRowsStructure, check, load


class Gain(NamedTuple):
    """A row's new tokens; for a new row all of its tokens, of which the first ``prompt`` are its prompt.

    At most ``most`` candidates are wanted.
    """

    key: int
    tokens: Sequence[int]
    prompt: int
    most: int


class Found(NamedTuple):
    """Candidates for a row. ``reaches`` are the chances that each holds together with all before it.

    ``from_others`` says of each whether its longest match is another row's answer.
    """

    tokens: Sequence[int] = ()
    reaches: Sequence[float] = ()
    from_others: Sequence[int] = ()


NOTHING_FOUND = Found()

# As in suffixes.cpp: tokens of a chunk, and bytes of its header; lengths of n-grams; the smallest table; bytes of an int
# and of a page.
CHUNK, OF_A_CHUNK, LEVELS, LEAST_BUCKETS, INT, PAGE = 32, 24, 3, 256, 4, 4096


def bytes_of_answers(most: int, written: int) -> int:
    """Bytes of the last ``most`` tokens of all answers once ``written`` are written; untouched pages take no memory."""
    chunks = most // CHUNK
    if not chunks:
        return 0
    buckets = max(LEAST_BUCKETS, 1 << (most - 1).bit_length())
    # Every token has its place in the tables, wherever that is.
    tables = min(INT * LEVELS * buckets, PAGE * LEVELS * written)
    return OF_A_CHUNK * chunks + INT * (1 + LEVELS) * min(chunks * CHUNK, written) + tables


class Suffixes:
    """Indexes the texts of unfinished rows, and the last ``tokens`` tokens of all answers."""

    def __init__(self, tokens: int) -> None:
        self._library = load()
        self._handle = c_void_p()
        check(self._library.outrider_suffixes_create(tokens, byref(self._handle)))
        self._room = (0, 0)
        self._resize(1, 1)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.outrider_suffixes_destroy(self._handle)

    @property
    def bytes(self) -> int:
        """The most memory that answers take."""
        return int(self._library.outrider_suffixes_bytes(self._handle))

    def advance(self, gains: Sequence[Gain], least_reach: float) -> list[Found]:
        """Add the rows' new tokens; candidates for each row, as far as their reach is at least ``least_reach``."""
        if not gains:
            return []
        stride = max(1, max(gain.most for gain in gains))
        self._resize(len(gains), stride)
        keys = array("q", [gain.key for gain in gains])
        prompts = array("i", [gain.prompt for gain in gains])
        gained = array("i", [len(gain.tokens) for gain in gains])
        most = array("i", [gain.most for gain in gains])
        tokens = array("i")
        for gain in gains:
            tokens.extend(gain.tokens)
        rows = SuffixRowsStructure(
            len(gains),
            *(_address(each) for each in (keys, prompts, gained, tokens, most)),
            stride,
            least_reach,
            *(_address(each) for each in (self._made, self._candidates, self._reaches, self._from_others)),
        )
        check(self._library.outrider_suffixes_advance(self._handle, byref(rows)))
        return [self._found(at * stride, made) for at, made in enumerate(self._made[: len(gains)])]

    def end(self, key: int, tokens: Sequence[int]) -> None:
        """The row has ended with these last tokens; its answer is kept."""
        last = array("i", tokens)
        check(self._library.outrider_suffixes_end(self._handle, key, _address(last), len(last)))

    def learn(self, answer: Sequence[int]) -> None:
        """Add an answer of another replica."""
        tokens = array("i", answer)
        check(self._library.outrider_suffixes_learn(self._handle, _address(tokens), len(tokens)))

    def _found(self, first: int, made: int) -> Found:
        if not made:
            return NOTHING_FOUND
        part = slice(first, first + made)
        return Found(self._candidates[part].tolist(), self._reaches[part].tolist(), self._from_others[part].tolist())

    def _resize(self, rows: int, stride: int) -> None:
        if rows * stride <= self._room[0] and rows <= self._room[1]:
            return
        self._room = (rows * stride, rows)
        self._made = array("i", bytes(4 * rows))
        self._candidates = array("i", bytes(4 * rows * stride))
        self._reaches = array("d", bytes(8 * rows * stride))
        self._from_others = array("B", bytes(rows * stride))


def _address(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]
