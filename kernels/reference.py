"""Runs a program in NumPy, one row at a time: what the kernels are tested against.

Everything is float64 except what the format itself rounds: packed weights, the cache, and the activations of a bf16 or
integer product. The compiled kernels differ by their rounding of the rest; an int8 activation near a half may then differ
by one step, which the tests' tolerances allow.

Codes with bf16 or fp32 activations (W4ABF16, W8AF32) are sums of (code - zero point) * scale * activation. The kernels take
an activation as a whole number of 15 bits (bf16) or 23 (fp32) times a power of two that a block of channels shares, and
sum products of whole numbers: exactly within a group, whose sums are added in fp32, group by group. The rounding error of
an activation is below 2^-15 or 2^-23 of the block's largest; a bf16 activation above 2^-7 of it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.kernels import packing, storage
from outrider.kernels.program import (
    ADD_RESIDUAL,
    BY_SCORE,
    NOT_NORMALISED,
    SIGMOIDS,
    Activation,
    Cache,
    Format,
    Kind,
    Norm,
    Op,
    Program,
    Routing,
    Slice,
    Weight,
)

Array = NDArray[np.float64]
# With an int8 cache this many attention weights are rounded together.
CHUNK = 256


class ReferenceModel:
    """The program over its dequantised weights."""

    def __init__(self, program: Program, memory: NDArray[np.uint8]) -> None:
        self.program = program
        offsets, _ = packing.weight_offsets(program)
        packed = [
            memory[offset : offset + packing.packed_size(weight)]
            for weight, offset in zip(program.weights, offsets, strict=True)
        ]
        pairs = list(zip(program.weights, packed, strict=True))
        self.weights = [packing.unpack(weight, each).astype(np.float64) for weight, each in pairs]
        # The input channel of each column of a matrix in activation order.
        self.orders = [storage.unpack_order(weight, each) if weight.ordered else None for weight, each in pairs]

    def logits(self, tokens: Sequence[int]) -> Array:
        """The logits after each of a row's tokens: shape (tokens, vocabulary).

        Where rope depends on a row's length, the logits after a position are those of a row that ends there.
        """
        longest = max((op.longest for op in self.program.ops), default=0)
        if 0 < longest < len(tokens):
            return np.concatenate([self._logits(tokens[:longest]), self._logits(tokens)[longest:]])
        return self._logits(tokens)

    def _logits(self, tokens: Sequence[int]) -> Array:
        buffers = [np.full((len(tokens), width), np.nan) for width in self.program.buffers]
        for op in self.program.ops:
            if op.kind is Kind.CHOOSE:
                return _read(buffers, op.input).copy()
            result = self._run(op, buffers, np.asarray(tokens))
            output = op.input if op.kind is Kind.ROPE else op.output
            buffers[output.buffer][:, output.offset : output.offset + output.width] = result
        raise ValueError("a program ends with choose")

    def _run(self, op: Op, buffers: list[Array], tokens: NDArray[np.int64]) -> Array:
        output = self._output(op, buffers, tokens)
        if op.kind in ADD_RESIDUAL and op.residual.buffer >= 0:
            return output + _read(buffers, op.residual)
        return output

    def _output(self, op: Op, buffers: list[Array], tokens: NDArray[np.int64]) -> Array:
        """The operation's output, before its residual is added."""
        if op.kind is Kind.EMBED:
            return self.weights[op.weight][tokens] * np.float32(op.scale)
        x = _read(buffers, op.input)
        if op.kind is Kind.SELECT:
            return x
        if op.kind is Kind.POSITION:
            return x + self.weights[op.weight][np.arange(len(x)) + op.integer]
        if op.kind is Kind.NORM:
            return _norm(op, x, self.weights[op.weight][0], self._bias(op))
        if op.kind is Kind.LINEAR:
            weight = self.program.weights[op.weight]
            x = _activations(x, weight, self.orders[op.weight])
            return _linear(op, x, weight, self.weights[op.weight], self._bias(op))
        if op.kind is Kind.HEADS:
            return self._heads(op, x)
        if op.kind is Kind.SCALE:
            return self._scale(op, x)
        if op.kind is Kind.XIELU:
            return _xielu(x, *self.weights[op.weight][0, :4])
        if op.kind is Kind.CONNECT:
            return _connect(op, x, self.weights[op.weight][0])
        if op.kind is Kind.GAUSSIAN_TOP_K:
            least = x.mean(axis=1, keepdims=True) + np.float32(op.scale) * x.std(axis=1, keepdims=True)
            return np.asarray(np.maximum(0, x - least))
        if op.kind is Kind.ROPE:
            long = op.longest and len(tokens) > op.longest
            return _rope(op, x, self.weights[op.bias if long else op.weight][0])
        if op.kind is Kind.ROUTE:
            return self._route(op, x)
        if op.kind is Kind.CONVOLVE:
            before, behind = (_read(buffers, part) if part.buffer >= 0 else 1.0 for part in (op.key, op.value))
            return np.asarray(_convolve(op, x * before, self.weights[op.weight], self._bias(op)) * behind)
        key = _read(buffers, op.key)
        if op.kind is Kind.EXPERTS:
            return self._experts(op, x, key)
        if op.kind is Kind.MIX:
            norm = (self.weights[op.weight][0], self.weights[op.bias][0]) if op.weight >= 0 else None
            return _mix(op, x, key, _read(buffers, op.value) if op.value.buffer >= 0 else None, norm)
        if op.kind is Kind.GATE:
            return np.asarray(x * _activate(key, op.activation))
        if op.kind is Kind.BLEND:
            return _blend(op, x, key)
        if op.kind is Kind.MATCH_RMS:
            return _match_rms(op, x, key)
        value = _read(buffers, op.value)
        if op.kind is Kind.ATTENTION:
            return self._attention(op, x, key, value)
        gates = _read(buffers, op.residual)
        if op.kind is Kind.DELTA:
            return _delta(op, x, key, value, gates, self.weights[op.weight][0], self.weights[op.bias][0])
        if op.kind is Kind.SCAN:
            return _scan(op, x, key, value, gates, self.weights[op.weight], self.weights[op.bias][0])
        raise ValueError(f"{op.kind} is not defined here")

    def _bias(self, op: Op) -> Array | None:
        return self.weights[op.bias][0] if op.bias >= 0 else None

    def _scale(self, op: Op, x: Array) -> Array:
        """x times a factor for each column, or for each token by its position (the last one: also later)."""
        factors = self.weights[op.weight][0, : self.program.weights[op.weight].columns]
        if op.integer and not op.window:
            return np.asarray(x * factors)
        positions = np.arange(len(x))
        indices = (positions + op.integer) // op.window if op.window else 0 * positions
        return np.asarray(x * factors[np.minimum(indices, len(factors) - 1), None])

    def _route(self, op: Op, scores: Array) -> Array:
        routed = _route(op, scores, self.weights[op.weight][0] if op.weight >= 0 else None)
        factors = self._bias(op)
        if factors is not None:
            routed[:, op.kv_heads :] *= factors[routed[:, : op.kv_heads].astype(np.int64)]
        return routed

    def _attention(self, op: Op, query: Array, key: Array, value: Array) -> Array:
        """Attention over keys and values as the cache rounds them."""
        if self.program.cache is Cache.BF16:
            key, value = _bf16(key), _bf16(value)
        elif self.program.cache is Cache.INT8:
            if op.value_in_key:
                query, key = (_in_two_parts(each, op.head_size, op.value_size) for each in (query, key))
            else:
                query, key = (quantised_activations(each, op.head_size) for each in (query, key))
            value = quantised_activations(value, op.value_size)
        sinks = self.weights[op.weight][0] if op.weight >= 0 else None
        slopes = self.weights[op.bias][0, : op.heads] if op.bias >= 0 else None
        return _attention(op, query, key, value, sinks, slopes, whole=self.program.cache is Cache.INT8)

    def _heads(self, op: Op, x: Array) -> Array:
        """For each head its first columns, unchanged, then the product of its last columns."""
        parts = []
        for head, columns in enumerate(np.split(x, op.heads, axis=1)):
            number = op.weight + head
            weight = self.program.weights[number]
            kept, multiplied = np.split(columns, [columns.shape[1] - weight.columns], axis=1)
            inputs = _activations(multiplied, weight, self.orders[number])
            parts += [kept, _linear(op, inputs, weight, self.weights[number], None)]
        return np.concatenate(parts, axis=1)

    def _experts(self, op: Op, x: Array, route: Array) -> Array:
        """Each token's products, concatenated; each is padded with zeros to a multiple of 16 columns."""
        first = self.program.weights[op.weight]
        width = first.rows // 2 if first.gated else first.rows
        result = np.zeros((len(x), op.kv_heads, op.output.width // op.kv_heads))
        for token, slot in np.ndindex(len(x), op.kv_heads):
            number = int(route[token, slot])
            if number >= op.heads:  # has no product (MIX)
                continue
            weight = self.program.weights[op.weight + number]
            row = x[token].reshape(op.kv_heads, -1)[slot] if op.integer else x[token]
            inputs = _activations(row[None, : weight.columns], weight, self.orders[op.weight + number])
            bias = self.weights[op.bias + number][0] if op.bias >= 0 else None
            result[token, slot, :width] = _linear(op, inputs, weight, self.weights[op.weight + number], bias)[0]
        return result.reshape(len(x), -1)


def _read(buffers: list[Array], slice: Slice) -> Array:
    return buffers[slice.buffer][:, slice.offset : slice.offset + slice.width]


def _bf16(x: Array) -> Array:
    return packing.from_bf16(packing.to_bf16(x.astype(np.float32))).astype(np.float64)


def _norm(op: Op, x: Array, weight: Array, bias: Array | None) -> Array:
    heads = x.reshape(len(x), op.heads, op.head_size)
    if op.integer == Norm.LAYER:
        heads = heads - heads.mean(axis=2, keepdims=True)
    scaled: Array = heads / np.sqrt((heads * heads).mean(axis=2, keepdims=True) + np.float32(op.epsilon))
    scaled = scaled * weight[: op.head_size]
    return (scaled if bias is None else scaled + bias[: op.head_size]).reshape(x.shape)


def quantised_activations(x: Array, group: int, largest: int = storage.LARGEST_INT8) -> Array:
    """``x`` rounded to int8, with one scale for every token and group of channels, and dequantised."""
    result = np.empty_like(x)
    for start in range(0, x.shape[1], group):
        part = x[:, start : start + group].astype(np.float32)
        highest = np.abs(part).max(axis=1, keepdims=True)
        inverse = np.where(highest > 1e-30, np.float32(largest) / np.maximum(highest, np.float32(1e-30)), np.float32(0))
        scale = np.where(highest > 1e-30, highest / np.float32(largest), np.float32(0))
        result[:, start : start + group] = np.rint(part * inverse) * scale.astype(np.float64)
    return result


def _in_sixteen_bits(x: Array, block: int, order: NDArray[np.int32] | None) -> Array:
    """Whole numbers of 15 bits and a sign, times a power of two that a block of channels shares."""
    columns = np.arange(x.shape[1]) if order is None else order
    result = np.empty_like(x)
    for start in range(0, x.shape[1], block):
        part = columns[start : start + block]
        largest = np.abs(x[:, part]).max(axis=1, keepdims=True).astype(np.float32) * np.float32(1.0078125)
        step = np.ldexp(1.0, np.frexp(largest)[1] - 15)
        result[:, part] = np.rint(x[:, part] / step) * step
    return result


def _activations(x: Array, weight: Weight, order: NDArray[np.int32] | None) -> Array:
    """``x`` rounded as the product with ``weight`` requires."""
    if weight.format is Format.BF16:
        return _bf16(x)
    if weight.format is Format.W4ABF16:
        return _in_sixteen_bits(_bf16(x), storage.geometry(weight).block, order)
    if weight.format not in (Format.W4A8, Format.W8A8):
        return x
    block, largest = storage.geometry(weight).block, storage.largest_activation(weight)
    if order is None:
        return quantised_activations(x, block, largest)
    result = np.empty_like(x)
    result[:, order] = quantised_activations(x[:, order], block, largest)
    return result


def _linear(op: Op, x: Array, weight: Weight, matrix: Array, bias: Array | None) -> Array:
    y = x @ matrix.T
    if weight.gated:
        half = weight.rows // 2
        y = y if bias is None else y + bias[: y.shape[1]]
        gate, up = y[:, :half], y[:, half:]
        cap = np.float32(op.cap)
        if op.activation is Activation.BOUNDED_SILU:
            return np.asarray(np.minimum(_activate(gate, Activation.SILU), cap) * np.clip(up, -cap, cap))
        if op.cap:
            gate, up = np.minimum(gate, cap), np.clip(up, -cap, cap)
        if op.activation is Activation.CLAMPED_SWIGLU:
            return np.asarray(gate / (1 + np.exp(-np.float32(op.scale) * gate)) * (up + 1))
        return _activate(gate, op.activation) * up
    y = y if bias is None else y + bias[: y.shape[1]]
    if op.activation is Activation.CLIP:
        return np.asarray(np.clip(y, -np.float32(op.cap), np.float32(op.cap)) * np.float32(op.scale))
    return np.asarray(_cap(_activate(y, op.activation), op.cap) * np.float32(op.scale))


def _xielu(x: Array, first: float, second: float, beta: float, epsilon: float) -> Array:
    positive, negative = np.log1p(np.exp(first)), beta + np.log1p(np.exp(second))
    below = (np.expm1(np.minimum(x, epsilon)) - x) * negative
    return np.asarray(np.where(x > 0, positive * x * x, below) + beta * x)


def _cap(x: Array, cap: float) -> Array:
    return np.asarray(np.tanh(x / np.float32(cap)) * np.float32(cap)) if cap else x


def _activate(x: Array, activation: Activation) -> Array:
    if activation is Activation.RELU:
        return np.maximum(x, 0)
    if activation is Activation.RELU_SQUARED:
        return np.asarray(np.maximum(x, 0) ** 2)
    if activation is Activation.GELU_ERF:
        return np.asarray(0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))))
    if activation is Activation.GELU_TANH:
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    if activation is Activation.SILU:
        return np.asarray(x / (1 + np.exp(-x)))
    if activation is Activation.SIGMOID:
        return np.asarray(1 / (1 + np.exp(-x)))
    if activation is Activation.RETAINED:
        added = 1 / (1 + np.exp(-x))
        return np.asarray(np.sqrt(np.maximum(np.float32(1e-3), (1 - added) * (1 + added))))
    if activation is Activation.SOFTPLUS:
        return np.asarray(np.logaddexp(0, x))
    return x


