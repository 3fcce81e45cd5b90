"""Helpers for reading blocks: scales, codes, and rows of both."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import Levels, QuantisedRows, Scheme

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
SUPER = 256


def half(blocks: Bytes, at: int) -> Floats:
    """The fp16 at byte ``at`` of every block: [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def nibbles(packed: Bytes) -> Bytes:
    """The lower nibbles of all bytes, then the upper ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def in_rows(codes: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(codes).reshape(codes.shape[0], -1)


def plain(scheme: Scheme, scales: Floats, codes: Bytes, minima: Floats | None = None) -> QuantisedRows:
    zero = 0 if scheme.minima else 1 << (scheme.bits - 1)
    return QuantisedRows(scheme, in_rows(codes), scales, np.full(scales.shape, zero, np.uint8), minima)


def two_levels(
    scheme: Scheme,
    codes: Bytes,
    scales: tuple[Floats, NDArray[np.int16]],
    minima: tuple[Floats, NDArray[np.int16]] | None,
) -> QuantisedRows:
    groups = SUPER // scheme.group
    spread = np.repeat(scales[0], groups, axis=1) * scales[1]
    low = None if minima is None else np.repeat(minima[0], groups, axis=1) * minima[1]
    levels = Levels(*scales, *(minima or ()))
    zero = 0 if minima is not None else 1 << (scheme.bits - 1)
    return QuantisedRows(scheme, codes, spread, np.full(spread.shape, zero, np.uint8), low, levels)
