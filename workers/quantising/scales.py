"""AWQ's and SmoothQuant's factors: a channel is divided by a factor, and the weights that read it multiplied by it.

The function stays the same, but its rounding error changes. The weights of a channel with large activations matter more, so
a larger factor protects them (AWQ). For int8 activations, a factor takes a channel's outliers into the weights
(SmoothQuant). Factors are a power of the channel's size; the exponent is that with the smallest measured error, and no
factors are tried, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from outrider.workers.quantising.grids import Form, nearest, whole_range
from outrider.workers.quantising.layers import Feeder, Rows

EXPONENTS = 20
SMOOTHING = (0.35, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
# Factors are compared on this many rows of each matrix.
MOST_ROWS = 256
SMALLEST = 1e-6
LARGEST_FACTOR = 1e4


def activation_aware(feeder: Feeder, matrices: Sequence[Tensor], hessian: Tensor, form: Form) -> Tensor | None:
    """AWQ's factors for the channels that ``matrices`` read; None where the error is smallest without factors."""
    importance = hessian.diagonal()
    size = importance.clamp_min(0).sqrt()
    sampled = torch.cat([_some_rows(matrix) for matrix in matrices])

    def loss(factors: Tensor) -> float:
        scaled = sampled * factors
        rounded = nearest(scaled, whole_range(scaled, form), form).matrix() / factors
        error = rounded - sampled
        return float(((error @ hessian) * error).sum())

    candidates = [_normalised(_shared(size, feeder).pow(step / EXPONENTS)) for step in range(1, EXPONENTS)]
    return _best(candidates, loss, len(size))


def smoothing(feeder: Feeder, matrices: Sequence[Tensor], inputs: Tensor, form: Form) -> Tensor | None:
    """SmoothQuant's factors, by the error on a sample of the ``inputs`` with inputs and weights rounded; None as above."""
    sampled = torch.cat([_some_rows(matrix) for matrix in matrices])
    exact = inputs @ sampled.T
    largest = _shared(inputs.abs().amax(0), feeder).clamp_min(SMALLEST)
    heaviest = _shared(torch.stack([matrix.abs().amax(0) for matrix in matrices]).amax(0), feeder).clamp_min(SMALLEST)

    def loss(factors: Tensor) -> float:
        scaled = sampled * factors
        rounded = nearest(scaled, whole_range(scaled, form), form).matrix()
        return float((rounded_activations(inputs / factors) @ rounded.T - exact).square().sum())

    candidates = [_normalised(largest.pow(alpha) / heaviest.pow(1 - alpha)) for alpha in SMOOTHING]
    return _best(candidates, loss, len(largest))


def rounded_activations(x: Tensor) -> Tensor:
    """Rounded to int8 with one scale for each token, and dequantised."""
    scale = (x.abs().amax(1, keepdim=True) / 127).clamp_min(1e-10)
    return torch.round(x / scale).clamp_(-128, 127).mul_(scale)


def apply(
    feeder: Feeder,
    names: Sequence[str],
    factors: Tensor,
    tensors: MutableMapping[str, Tensor],
    stored: Mapping[str, torch.dtype],
) -> Tensor:
    """Multiply the columns of the matrices ``names`` and divide their feeder, in ``tensors``; returns the factors applied.

    A norm's gain is rounded to the type that it is stored in, so the factors become gain / (rounded gain): the product is
    then the same. A gain that would be 0 or infinite in that type (fp16) is not divided.
    """
    if feeder.vectors:
        gain = feeder.vectors[0]
        divided = (tensors[gain] / factors).to(stored[gain]).float()
        kept = (divided != 0) & divided.isfinite() & (tensors[gain] != 0)
        factors = torch.where(kept, tensors[gain] / divided, torch.ones_like(factors))
        for name in feeder.vectors:
            tensors[name] = (tensors[name] / factors).to(stored[name]).float()
    else:
        # Heads that share a channel have the same factor.
        single = factors.view(-1, feeder.repeats, feeder.head_size)[:, 0].reshape(-1) if feeder.repeats > 1 else factors
        _divide(feeder.rows, single, tensors, None)
        _divide(feeder.bias_rows, single, tensors, stored)
    for name in names:
        tensors[name] = tensors[name] * factors
    return factors


def _divide(
    parts: Sequence[Rows], factors: Tensor, tensors: MutableMapping[str, Tensor], stored: Mapping[str, torch.dtype] | None
) -> None:
    taken = 0
    for part in parts:
        changed = tensors[part.tensor].clone()
        for start, stop in part.ranges:
            some = factors[taken : taken + stop - start]
            changed[start:stop] /= some if changed.dim() == 1 else some[:, None]
            taken += stop - start
        tensors[part.tensor] = changed if stored is None else changed.to(stored[part.tensor]).float()


def _some_rows(matrix: Tensor) -> Tensor:
    return matrix[:: max(1, len(matrix) // MOST_ROWS)]


def _shared(size: Tensor, feeder: Feeder) -> Tensor:
    """Where several heads read one channel of the values, the largest of their sizes."""
    if feeder.repeats == 1:
        return size
    heads = size.view(-1, feeder.repeats, feeder.head_size)
    return heads.amax(1, keepdim=True).expand_as(heads).reshape(-1)


def _normalised(factors: Tensor) -> Tensor:
    factors = factors.clamp_min(SMALLEST)
    middle = (factors.amax() * factors.amin()).sqrt()
    return (factors / middle).clamp_(1 / LARGEST_FACTOR, LARGEST_FACTOR)


def _best(candidates: Sequence[Tensor], loss: Callable[[Tensor], float], channels: int) -> Tensor | None:
    best, least = None, loss(torch.ones(channels))
    for factors in candidates:
        found = loss(factors)
        if found < least:
            best, least = factors, found
    return best
