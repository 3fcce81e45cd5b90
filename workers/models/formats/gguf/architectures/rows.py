"""Permutations of rows by llama.cpp's converter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.workers.models.formats.gguf.architectures.architecture import Values

ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
NORMS_BEHIND = ("self_attn.query_layernorm", "self_attn.key_layernorm")


def interleaved(config: Values, part: str, rows: int) -> NDArray[np.int64] | None:
    """For llama.cpp's rope the two halves of each head are interleaved: row i of the first half is stored at 2i, row i of
    the second half at 2i + 1.
    """
    return _each_head_interleaved(config, rows) if part in ROTATED else None


def interleaved_with_norms(config: Values, part: str, rows: int) -> NDArray[np.int64] | None:
    """As ``interleaved``, and the same for norms of heads that are applied after rope."""
    return _each_head_interleaved(config, rows) if part in (*ROTATED, *NORMS_BEHIND) else None


def _each_head_interleaved(config: Values, rows: int) -> NDArray[np.int64]:
    size = config["head_dim"]
    each = np.arange(rows)
    half, within = each % size // (size // 2), each % (size // 2)
    places: NDArray[np.int64] = each // size * size + 2 * within + half
    return places
