"""A program's operations in torch, float32, over many sequences of equal length at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.program import ADD_RESIDUAL, Activation, Format, Kind, Norm, Op, Program, Slice, Weight
from outrider.workers.quantising.products import rounded_linear
from outrider.workers.quantising.recurrence import convolve, delta, scan
from outrider.workers.quantising.routing import mix, route

# The tokens of one step in a gated feed-forward layer, whose intermediate is as wide as gate and up together.
TOKENS_AT_ONCE = 2048

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.NONE: lambda x: x,
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
    Activation.GELU_ERF: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.SILU: F.silu,
    Activation.SIGMOID: F.sigmoid,
    Activation.SOFTPLUS: F.softplus,
    Activation.RETAINED: lambda x: (torch.sigmoid(-x) * (1.0 + torch.sigmoid(x))).clamp(min=1e-3).sqrt(),
}

# The program's buffers: [tokens, width], sequences concatenated.
Buffers = dict[int, Tensor]
# Called with the index of a weight that is rounded, and its input, before they are multiplied; returns the input to use.
Watch = Callable[[int, Tensor], Tensor]


class Forward:
    """``tensors`` are the checkpoint's, by name, in float32; only those of the operations that are run need be there.

    ``least``: an expert to which the router sends fewer tokens is also given ``least`` others, spread evenly over the
    layer's tokens, so that ``watch`` has enough inputs to calibrate with. Their outputs are used for nothing else. ``few``
    has the indices of the first matrices of such experts.
    """

    def __init__(
        self, program: Program, tensors: Mapping[str, Tensor], length: int, exactly: bool = True, least: int = 0
    ) -> None:
        self._program = program
        self._tensors = tensors
        self._length = length
        self._multiply = F.linear if exactly else rounded_linear
        self._least = least
        self.few: set[int] = set()
        # By expert: the outputs of its first matrix for these additional tokens, which are the inputs of its second.
        self._additional: dict[int, Tensor] = {}

    def run(self, start: int, stop: int, buffers: Buffers, tokens: Tensor, watch: Watch | None = None) -> None:
        """Run operations ``start`` to ``stop`` on the buffers."""
        for number in range(start, stop):
            op = self._program.ops[number]
            result = self._run(op, buffers, tokens, watch)
            output = op.input if op.kind is Kind.ROPE else op.output
            width = self._program.buffers[output.buffer]
            if output.width == width:
                buffers[output.buffer] = result
            else:
                buffers.setdefault(output.buffer, torch.empty(len(result), width))
                _part(buffers, output).copy_(result)

    def _run(self, op: Op, buffers: Buffers, tokens: Tensor, watch: Watch | None) -> Tensor:
        output = self._output(op, buffers, tokens, watch)
        if op.kind in ADD_RESIDUAL and op.residual.buffer >= 0:
            return output + _part(buffers, op.residual)
        return output

    def _output(self, op: Op, buffers: Buffers, tokens: Tensor, watch: Watch | None) -> Tensor:
        """The operation's output, before its residual is added."""
        if op.kind is Kind.EMBED:
            return self._weight(op.weight)[tokens] * op.scale
        x = _part(buffers, op.input)
        if op.kind is Kind.SELECT:
            return x
        if op.kind is Kind.POSITION:
            positions = torch.arange(self._length) + op.integer
            return x + self._weight(op.weight)[positions].repeat(len(x) // self._length, 1)
        if op.kind is Kind.NORM:
            return _norm(op, x, self._weight(op.weight), self._weight_or_none(op.bias))
        if op.kind is Kind.LINEAR:
            return self._product(op, op.weight, op.bias, x, watch)
        if op.kind is Kind.HEADS:
            return self._heads(op, x)
        if op.kind is Kind.SCALE:
            by_column = op.integer and not op.window
            return x * (self._weight(op.weight) if by_column else self._factors(op, len(x)))
        if op.kind is Kind.XIELU:
            return _xielu(x, *self._weight(op.weight))
        if op.kind is Kind.CONNECT:
            return _connect(op, x, self._weight(op.weight))
        if op.kind is Kind.GAUSSIAN_TOP_K:
            deviation, mean = torch.std_mean(x, dim=1, correction=0, keepdim=True)
            return F.relu(x - (mean + op.scale * deviation))
        if op.kind is Kind.ROPE:
            long = op.longest and self._length > op.longest
            frequencies = self._program.weights[op.bias if long else op.weight].values
            return _rope(op, x, torch.tensor(frequencies), self._length)
        if op.kind is Kind.ROUTE:
            return route(op, x, self._weight_or_none(op.weight), self._weight_or_none(op.bias))
        if op.kind is Kind.CONVOLVE:
            gate_in, gate_out = (_part(buffers, part) if part.buffer >= 0 else 1.0 for part in (op.key, op.value))
            bias = self._weight_or_none(op.bias)
            return ACTIVATIONS[op.activation](convolve(x * gate_in, self._weight(op.weight), bias, self._length)) * gate_out
        key = _part(buffers, op.key)
        if op.kind is Kind.EXPERTS:
            return self._experts(op, x, key, watch)
        if op.kind is Kind.MIX:
            norm = (self._weight(op.weight), self._weight(op.bias)) if op.weight >= 0 else None
            return mix(op, x, key, _part(buffers, op.value) if op.value.buffer >= 0 else None, norm)
        if op.kind is Kind.GATE:
            return x * ACTIVATIONS[op.activation](key)
        if op.kind is Kind.BLEND:
            return _blend(op, x, key)
        if op.kind is Kind.MATCH_RMS:
            return _match_rms(op, x, key)
        value = _part(buffers, op.value)
        if op.kind is Kind.ATTENTION:
            sinks, slopes = self._weight_or_none(op.weight), self._weight_or_none(op.bias)
            return _attention(op, x, key, value, self._length, sinks, slopes)
        gates = _part(buffers, op.residual)
        if op.kind is Kind.DELTA:
            return delta(op, x, key, value, gates, self._weight(op.weight), self._weight(op.bias), self._length)
        if op.kind is Kind.SCAN:
            return scan(op, x, key, value, gates, self._weight(op.weight), self._weight(op.bias), self._length)
        raise ValueError(f"{op.kind} has no output")

    def _weight_or_none(self, index: int) -> Tensor | None:
        return None if index < 0 else self._weight(index)

    def _weight(self, index: int) -> Tensor:
        return _stacked(self._program.weights[index], self._tensors)

    def _heads(self, op: Op, x: Tensor) -> Tensor:
        parts = []
        for head, columns in enumerate(x.chunk(op.heads, dim=1)):
            matrix = self._weight(op.weight + head)
            kept = columns.shape[1] - matrix.shape[1]
            parts += [columns[:, :kept], self._multiply(columns[:, kept:], matrix, None)]
        return torch.cat(parts, dim=1)

    def _factors(self, op: Op, tokens: int) -> Tensor:
        """A factor for each token by its position; the last factor is that of all later positions."""
        factors, positions = self._weight(op.weight), torch.arange(self._length)
        places = ((positions + op.integer) // op.window if op.window else 0 * positions).clamp(max=len(factors) - 1)
        return factors[places].repeat(tokens // self._length)[:, None]

    def _product(self, op: Op, number: int, shift: int, x: Tensor, watch: Watch | None) -> Tensor:
        """x times the program's weight ``number``, plus bias ``shift`` (-1: none), with the activation of ``op``."""
        weight = self._program.weights[number]
        x = watch(number, x) if watch is not None and weight.format.integer else x
        matrix = self._weight(number)
        bias = None if shift < 0 else self._weight(shift)
        # fp32 weights are routers', whose scores may be close: they are multiplied exactly.
        multiply = F.linear if weight.format is Format.FP32 else self._multiply
        if op.activation is Activation.CLIP:
            return multiply(x, matrix, bias).clamp(-op.cap, op.cap)
        if not weight.gated:
            return _cap(ACTIVATIONS[op.activation](multiply(x, matrix, bias)), op.cap) * op.scale
        return torch.cat([_gated(op, multiply(some, matrix, bias)) for some in x.split(TOKENS_AT_ONCE)])

    def _experts(self, op: Op, x: Tensor, routed: Tensor, watch: Watch | None) -> Tensor:
        """One expert after the other, each with the tokens that the router sends to it."""
        numbers, first = routed[:, : op.kv_heads].long(), self._program.weights[op.weight]
        width = first.rows // 2 if first.gated else first.rows
        result = torch.zeros(len(x), op.kv_heads, op.output.width // op.kv_heads)
        # [tokens, chosen experts, width]: each expert's own input (op.integer), or the same one for all experts of a token.
        read = x.reshape(len(x), op.kv_heads, -1) if op.integer else x[:, None].expand(-1, op.kv_heads, -1)
        for expert in range(op.heads):
            tokens, slots = (numbers == expert).nonzero(as_tuple=True)
            inputs = read[tokens, slots, : first.columns]
            if op.integer:
                additional = self._additional.pop(expert, None)
            else:
                additional = self._additional_tokens(op.weight + expert, x, len(tokens))
            inputs = inputs if additional is None else torch.cat([inputs, additional])
            if not len(inputs):
                continue
            shift = op.bias + expert if op.bias >= 0 else -1
            made = self._product(op, op.weight + expert, shift, inputs, watch)
            result[tokens, slots, :width] = made[: len(tokens)]
            if additional is not None and not op.integer:
                self._additional[expert] = made[len(tokens) :]
        return result.view(len(x), -1)

    def _additional_tokens(self, number: int, x: Tensor, sent: int) -> Tensor | None:
        if sent >= self._least:
            return None
        self.few.add(number)
        return x[torch.arange(self._least) * len(x) // self._least] if len(x) > self._least else x


def _part(buffers: Buffers, slice: Slice) -> Tensor:
    return buffers[slice.buffer][:, slice.offset : slice.offset + slice.width]


def _stacked(weight: Weight, tensors: Mapping[str, Tensor]) -> Tensor:
    if weight.values:
        return torch.tensor(weight.values)
    # A scalar is a vector of one.
    found = [(source, tensors[source.name].reshape(tensors[source.name].shape or (1,))) for source in weight.sources]
    parts = [tensor[start:stop] + source.plus for source, tensor in found for start, stop in source.ranges]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.T if weight.sources[0].transposed else whole


def _gated(op: Op, y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=1)
    if op.activation is Activation.BOUNDED_SILU:
        return F.silu(gate).clamp(max=op.cap) * up.clamp(-op.cap, op.cap)
    if op.cap:
        gate, up = gate.clamp(max=op.cap), up.clamp(-op.cap, op.cap)
    if op.activation is Activation.CLAMPED_SWIGLU:
        return gate * torch.sigmoid(op.scale * gate) * (up + 1)
    return ACTIVATIONS[op.activation](gate) * up


def _norm(op: Op, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    heads = x.reshape(len(x), op.heads, op.head_size)
    if op.integer == Norm.LAYER:
        return F.layer_norm(heads, (op.head_size,), weight, bias, op.epsilon).reshape(x.shape)
    scaled = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + op.epsilon) * weight
    return (scaled if bias is None else scaled + bias).reshape(x.shape)


def _xielu(x: Tensor, first: Tensor, second: Tensor, beta: Tensor, epsilon: Tensor) -> Tensor:
    below = (torch.expm1(torch.minimum(x, epsilon)) - x) * (beta + F.softplus(second))
    return torch.where(x > 0, F.softplus(first) * x * x, below) + beta * x


def _rope(op: Op, x: Tensor, frequencies: Tensor, length: int) -> Tensor:
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cosine, sine = (angles.cos() * op.scale)[:, None], (angles.sin() * op.scale)[:, None]
    half = op.rotated // 2
    first, second, rest = x.reshape(-1, length, op.heads, op.head_size).split([half, half, op.head_size - 2 * half], dim=3)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=3).reshape(x.shape)


def _blend(op: Op, x: Tensor, coefficients: Tensor) -> Tensor:
    sums = coefficients.reshape(len(x), -1, op.heads) @ x.reshape(len(x), op.heads, -1)
    return sums.reshape(len(x), -1)


def _connect(op: Op, logits: Tensor, numbers: Tensor) -> Tensor:
    parts = op.connections
    x = logits * numbers[: len(parts)].repeat_interleave(torch.tensor(parts)) + numbers[len(parts) :]
    reads, *others = x.split(parts, dim=1)
    made = [torch.sigmoid(reads) + op.epsilon]
    if others:
        made.append(op.scale * torch.sigmoid(others[0]) + op.cap)
    if len(others) > 1:
        mixed = others[1].reshape(-1, op.heads, op.heads).softmax(dim=2) + op.epsilon
        for dim in (1, *(2, 1) * (op.integer - 1)):
            mixed = mixed / (mixed.sum(dim=dim, keepdim=True) + op.epsilon)
        made.append(mixed.transpose(1, 2).reshape(len(x), -1))
    return torch.cat(made, dim=1)


def _match_rms(op: Op, x: Tensor, model: Tensor) -> Tensor:
    vectors = x.reshape(len(x), op.heads, -1)
    own = vectors.square().mean(-1, keepdim=True).clamp(min=op.epsilon)
    return (vectors * (model.square().mean(-1)[:, None, None].sqrt() / own.sqrt())).reshape(x.shape)


def _cap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap if cap else x


def _attention(
    op: Op, query: Tensor, key: Tensor, value: Tensor, length: int, sinks: Tensor | None, slopes: Tensor | None
) -> Tensor:
    queries = query.reshape(-1, length, op.heads, op.head_size).transpose(1, 2)
    keys = key.reshape(-1, length, op.kv_heads, op.head_size).transpose(1, 2)
    values = value.reshape(-1, length, op.kv_heads, op.value_size).transpose(1, 2)
    places = torch.arange(length)
    seen: Tensor = (places <= places[:, None]) & (places >= op.first_seen(places)[:, None])
    biases = None if slopes is None else op.alibi(slopes, places, lambda x: x.to(torch.bfloat16).float())
    mask = seen if op.window else None
    if biases is not None:
        mask = biases.masked_fill(~seen, float("-inf"))
    outputs = []
    for q, k, v in zip(queries, keys, values, strict=True):
        if op.cap or sinks is not None:
            outputs.append(_scored_attention(op, q, k, v, sinks, biases))
            continue
        attended = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=op.scale, enable_gqa=True
        )
        outputs.append(attended[0])
    return torch.stack(outputs).transpose(1, 2).reshape(len(query), -1)


def _scored_attention(
    op: Op, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, biases: Tensor | None
) -> Tensor:
    """Attention of one sequence [heads, tokens, head size] with a soft cap on the scores, or sinks. ``biases``: [heads,
    tokens, tokens], added to the scores."""
    keys, values = (x.repeat_interleave(op.heads // op.kv_heads, dim=0) for x in (key, value))
    scores = _cap(query @ keys.transpose(1, 2) * op.scale, op.cap)
    scores = scores if biases is None else scores + biases
    places = torch.arange(query.shape[1])
    seen = (places <= places[:, None]) & (places >= op.first_seen(places)[:, None])
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return scores.softmax(dim=-1) @ values
    beside = sinks[:, None, None].expand(-1, len(places), 1)
    return torch.cat([scores, beside], dim=2).softmax(dim=-1)[:, :, :-1] @ values
