"""Decodes a row's tokens to its text, and finds stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from outrider.workers.messages import Echo, Logprobs, Row
from outrider.workers.models.text_after import text_after
from outrider.workers.target.logprobs import TokenBytes, describe

# The most bytes, and so tokens, of one character.
LONGEST_CHARACTER = 4


class Decoder(Protocol):
    def __call__(self, tokens: Sequence[int]) -> str: ...


class TextWriter:
    """Collects one row's tokens. Only rows with stop strings are decoded before they end.

    A stop string that is complete within the first ``min_tokens`` tokens is text like any other. ``end_tokens`` are left
    out of the text; ``stop_tokens`` are stop strings that are one special token. The text is decoded as a continuation of
    ``prompt``. ``token_bytes`` is needed for log-probabilities.
    """

    def __init__(
        self,
        decode: Decoder,
        stop: Sequence[str],
        end_tokens: Collection[int],
        min_tokens: int = 0,
        token_bytes: TokenBytes | None = None,
        prompt: Sequence[int] = (),
        stop_tokens: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._prompt = prompt
        self._stop_tokens = stop_tokens
        self._stop = stop
        self._end_tokens = end_tokens
        self._min_tokens = min_tokens
        self._token_bytes = token_bytes
        self._tokens: list[int] = []
        self._shown: list[int] = []
        # How many of the tokens shown are among the first min_tokens.
        self._exempt = 0
        # A window of this many tokens holds any stop string: at most four tokens make one character.
        self._window = 4 * max((len(word) for word in stop), default=0) + 8

    def stopped_by(self, token: int) -> bool:
        """Add a token; True if the text now holds a stop string."""
        self._tokens.append(token)
        if token not in self._end_tokens:
            self._shown.append(token)
        if len(self._tokens) <= self._min_tokens:
            self._exempt = len(self._shown)
            return False
        if token in self._stop_tokens:
            return True
        first = max(0, len(self._shown) - self._window)
        return bool(self._stop) and self._find_stop(self._text_from(first), first) is not None

    def text(self) -> str:
        """The text so far, without end tokens, up to the first stop string."""
        text = self._text_from(0)
        return text[: self._find_stop(text, 0)]

    def logprobs(self, entries: Sequence[Sequence[tuple[int, float]]]) -> Logprobs:
        """The log-probabilities of the tokens so far; ``entries`` are the engine's."""
        if self._token_bytes is None:
            raise ValueError("log-probabilities of a row whose tokens have no known pieces")
        return describe(self._tokens, entries, self.text(), self._token_bytes, self._end_tokens)

    def echo(self, row: Row, entries: Sequence[Sequence[tuple[int, float]]]) -> Echo:
        """The row's prompt; ``entries`` are the log-probabilities of its tokens but the first, if the row asks for any."""
        text = row.echo or self._decode(row.prompt)
        if row.logprobs is None or self._token_bytes is None:
            return Echo(text, row.prompt)
        first = [(row.prompt[0], 0.0)]
        told = describe(row.prompt, [first, *entries], text, self._token_bytes, self._end_tokens, given=bool(row.echo))
        return Echo(text, row.prompt, told)

    def _text_from(self, first: int, end: int | None = None) -> str:
        """The text of the shown tokens first..end."""
        shown = self._shown[first:end]
        return self._decode(shown) if first else text_after(self._prompt, shown, self._decode)

    def _find_stop(self, text: str, first: int) -> int | None:
        """Where the first stop string begins that is not complete within the exempt tokens.

        The text is that of the shown tokens from ``first`` on.
        """
        exempt = self._exempt_characters(first) if first < self._exempt else 0
        found = [text.find(word, max(0, exempt - len(word) + 1)) for word in self._stop]
        return min((index for index in found if index >= 0), default=None)

    def _exempt_characters(self, first: int) -> int:
        """How many characters the exempt tokens from ``first`` on make.

        A character that is incomplete at their end decodes to replacement characters, by decoders such as Llama 2's with
        all bytes in front of it: then fewer tokens, at most a character's bytes, make more of the text.
        """
        length = 0
        for end in range(self._exempt, max(first, self._exempt - LONGEST_CHARACTER), -1):
            text = self._text_from(first, end)
            length = max(length, len(text.rstrip("\ufffd")))
            if not text.endswith("\ufffd"):
                break
        return length