def _convolve(op: Op, x: Array, taps: Array, bias: Array | None) -> Array:
    """A causal depthwise convolution; before the row's first token there are zeros."""
    count = taps.shape[1]
    padded = np.concatenate([np.zeros((count - 1, x.shape[1])), x])
    y = sum(padded[tap : tap + len(x)] * taps[:, tap] for tap in range(count))
    return _activate(np.asarray(y if bias is None else y + bias[: x.shape[1]]), op.activation)


def _delta(op: Op, query: Array, key: Array, value: Array, gates: Array, decay: Array, shift: Array) -> Array:
    """The gated delta rule. For each token: state *= decay; state += key (beta * (value - state^T key))^T; result =
    state^T query."""
    count, group = len(query), op.heads // op.kv_heads
    queries, keys = (
        np.repeat(x / np.sqrt((x * x).sum(axis=2, keepdims=True) + np.float32(op.epsilon)), group, axis=1)
        for x in (x.reshape(count, op.kv_heads, op.head_size) for x in (query, key))
    )
    values = value.reshape(count, op.heads, -1)
    most = 1.0 if op.window else op.cap or 1.0
    rates, given = np.float32(most) / (1 + np.exp(-gates[:, : op.heads])), gates[:, op.heads :] + shift[: op.decays]
    given, speed = given.reshape(count, op.heads, -1), np.exp(decay[: op.heads])[:, None]
    if op.window:  # decays have a lower bound
        kept = np.exp(-np.float32(op.cap) / (1 + np.exp(-speed * given)))
    else:
        kept = np.exp(-speed * np.logaddexp(0, given))
    state, result = np.zeros((op.heads, op.head_size, values.shape[2])), np.empty_like(values)
    for token in range(count):
        state = state * kept[token, :, :, None]
        read = np.einsum("hij,hi->hj", state, keys[token])
        change = (values[token] - read) * rates[token, :, None]
        state = state + keys[token, :, :, None] * change[:, None]
        result[token] = np.einsum("hij,hi->hj", state, queries[token]) * np.float32(op.scale)
    return np.asarray(result.reshape(value.shape))


