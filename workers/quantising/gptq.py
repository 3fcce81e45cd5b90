"""Rounding with error feedback (GPTQ): what one column loses is made up for by those that are still to be rounded.

The loss is that of the layer's output over calibration text, ``tr((W - Q) H (W - Q)^T)`` with ``H = X^T X``. Columns go in
the order of their weight in it, the heaviest first, on grids fitted beforehand: so a group keeps one scale wherever its
columns come, and the file needs no index of groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.workers.quantising.grids import Form, Grid, Rounded, fit, nearest_column

BLOCK = 128
# Of the mean of the diagonal: what is added to it, so that directions that the text never took stay tame.
DAMPING = 0.01
MOST_DAMPING = 1.0
SWEEPS = 2
SMALLEST = 1e-12


def error_feedback(matrix: Tensor, hessian: Tensor, form: Form, damping: float = DAMPING) -> Rounded:
    diagonal = hessian.diagonal()
    grid = fit(matrix, form, diagonal)
    order = torch.argsort(diagonal, descending=True, stable=True)
    scales, zeros = grid.spread(form.width(matrix.shape[1]))
    weights, scales, zeros = matrix[:, order], scales[:, order], zeros[:, order]
    inverse = _inverse_factor(hessian[order][:, order], damping)
    values = torch.empty_like(weights)
    columns = weights.shape[1]
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        block, errors = weights[:, start:stop].T.contiguous(), torch.empty(stop - start, len(weights))
        for index in range(stop - start):
            place = start + index
            column, scale, zero = block[index], scales[:, place], zeros[:, place]
            values[:, place] = rounded = nearest_column(column, scale, zero, form)
            errors[index] = (column - (rounded - zero) * scale) / inverse[place, place]
            block[index:].addr_(inverse[place, place:stop], errors[index], alpha=-1)
        weights[:, stop:].addmm_(errors.T, inverse[start:stop, stop:], alpha=-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(columns)
    return _refined(matrix, Rounded(values[:, back].to(torch.int8), grid, form), hessian, damping)


def _refined(matrix: Tensor, rounded: Rounded, hessian: Tensor, damping: float) -> Rounded:
    """Every weight once more to the value that is best beside all others as they are, and every scale likewise.

    Feedback could only look ahead: a column was rounded before it was known what those behind it would lose. Each step is
    the least of a parabola, so the loss falls or stays.
    """
    form = rounded.form
    columns, width = matrix.shape[1], form.width(matrix.shape[1])
    mean = hessian.diagonal().mean().clamp_min(SMALLEST)
    hessian = hessian / mean
    hessian.diagonal().add_(damping)
    values, scales, zeros = rounded.values.float(), rounded.grid.scales.clone(), rounded.grid.zeros
    lost = matrix - rounded.matrix()
    for _ in range(SWEEPS):
        for start in range(0, columns, step := min(width, BLOCK)):
            part = slice(start, start + step)
            inner, group = hessian[part, part], start // width
            slope = lost @ hessian[:, part]
            scale, zero = scales[:, group], zeros[:, group]
            for index in range(inner.shape[0]):
                place = start + index
                # What this column should lose, so that it makes up for what the others do.
                best = lost[:, place] - slope[:, index] / inner[index, index]
                found = nearest_column(matrix[:, place] - best, scale, zero, form)
                change = matrix[:, place] - (found - zero) * scale - lost[:, place]
                slope.addr_(change, inner[index])
                lost[:, place] += change
                values[:, place] = found
            if form.group:
                steps = values[:, part] - zero[:, None]
                bend = ((steps @ inner) * steps).sum(1)
                wanted = scale + torch.where(bend > 0, (steps * slope).sum(1) / bend, torch.zeros_like(bend))
                stored = wanted.to(form.scale_type).float()
                stored = torch.where(stored * scale > 0, stored, scale)
                lost[:, part] -= steps * (stored - scale)[:, None]
                scales[:, group] = stored
    return Rounded(values.to(torch.int8), Grid(scales, zeros), form)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse; with more damping where rounding has made it indefinite."""
    mean = hessian.diagonal().mean().clamp_min(SMALLEST)
    hessian = hessian / mean
    # A channel that is always zero: its weights do not matter, and must not divide by nothing.
    dead = hessian.diagonal() <= 0
    hessian.diagonal()[dead] = 1
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        if damping >= MOST_DAMPING:
            raise ArithmeticError("the calibration text gives a layer no directions that rounding could go by")
        damping *= 10
