"""Checkpoints that say their head is the embedding and then hold a head of their own.

transformers believes the weights rather than the configuration where both are there and differ, and so do we.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from outrider.kernels.program import Kind, Program, Tensor
from outrider.workers.models.checkpoint import Checkpoint, open_checkpoint

CHUNK_ROWS = 4096
HEAD = "lm_head.weight"


def head_of_its_own(program: Program, path: Path, allow_pickle: bool = False) -> bool:
    """Whether a program that ends with the embedding as its head should end with the checkpoint's own head."""
    embedding = next(program.weights[op.weight].sources[0] for op in program.ops if op.kind is Kind.EMBED)
    head = next(op for op in reversed(program.ops) if op.kind is Kind.LINEAR)
    if program.weights[head.weight].sources != (embedding,):
        return False
    checkpoint = open_checkpoint(path, allow_pickle)
    try:
        return checkpoint.has(HEAD) and _differ(checkpoint, embedding, Tensor(HEAD, embedding.shape))
    finally:
        checkpoint.close()


def _differ(checkpoint: Checkpoint, one: Tensor, other: Tensor) -> bool:
    checkpoint.check(one)
    checkpoint.check(other)
    starts = range(0, one.shape[0], CHUNK_ROWS)
    chunks = [(start, min(start + CHUNK_ROWS, one.shape[0])) for start in starts]
    return any(not np.array_equal(checkpoint.rows(one, *chunk), checkpoint.rows(other, *chunk)) for chunk in chunks)