def _scan(op: Op, query: Array, key: Array, value: Array, steps: Array, numbers: Array, shift: Array) -> Array:
    """The scan of Mamba. For each token: state *= decay; state += key (value * step)^T; result = state^T query + D * value.
    Steps, rates and D have one number for each head (Mamba 2), or steps and D one for each column, and rates one for each
    element of a state (Mamba 1)."""
    count, group, width = len(query), op.heads // op.kv_heads, value.shape[1]
    if op.by_column:
        rates = np.exp(numbers).reshape(op.heads, -1, op.head_size).swapaxes(1, 2)
        shift, skip = shift[:width], shift[width : 2 * width].reshape(op.heads, -1)
    else:
        rates = np.exp(numbers[0, : op.heads])[:, None, None]
        shift, skip = shift[: op.heads], numbers[0, op.heads : 2 * op.heads, None]
    queries, keys = (np.repeat(x.reshape(count, op.kv_heads, op.head_size), group, axis=1) for x in (query, key))
    values, steps = value.reshape(count, op.heads, -1), np.logaddexp(0, steps + shift).reshape(count, op.heads, -1)
    state, result = np.zeros((op.heads, op.head_size, values.shape[2])), np.empty_like(values)
    for token in range(count):
        added = keys[token, :, :, None] * (values[token] * steps[token])[:, None]
        state = state * np.exp(-rates * steps[token][:, None]) + added
        result[token] = np.einsum("hij,hi->hj", state, queries[token]) + skip * values[token]
    return np.asarray(result.reshape(value.shape))


