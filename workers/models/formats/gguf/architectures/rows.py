"""Where in a GGUF file a tensor's rows lie, where llama.cpp's converter put them elsewhere."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.workers.models.formats.gguf.architectures.architecture import Values

ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


def interleaved(config: Values, part: str, rows: int) -> NDArray[np.int64] | None:
    """For llama.cpp's way of rotating each head's two halves lie interleaved.

    Row i of the first lies at 2i, of the second at 2i + 1.
    """
    if part not in ROTATED:
        return None
    size = config["head_dim"]
    each = np.arange(rows)
    half, within = each % size // (size // 2), each % (size // 2)
    places: NDArray[np.int64] = each // size * size + 2 * within + half
    return places
