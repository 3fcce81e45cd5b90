"""Checkpoints whose configuration ties the LM head to the embedding, but which have an LM head of their own.

As in transformers, the checkpoint's own head is used if it differs from the embedding.
"""

from __future__ import annotations

import numpy as np

from outrider.kernels.program import Kind, Program, Tensor
from outrider.workers.models.checkpoint import Checkpoint

CHUNK_ROWS = 4096
HEAD = "lm_head.weight"


def has_untied_head(program: Program, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has its own LM head where the program uses the embedding."""
    embedding = next(program.weights[op.weight].sources[0] for op in program.ops if op.kind is Kind.EMBED)
    head = next(op for op in reversed(program.ops) if op.kind is Kind.LINEAR)
    if program.weights[head.weight].sources != (embedding,):
        return False
    head_itself = Tensor(HEAD, embedding.shape)
    if not checkpoint.has(HEAD):
        # A quantised head is never the embedding.
        return checkpoint.matrix(head_itself) is not None
    return _differ(checkpoint, embedding, head_itself)


def _differ(checkpoint: Checkpoint, one: Tensor, other: Tensor) -> bool:
    checkpoint.check(other)
    starts = range(0, one.shape[0], CHUNK_ROWS)
    chunks = [(start, min(start + CHUNK_ROWS, one.shape[0])) for start in starts]
    return any(not np.array_equal(checkpoint.rows(one, *chunk), checkpoint.rows(other, *chunk)) for chunk in chunks)