def _route(op: Op, scores: Array, corrections: Array | None) -> Array:
    """The indices of the best experts (ties by index), then their weights."""
    if op.integer == Routing.SPARSE_MIXER:
        return _mix_sparsely(op, scores)
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    softmax = exponentials / exponentials.sum(axis=1, keepdims=True)
    chances = 1 / (1 + np.exp(-scores)) if Routing(op.integer) in SIGMOIDS else softmax
    values = scores if (corrections is None and not op.head_size) or Routing(op.integer) in BY_SCORE else chances
    values = values if corrections is None else values + corrections[: op.heads]
    if op.head_size:
        groups = values.reshape(len(values), -1, op.head_size)
        counted = 1 if op.integer == Routing.SOFTMAX_GROUPS else 2
        sums = np.sort(groups, axis=2)[:, :, -counted:].sum(axis=2)
        kept = np.argsort(-sums, axis=1, kind="stable")[:, : op.window]
        out = np.ones(sums.shape, bool)
        np.put_along_axis(out, kept, False, axis=1)
        values = np.where(out[:, :, None], -np.inf, groups).reshape(values.shape)
    best = np.argsort(-values, axis=1, kind="stable")[:, : op.kv_heads]
    weights = np.take_along_axis(chances, best, axis=1)
    total = weights.sum(axis=1, keepdims=True)
    if Routing(op.integer) in SIGMOIDS:
        total = total + np.float32(op.epsilon)
    elif op.integer == Routing.SOFTMAX_SHARE:
        total = np.maximum(total, np.float32(op.epsilon))
    shared = Routing(op.integer) not in NOT_NORMALISED
    return np.concatenate([best, (weights / total if shared else weights) * np.float32(op.scale)], axis=1)


