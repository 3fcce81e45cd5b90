"""Small random programs with the operations of every kind of family, whose weights the NumPy definition packs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.kernels import packing
from outrider.kernels.builder import Builder
from outrider.kernels.native import NativeFeed, NativeModel
from outrider.kernels.program import Activation, Format, Norm, Program, Routing, Slice, Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """``style``: llama (rms, rope, gated), qwen (also head norms, biases) or opt (layer norm, learned positions).

    ``capped``: llama with scaled embeddings, norms after attention and feed-forward, soft caps, sinks and partial rope.
    ``longest``: the longest rows with the first frequencies of long rope. ``shared``: layers from the third on have queries
    only, use the keys and values of the layer two before them, and multiply their output by a scalar.
    ``clipped``: clipped queries, keys and values, queries scaled by position, and xIELU.
    ``value``: the size of a head's values, which differs from that of keys; rope is on eight columns of each head.
    ``chunk``: the size of chunks, to which attention is limited; queries are scaled by position, and an expert's input by
    its weight. ``bounded``: the last layer's decays have a bound. ``by_column``: scans have a step for each column, and
    attention gates by softplus. ``slopes``: those of ALiBi by head, in place of rope; ``bf16_biases``: they are in bf16.
    ``streams``: the number of parallel hidden states, of which layers read the second; gates are mostly closed.
    ``connected``: instead layers read and write all of them by hyper-connections, which mix them in every second layer, and
    the gated layer is clamped. ``idle``: the router chooses among so many more experts, which give back what they are
    given. ``normed``: experts' products have a norm, and trained gates weaken the residual that they are added to.
    """

    style: str = "llama"
    width: int = 352
    inner: int = 200
    heads: int = 22
    kv_heads: int = 22
    layers: int = 2
    vocabulary: int = 211
    context: int = 640
    window: int = 0
    chunk: int = 0
    group: int = 128
    activation: Activation = Activation.SILU
    capped: bool = False
    longest: int = 0
    experts: int = 0
    chosen: int = 2
    idle: int = 0
    normed: bool = False
    taps: int = 0
    delta: bool = False
    bounded: bool = False
    scan: bool = False
    by_column: bool = False
    shared: bool = False
    clipped: bool = False
    value: int = 0
    streams: int = 0
    connected: bool = False
    slopes: tuple[float, ...] = ()
    bf16_biases: bool = False


LLAMA = Shape()
GROUPED = Shape(width=256, heads=32, kv_heads=4, inner=136, group=32, layers=1, vocabulary=97)
QWEN = Shape(style="qwen", width=160, heads=4, kv_heads=2, inner=352, group=64, window=40)
OPT = Shape(style="opt", width=96, heads=12, kv_heads=12, inner=200, group=64, activation=Activation.RELU)
BIGCODE = Shape(style="opt", width=128, heads=8, kv_heads=1, inner=512, activation=Activation.GELU_TANH, layers=1)
GELU = Shape(style="opt", width=144, heads=2, kv_heads=2, inner=100, activation=Activation.GELU_ERF, layers=1)
CAPPED = Shape(width=144, heads=6, kv_heads=3, inner=120, window=37, activation=Activation.GELU_TANH, capped=True)
LONG = Shape(width=96, heads=4, kv_heads=2, inner=104, vocabulary=101, layers=2, longest=20)
MIXTURE = Shape(width=160, heads=4, kv_heads=2, inner=72, group=32, experts=7, chosen=3, layers=2)
HYBRID = Shape(width=144, heads=6, kv_heads=2, inner=104, group=32, layers=3, vocabulary=101, taps=4)
DELTA = Shape(width=96, heads=4, kv_heads=1, inner=104, group=32, layers=3, vocabulary=101, taps=3, delta=True)
BOUNDED = replace(DELTA, bounded=True)
SCAN = Shape(width=96, heads=4, kv_heads=1, inner=104, group=32, layers=3, vocabulary=101, taps=4, scan=True)
BY_COLUMN = replace(SCAN, by_column=True)
# Without attention.
SCAN_ALONE = replace(SCAN, layers=1)
SHARED = Shape(width=160, heads=4, kv_heads=2, inner=104, group=32, layers=4, vocabulary=101, window=21, shared=True)
LATENT = Shape(width=144, heads=6, kv_heads=1, inner=104, group=32, vocabulary=101, window=37, value=40)
NARROW = Shape(width=160, heads=4, kv_heads=2, inner=72, group=32, vocabulary=97, value=8)
CLAMPED = Shape(
    width=128, heads=4, kv_heads=2, inner=96, group=32, experts=20, chosen=2, activation=Activation.CLAMPED_SWIGLU
)
IDLE = Shape(
    width=160, heads=4, kv_heads=2, inner=72, group=32, experts=5, chosen=4, idle=6, activation=Activation.BOUNDED_SILU
)
NORMED = Shape(width=144, heads=6, kv_heads=3, inner=72, group=32, vocabulary=101, experts=6, chosen=3, normed=True)
CLIPPED = Shape(width=144, heads=6, kv_heads=2, inner=104, group=32, vocabulary=101, clipped=True)
STREAMS = Shape(
    width=160, heads=4, kv_heads=2, inner=136, group=32, vocabulary=97, activation=Activation.GELU_TANH, streams=3
)
CONNECTED = Shape(width=96, heads=4, kv_heads=2, inner=104, group=32, layers=2, vocabulary=101, streams=3, connected=True)
CHUNKED = Shape(width=144, heads=6, kv_heads=3, inner=72, group=32, vocabulary=101, chunk=37, experts=5, chosen=1)
SLOPES = Shape(width=144, heads=6, kv_heads=6, inner=72, group=32, vocabulary=97, slopes=(0.5, 0.35, 0.25, 0.1, 0.07, 0.01))
BF16_BIASES = replace(SLOPES, kv_heads=2, bf16_biases=True)
SHAPES = {
    "slopes": SLOPES,
    "bf16 biases": BF16_BIASES,
    "chunked": CHUNKED,
    "streams": STREAMS,
    "connected": CONNECTED,
    "shared": SHARED,
    "clipped": CLIPPED,
    "hybrid": HYBRID,
    "delta": DELTA,
    "bounded": BOUNDED,
    "scan": SCAN,
    "by column": BY_COLUMN,
    "latent": LATENT,
    "narrow": NARROW,
    "mixture": MIXTURE,
    "clamped": CLAMPED,
    "idle": IDLE,
    "normed": NORMED,
    "capped": CAPPED,
    "long": LONG,
    "llama": LLAMA,
    "grouped": GROUPED,
    "qwen": QWEN,
    "opt": OPT,
    "bigcode": BIGCODE,
    "gelu": GELU,
}


def in_turn(formats: Sequence[Format], others: Sequence[T]) -> list[tuple[str, Format, T]]:
    """Every shape in every format, each with one of ``others``, so that every pair of values of the three occurs."""
    return [
        (name, format, others[(row + column) % len(others)])
        for row, name in enumerate(SHAPES)
        for column, format in enumerate(formats)
    ]


def build(shape: Shape, precision: Format) -> Program:
    builder = Builder(shape.vocabulary, shape.context, precision, shape.group)
    if shape.connected:
        return _connected(builder, shape)
    if shape.streams:
        return _streams(builder, shape)
    width, head = shape.width, shape.width // shape.heads
    kv_width = shape.kv_heads * head
    opt, qwen = shape.style == "opt", shape.style == "qwen"

    def vector(name: str, size: int) -> Tensor:
        return Tensor(name, (size,))

    def norm(x, name, residual=None):
        kind = Norm.LAYER if opt else Norm.RMS
        bias = vector(name + ".bias", width) if opt else None
        return builder.norm(x, vector(name, width), kind=kind, epsilon=1e-5, bias=bias, residual=residual)

    x = builder.embed(Tensor("embed", (shape.vocabulary, width)), 1.75 if shape.capped else 1.0)
    if opt:
        x = builder.positions(x, Tensor("positions", (shape.context + 2, width)), offset=2)
    keys_and_values: list[tuple[Slice, Slice]] = []
    for layer in range(shape.layers):
        at = f"{layer}."
        h = norm(x, at + "norm1")
        if shape.taps and layer != 1:
            layer_of = _delta_net if shape.delta else _mamba if shape.scan else _convolution
            x = layer_of(builder, shape, at, h, x)
            continue
        if shape.value:
            x = _latent(builder, shape, at, h, x)
            h = norm(x, at + "norm2")
            matrix = (shape.inner, width)
            m = builder.gated(h, Tensor(at + "gate", matrix), Tensor(at + "up", matrix), shape.activation)
            x = builder.linear(m, [Tensor(at + "down", (width, shape.inner))], residual=x)
            continue
        reads = shape.shared and layer >= 2
        sizes = {"q": width} if reads else {"q": width, "k": kv_width, "v": kv_width}
        matrices = [Tensor(at + name, (size, width)) for name, size in sizes.items()]
        biases = [vector(at + name + ".bias", size) for name, size in sizes.items()] if opt or qwen else []
        bound: dict[str, Any] = dict(activation=Activation.CLIP, cap=0.6, scale=1.5) if shape.clipped else {}
        made = builder.linear(h, matrices, biases=biases, **bound)
        q = made.part(0, width)
        k, v = keys_and_values[layer - 2] if reads else made.part(width, 2 * kv_width).split(kv_width, kv_width)
        keys_and_values.append((k, v))
        if qwen:
            builder.head_norm(q, vector(at + "qnorm", head), heads=shape.heads, epsilon=1e-6)
            builder.head_norm(k, vector(at + "knorm", head), heads=shape.kv_heads, epsilon=1e-6)
        if not opt and not shape.slopes:
            frequencies = [float(np.float32(10000.0 ** (-2 * i / head))) for i in range(head // 2)]
            frequencies = frequencies[: len(frequencies) // 2] if shape.capped else frequencies
            longer = [frequency / 3 for frequency in frequencies] if shape.longest else []
            rope: dict[str, Any] = dict(factor=1.25 if qwen else 1.0, long_frequencies=longer, longest=shape.longest)
            builder.rope(q, frequencies, heads=shape.heads, **rope)
            if not reads:
                builder.rope(k, frequencies, heads=shape.kv_heads, **rope)
        if shape.clipped:
            builder.scale_by_position(q, (1.0, 1.3, 0.7), 16)
        if shape.chunk:
            builder.scale_by_position(q, (1.0, 1.3, 0.7, 1.1), 5, ahead=1)
        more: dict[str, Any] = dict(cap=1.5, sinks=vector(at + "sinks", shape.heads), scale=0.4) if shape.capped else {}
        more |= dict(slopes=shape.slopes, bf16_biases=shape.bf16_biases) if shape.slopes else {}
        seen: dict[str, Any] = dict(window=shape.window, chunk=shape.chunk)
        a = builder.attention(q, k, v, heads=shape.heads, kv_heads=shape.kv_heads, **seen, **more)
        if shape.delta:
            a = builder.gate(a, builder.linear(h, [Tensor(at + "a", (width, width))]))
        if shape.by_column:
            a = builder.gate(a, builder.linear(h, [Tensor(at + "a", (width, width))]), activation=Activation.SOFTPLUS)
            one = builder.linear(h, [Tensor(at + "one", (1, width))], precision=Format.FP32)
            builder.gate(a.part(0, head), one, activation=Activation.SOFTPLUS, output=a.part(0, head))
        output_bias = [vector(at + "o.bias", width)] if opt else []
        if shape.capped:
            y = builder.linear(a, [Tensor(at + "o", (width, width))], cap=2.5, scale=0.6)
            x = norm(y, at + "norm behind", x)
        else:
            x = builder.linear(a, [Tensor(at + "o", (width, width))], biases=output_bias, residual=x)
        h = norm(x, at + "norm2")
        if shape.experts:
            x = _mixture(builder, shape, at, h, x)
            continue
        if shape.clipped:
            numbers = [Tensor(f"{at}{name}.bias", (1,)) for name in ("positive", "negative", "beta", "epsilon")]
            m = builder.xielu(builder.linear(h, [Tensor(at + "up", (shape.inner, width))]), numbers)
        elif opt:
            up = [vector(at + "up.bias", shape.inner)]
            m = builder.linear(h, [Tensor(at + "up", (shape.inner, width))], biases=up, activation=shape.activation)
        else:
            matrix = (shape.inner, width)
            m = builder.gated(h, Tensor(at + "gate", matrix), Tensor(at + "up", matrix), shape.activation)
        x = builder.linear(m, [Tensor(at + "down", (width, shape.inner))], residual=x)
        if shape.shared:
            x = builder.scale(x, Tensor(at + "scalar", (1,)))
    x = norm(x, "norm")
    bounds: dict[str, Any] = dict(scale=0.25, cap=4.0) if shape.capped else {}
    return builder.finish(builder.linear(x, [Tensor("head", (shape.vocabulary, width))], **bounds))


def _streams(builder: Builder, shape: Shape) -> Program:
    width, inner, count, head = shape.width, shape.inner, shape.streams, shape.width // shape.heads
    names, kv_width = ("q", "k", "v"), shape.kv_heads * head

    def norm(x: Slice, name: str, residual: Slice | None = None) -> Slice:
        return builder.norm(x, Tensor(name, (width,)), kind=Norm.RMS, epsilon=1e-5, residual=residual)

    def coefficients(x: Slice, name: str, sums: int, shift: float = 0.0) -> Slice:
        seen = builder.linear(norm(x, name + "norm"), [Tensor(name + "seen", (5, width))], precision=Format.FP32, cap=1.0)
        return builder.linear(seen, [Tensor(name, (sums, 5))], shift=shift, precision=Format.FP32, scale=0.4)

    first = builder.embed(Tensor("embed", (shape.vocabulary, width)))
    x = builder.room(count * width)
    builder.scale(first, 0.75, output=x.part(0, width))
    others = builder.linear(first, [Tensor(f"begin.{stream}", (width, width)) for stream in range(1, count)])
    builder.match_rms(others, first, epsilon=1e-5, output=x.part(width, (count - 1) * width))
    for layer in range(shape.layers):
        at = f"{layer}."
        x = builder.blend(x, coefficients(x.part(width, width), at + "predict", count**2), vectors=count, residual=x)
        one = x.part(width, width)
        h = norm(one, at + "norm1")
        matrices = [Tensor(at + name, (size, width)) for name, size in zip(names, (width, kv_width, kv_width), strict=True)]
        q, k, v = builder.linear(h, matrices).split(width, kv_width, kv_width)
        sizes: dict[str, Any] = dict(heads=shape.heads, kv_heads=shape.kv_heads, window=shape.window)
        a = builder.linear(builder.attention(q, k, v, **sizes), [Tensor(at + "o", (width, width))], residual=one)
        h = norm(a, at + "norm2")
        gate, up = builder.linear(h, [Tensor(at + name, (inner, width)) for name in ("gate", "up")]).split(inner, inner)
        builder.gaussian_top_k(gate, 0.75)
        m = builder.linear(builder.gate(up, gate, activation=shape.activation), [Tensor(at + "down", (width, inner))])
        a = builder.scale(m, 0.5, residual=a)
        missed = builder.scale(one, -1.0, residual=a)
        x = builder.blend(missed, coefficients(a, at + "correct", count, 1.0), vectors=1, residual=x)
        y = builder.scale_columns(x.part(width, width), Tensor(at + "columns", (width,)))
        last = x.part((count - 1) * width, width)
        builder.scale(norm(y, at + "norm3"), 1.0, residual=last, output=last)
    first, *rest = x.split(*[width] * count)
    total = first
    for number, stream in enumerate(rest):
        total = builder.match_rms(
            builder.linear(stream, [Tensor(f"end.{number}", (width, width))]), first, epsilon=1e-5, residual=total
        )
    total = norm(builder.scale(total, 1 / count), "norm")
    return builder.finish(builder.linear(total, [Tensor("head", (shape.vocabulary, width))]))


def _connected(builder: Builder, shape: Shape) -> Program:
    width, inner, count, head = shape.width, shape.inner, shape.streams, shape.width // shape.heads
    kv_width = shape.kv_heads * head

    def weights(x: Slice, name: str, parts: int, rounds: int = 1) -> Slice:
        rows = sum((count, count, count**2)[:parts])
        h = builder.norm(x, None, kind=Norm.RMS, epsilon=1e-5)
        logits = builder.linear(h, [Tensor(name, (rows, x.width))], precision=Format.FP32)
        numbers = Tensor(name + " factors", (parts,)), Tensor(name + " bias", (rows,))
        return builder.connect(logits, *numbers, streams=count, epsilon=1e-3, most=1.5, least=0.25, rounds=rounds)

    def block(x: Slice, name: str, mixed: bool, compute: Callable[[Slice], Slice]) -> Slice:
        each = weights(x, name, 3 if mixed else 2, rounds=3)
        h = builder.blend(x, each.part(0, count), vectors=count)
        made = compute(builder.norm(h, Tensor(name + " norm", (width,)), kind=Norm.RMS, epsilon=1e-5))
        x = builder.blend(x, each.part(2 * count, count**2), vectors=count) if mixed else x
        return builder.blend(made, each.part(count, count), vectors=1, residual=x)

    x = builder.room(count * width)
    first = builder.embed(Tensor("embed", (shape.vocabulary, width)))
    for stream, part in enumerate(x.split(*[width] * count)):
        builder.scale(first, 1.0 - 0.25 * stream, output=part)
    for layer in range(shape.layers):

        def attention(h: Slice, at: str = f"{layer}.") -> Slice:
            sizes = zip(("q", "k", "v"), (width, kv_width, kv_width), strict=True)
            made = builder.linear(h, [Tensor(at + name, (size, width)) for name, size in sizes])
            q, k, v = made.split(width, kv_width, kv_width)
            a = builder.attention(q, k, v, heads=shape.heads, kv_heads=shape.kv_heads, window=shape.window)
            return builder.linear(a, [Tensor(at + "o", (width, width))])

        def gated(h: Slice, at: str = f"{layer}.") -> Slice:
            gate, up = (Tensor(at + name, (inner, width)) for name in ("gate", "up"))
            m = builder.gated(h, gate, up, shape.activation, cap=0.75)
            return builder.linear(m, [Tensor(at + "down", (width, inner))])

        x = block(x, f"{layer}.first", layer % 2 == 0, attention)
        x = block(x, f"{layer}.second", layer % 2 == 0, gated)
    y = builder.blend(x, weights(x, "last", 1), vectors=count)
    y = builder.norm(y, Tensor("norm", (width,)), kind=Norm.RMS, epsilon=1e-5)
    return builder.finish(builder.linear(y, [Tensor("head", (shape.vocabulary, width))]))


def _latent(builder: Builder, shape: Shape, at: str, h: Slice, x: Slice) -> Slice:
    """Attention with values of another size than keys. With one KV head the values are the key's columns without rope (the
    latent vector), and each head has a matrix for its queries and one for its results."""
    turned, heads, kv_heads, width = 8, shape.heads, shape.kv_heads, shape.width
    latent, own = kv_heads == 1, width // heads - turned
    size = turned + (shape.value if latent else own)
    sizes = {"q": width, "k": kv_heads * size} | ({} if latent else {"v": kv_heads * shape.value})
    made = builder.linear(h, [Tensor(at + name, (size, width)) for name, size in sizes.items()])
    query, key = made.part(0, width), made.part(width, kv_heads * size)
    frequencies = [float(np.float32(10000.0 ** (-2 * i / turned))) for i in range(turned // 2)]
    builder.rope(query, frequencies, heads=heads)
    builder.rope(key, frequencies, heads=kv_heads)
    if latent:
        query = builder.heads(query, [Tensor(f"{at}in {head}", (shape.value, own)) for head in range(heads)])
        value = key.part(turned, shape.value)
    else:
        value = made.part(width + key.width, kv_heads * shape.value)
    a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads, window=shape.window)
    if latent:
        a = builder.heads(a, [Tensor(f"{at}out {head}", (own, shape.value)) for head in range(heads)])
    return builder.linear(a, [Tensor(at + "o", (width, a.width))], residual=x)


def _convolution(builder: Builder, shape: Shape, at: str, h: Slice, x: Slice) -> Slice:
    """A short convolution between two gates; in the last layer without gates, but with a bias and an activation."""
    width, last = shape.width, at.startswith(str(shape.layers - 1))
    parts = builder.linear(h, [Tensor(at + "in", (3 * width, width))]).split(width, width, width)
    more: dict[str, Any] = dict(before=parts[0], behind=parts[1])
    if last:
        more = dict(bias=Tensor(at + "taps.bias", (width,)), activation=Activation.SILU)
    c = builder.convolve(parts[2], Tensor(at + "taps", (width, 1, shape.taps)), **more)
    return builder.linear(c, [Tensor(at + "out", (width, width))], residual=x)


def _delta_net(builder: Builder, shape: Shape, at: str, h: Slice, x: Slice) -> Slice:
    """A delta net with four value heads and two key heads of another size; in the last layer four key heads, and a decay
    for each row of the state."""
    last = at.startswith(str(shape.layers - 1))
    heads, kv_heads, size, columns, width = 4, 4 if last else 2, 20, 80, shape.width
    decays = heads * size if last else heads
    mixed = 2 * kv_heads * size + heads * columns
    y = builder.linear(h, [Tensor(at + "mixed", (mixed, width))])
    y = builder.convolve(y, Tensor(at + "taps", (mixed, 1, shape.taps)), activation=Activation.SILU)
    gates = builder.linear(h, [Tensor(at + "gates", (heads + decays, width))], precision=Format.FP32)
    query, key, value = y.split(kv_heads * size, kv_heads * size, heads * columns)
    numbers: dict[str, Any] = dict(decay=Tensor(at + "decay", (heads,)), shift=Tensor(at + "shift.bias", (decays,)))
    if last:
        numbers |= dict(bound=3.0) if shape.bounded else dict(most=2.0)
    y = builder.delta(query, key, value, gates, heads=heads, kv_heads=kv_heads, **numbers)
    builder.head_norm(y, Tensor(at + "norm of heads", (columns,)), heads=heads, epsilon=1e-6)
    z = builder.linear(h, [Tensor(at + "z", (heads * columns, width))])
    y = builder.gate(y, z, activation=Activation.SILU)
    return builder.linear(y, [Tensor(at + "out", (width, heads * columns))], residual=x)


def _mamba(builder: Builder, shape: Shape, at: str, h: Slice, x: Slice) -> Slice:
    """Mamba 2 with six heads and two keys, each shared by three heads; in the last layer one key for all heads. By columns:
    Mamba 1."""
    heads, size, columns, width = 6, 20, 80, shape.width
    kv_heads = 1 if at.startswith(str(shape.layers - 1)) else 2
    mixed = 2 * kv_heads * size + heads * columns
    y = builder.linear(h, [Tensor(at + "mixed", (mixed, width))])
    taps, bias = Tensor(at + "taps", (mixed, 1, shape.taps)), Tensor(at + "taps.bias", (mixed,))
    y = builder.convolve(y, taps, bias=bias, activation=Activation.SILU)
    count = heads * columns if shape.by_column else heads
    steps = builder.linear(h, [Tensor(at + "steps", (count, width))], precision=Format.FP32)
    value, key, query = y.split(heads * columns, kv_heads * size, kv_heads * size)
    numbers = {name: Tensor(at + name + end, (count,)) for name, end in (("decay", ""), ("skip", ""), ("shift", ".bias"))}
    if shape.by_column:
        numbers["decay"] = Tensor(at + "decays", (count, size))
    y = builder.scan(query, key, value, steps, heads=heads, kv_heads=kv_heads, **numbers)
    y = builder.gate(y, builder.linear(h, [Tensor(at + "z", (heads * columns, width))]), activation=Activation.SILU)
    builder.head_norm(y, None, heads=kv_heads, epsilon=1e-6)
    y = builder.scale_columns(y, Tensor(at + "norm of groups", (heads * columns,)))
    return builder.linear(y, [Tensor(at + "out", (width, heads * columns))], residual=x)


def _mixture(builder: Builder, shape: Shape, at: str, h: Slice, x: Slice) -> Slice:
    """Experts, and a shared expert with a gate; with a clamped activation experts have biases, and there is no shared
    expert."""
    clamped, scaled = shape.activation is Activation.CLAMPED_SWIGLU, bool(shape.chunk)
    width, inner, names = shape.width, shape.inner, [f"{at}{number}." for number in range(shape.experts)]
    scores = builder.linear(h, [Tensor(at + "router", (shape.experts + shape.idle, width))], precision=Format.FP32)
    routing = Routing.SIGMOID_EACH if scaled else Routing.SOFTMAX_CHOSEN if clamped else Routing.SOFTMAX
    route = builder.route(scores, shape.chosen, routing)
    gates = [[Tensor(name + "gate", (inner, width)), Tensor(name + "up", (inner, width))] for name in names]
    gate_biases = (
        [[Tensor(name + part, (inner,)) for part in ("gate.bias", "up.bias")] for name in names] if clamped else []
    )
    bounds: dict[str, Any] = dict(scale=1.702, cap=0.7) if clamped else {}
    if shape.activation is Activation.BOUNDED_SILU:
        bounds["cap"] = 0.3
    read = builder.blend(h, route.part(1, 1), vectors=1) if scaled else h
    m = builder.experts(read, route, gates, biases=gate_biases, gated=True, activation=shape.activation, **bounds)
    downs = [[Tensor(name + "down", (width, inner))] for name in names]
    down_biases = [[Tensor(name + "down.bias", (width,))] for name in names] if clamped else []
    products = builder.experts(m, route, downs, biases=down_biases, behind=True)
    if not clamped:
        gate, up = Tensor(at + "gate", (inner, width)), Tensor(at + "up", (inner, width))
        y = builder.gated(h, gate, up, shape.activation, **bounds)
        y = builder.linear(y, [Tensor(at + "down", (width, inner))])
        x = builder.gate(y, builder.linear(h, [Tensor(at + "key", (1, width))], precision=Format.FP32), residual=x)
    if shape.normed:
        made = builder.mix(products, route, width, gain=Tensor(at + "gain", (width,)), epsilon=1e-3)
        trained = builder.spread(made, Tensor(at + "gates.bias", (width,)))
        made = builder.gate(made, trained)
        return builder.gate(x, trained, activation=Activation.RETAINED, residual=made)
    idle = h if shape.idle else None
    return builder.mix(products, route, width, residual=x, weighed=not scaled, idle=idle, experts=shape.experts)


def stored(program: Program, **changes: Any) -> Program:
    """The program with another group or storage for all matrices except embedding tables."""
    return replace(program, weights=tuple(each if each.table else replace(each, **changes) for each in program.weights))


def random_matrices(program: Program, seed: int = 0) -> list[NDArray[np.float32]]:
    """A random matrix for each weight, scaled so that activations stay near one."""
    generator = np.random.default_rng(seed)
    matrices = []
    for weight in program.weights:
        if weight.values:
            matrices.append(np.array([weight.values], np.float32))
            continue
        size = (weight.rows, weight.columns)
        normal = generator.standard_normal(size)
        if weight.table and weight.rows == 1:
            bias = weight.sources[0].name.endswith("bias")
            # Decays that let states last.
            middle = -3 if weight.sources[0].name.endswith("decay") else 0 if bias else 1
            matrices.append((normal * 0.1 + middle).astype(np.float32))
        else:
            matrices.append((normal * (1 if weight.table else weight.columns**-0.5)).astype(np.float32))
    return matrices


@dataclass
class Packed:
    program: Program
    memory: NDArray[np.uint8]

    def model(self, threads: int = 1, cache_bytes: int = 0) -> NativeModel:
        offsets, _ = packing.weight_offsets(self.program)
        base = self.memory.ctypes.data
        addresses = [base + offset for offset in offsets]
        return NativeModel(self.program, addresses, threads=threads, cache_bytes=cache_bytes, keep=self.memory)


def packed(shape: Shape, precision: Format, seed: int = 0) -> Packed:
    program = build(shape, precision)
    return Packed(program, pack_program(program, random_matrices(program, seed)))


def tokens(shape: Shape, count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, shape.vocabulary, count).tolist()


def all_logits(model: NativeModel, row: int, text: list[int], pieces: tuple[int, ...] = ()) -> NDArray[np.float32]:
    """Logits after every token, fed in pieces of these sizes and the rest in one."""
    parts, start = [], 0
    for piece in (*pieces, len(text)):
        part = text[start : start + piece]
        start += len(part)
        if part:
            parts.append(model.forward([NativeFeed(row, part, choose=len(part), logits=len(part))])[0].logits)
    return np.concatenate(parts)


def assert_same_bits(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def assert_bits_of_generic(
    model: Packed, isa: str, text: list[int], pieces: Iterable[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asserts that this instruction set's logits have the bits of the generic unit's, however the text is divided."""
    monkeypatch.setenv("OUTRIDER_ISA", "generic")
    with model.model() as engine:
        wanted = all_logits(engine, engine.open(), text)
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    with model.model(threads=2) as engine:
        for each in pieces:
            assert_same_bits(all_logits(engine, engine.open(), text, each), wanted)


def pack_program(program: Program, matrices: Sequence[packing.Matrix]) -> NDArray[np.uint8]:
    """All weights of a program packed into one array, slowly."""
    offsets, size = packing.weight_offsets(program)
    # The array starts at a multiple of 64 bytes, as the kernels ask.
    raw = np.zeros(size + packing.ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % packing.ALIGNMENT
    memory = raw[start : start + size]
    for weight, offset, matrix in zip(program.weights, offsets, matrices, strict=True):
        packed = packing.pack(weight, matrix)
        memory[offset : offset + packed.size] = packed
    return memory
