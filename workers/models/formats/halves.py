"""Tests which numbers fp16 represents exactly: the kernels store minima, and the scales with them, in fp16 only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import Floats
from outrider.workers.models.formats.raw import to_float32


def exact(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each number is exact; ``values`` are floats of ``RawTensors`` (bf16 as uint16)."""
    return _OF_BF16[values] if values.dtype == np.uint16 else _exact(to_float32(values))


def _exact(numbers: Floats) -> NDArray[np.bool_]:
    with np.errstate(over="ignore"):
        found: NDArray[np.bool_] = numbers.astype(np.float16).astype(np.float32) == numbers
    return found


# A table for all bf16 numbers, since checkpoints have a scale and a minimum for every 64 weights.
_OF_BF16 = _exact(to_float32(np.arange(1 << 16, dtype=np.uint16)))