def _mix(op: Op, x: Array, route: Array, own: Array | None, norm: tuple[Array, Array] | None) -> Array:
    """The sum of each token's products of its experts, times their weights (``integer`` 0); ``own`` stands for those of
    experts beyond ``heads``. ``norm``: the vectors by which products are multiplied before and behind their norm."""
    products = x.reshape(len(x), op.kv_heads, -1)[:, :, : op.output.width]
    if norm is not None:
        grown = products * norm[0][: op.output.width]
        size = np.sqrt((grown**2).mean(axis=2, keepdims=True) + np.float32(op.epsilon))
        products = grown / size * norm[1][: op.output.width]
    if own is not None:
        products = np.where((route[:, : op.kv_heads] >= op.heads)[:, :, None], own[:, None], products)
    weights = np.ones((len(x), op.kv_heads)) if op.integer else route[:, op.kv_heads :]
    return np.asarray((products * weights[:, :, None]).sum(axis=1) * np.float32(op.scale))


def _blend(op: Op, x: Array, coefficients: Array) -> Array:
    vectors, sums = x.reshape(len(x), op.heads, -1), coefficients.reshape(len(x), -1, op.heads)
    return np.asarray(sums @ vectors).reshape(len(x), -1)


def _connect(op: Op, logits: Array, numbers: Array) -> Array:
    """The weights of hyper-connections: reads, writes, and the mixes' transpose."""
    epsilon, parts = np.float32(op.epsilon), op.connections
    x = logits * np.repeat(numbers[: len(parts)], parts) + numbers[len(parts) : len(parts) + sum(parts)]
    made = [1 / (1 + np.exp(-x[:, : op.heads])) + epsilon]
    if len(parts) > 1:
        written = 1 / (1 + np.exp(-x[:, op.heads : 2 * op.heads]))
        made.append(np.float32(op.scale) * written + np.float32(op.cap))
    if len(parts) > 2:
        rows = x[:, 2 * op.heads :].reshape(len(x), op.heads, op.heads)
        mixed = np.exp(rows - rows.max(axis=2, keepdims=True))
        mixed = mixed / mixed.sum(axis=2, keepdims=True) + epsilon
        for axis in (1, *(2, 1) * (op.integer - 1)):
            mixed = mixed / (mixed.sum(axis=axis, keepdims=True) + epsilon)
        made.append(mixed.transpose(0, 2, 1).reshape(len(x), -1))
    return np.concatenate(made, axis=1)


