"""Text that the pocket pair was never trained on."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))


def held_out_tokens(path: Path, count: int) -> list[int]:
    """The first tokens of the text that the pocket pair was never trained on."""
    from tokenizers import Tokenizer
    from train_pocket import END_OF_TEXT, read_corpus

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    tokens: list[int] = []
    for text in read_corpus()[1]:
        tokens += [end, *tokenizer.encode(text).ids]
        if len(tokens) >= count:
            break
    return tokens[:count]
