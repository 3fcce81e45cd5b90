"""Divides a text into windows that fit into a model's context, and says which of their tokens are scored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# The usual window for perplexity, also of models with longer contexts.
USUAL = 2048
# The bytes of one pass's logits, as float32; the arithmetic on them takes a few times as many.
PASS_BYTES = 64 << 20
MOST_TOKENS = 512
LOGIT_BYTES = 4
# The memory of a pass / that of its logits, as measured, for one model and for two.
TIMES_LOGITS = {1: 6, 2: 12}


def tokens_of_a_pass(vocabulary: int) -> int:
    return max(1, min(MOST_TOKENS, PASS_BYTES // (LOGIT_BYTES * vocabulary)))


def pass_bytes(models: int, vocabulary: int) -> int:
    """The memory of a pass, without that of the engines."""
    return TIMES_LOGITS[models] * LOGIT_BYTES * vocabulary * tokens_of_a_pass(vocabulary)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are fed together; those from ``first`` on are scored, each given the tokens before it in the window."""

    tokens: tuple[int, ...]
    first: int

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.first


def windows_of(pieces: Iterable[Sequence[int]], size: int, stride: int) -> Iterator[Window]:
    """Windows of ``size`` tokens, each beginning ``stride`` behind the one before; the last is shorter.

    Every token is scored once, in the first window that holds it. A window's first token has nothing before it and is not
    scored, so with ``stride == size`` a window scores one token less than it has. ``pieces`` are one text's tokens.
    """
    held: list[int] = []
    first = 1
    for piece in pieces:
        held.extend(piece)
        start = 0
        while len(held) - start > size:
            yield Window(tuple(held[start : start + size]), first)
            first = max(1, size - stride)
            start += stride
        del held[:start]
    if len(held) > first:
        yield Window(tuple(held), first)