def _match_rms(op: Op, x: Array, model: Array) -> Array:
    vectors = x.reshape(len(x), op.heads, -1)
    own = np.maximum((vectors * vectors).mean(axis=2, keepdims=True), np.float32(op.epsilon))
    wanted = (model * model).mean(axis=1)[:, None, None]
    return np.asarray(vectors * np.sqrt(wanted / own)).reshape(x.shape)


def _mix_sparsely(op: Op, scores: Array) -> Array:
    """Two experts: the weight of the best is its softmax over the scores near it, that of the second likewise, without the
    best."""
    left, best, weights = scores.copy(), [], []
    for _ in range(2):
        number = left.argmax(axis=1)[:, None]
        top = np.take_along_axis(left, number, axis=1)
        size = np.maximum(np.abs(scores), top)
        far = np.divide(top - scores, size, out=np.zeros_like(size), where=size > 0) > np.float32(op.epsilon)
        weights.append(1 / np.where(far, 0, np.exp(left - top)).sum(axis=1, keepdims=True) * np.float32(op.scale))
        best.append(number)
        np.put_along_axis(left, number, -np.inf, axis=1)
    return np.concatenate([*best, *weights], axis=1)


def _rope(op: Op, x: Array, frequencies: Array) -> Array:
    half = op.rotated // 2
    # The angle is fp32 in every implementation that checkpoints were trained with.
    angles = np.arange(len(x), dtype=np.float32)[:, None] * frequencies[:half].astype(np.float32)
    cosine = (np.cos(angles.astype(np.float64)) * op.scale)[:, None]
    sine = (np.sin(angles.astype(np.float64)) * op.scale)[:, None]
    heads = x.reshape(len(x), op.heads, op.head_size)
    first, second, rest = heads[:, :, :half], heads[:, :, half : 2 * half], heads[:, :, 2 * half :]
    turned = (first * cosine - second * sine, second * cosine + first * sine, rest)
    return np.concatenate(turned, axis=2).reshape(x.shape)


