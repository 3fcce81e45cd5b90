"""Builds the log-probabilities of a row's result from those of the engine."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from outrider.workers.messages import Logprobs


class TokenBytes(Protocol):
    """The bytes of single tokens, as ``outrider.workers.models.token_bytes`` derives them from a tokenizer."""

    @property
    def silent_tokens(self) -> frozenset[int]:
        """The tokens that leave nothing in a text."""

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes of text; of a special token, those of its name."""

    def silent(self, token: int) -> bool:
        """Whether the token is one of ``silent_tokens``."""


def describe(
    tokens: Sequence[int],
    entries: Sequence[Sequence[tuple[int, float]]],
    text: str,
    token_bytes: TokenBytes,
    left_out: Collection[int],
    given: bool = False,
) -> Logprobs:
    """``entries`` are the engine's, one for each token; ``left_out`` are tokens that are not in the text.

    In a ``given`` text (an echoed prompt) they are counted where the text has their names.
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
    """How many characters of the text come before each token; for a token within a character, those before that character.

    ``pieces``: (bytes of the token, whether the text leaves it out).
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets, length = [], 0
    # Some tokenizers drop the space at the beginning of a text.
    spoken = b"".join(piece for piece, left_out in pieces if not left_out)
    dropped = int(len(spoken) - len(spoken.lstrip(b" ")) > len(text) - len(text.lstrip(" ")))
    for piece, left_out in pieces:
        offset = min(max(0, length - dropped), len(text))
        offsets.append(offset)
        if not left_out or (given and text.startswith(piece.decode(errors="replace"), offset)):
            length += len(decoder.decode(piece))
    return tuple(offsets)
