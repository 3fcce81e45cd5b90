"""Which numbers fp16 has exactly: the kernels keep minima, and the scales beside them, in no other type."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import Floats
from outrider.workers.models.formats.raw import to_float32


def exact(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Of each, as ``RawTensors`` hands floats on."""
    return _OF_BF16[values] if values.dtype == np.uint16 else _exact(to_float32(values))


def _exact(numbers: Floats) -> NDArray[np.bool_]:
    with np.errstate(over="ignore"):
        found: NDArray[np.bool_] = numbers.astype(np.float16).astype(np.float32) == numbers
    return found


# bf16 has few enough numbers to look each up: a checkpoint has one scale and one minimum for every 64 weights.
_OF_BF16 = _exact(to_float32(np.arange(1 << 16, dtype=np.uint16)))
