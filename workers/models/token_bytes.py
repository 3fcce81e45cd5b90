"""The bytes of single tokens, which may be a part of a character."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from outrider.workers.models.fast_tokenizer import TextCoder

# The largest factor by which a decoder may lengthen a token.
MOST_GROWTH = 64
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerBytes:
    def __init__(self, coder: TextCoder) -> None:
        self._coder = coder
        self._added = coder.added
        self.silent_tokens = frozenset(token for token, added in self._added.items() if added.special)
        decoder = getattr(coder.fast, "decoder", None)
        self._decoders = list(_flat(json.loads(decoder.__getstate__()))) if decoder is not None else []
        self._kinds = {decoder["type"] for decoder in self._decoders}
        if (growth := math.prod(map(_growth, self._decoders))) > MOST_GROWTH:
            raise ValueError(f"its decoder makes a token up to {growth:.3g} times as long")

    def silent(self, token: int) -> bool:
        return token in self.silent_tokens

    def settled(self, tokens: Sequence[int], shown: Collection[int] = ()) -> Sequence[int]:
        """The tokens of an unfinished answer without the bytes at its end, whose text further tokens may change.

        Of decoders such as Llama 2's: they take neighbouring bytes together, and where these are no UTF-8 as a whole (the
        last character is incomplete), all of them become replacement characters, a line feed in front of it too.
        """
        end = len(tokens)
        while end and "ByteFallback" in self._kinds and self._joins_bytes(tokens[end - 1], shown):
            end -= 1
        return tokens[:end]

    def _joins_bytes(self, token: int, shown: Collection[int]) -> bool:
        """Whether bytes before the token and behind it may be neighbours: it is one, or leaves nothing in the text."""
        if token in self._added:
            return self.silent(token) and token not in shown
        name = self._coder.token(token)
        return name is None or BYTE_TOKEN.fullmatch(name) is not None

    def bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token].content).encode()
        name = self._coder.token(token)
        if name is None:  # an id that pads the vocabulary
            return b""
        if "ByteLevel" in self._kinds:
            return b"".join(_byte_of(letter) for letter in name)
        if "ByteFallback" in self._kinds and (found := BYTE_TOKEN.fullmatch(name)):
            return bytes.fromhex(found[1])
        if self._kinds & {"Replace", "Metaspace"}:
            return self._replaced(name).encode()
        # Other decoders join words by rules of their own: take the text of the token alone.
        return self._coder.decode([token], False).encode()

    def _replaced(self, name: str) -> str:
        for decoder in self._decoders:
            if decoder["type"] == "Replace" and "String" in decoder["pattern"]:
                name = name.replace(decoder["pattern"]["String"], decoder["content"])
            elif decoder["type"] == "Metaspace":
                name = name.replace(decoder["replacement"], " ")
        return name


def _growth(decoder: dict[str, Any]) -> float:
    """The largest factor by which this decoder lengthens a text."""
    if decoder["type"] != "Replace":
        return 1.0
    return max(1.0, len(decoder["content"]) / max(1, len(decoder["pattern"].get("String", ""))))


def _flat(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A decoder may be a sequence of others."""
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _flat(inner)
    else:
        yield decoder


def _letters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for letters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


LETTERS = _letters()


def _byte_of(letter: str) -> bytes:
    return bytes((LETTERS[letter],)) if letter in LETTERS else letter.encode()
