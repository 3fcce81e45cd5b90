"""Runs a program in torch (float32, one row): slow, short, and independent of the kernels that are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.functional import layer_norm, linear, relu, silu

from outrider.kernels.program import Activation, Kind, Norm, Op, Program, Slice, Tensor


def gelu_erf(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.NONE: lambda x: x,
    Activation.RELU: relu,
    Activation.RELU_SQUARED: lambda x: relu(x).square(),
    Activation.GELU_ERF: gelu_erf,
    Activation.GELU_TANH: gelu_tanh,
    Activation.SILU: silu,
}
GATES = {Activation.SIGMOID: torch.sigmoid, Activation.SOFTPLUS: torch.nn.functional.softplus}


def run(program: Program, tensors: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """The logits after every token."""
    # Filled with NaN, so that a column that no operation writes shows in the result.
    buffers = [torch.full((len(tokens), width), torch.nan) for width in program.buffers]
    weights = [_weight(program, index, tensors) for index in range(len(program.weights))]

    def read(part: Slice) -> torch.Tensor:
        return buffers[part.buffer][:, part.offset : part.offset + part.width].clone()

    for op in program.ops:
        if op.kind is Kind.CHOOSE:
            return read(op.input)
        result = _apply(program, op, read, weights, torch.tensor(list(tokens)))
        buffers[op.output.buffer][:, op.output.offset : op.output.offset + op.output.width] = result
    raise AssertionError("the program does not end with a choice")


def _weight(program: Program, index: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    weight = program.weights[index]
    if weight.values:
        return torch.tensor(weight.values)
    whole = torch.cat(
        [
            _as_asked(source, tensors[source.name])[start:stop] + source.plus
            for source in weight.sources
            for start, stop in source.ranges
        ]
    )
    return whole.T if weight.sources[0].transposed else whole


def _as_asked(source: Tensor, stored: torch.Tensor) -> torch.Tensor:
    if not source.stored:
        return stored if stored.dim() else stored[None]
    return stored.T if len(source.shape) == 2 else stored.flatten()


def _check(source: Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    assert tuple(tensors[source.name].shape) == source.shape, source


def _apply(program: Program, op: Op, read, weights: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    x = read(op.input) if op.input.buffer >= 0 else torch.empty(0)
    weight = weights[op.weight] if op.weight >= 0 else torch.empty(0)
    bias = weights[op.bias] if op.bias >= 0 else None
    match op.kind:
        case Kind.EMBED:
            return weight[tokens] * op.scale
        case Kind.POSITION:
            return x + weight[torch.arange(len(tokens)) + op.integer]
        case Kind.SELECT:
            return x
        case Kind.NORM:
            heads = x.view(len(tokens), op.heads, op.head_size)
            if op.integer == Norm.LAYER:
                y = layer_norm(heads, (op.head_size,), weight, bias, op.epsilon).flatten(1)
            else:
                y = (heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + op.epsilon) * weight).flatten(1)
            return y if op.residual.buffer < 0 else y + read(op.residual)
        case Kind.LINEAR:
            y = linear(x, weight, bias)
            if program.weights[op.weight].gated:
                gate, up = y.chunk(2, dim=-1)
                if op.cap:
                    gate, up = gate.clamp(max=op.cap), up.clamp(-op.cap, op.cap)
                return ACTIVATIONS[op.activation](gate) * up
            if op.activation == Activation.CLIP:
                y = y.clamp(-op.cap, op.cap)
                return y * op.scale if op.residual.buffer < 0 else y * op.scale + read(op.residual)
            y = ACTIVATIONS[op.activation](y)
            y = (torch.tanh(y / op.cap) * op.cap if op.cap else y) * op.scale
            return y if op.residual.buffer < 0 else y + read(op.residual)
        case Kind.ROPE:
            weight = bias if bias is not None and op.longest and len(tokens) > op.longest else weight
            heads = x.view(len(tokens), op.heads, op.head_size)
            half = op.rotated // 2
            angle = (torch.arange(len(tokens)).float()[:, None] * weight[None])[:, None]
            cosine, sine = angle.cos() * op.scale, angle.sin() * op.scale
            low, high, rest = heads[:, :, :half], heads[:, :, half : 2 * half], heads[:, :, 2 * half :]
            return torch.cat([low * cosine - high * sine, high * cosine + low * sine, rest], dim=2).flatten(1)
        case Kind.CONVOLVE:
            x = x * read(op.key) if op.key.buffer >= 0 else x
            padded = torch.nn.functional.pad(x.T, (weight.shape[-1] - 1, 0))
            y = ACTIVATIONS[op.activation](torch.nn.functional.conv1d(padded, weight, bias, groups=x.shape[1]).T)
            return y * read(op.value) if op.value.buffer >= 0 else y
        case Kind.GATE:
            return x * (ACTIVATIONS | GATES)[op.activation](read(op.key))
        case Kind.SCALE:
            places = torch.arange(len(tokens)) + op.integer
            places = places // op.window if op.window else 0 * places
            y = x * (weight if op.integer and not op.window else weight[places.clamp(max=len(weight) - 1), None])
            return y if op.residual.buffer < 0 else y + read(op.residual)
        case Kind.XIELU:
            first, second, beta, epsilon = weight
            negative = (torch.expm1(torch.minimum(x, epsilon)) - x) * (beta + torch.nn.functional.softplus(second))
            return torch.where(x > 0, torch.nn.functional.softplus(first) * x * x, negative) + beta * x
        case Kind.HEADS:
            parts = []
            for columns, matrix in zip(x.chunk(op.heads, dim=1), weights[op.weight : op.weight + op.heads], strict=True):
                kept = columns.shape[1] - matrix.shape[1]
                parts += [columns[:, :kept], columns[:, kept:] @ matrix.T]
            return torch.cat(parts, dim=1)
        case Kind.GAUSSIAN_TOP_K:
            return relu(x - (x.mean(dim=1) + op.scale * x.std(dim=1, unbiased=False))[:, None])
        case Kind.BLEND:
            coefficients = read(op.key).view(len(tokens), -1, op.heads)
            y = torch.einsum("tvh,thc->tvc", coefficients, x.view(len(tokens), op.heads, -1)).flatten(1)
            return y if op.residual.buffer < 0 else y + read(op.residual)
        case Kind.CONNECT:
            return _connect(op, x, weight)
        case Kind.MATCH_RMS:
            vectors = x.view(len(tokens), op.heads, -1)
            own = vectors.square().mean(dim=2, keepdim=True).clamp(min=op.epsilon)
            y = (vectors * (read(op.key).square().mean(dim=1)[:, None, None] / own).sqrt()).flatten(1)
            return y if op.residual.buffer < 0 else y + read(op.residual)
        case Kind.DELTA:
            return _delta(op, x, read(op.key), read(op.value), read(op.residual), weight, bias)
        case Kind.SCAN:
            return _scan(op, x, read(op.key), read(op.value), read(op.residual), weight, bias)
        case Kind.ATTENTION:
            slopes = bias if op.bias >= 0 else None
            return _attention(op, x, read(op.key), read(op.value), weight if op.weight >= 0 else None, slopes)
    raise AssertionError(op.kind)


def _connect(op: Op, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    count, parts = op.heads, len(op.connections)
    widths, factors, biases = [count, count, count * count][:parts], numbers[:parts], numbers[parts:].split(op.connections)
    x = [part * factor + bias for part, factor, bias in zip(x.split(widths, dim=1), factors, biases, strict=True)]
    made = [x[0].sigmoid() + op.epsilon, *(op.scale * each.sigmoid() + op.cap for each in x[1:2])]
    for each in x[2:]:
        mixes = each.view(-1, count, count).softmax(dim=2) + op.epsilon
        mixes = mixes / (mixes.sum(dim=1, keepdim=True) + op.epsilon)
        for _ in range(op.integer - 1):
            mixes = mixes / (mixes.sum(dim=2, keepdim=True) + op.epsilon)
            mixes = mixes / (mixes.sum(dim=1, keepdim=True) + op.epsilon)
        made.append(mixes.mT.flatten(1))
    return torch.cat(made, dim=1)


def _attention(
    op: Op,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    count = len(query)
    positions = torch.arange(count)
    seen = positions[None] <= positions[:, None]
    if op.window > 0:
        seen &= positions[None] > positions[:, None] - op.window
    elif op.window < 0:
        seen &= positions[None] // -op.window == positions[:, None] // -op.window
    q, k, v = (
        part.view(count, heads, -1).transpose(0, 1)
        for part, heads in ((query, op.heads), (key, op.kv_heads), (value, op.kv_heads))
    )
    k, v = (part.repeat_interleave(op.heads // op.kv_heads, dim=0) for part in (k, v))
    scores = q @ k.transpose(1, 2) * op.scale
    scores = torch.tanh(scores / op.cap) * op.cap if op.cap else scores
    if slopes is not None:
        biases = slopes[:, None] * positions
        if op.rotated:
            biases = (slopes[:, None] * positions.bfloat16().float()).bfloat16().float() * op.scale
        scores = scores + (biases[:, None] - biases[:, :, None])
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, count, 1)], dim=2)
    weights = scores.softmax(dim=2)[:, :, :count]
    return (weights @ v).transpose(0, 1).reshape(count, -1)


def _delta(op: Op, query, key, value, gates, decay, shift) -> torch.Tensor:
    queries, keys = (
        torch.repeat_interleave(
            x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + op.epsilon), op.heads // op.kv_heads, dim=1
        )
        for x in (x.view(len(query), op.kv_heads, op.head_size) for x in (query, key))
    )
    values = value.view(len(query), op.heads, -1)
    rates = gates[:, : op.heads].sigmoid() * (1.0 if op.window else op.cap or 1.0)
    kept, speed = (gates[:, op.heads :] + shift).view(len(query), op.heads, -1), decay.exp()[:, None]
    steps = op.cap * (speed * kept).sigmoid() if op.window else speed * torch.nn.functional.softplus(kept)
    kept = (-steps).exp()
    state, result = torch.zeros(op.heads, op.head_size, values.shape[2]), []
    for token in range(len(query)):
        state = state * kept[token, ..., None]
        change = (values[token] - torch.einsum("hij,hi->hj", state, keys[token])) * rates[token, :, None]
        state = state + keys[token, :, :, None] * change[:, None]
        result.append(torch.einsum("hij,hi->hj", state, queries[token] * op.scale).flatten())
    return torch.stack(result)


def _scan(op: Op, query, key, value, steps, numbers, shift) -> torch.Tensor:
    count, group = len(query), op.heads // op.kv_heads
    queries, keys = (x.view(count, op.kv_heads, op.head_size).repeat_interleave(group, dim=1) for x in (query, key))
    if steps.shape[1] == op.heads:
        decay, skip = numbers.split(op.heads)
        rates = decay[:, None, None]
    else:
        shift, skip = shift.chunk(2)
        rates = numbers.view(op.heads, -1, op.head_size).transpose(1, 2)
    values, steps = value.view(count, op.heads, -1), torch.nn.functional.softplus(steps + shift).view(count, op.heads, -1)
    state, result = torch.zeros(op.heads, op.head_size, values.shape[2]), []
    for token in range(count):
        added = torch.einsum("hi,hj->hij", keys[token], values[token] * steps[token])
        state = state * torch.exp(-rates.exp() * steps[token][:, None]) + added
        result.append(
            (torch.einsum("hij,hi->hj", state, queries[token]) + skip.view(op.heads, -1) * values[token]).flatten()
        )
    return torch.stack(result)
