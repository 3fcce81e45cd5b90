"""What a row's result says of its tokens' probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from outrider.workers.messages import Logprobs


class TokenBytes(Protocol):
    """What single tokens stand for; ``outrider.workers.models.token_bytes`` knows it of a tokenizer."""

    @property
    def silent_tokens(self) -> frozenset[int]:
        """Those that leave nothing in a text."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes of text that the token stands for: of a special one, those of its name."""

    def silent(self, token: int) -> bool:
        """Whether the token is one of those."""


def describe(
    tokens: Sequence[int],
    entries: Sequence[Sequence[tuple[int, float]]],
    text: str,
    token_bytes: TokenBytes,
    left_out: Collection[int],
    given: bool = False,
) -> Logprobs:
    """``entries`` are an engine's, one a token; ``left_out`` are tokens that the text does not show.

    Of a text that was ``given`` it is where they are not written out there.
    """
    named = {token for entry in entries for token, _ in entry}
    pieces = [(token_bytes.bytes_of(token), token in left_out or token_bytes.silent(token)) for token in tokens]
    return Logprobs(
        chosen=tuple(entry[0][1] for entry in entries),
        likeliest=tuple(tuple(entry[1:]) for entry in entries),
        token_bytes={token: token_bytes.bytes_of(token) for token in sorted(named)},
        offsets=_offsets(pieces, text, given),
    )


def _offsets(pieces: Sequence[tuple[bytes, bool]], text: str, given: bool) -> tuple[int, ...]:
    """How many characters of the text come before each token; one that ends a character begun before stands at that one.

    Of each its bytes, and whether the text leaves it out.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets, length = [], 0
    # Some tokenizers drop the space before the first word of a text that stands behind nothing.
    spoken = b"".join(piece for piece, left_out in pieces if not left_out)
    dropped = int(len(spoken) - len(spoken.lstrip(b" ")) > len(text) - len(text.lstrip(" ")))
    for piece, left_out in pieces:
        offset = min(max(0, length - dropped), len(text))
        offsets.append(offset)
        if not left_out or (given and text.startswith(piece.decode(errors="replace"), offset)):
            length += len(decoder.decode(piece))
    return tuple(offsets)
