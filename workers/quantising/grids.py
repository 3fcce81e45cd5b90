"""Quantisation grids: a scale, and with asymmetric forms a zero point, for every group of a row.

A weight is ``(value - zero) * scale``. Values and zero points are signed numbers of ``bits``, as in compressed-tensors, and
scales are rounded to the type that they are stored in at once, so that weights are rounded with the final scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# This many rows are fitted together, so that the tries stay in the processor's caches.
ROWS_AT_ONCE = 64
# The number of ranges tried for a group, from the whole one down to this share of it.
SHRINK_STEPS, LEAST_RANGE = 16, 0.6
SMALLEST = 1e-10


@dataclass(frozen=True, slots=True)
class Form:
    """``group`` weights along a row have one scale; 0 is the whole row."""

    bits: int
    group: int
    symmetric: bool
    scale_type: torch.dtype

    @property
    def lowest(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def width(self, columns: int) -> int:
        return self.group or columns


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and zero points, float32 [rows, groups]."""

    scales: Tensor
    zeros: Tensor

    def spread(self, width: int) -> tuple[Tensor, Tensor]:
        return self.scales.repeat_interleave(width, 1), self.zeros.repeat_interleave(width, 1)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix on its grid: ``values`` int8 [rows, columns]."""

    values: Tensor
    grid: Grid
    form: Form

    def matrix(self) -> Tensor:
        """The dequantised matrix."""
        scales, zeros = self.grid.spread(self.form.width(self.values.shape[1]))
        return (self.values.float() - zeros) * scales


def joined(parts: Sequence[Rounded]) -> Rounded:
    """Concatenated by rows."""
    grid = Grid(torch.cat([part.grid.scales for part in parts]), torch.cat([part.grid.zeros for part in parts]))
    return Rounded(torch.cat([part.values for part in parts]), grid, parts[0].form)


def fit(matrix: Tensor, form: Form, importance: Tensor | None = None) -> Grid:
    """The grid with the least squared error of rounding to nearest, each column weighed by its ``importance``.

    Several ranges are tried for each group: a smaller one clips its largest weights and rounds all others more finely.
    """
    rows, columns = matrix.shape
    width = form.width(columns)
    weights = torch.ones(columns) if importance is None else importance / importance.mean().clamp_min(SMALLEST)
    weights = weights.view(1, columns // width, width)
    scales, zeros = [], []
    for start in range(0, rows, ROWS_AT_ONCE):
        blocks = matrix[start : start + ROWS_AT_ONCE].view(-1, columns // width, width)
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        best = torch.full_like(low, torch.inf)
        chosen = [torch.zeros_like(low), torch.zeros_like(low)]
        for step in range(SHRINK_STEPS + 1):
            part = 1 - (1 - LEAST_RANGE) * step / SHRINK_STEPS
            scale, zero = _grid_of(low * part, high * part, form)
            error = _rounded(blocks, scale[..., None], zero[..., None], form).sub_(zero[..., None]).mul_(scale[..., None])
            loss = error.sub_(blocks).square_().mul_(weights).sum(-1)
            better = loss < best
            best = torch.where(better, loss, best)
            chosen = [torch.where(better, new, old) for new, old in zip((scale, zero), chosen, strict=True)]
        scales.append(chosen[0])
        zeros.append(chosen[1])
    return Grid(torch.cat(scales), torch.cat(zeros))


def whole_range(matrix: Tensor, form: Form) -> Grid:
    """The grid that clips no weight."""
    blocks = matrix.view(len(matrix), -1, form.width(matrix.shape[1]))
    return Grid(*_grid_of(blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0), form))


def _grid_of(low: Tensor, high: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    if form.symmetric:
        # Values range from -2^(bits - 1) to 2^(bits - 1) - 1, so a negative scale may fit the range better.
        positive = torch.maximum(high / form.highest, low / form.lowest)
        negative = torch.maximum(-low / form.highest, high / -form.lowest)
        wanted = torch.where(negative < positive, -negative, positive)
    else:
        wanted = (high - low) / (form.highest - form.lowest)
    scale = wanted.to(form.scale_type).float()
    # A group of zeros, or one whose scale underflows.
    scale = torch.where(scale.abs() > SMALLEST, scale, torch.ones_like(scale))
    if form.symmetric:
        return scale, torch.zeros_like(scale)
    return scale, (form.lowest - torch.round(low / scale)).clamp_(form.lowest, form.highest)


def _rounded(weights: Tensor, scale: Tensor, zero: Tensor, form: Form) -> Tensor:
    return torch.round(weights / scale).add_(zero).clamp_(form.lowest, form.highest)


def nearest(matrix: Tensor, grid: Grid, form: Form) -> Rounded:
    """Round to nearest."""
    scales, zeros = grid.spread(form.width(matrix.shape[1]))
    return Rounded(_rounded(matrix, scales, zeros, form).to(torch.int8), grid, form)


def nearest_column(column: Tensor, scale: Tensor, zero: Tensor, form: Form) -> Tensor:
    """One column's values, as float32."""
    return _rounded(column, scale, zero, form)
