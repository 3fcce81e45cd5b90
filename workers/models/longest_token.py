"""How many characters of a text one token can stand for at most, so that a text that cannot fit need not be encoded.

Known of tokenizers by byte pairs in which every character becomes a token or part of one. Others may drop characters, or
make one token of any number of unknown ones, and have no bound.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as Fast

# Canonical composition makes one character of four at most.
MOST_COMPOSED = 4
COMPOSING, KEEPING = ("NFC", "NFKC"), ("NFD", "NFKD", "Prepend", "Lowercase")
# The characters by which a ByteLevel pre-tokenizer writes the 256 bytes: printable ones by themselves, others from 256 on.
PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
BYTE_LETTERS = frozenset(map(chr, [*PRINTABLE, *range(256, 512 - len(PRINTABLE))]))
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def longest_token(fast: Fast) -> int | None:
    """The bound; None if none is known."""
    written: dict[str, Any] = json.loads(fast.to_str())
    model = written["model"]
    composed = _composed(written["normalizer"])
    steps = _steps(written["pre_tokenizer"], "pretokenizers")
    if (
        model["type"] != "BPE"
        or composed is None
        or any(map(model.get, ("dropout", "continuing_subword_prefix", "end_of_word_suffix")))
        or not all(map(_keeps_text, steps))
        or any(token["lstrip"] or token["rstrip"] for token in written["added_tokens"])
    ):
        return None
    vocabulary = model["vocab"].keys()
    by_bytes = any(step["type"] == "ByteLevel" for step in steps)
    if not (vocabulary >= BYTE_LETTERS if by_bytes else model["byte_fallback"] and vocabulary >= BYTE_TOKENS):
        return None
    added = (token["content"] for token in written["added_tokens"])
    return composed * max(map(len, (*vocabulary, *added)))


def _composed(normalizer: dict[str, Any] | None) -> int | None:
    """Of how many characters the normalizer makes one at most; None if it may drop some."""
    most = 1
    for step in _steps(normalizer, "normalizers"):
        if step["type"] in COMPOSING:
            most *= MOST_COMPOSED
        elif step["type"] == "Replace":
            replaced = step["pattern"].get("String")
            if replaced is None or len(step["content"]) < len(replaced):
                return None
        elif step["type"] not in KEEPING:
            return None
    return most


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer leaves every character in a piece."""
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")


def _steps(whole: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    if whole is None:
        return []
    return [step for part in whole[parts] for step in _steps(part, parts)] if whole["type"] == "Sequence" else [whole]
