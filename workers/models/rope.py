"""Rotary frequencies and their scalings, bit for bit as transformers computes them.

Every step rounds to float32 where transformers does. Powers and logarithms use ``kernels/arithmetic.py``, because the last
bits of the system's functions differ between machines.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels import arithmetic
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config

Float32Array = NDArray[np.float32]
ONE = np.float32(1.0)
LARGEST_BASE = float(np.finfo(np.float32).max)
LONG, PROPORTIONAL = "longrope", "proportional"
GREATER_THAN_0 = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
# Rope types that may rotate only a part of each head.
WITH_PART = ("default", "linear", "dynamic", LONG)
KNOWN = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    # GGUF: the divisor of each frequency is stored.
    "factors": frozenset({"factors"}),
    LONG: frozenset({"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"}),
    PROPORTIONAL: frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        | {"original_max_position_embeddings"}
    ),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Inverse frequencies, one for each pair of a head's first columns; ``factor`` multiplies every sine and cosine.

    Rows of more than ``longest`` tokens (0: there are none) take the long frequencies.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    long_frequencies: tuple[float, ...] = ()
    longest: int = 0


def read_rope(
    config: Config,
    head_size: int,
    context: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    long_from: int = 0,
    fixed_alpha: bool = False,
    base: float | None = None,
    usual: Mapping[str, Any] | None = None,
    passed_over: Collection[str] = (),
) -> Rope:
    """Read ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``.

    ``theta`` is the family's default base. ``partial``: the default share of each head that is rotated, for families that
    may rotate a part. ``long_from``: the switch of long rope, for families that compute a longer row anew (Phi 3).
    ``fixed_alpha``: the type "dynamic" may have an ``alpha``, which scales the base for all rows (Hunyuan). ``base``
    overrides the parameters' base; ``usual`` are the default parameters. ``passed_over`` are keys that are not about rope.
    """
    stated = config.get("rope_parameters")
    scaling = config.get("rope_scaling") or (usual if stated is None else stated) or {}
    if partial is None:
        config.only("partial_rotary_factor", 1.0)
    original = long_from or config.get("original_max_position_embeddings")
    reading = _Reading(config, head_size, context, config.number("rope_theta", theta), partial, long_from, fixed_alpha)
    parameters = _parameters(config, scaling) | ({} if base is None else {"rope_theta": base})
    parameters = {key: value for key, value in parameters.items() if key not in passed_over}
    return reading.rope(parameters, original)


def plain_rope(columns: int, theta: float = 10000.0) -> Rope:
    """Unscaled rope of this many columns, for families without rope parameters."""
    return _rope(ONE / _power(theta, np.arange(0, columns, 2, dtype=np.float32) / np.float32(columns)))


def read_ropes(
    config: Config,
    head_size: int | Mapping[str, int],
    context: int,
    thetas: Mapping[str, float],
    usual: Mapping[str, Any] | None = None,
    proportional: bool = False,
    partial: float | None = None,
) -> dict[str, Rope]:
    """Rope by type of layer: ``rope_parameters`` has parameters for each type, ``rope_scaling`` those of full attention.

    ``thetas`` are the default bases, ``usual`` the default parameters (Gemma 3 and 4, OLMo 3). Heads may have a size by
    type. ``proportional``: a part of each head may be rotated with the frequencies of a whole head. ``partial``: the
    default share of each head that is rotated, for families whose parameters may set it.
    """
    config.only("partial_rotary_factor", 1.0)
    stated = _parameters(config, config.get("rope_parameters") or usual or {})
    if unknown := set(stated) - set(thetas):
        raise ModelError(
            f'{config.source}: "rope_parameters" of layers of the types {sorted(thetas)} has {sorted(unknown)[0]!r}'
        )
    scaling = _parameters(config, config.get("rope_scaling") or {})
    found = {}
    sizes = head_size if isinstance(head_size, Mapping) else dict.fromkeys(thetas, head_size)
    for kind, size in sizes.items():
        # "rope_type" takes precedence over the older "type" of "rope_scaling".
        parameters = _parameters(config, stated.get(kind) or {"rope_type": "default"})
        if not (parameters | scaling).get("truncate", True):
            # transformers reads "truncate" at the top level only, and so truncates.
            raise config.unknown('"truncate" in "rope_parameters" by type of layer')
        reading = _Reading(config, size, context, thetas[kind], partial, 0, proportional=proportional)
        found[kind] = reading.rope(parameters | (scaling if kind == "full_attention" else {}), None)
    return found


def require_bases(config: Config, kinds: Collection[str]) -> None:
    """Refuse parameters without a base for layers of one of these types, which transformers does not run."""
    stated = config.get("rope_parameters")
    for kind in kinds if isinstance(stated, dict) and stated else ():
        of_kind = stated.get(kind)
        if of_kind is None or (isinstance(of_kind, dict) and of_kind.get("rope_theta") is None):
            raise ModelError(f'{config.source}: "rope_parameters" has no "rope_theta" for layers of the type "{kind}"')


def _parameters(config: Config, values: object) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ModelError(f'{config.source}: "rope_parameters" must be an object, got {values!r}')
    return dict(values)


@dataclass(frozen=True, slots=True)
class _Reading:
    """The context in which one set of parameters is read: the model's sizes, and what the family allows."""

    config: Config
    head_size: int
    context: int
    theta: float
    partial: float | None
    long_from: int
    fixed_alpha: bool = False
    proportional: bool = False

    def rope(self, scaling: Mapping[str, Any], original: Any) -> Rope:
        """``original``: "original_max_position_embeddings" outside of the parameters; None where it is not there."""
        for key, value in scaling.items():
            if isinstance(value, dict) or key.endswith("_attention"):
                raise self.config.unknown(f'"rope_parameters" by type of layer ({key!r})')
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        # The first releases of Phi 3 call long rope "su" or "yarn".
        kind = LONG if self.long_from and kind in ("su", "yarn") else kind
        if kind not in KNOWN or (kind == LONG and not self.long_from) or (kind == PROPORTIONAL and not self.proportional):
            raise self.config.unknown(f"the rope type {kind!r}")
        parameters = {k: value for k, value in scaling.items() if k not in ("rope_type", "type") and value is not None}
        theta = float(parameters.pop("rope_theta", self.theta))
        partial = parameters.pop("partial_rotary_factor", 1.0 if self.partial is None else self.partial)
        if self.fixed_alpha and kind == "dynamic" and parameters.get("alpha"):
            kind, theta = "default", theta * self._stretched(parameters["alpha"])
        part = int(self.head_size * partial)
        turned = int(partial * self.head_size // 2) if kind == PROPORTIONAL else 0
        if kind == PROPORTIONAL and 0 < turned <= self.head_size // 2:
            part, partial = self.head_size, 1.0
        if partial != 1.0 and (self.partial is None or kind not in WITH_PART or part < 2 or part % 2):
            raise self.config.unknown("partial rotary embeddings like these", hf="does")
        if original is not None:
            parameters["original_max_position_embeddings"] = original
        elif kind in ("llama3", "yarn"):
            parameters.setdefault("original_max_position_embeddings", self.context)
        for key in parameters:
            if kind != "default" and key not in KNOWN[kind]:
                raise ModelError(f'{self.config.source}: the native engine does not know "{key}" of the rope type {kind!r}')
            if kind != "default" and key in GREATER_THAN_0 and not _positive(parameters[key]):
                raise ModelError(f"{self.config.source}: the rope type {kind!r} misstates {key!r}: {parameters[key]!r}")
        wavelengths = _power(theta, np.arange(0, part, 2, dtype=np.float32) / np.float32(part))
        try:
            with np.errstate(all="ignore"):  # the results are checked below
                rope = _scaled(kind, parameters, theta, wavelengths, self.context, turned)
        except (KeyError, TypeError) as error:
            raise ModelError(f"{self.config.source}: the rope type {kind!r} lacks or misstates {error}") from None
        if not all(map(math.isfinite, (*rope.frequencies, *rope.long_frequencies, rope.factor))):
            raise ModelError(f"{self.config.source}: the rope type {kind!r} gives frequencies that are not finite numbers")
        return rope

    def _stretched(self, alpha: Any) -> float:
        """alpha ^ (d / (d - 2)) for heads of d columns."""
        if not _positive(alpha):
            raise ModelError(f"{self.config.source}: the rope type 'dynamic' misstates 'alpha': {alpha!r}")
        exponent = self.head_size / (self.head_size - 2)
        return float(arithmetic.exp(np.array([exponent * _log(float(alpha))]))[0])


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _scaled(
    kind: str, parameters: Mapping[str, Any], theta: float, wavelengths: Float32Array, context: int, turned: int
) -> Rope:
    if kind == PROPORTIONAL:
        # All pairs of a head are rotated, those beyond the part by an angle of 0.
        inverse = (ONE / wavelengths) / np.float32(parameters.get("factor", 1.0))
        inverse[turned:] = 0
        return _rope(inverse)
    if kind == "linear":
        return _rope((ONE / wavelengths) / np.float32(parameters["factor"]))
    if kind == "factors":
        return _rope((ONE / wavelengths) / _factors(parameters, "factors", wavelengths))
    if kind == LONG:
        return _long(parameters, wavelengths, context)
    if kind == "llama3":
        return _llama3(parameters, ONE / wavelengths)
    if kind == "yarn":
        return _yarn(parameters, theta, wavelengths, context)
    # "dynamic" changes the base only for rows beyond max_position_embeddings, and there are none.
    return _rope(ONE / wavelengths)


def _factors(parameters: Mapping[str, Any], key: str, wavelengths: Float32Array) -> Float32Array:
    factors = np.array(parameters[key], np.float32)
    if factors.shape != wavelengths.shape or not (np.isfinite(factors) & (factors > 0)).all():
        raise TypeError(f"{factors.size} factors of {wavelengths.size} frequencies")
    return factors


def _long(parameters: Mapping[str, Any], wavelengths: Float32Array, context: int) -> Rope:
    """Long rope: short frequencies for rows up to the original length, long ones for longer rows."""
    original = int(parameters["original_max_position_embeddings"])
    short, long = (ONE / (_factors(parameters, key, wavelengths) * wavelengths) for key in ("short_factor", "long_factor"))
    factor = float(parameters.get("factor") or context / original)
    stated = parameters.get("attention_factor")
    attention = 1.0 if factor <= 1.0 else math.sqrt(1.0 + _log(factor) / _log(float(original)))
    usual = _rope(short, attention if stated is None else float(stated))
    if context <= original:
        return usual
    return replace(usual, long_frequencies=_rope(long).frequencies, longest=original)


def _llama3(parameters: Mapping[str, Any], inverse: Float32Array) -> Rope:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated."""
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
        """The column whose wave makes this many rotations over the original context."""
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


def latent_factor(config: Config) -> float:
    """The factor of DeepSeek's attention scores with yarn's ``mscale_all_dim`` m: (0.1 m log(factor) + 1)²."""
    parameters = _parameters(config, config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    for key in ("mscale_all_dim", "factor"):
        if not _positive(parameters.get(key)):
            raise ModelError(f"{config.source}: the rope type {kind!r} misstates {key!r}: {parameters.get(key)!r}")
    factor = float(parameters["factor"])
    return (0.1 * float(parameters["mscale_all_dim"]) * _log(factor) + 1.0) ** 2 if factor > 1.0 else 1.0


def _log(x: float) -> float:
    return float(arithmetic.log(np.array([x]))[0])


def _power(base: float, exponents: Float32Array) -> Float32Array:
    """base^exponent, rounded once to float32; exponents are from 0 to 1, and so the base is within float32, too."""
    if not 1.0 <= base <= LARGEST_BASE:
        raise ModelError(f"a rope base of {base} is not supported by the native engine")
    powers = 1.0 / arithmetic.exp(-exponents.astype(np.float64) * _log(base))
    return powers.astype(np.float32)
