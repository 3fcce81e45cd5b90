"""Checkpoints that say their head is the embedding and then hold a head of their own.

transformers believes the weights rather than the configuration where both are there and differ, and so do we.
"""

from __future__ import annotations

import numpy as np

from outrider.kernels.program import Kind, Program, Tensor
from outrider.workers.models.checkpoint import Checkpoint

CHUNK_ROWS = 4096
HEAD = "lm_head.weight"


def has_untied_head(program: Program, checkpoint: Checkpoint) -> bool:
    """Whether a program that ends with the embedding as its head should end with the checkpoint's own head."""
    embedding = next(program.weights[op.weight].sources[0] for op in program.ops if op.kind is Kind.EMBED)
    head = next(op for op in reversed(program.ops) if op.kind is Kind.LINEAR)
    if program.weights[head.weight].sources != (embedding,):
        return False
    head_itself = Tensor(HEAD, embedding.shape)
    if not checkpoint.has(HEAD):
        # A head that is quantised is one of its own.
        return checkpoint.matrix(head_itself) is not None
    return _differ(checkpoint, embedding, head_itself)


def _differ(checkpoint: Checkpoint, one: Tensor, other: Tensor) -> bool:
    checkpoint.check(other)
    starts = range(0, one.shape[0], CHUNK_ROWS)
    chunks = [(start, min(start + CHUNK_ROWS, one.shape[0])) for start in starts]
    return any(not np.array_equal(checkpoint.rows(one, *chunk), checkpoint.rows(other, *chunk)) for chunk in chunks)
