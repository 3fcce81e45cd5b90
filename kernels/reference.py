"""Runs a program in NumPy, one row at a time: what the kernels are tested against.

Everything is float64 but what the format itself rounds: packed weights, the cache, and the activations that go into a bf16
or integer product. The compiled kernels differ by their rounding; int8 activations that fall on another side of a half
differ by one step, which the tests' tolerances allow for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.kernels import packing
from outrider.kernels.program import Activation, Cache, Format, Kind, Norm, Op, Program, Slice, Weight

Array = NDArray[np.float64]


class ReferenceModel:
    """The program over the matrices that its packed weights stand for."""

    def __init__(self, program: Program, memory: NDArray[np.uint8]) -> None:
        self.program = program
        offsets, _ = packing.layout(program)
        self.weights = [
            packing.unpack(weight, memory[offset : offset + packing.packed_size(weight)]).astype(np.float64)
            for weight, offset in zip(program.weights, offsets, strict=True)
        ]

    def logits(self, tokens: Sequence[int]) -> Array:
        """The logits after each of a row's tokens: shape (tokens, vocabulary)."""
        buffers = [np.full((len(tokens), width), np.nan) for width in self.program.buffers]
        for op in self.program.ops:
            if op.kind is Kind.CHOOSE:
                return _read(buffers, op.input).copy()
            result = self._run(op, buffers, np.asarray(tokens))
            output = op.input if op.kind is Kind.ROPE else op.output
            buffers[output.buffer][:, output.offset : output.offset + output.width] = result
        raise ValueError("a program ends with choose")

    def _run(self, op: Op, buffers: list[Array], tokens: NDArray[np.int64]) -> Array:
        positions = np.arange(len(tokens))
        if op.kind is Kind.EMBED:
            return self.weights[op.weight][tokens]
        x = _read(buffers, op.input)
        if op.kind is Kind.POSITION:
            return x + self.weights[op.weight][positions + op.integer]
        if op.kind is Kind.SELECT:
            return x
        bias = self.weights[op.bias][0] if op.bias >= 0 else None
        if op.kind is Kind.NORM:
            return _norm(op, x, self.weights[op.weight][0], bias)
        if op.kind is Kind.LINEAR:
            residual = _read(buffers, op.residual) if op.residual.buffer >= 0 else None
            return _linear(op, x, self.program.weights[op.weight], self.weights[op.weight], bias, residual)
        if op.kind is Kind.ROPE:
            return _rope(op, x, self.weights[op.weight][0])
        key, value = _read(buffers, op.key), _read(buffers, op.value)
        if self.program.cache is Cache.BF16:
            key, value = _bf16(key), _bf16(value)
        elif self.program.cache is Cache.INT8:
            x, key, value = (quantised_activations(each, op.head_size) for each in (x, key, value))
        return _attention(op, x, key, value)


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


def quantised_activations(x: Array, group: int) -> Array:
    """``x`` as int8 with one scale for every token and group of channels, as numbers again."""
    result = np.empty_like(x)
    for start in range(0, x.shape[1], group):
        part = x[:, start : start + group].astype(np.float32)
        highest = np.abs(part).max(axis=1, keepdims=True)
        inverse = np.where(highest > 1e-30, np.float32(127) / np.maximum(highest, np.float32(1e-30)), np.float32(0))
        scale = np.where(highest > 1e-30, highest / np.float32(127), np.float32(0))
        result[:, start : start + group] = np.rint(part * inverse) * scale.astype(np.float64)
    return result


def _linear(op: Op, x: Array, weight: Weight, matrix: Array, bias: Array | None, residual: Array | None) -> Array:
    if weight.format is Format.BF16:
        x = _bf16(x)
    elif weight.format.integer:
        x = quantised_activations(x, weight.group)
    y = x @ matrix.T
    if weight.gated:
        half = weight.rows // 2
        y = y if bias is None else y + bias[: y.shape[1]]
        return _activate(y[:, :half], op.activation) * y[:, half:]
    y = _activate(y if bias is None else y + bias[: y.shape[1]], op.activation)
    return np.asarray(y if residual is None else y + residual)


def _activate(x: Array, activation: Activation) -> Array:
    if activation is Activation.RELU:
        return np.maximum(x, 0)
    if activation is Activation.GELU_ERF:
        return np.asarray(0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))))
    if activation is Activation.GELU_TANH:
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    if activation is Activation.SILU:
        return np.asarray(x / (1 + np.exp(-x)))
    return x


def _rope(op: Op, x: Array, frequencies: Array) -> Array:
    half = op.head_size // 2
    # The angle is fp32 in every implementation that checkpoints were trained with.
    angles = np.arange(len(x), dtype=np.float32)[:, None] * frequencies[:half].astype(np.float32)
    cosine = (np.cos(angles.astype(np.float64)) * op.scale)[:, None]
    sine = (np.sin(angles.astype(np.float64)) * op.scale)[:, None]
    heads = x.reshape(len(x), op.heads, op.head_size)
    first, second = heads[:, :, :half], heads[:, :, half:]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=2).reshape(x.shape)


def _attention(op: Op, query: Array, key: Array, value: Array) -> Array:
    count = len(query)
    queries = query.reshape(count, op.kv_heads, op.heads // op.kv_heads, op.head_size)
    keys, values = (x.reshape(count, op.kv_heads, op.head_size) for x in (key, value))
    scores = np.einsum("qhgd,khd->hgqk", queries, keys) * np.float32(op.scale)
    distance = np.arange(count)[:, None] - np.arange(count)
    seen = (distance >= 0) & ((distance < op.window) if op.window else True)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    return np.asarray(np.einsum("hgqk,khd->qhgd", weights, values).reshape(query.shape))
