"""What a row's result says of its tokens' probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from outrider.workers.messages import Logprobs


class TokenBytes(Protocol):
    """What single tokens stand for; ``outrider.workers.models.token_bytes`` knows it of a tokenizer."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes of text that the token stands for: of a special one, those of its name."""

    def silent(self, token: int) -> bool:
        """Whether the token leaves nothing in a text."""


def describe(
    tokens: Sequence[int],
    entries: Sequence[Sequence[tuple[int, float]]],
    text: str,
    token_bytes: TokenBytes,
    left_out: Collection[int],
) -> Logprobs:
    """``entries`` are an engine's, one a token; ``left_out`` are tokens that the text does not show."""
    named = {token for entry in entries for token, _ in entry}
    spoken = [b"" if token in left_out or token_bytes.silent(token) else token_bytes.bytes_of(token) for token in tokens]
    return Logprobs(
        chosen=tuple(entry[0][1] for entry in entries),
        likeliest=tuple(tuple(entry[1:]) for entry in entries),
        token_bytes={token: token_bytes.bytes_of(token) for token in sorted(named)},
        offsets=_offsets(spoken, text),
    )


def _offsets(spoken: Sequence[bytes], text: str) -> tuple[int, ...]:
    """How many characters of the text come before each token; one that ends a character begun before stands at that one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets, length = [], 0
    # Some tokenizers drop the space before a text's first word.
    dropped = int(b"".join(spoken).startswith(b" ") and not text.startswith(" "))
    for piece in spoken:
        offsets.append(min(max(0, length - dropped), len(text)))
        length += len(decoder.decode(piece))
    return tuple(offsets)
