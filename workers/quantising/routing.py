"""Routers of mixtures of experts, and the weighted sum of experts' outputs, in torch (defined in kernels/builder.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.program import BY_SCORE, NOT_NORMALISED, SIGMOIDS, Op, Routing


def route(op: Op, scores: Tensor, corrections: Tensor | None, factors: Tensor | None) -> Tensor:
    """[tokens, 2 * chosen]: the indices of the best experts (of equal scores the first), then their weights."""
    if op.integer == Routing.SPARSE_MIXER:
        return _mix_sparsely(op, scores)
    routing = Routing(op.integer)
    chances = scores.sigmoid() if routing in SIGMOIDS else scores.softmax(dim=1)
    values = scores if (corrections is None and not op.head_size) or routing in BY_SCORE else chances
    values = values if corrections is None else values + corrections
    best = _highest(_of_groups(op, values) if op.head_size else values, op.kv_heads)
    weights = chances.gather(1, best)
    if routing not in NOT_NORMALISED:
        total = weights.sum(dim=1, keepdim=True)
        if routing in SIGMOIDS:
            total = total + op.epsilon
        elif routing is Routing.SOFTMAX_SHARE:
            total = total.clamp(min=op.epsilon)
        weights = weights / total
    weights = weights * op.scale
    return torch.cat([best.float(), weights if factors is None else weights * factors[best]], dim=1)


def _highest(values: Tensor, count: int) -> Tensor:
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _of_groups(op: Op, values: Tensor) -> Tensor:
    """-infinity for experts of groups that are not chosen."""
    groups = values.view(len(values), -1, op.head_size)
    counted = 1 if op.integer == Routing.SOFTMAX_GROUPS else 2
    kept = _highest(groups.topk(counted, dim=2).values.sum(dim=2), op.window)
    out = torch.ones(groups.shape[:2], dtype=torch.bool).scatter(1, kept, False)
    return groups.masked_fill(out[:, :, None], float("-inf")).view(values.shape)


def _mix_sparsely(op: Op, scores: Tensor) -> Tensor:
    """Phi-MoE's SparseMixer: two experts, each with its share of a softmax over scores that are not larger, and close."""
    left, best, weights = scores, [], []
    for _ in range(2):
        number = left.argmax(dim=1, keepdim=True)
        top = left.gather(1, number)
        # size == 0 only where all scores are 0: these are close to each other.
        size = torch.maximum(scores.abs(), top)
        far = torch.where(size > 0, (top - scores) / size, 0.0) > op.epsilon
        weights.append(op.scale / (left - top).exp().masked_fill(far, 0.0).sum(dim=1, keepdim=True))
        best.append(number.float())
        left = left.scatter(1, number, float("-inf"))
    return torch.cat([*best, *weights], dim=1)


def mix(op: Op, products: Tensor, routed: Tensor, own: Tensor | None, norm: tuple[Tensor, Tensor] | None) -> Tensor:
    """The sum of a token's expert outputs, weighted unless ``op.integer``; ``own`` stands for those of experts beyond
    ``op.heads``. ``norm``: the vectors by which they are multiplied before and behind their norm."""
    each = products.reshape(len(products), op.kv_heads, -1)[:, :, : op.output.width]
    if norm is not None:
        each = each * norm[0]
        each = each * torch.rsqrt(each.square().mean(-1, keepdim=True) + op.epsilon) * norm[1]
    if own is not None:
        each = torch.where((routed[:, : op.kv_heads] >= op.heads)[:, :, None], own[:, None], each)
    weighed = each if op.integer else each * routed[:, op.kv_heads :, None]
    return weighed.sum(dim=1) * op.scale
