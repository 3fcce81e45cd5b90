"""Rotary frequencies and their scalings, as transformers computes them.

Every step rounds to float32 where transformers does, so that the frequencies come out as the same numbers; powers and
logarithms go through our own arithmetic, because the system's give other last bits on other machines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels import arithmetic
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config

Float32Array = NDArray[np.float32]
ONE = np.float32(1.0)
KNOWN = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        | {"original_max_position_embeddings"}
    ),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Inverse frequencies, one for each pair of a head's columns; ``factor`` multiplies every sine and cosine."""

    frequencies: tuple[float, ...]
    factor: float = 1.0


def read_rope(config: Config, head_size: int, context: int) -> Rope:
    """From ``rope_parameters``, or from the older ``rope_theta`` beside ``rope_scaling``."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    config.get("rope_parameters")
    if not isinstance(scaling, dict):
        raise ModelError(f'{config.source}: "rope_parameters" must be an object, got {scaling!r}')
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in KNOWN:
        raise ModelError(f"{config.source}: the native engine does not know the rope type {kind!r}; the hf engine may")
    config.only("partial_rotary_factor", 1.0)
    parameters = {key: value for key, value in scaling.items() if key not in ("rope_type", "type") and value is not None}
    theta = float(parameters.pop("rope_theta", config.number("rope_theta", 10000.0)))
    if parameters.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{config.source}: the native engine does not know partial rotary embeddings; the hf engine does")
    original = config.get("original_max_position_embeddings")
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    elif kind in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", context)
    for key in parameters:
        if kind != "default" and key not in KNOWN[kind]:
            raise ModelError(f'{config.source}: the native engine does not know "{key}" of the rope type {kind!r}')
    wavelengths = _power(theta, np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size))
    try:
        return _scaled(kind, parameters, theta, wavelengths, context)
    except (KeyError, TypeError) as error:
        raise ModelError(f"{config.source}: the rope type {kind!r} lacks or misstates {error}") from None


def _scaled(kind: str, parameters: Mapping[str, Any], theta: float, wavelengths: Float32Array, context: int) -> Rope:
    if kind == "linear":
        return _rope((ONE / wavelengths) / np.float32(parameters["factor"]))
    if kind == "llama3":
        return _llama3(parameters, ONE / wavelengths)
    if kind == "yarn":
        return _yarn(parameters, theta, wavelengths, context)
    # "dynamic" changes the base only beyond max_position_embeddings, and no row grows beyond that.
    return _rope(ONE / wavelengths)


def _llama3(parameters: Mapping[str, Any], inverse: Float32Array) -> Rope:
    """Low frequencies are divided by the factor, high ones kept, those between blended."""
    factor = np.float32(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original = float(parameters["original_max_position_embeddings"])
    lengths = np.float32(2 * math.pi) / inverse
    smooth = (np.float32(original) / lengths - np.float32(low)) / np.float32(high - low)
    blended = (ONE - smooth) * (inverse / factor) + smooth * inverse
    scaled = np.where(lengths > np.float32(original / low), inverse / factor, inverse)
    between = (lengths >= np.float32(original / high)) & (lengths <= np.float32(original / low))
    return _rope(np.where(between, blended, scaled))


def _yarn(parameters: Mapping[str, Any], theta: float, wavelengths: Float32Array, context: int) -> Rope:
    """Interpolation for low frequencies, none for high ones, a ramp between, and a factor on the attention."""
    original = float(parameters["original_max_position_embeddings"])
    factor = float(parameters.get("factor") or context / original)
    pairs = len(wavelengths)

    def turning(rotations: float) -> float:
        """The column at which a wave turns so many times over the original context."""
        return 2 * pairs * _log(original / (rotations * 2 * math.pi)) / (2 * _log(theta))

    low = turning(float(parameters.get("beta_fast") or 32))
    high = turning(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = ONE - np.clip(ramp, np.float32(0), ONE)
    inverse = (ONE / (np.float32(factor) * wavelengths)) * (ONE - kept) + (ONE / wavelengths) * kept
    stated = parameters.get("attention_factor")
    return _rope(inverse, float(stated) if stated is not None else _attention_factor(parameters, factor))


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * _log(factor) + 1.0

    first, all_columns = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return of(float(first)) / of(float(all_columns)) if first and all_columns else of(1.0)


def _rope(inverse: Float32Array, factor: float = 1.0) -> Rope:
    return Rope(tuple(float(value) for value in inverse.astype(np.float32)), factor)


def _log(x: float) -> float:
    return float(arithmetic.log(np.array([x]))[0])


def _power(base: float, exponents: Float32Array) -> Float32Array:
    """base^exponent, rounded once to float32; exponents are at least 0 and base at least 1."""
    if not base >= 1.0:
        raise ModelError(f"a rope base of {base} is not supported by the native engine")
    powers = 1.0 / arithmetic.exp(-exponents.astype(np.float64) * _log(base))
    return powers.astype(np.float32)
