"""Recurrent operations in torch: short convolutions and gated delta nets (defined in kernels/builder.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.program import Op


def convolve(x: Tensor, taps: Tensor, bias: Tensor | None, length: int) -> Tensor:
    """``taps``: [columns, 1, taps], the last one for the token itself; zeros before a sequence's first token."""
    sequences = x.reshape(-1, length, x.shape[1]).transpose(1, 2)
    padded = F.pad(sequences, (taps.shape[-1] - 1, 0))
    return F.conv1d(padded, taps, bias, groups=x.shape[1]).transpose(1, 2).reshape(x.shape)


def delta(
    op: Op, query: Tensor, key: Tensor, value: Tensor, gates: Tensor, decay: Tensor, shift: Tensor, length: int
) -> Tensor:
    """The gated delta rule, token by token, all sequences at once: S *= kept; S += k (rate (v - k^T S))^T; output = scale
    q^T S."""
    queries, keys = (_unit(op, part).reshape(-1, length, op.kv_heads, op.head_size) for part in (query, key))
    values = value.reshape(-1, length, op.heads, value.shape[1] // op.heads)
    rates = (gates[:, : op.heads].sigmoid() * (1.0 if op.window else op.cap or 1.0)).view(-1, length, op.heads)
    given = (gates[:, op.heads :] + shift).view(-1, length, op.heads, op.decays // op.heads)
    speed = decay.exp()[:, None]
    kept = (-(op.cap * (speed * given).sigmoid() if op.window else speed * F.softplus(given))).exp()
    state, found = torch.zeros(len(values), op.heads, op.head_size, values.shape[3]), torch.empty_like(values)
    for token in range(length):
        own, asked = (x[:, token].repeat_interleave(op.heads // op.kv_heads, dim=1) for x in (keys, queries))
        state *= kept[:, token, ..., None]
        read = torch.einsum("shij,shi->shj", state, own)
        change = (values[:, token] - read) * rates[:, token, :, None]
        state += own[..., None] * change[:, :, None]
        found[:, token] = torch.einsum("shij,shi->shj", state, asked) * op.scale
    return found.reshape(value.shape)


def scan(
    op: Op, query: Tensor, key: Tensor, value: Tensor, steps: Tensor, numbers: Tensor, shift: Tensor, length: int
) -> Tensor:
    """The scan, token by token, all sequences at once: S *= decay; S += k (v * step)^T; output = S^T q + skip * v."""
    queries, keys = (part.reshape(-1, length, op.kv_heads, op.head_size) for part in (query, key))
    values = value.reshape(-1, length, op.heads, value.shape[1] // op.heads)
    if op.by_column:
        rates = numbers.exp().reshape(op.heads, -1, op.head_size).transpose(1, 2)
        shift, skip = shift.view(2, -1)
    else:
        decay, skip = numbers.split(op.heads)
        rates = decay.exp()[:, None, None]
    skip = skip.view(op.heads, -1)
    steps = F.softplus(steps + shift).view(-1, length, op.heads, steps.shape[1] // op.heads)
    state, found = torch.zeros(len(values), op.heads, op.head_size, values.shape[3]), torch.empty_like(values)
    for token in range(length):
        own, asked = (x[:, token].repeat_interleave(op.heads // op.kv_heads, dim=1) for x in (keys, queries))
        added = values[:, token] * steps[:, token]
        state = state * (-rates * steps[:, token, :, None]).exp() + own[..., None] * added[:, :, None]
        found[:, token] = torch.einsum("shij,shi->shj", state, asked) + skip * values[:, token]
    return found.reshape(value.shape)


def _unit(op: Op, x: Tensor) -> Tensor:
    heads = x.reshape(len(x), op.kv_heads, op.head_size)
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + op.epsilon)