def _in_two_parts(x: Array, head_size: int, value_size: int) -> Array:
    """Heads rounded to int8 with two scales each: one for the last columns, which are values, too, one for the others."""
    before, shared = np.split(x.reshape(-1, head_size), [head_size - value_size], axis=1)
    parts = [quantised_activations(part, part.shape[1]) for part in (before, shared)]
    return np.concatenate(parts, axis=1).reshape(x.shape)


def _whole_weights(weights: Array, scales: Array) -> Array:
    """Weights [KV heads, grouped queries, queries, keys], rounded so that weight * scale is a whole number up to 32,767
    times a step, which each chunk of keys has. ``scales`` [KV heads, keys] are those of the values."""
    scales = scales[:, None, None, :]
    scaled = weights * scales
    for first in range(0, scaled.shape[3], CHUNK):
        part = scaled[..., first : first + CHUNK]
        step = part.max(axis=3, keepdims=True) / 32767
        np.divide(part, step, out=part, where=step > 0)
        part[...] = np.round(part) * step
    return np.divide(scaled, scales, out=np.zeros_like(scaled), where=scales > 0)


def _attention(
    op: Op, query: Array, key: Array, value: Array, sinks: Array | None, slopes: Array | None, whole: bool
) -> Array:
    """``whole``: values are int8, and weights are rounded to whole numbers, too."""
    count = len(query)
    queries = query.reshape(count, op.kv_heads, op.heads // op.kv_heads, op.head_size)
    keys, values = (x.reshape(count, op.kv_heads, -1) for x in (key, value))
    scores = np.einsum("qhgd,khd->hgqk", queries, keys) * np.float32(op.scale)
    scores = _cap(scores, op.cap)
    places = np.arange(count)
    if slopes is not None:
        scores += op.alibi(slopes, places, _bf16).reshape(scores.shape)
    seen = (places <= places[:, None]) & (places >= op.first_seen(places)[:, None])
    scores = np.where(seen, scores, -np.inf)
    highest, rest = scores.max(axis=3, keepdims=True), np.float64(0.0)
    if sinks is not None:
        # One sink for each head: [KV heads, grouped queries, 1, 1].
        sink = sinks[: op.heads].reshape(op.kv_heads, -1, 1, 1)
        highest = np.maximum(highest, sink)
        rest = np.exp(sink - highest)
    weights = np.exp(scores - highest)
    weights /= weights.sum(axis=3, keepdims=True) + rest
    if whole:
        weights = _whole_weights(weights, abs(values).max(axis=2).T / 127)
    return np.asarray(np.einsum("hgqk,khd->qhgd", weights, values).reshape(count, -1))
