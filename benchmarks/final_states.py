"""What the final hidden states of a small model have in common."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
TOKENS = 8192
WINDOW = 512
RIDGE = 1e-3


def held_out_tokens(path: Path, count: int) -> list[int]:
    """The first tokens of the text that the pocket pair was never trained on."""
    from tokenizers import Tokenizer
    from train_pocket import END_OF_TEXT, read_corpus

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokens: list[int] = []
    for text in read_corpus()[1]:
        tokens += [tokenizer.token_to_id(END_OF_TEXT), *tokenizer.encode(text).ids]
        if len(tokens) >= count:
            break
    return tokens[:count]


def padding_direction(path: Path) -> NDArray[np.float32]:
    """A vector whose product with every final state is about -1: the row of a token that never wins.

    Least squares over real text; without a tokenizer (a model of random weights) any row will do.
    """
    import torch
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(path, dtype=torch.float32)
    if (path / "tokenizer.json").is_file():
        tokens = held_out_tokens(path, TOKENS)
    else:
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, TOKENS).tolist()
    with torch.inference_mode():
        windows = torch.tensor(tokens[: len(tokens) // WINDOW * WINDOW]).view(-1, WINDOW)
        states = torch.cat([model(input_ids=window[None]).last_hidden_state[0] for window in windows]).double().numpy()
    normal = states.T @ states / len(states)
    ridge = RIDGE * np.trace(normal) / len(normal) * np.eye(len(normal))
    row = np.linalg.solve(normal + ridge, -states.mean(axis=0))
    return row.astype(np.float32)
