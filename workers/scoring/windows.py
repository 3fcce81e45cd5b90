"""A text in windows that fit into a model's context: which tokens are fed together, and which of them count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# What perplexities of models with longer contexts are usually given for.
USUAL = 2048
# Logits of one pass, as float32; the arithmetic on them takes a few times as much.
PASS_BYTES = 64 << 20
MOST_TOKENS = 512
LOGIT_BYTES = 4
# How many times what its logits take a pass takes in all, as measured: for one model, or for two side by side.
TIMES_LOGITS = {1: 6, 2: 12}


def tokens_of_a_pass(vocabulary: int) -> int:
    return max(1, min(MOST_TOKENS, PASS_BYTES // (LOGIT_BYTES * vocabulary)))


def pass_bytes(models: int, vocabulary: int) -> int:
    """What a pass takes beside what the models work in."""
    return TIMES_LOGITS[models] * LOGIT_BYTES * vocabulary * tokens_of_a_pass(vocabulary)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are fed together; those from ``first`` on are scored, each by what stands before it in the window."""

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
