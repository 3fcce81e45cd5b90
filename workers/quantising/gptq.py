"""Rounding with error feedback (GPTQ): the error of a rounded column is compensated in the columns that are not rounded
yet.

It minimises the error of the layer's output over calibration text, ``tr((W - Q) H (W - Q)^T)`` with ``H = X^T X``. Columns
are rounded in falling order of their diagonal element of H, on grids that were fitted before: so a group has one scale
wherever its columns come in that order, and the file needs no group index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.workers.errors import UsageError
from outrider.workers.quantising.grids import Form, Grid, Rounded, fit, joined, nearest_column
from outrider.workers.quantising.products import rounded_factors
from outrider.workers.quantising.rows import by_rows

BLOCK = 128
# This share of the mean of H's diagonal is added to the diagonal, so that directions without calibration data stay bounded.
DAMPING = 0.01
MOST_DAMPING = 1.0
SWEEPS = 2
SMALLEST = 1e-12
# Triangular matrices of this size are inverted as they are, larger ones by halves.
SOLVED_AT_ONCE = 256


class Feedback:
    """The factors of H, shared by all matrices with the same inputs."""

    def __init__(self, hessian: Tensor, damping: float = DAMPING) -> None:
        self._importance = hessian.diagonal()
        self._order = torch.argsort(self._importance, descending=True, stable=True)
        self._inverse = _inverse_factor(hessian[self._order][:, self._order], damping)
        self._damped = hessian / self._importance.mean().clamp_min(SMALLEST)
        self._damped.diagonal().add_(damping)

    def rounded(self, matrix: Tensor, form: Form) -> Rounded:
        def round_rows(rows: slice) -> Rounded:
            part = matrix[rows]
            grid = fit(part, form, self._importance)
            return _refined(part, _fed_back(part, grid, form, self._inverse, self._order), self._damped)

        # torch's precision setting is global, so it is changed outside of the threads.
        with rounded_factors():
            return joined(by_rows(len(matrix), round_rows))


def _fed_back(matrix: Tensor, grid: Grid, form: Form, inverse: Tensor, order: Tensor) -> Rounded:
    scales, zeros = grid.spread(form.width(matrix.shape[1]))
    weights, scales, zeros = matrix[:, order], scales[:, order], zeros[:, order]
    values = torch.empty_like(weights, dtype=torch.int8)
    columns = weights.shape[1]
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        # Blocks are transposed, since the elements of a column of a large matrix each lie in another page.
        block, block_scales, block_zeros = (_by_column(part, start, stop) for part in (weights, scales, zeros))
        found, errors = torch.empty_like(block), torch.empty_like(block)
        for index in range(stop - start):
            place = start + index
            column, scale, zero = block[index], block_scales[index], block_zeros[index]
            found[index] = rounded = nearest_column(column, scale, zero, form)
            errors[index] = (column - (rounded - zero) * scale) / inverse[place, place]
            block[index:].addr_(inverse[place, place:stop], errors[index], alpha=-1)
        values[:, start:stop] = found.T
        weights[:, stop:].addmm_(errors.T, inverse[start:stop, stop:], alpha=-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(columns)
    return Rounded(values[:, back], grid, form)


def _by_column(matrix: Tensor, start: int, stop: int) -> Tensor:
    return matrix[:, start:stop].T.contiguous()


def _refined(matrix: Tensor, rounded: Rounded, hessian: Tensor) -> Rounded:
    """Coordinate descent on the rounded matrix: each weight, then each scale, is set to its optimum with all others fixed.

    Error feedback rounds a column before the errors of later columns are known. Each step here minimises a parabola, so the
    loss never rises.
    """
    form = rounded.form
    columns, width = matrix.shape[1], form.width(matrix.shape[1])
    values, scales, zeros = rounded.values.float(), rounded.grid.scales.clone(), rounded.grid.zeros
    lost = matrix - rounded.matrix()
    step = min(width, BLOCK)
    for _ in range(SWEEPS):
        for first in range(0, columns, together := BLOCK // step * step):
            last = min(first + together, columns)
            block_slopes = (lost @ hessian[:, first:last]).T.contiguous()
            for start in range(first, last, step):
                stop = min(start + step, columns)
                part, inner, group = slice(start, stop), hessian[start:stop, start:stop], start // width
                slopes, scale, zero = (
                    block_slopes[start - first : stop - first],
                    scales[:, group].clone(),
                    zeros[:, group].clone(),
                )
                exact, before = _by_column(matrix, start, stop), _by_column(lost, start, stop)
                missing, chosen = before.clone(), torch.empty_like(before)
                for index in range(stop - start):
                    # The error of this column that minimises the loss, given those of all others.
                    best = missing[index] - slopes[index] / inner[index, index]
                    chosen[index] = found = nearest_column(exact[index] - best, scale, zero, form)
                    change = exact[index] - (found - zero) * scale - missing[index]
                    slopes.addr_(inner[index], change)
                    missing[index] += change
                if form.group:
                    steps = chosen - zero
                    bend = ((inner @ steps) * steps).sum(0)
                    wanted = scale + torch.where(bend > 0, (steps * slopes).sum(0) / bend, torch.zeros_like(bend))
                    stored = wanted.to(form.scale_type).float()
                    stored = torch.where(stored * scale > 0, stored, scale)
                    missing -= steps * (stored - scale)
                    scales[:, group] = stored
                block_slopes[stop - first :].addmm_(hessian[stop:last, part], missing - before)
                lost[:, part] = missing.T
                values[:, part] = chosen.T
    return Rounded(values.to(torch.int8), Grid(scales, zeros), form)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of H^-1; with more damping where rounding errors have made H indefinite."""
    mean = hessian.diagonal().mean().clamp_min(SMALLEST)
    hessian = hessian / mean
    # A channel that is always zero: its weights do not matter, and must not divide by nothing.
    dead = hessian.diagonal() <= 0
    hessian.diagonal()[dead] = 1
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(damping)
        # H = R R^T with R upper triangular: R is the Cholesky factor of H with rows and columns reversed, reversed again.
        # Then H^-1 = (R^-1)^T R^-1, so H^-1 need not be computed and factorised.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            return _inverse_of_lower(lower).flip(0, 1)
        if damping >= MOST_DAMPING:
            raise UsageError(
                "--calibration: a layer's inputs from this text cannot be used: they may be non-finite, or too large for "
                "float32; give another text, or --method rtn, which needs none"
            )
        damping *= 10


def _inverse_of_lower(lower: Tensor) -> Tensor:
    """The inverse by recursive halves, since matrix products are faster than a triangular solve."""
    size = len(lower)
    if size <= SOLVED_AT_ONCE:
        return torch.linalg.solve_triangular(lower, torch.eye(size), upper=False)
    half = size // 2
    inverse = torch.zeros_like(lower)
    inverse[:half, :half] = first = _inverse_of_lower(lower[:half, :half])
    inverse[half:, half:] = second = _inverse_of_lower(lower[half:, half:])
    torch.mm(second @ lower[half:, :half], first, out=inverse[half:, :half]).neg_()
    return inverse
