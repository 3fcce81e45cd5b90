"""Putting a program together.

A family's builder calls the methods of ``Builder`` in the order of the model's arithmetic and gets back slices of buffers;
``finish`` freezes it all into a ``Program``.

    builder = Builder(vocabulary=32000, context=2048, precision=Format.W4A8)
    x = builder.embed(Tensor("model.embed_tokens.weight", (32000, 768)))
    for layer in range(layers):
        h = builder.norm(x, Tensor("...input_layernorm.weight", (768,)), kind=Norm.RMS, epsilon=1e-6)
        qkv = builder.linear(h, [query, key, value])
        q, k, v = qkv.split(768, 768, 768)
        builder.rope(q, frequencies, heads=12)
        builder.rope(k, frequencies, heads=12)
        a = builder.attention(q, k, v, heads=12, kv_heads=12)
        x = builder.linear(a, [output], residual=x)
        ...
        m = builder.gated(h, gate, up, Activation.SILU)
        x = builder.linear(m, [down], residual=x)
    x = builder.norm(x, ...)
    program = builder.finish(builder.linear(x, [head]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.kernels.program import ABSENT, Activation, Cache, Format, Kind, Norm, Op, Program, Slice, Tensor, Weight


@dataclass
class Builder:
    """Collects operations. ``precision`` is the format of matrices; embedding tables are bf16, or fp32 in fp32."""

    vocabulary: int
    context: int
    precision: Format
    group: int = 128
    _ops: list[Op] = field(default_factory=list)
    _weights: list[Weight] = field(default_factory=list)
    _widths: list[int] = field(default_factory=list)
    _layers: int = 0

    def embed(self, table: Tensor) -> Slice:
        """The token's row of ``table``."""
        output = self._buffer(table.shape[1])
        self._ops.append(Op(Kind.EMBED, output=output, weight=self._table(table)))
        return output

    def positions(self, x: Slice, table: Tensor, offset: int = 0) -> Slice:
        """``x`` plus the row of ``table`` at the token's position + ``offset`` (OPT's is 2)."""
        output = self._buffer(x.width)
        self._ops.append(Op(Kind.POSITION, x, output=output, weight=self._table(table), integer=offset))
        return output

    def norm(self, x: Slice, weight: Tensor, *, kind: Norm, epsilon: float, bias: Tensor | None = None) -> Slice:
        output = self._buffer(x.width)
        self._ops.append(
            Op(
                Kind.NORM,
                x,
                output=output,
                weight=self._vector([weight]),
                bias=self._vector([bias]) if bias else -1,
                integer=kind,
                head_size=x.width,
                epsilon=epsilon,
            )
        )
        return output

    def head_norm(self, x: Slice, weight: Tensor, *, heads: int, epsilon: float) -> None:
        """RMSNorm of every head by itself, in place (Qwen3's queries and keys)."""
        op = Op(Kind.NORM, x, output=x, weight=self._vector([weight]), integer=Norm.RMS, heads=heads, epsilon=epsilon)
        self._ops.append(replace(op, head_size=x.width // heads))

    def linear(
        self,
        x: Slice,
        matrices: Sequence[Tensor],
        *,
        biases: Sequence[Tensor] = (),
        activation: Activation = Activation.NONE,
        residual: Slice | None = None,
        precision: Format | None = None,
    ) -> Slice:
        """``activation(x W^T + b) + residual``, the matrices stacked: their outputs lie side by side in the result."""
        weight = self._matrix(x.width, matrices, precision, gated=False)
        output = self._buffer(sum(matrix.count for matrix in matrices))
        self._ops.append(
            Op(
                Kind.LINEAR,
                x,
                residual=residual or ABSENT,
                output=output,
                weight=weight,
                bias=self._vector(biases) if biases else -1,
                activation=activation,
            )
        )
        return output

    def gated(self, x: Slice, gate: Tensor, up: Tensor, activation: Activation, *, biases: Sequence[Tensor] = ()) -> Slice:
        """``activation(x G^T + b) * (x U^T + c)``; ``biases`` are b and c."""
        if gate.count != up.count:
            raise ValueError(f"{gate.name} has {gate.count} rows, {up.name} {up.count}")
        output = self._buffer(gate.count)
        weight = self._matrix(x.width, [gate, up], None, gated=True)
        bias = self._vector(biases) if biases else -1
        self._ops.append(Op(Kind.LINEAR, x, output=output, weight=weight, bias=bias, activation=activation))
        return output

    def rope(self, x: Slice, frequencies: Sequence[float], *, heads: int, factor: float = 1.0) -> None:
        """Rotates the halves of every head, in place. ``factor`` multiplies sine and cosine (yarn's attention factor)."""
        weight = self._add(Weight(Format.FP32, 1, len(frequencies), values=tuple(frequencies), table=True))
        head_size = x.width // heads
        if 2 * len(frequencies) != head_size:
            raise ValueError(f"{len(frequencies)} frequencies for heads of {head_size}")
        self._ops.append(Op(Kind.ROPE, x, output=x, weight=weight, heads=heads, head_size=head_size, scale=factor))

    def attention(
        self,
        query: Slice,
        key: Slice,
        value: Slice,
        *,
        heads: int,
        kv_heads: int,
        scale: float | None = None,
        window: int = 0,
    ) -> Slice:
        """Causal attention over the row's cache, into which the keys and values go. One call is one layer's cache."""
        head_size = query.width // heads
        if head_size % 8 or key.width != kv_heads * head_size or key.width != value.width or heads % kv_heads:
            raise ValueError(
                f"attention of {heads}/{kv_heads} heads over {query.width}, {key.width}, {value.width} columns"
            )
        output = self._buffer(query.width)
        self._ops.append(
            Op(
                Kind.ATTENTION,
                query,
                key,
                value,
                output=output,
                integer=self._layers,
                heads=heads,
                kv_heads=kv_heads,
                head_size=head_size,
                window=window,
                scale=head_size**-0.5 if scale is None else scale,
            )
        )
        self._layers += 1
        return output

    def finish(self, logits: Slice) -> Program:
        """The program that ends with a choice from ``logits``."""
        if logits.width != self.vocabulary:
            raise ValueError(f"{logits.width} logits for a vocabulary of {self.vocabulary}")
        self._ops.append(Op(Kind.CHOOSE, logits))
        ops, buffers = _share_buffers(*_select(self._ops, self._widths))
        cache = Cache.FP32 if self.precision is Format.FP32 else Cache.BF16
        return Program(ops, tuple(self._weights), buffers, self._layers, self.vocabulary, self.context, cache)

    def _buffer(self, width: int) -> Slice:
        self._widths.append(width)
        return Slice(len(self._widths) - 1, 0, width)

    def _add(self, weight: Weight) -> int:
        # Rope frequencies are asked for by every layer, a tied table twice: one copy each.
        if weight in self._weights:
            return self._weights.index(weight)
        self._weights.append(weight)
        return len(self._weights) - 1

    def _table(self, table: Tensor) -> int:
        format = Format.FP32 if self.precision is Format.FP32 else Format.BF16
        return self._add(Weight(format, table.count, table.shape[1], (table,), table=True))

    def _vector(self, parts: Sequence[Tensor]) -> int:
        return self._add(Weight(Format.FP32, 1, sum(part.count for part in parts), tuple(parts), table=True))

    def _matrix(self, columns: int, parts: Sequence[Tensor], precision: Format | None, *, gated: bool) -> int:
        for part in parts:
            if len(part.shape) != 2 or part.shape[1] != columns:
                raise ValueError(f"{part.name} has shape {part.shape}, its input has {columns} columns")
        format = self.precision if precision is None else precision
        rows = sum(part.count for part in parts)
        group = self.group if format.integer else 0
        return self._add(Weight(format, rows, columns, tuple(parts), group=group, gated=gated))


# What needs all of a batch's tokens: positions' own inputs, and the attention, which keeps their keys and values.
_EVERY_TOKEN = (Kind.EMBED, Kind.POSITION, Kind.ROPE, Kind.ATTENTION)


def _select(ops: Sequence[Op], widths: Sequence[int]) -> tuple[list[Op], list[int]]:
    """Behind the last attention only the positions go on whose choice or logits are asked for.

    Of a prompt that is the last one, so most of its last layer is spared.
    """
    border = 1 + max(index for index, op in enumerate(ops) if op.kind in _EVERY_TOKEN)
    before, after = list(ops[:border]), ops[border:]
    made = {op.output.buffer for op in before}
    selected = {}
    longer = list(widths)
    for buffer in sorted({read.buffer for op in after for read in op.reads} & made):
        selected[buffer] = len(longer)
        longer.append(widths[buffer])
        whole = Slice(buffer, 0, widths[buffer])
        before.append(Op(Kind.SELECT, whole, output=replace(whole, buffer=selected[buffer])))
    kept = {buffer: selected.get(buffer, buffer) for buffer in range(len(longer))}
    return before + [_rename(op, kept) for op in after], longer


def _share_buffers(ops: Sequence[Op], widths: Sequence[int]) -> tuple[tuple[Op, ...], tuple[int, ...]]:
    """Gives buffers whose lives do not overlap the same memory."""
    last_use = {slice.buffer: index for index, op in enumerate(ops) for slice in (*op.reads, op.output)}
    physical: dict[int, int] = {}
    sizes: list[int] = []
    free: list[int] = []
    renamed: list[Op] = []
    for index, op in enumerate(ops):
        buffer = op.output.buffer
        if buffer >= 0 and buffer not in physical:
            width = widths[buffer]
            fitting = [number for number in free if sizes[number] == width]
            if fitting:
                physical[buffer] = fitting[0]
                free.remove(fitting[0])
            else:
                physical[buffer] = len(sizes)
                sizes.append(width)
        renamed.append(_rename(op, physical))
        free += [
            physical[number]
            for number in {s.buffer for s in (*op.reads, op.output)}
            if last_use.get(number) == index and number >= 0
        ]
    return tuple(renamed), tuple(sizes)


def _rename(op: Op, physical: dict[int, int]) -> Op:
    def new(slice: Slice) -> Slice:
        return slice if slice.buffer < 0 else Slice(physical[slice.buffer], slice.offset, slice.width)

    return replace(
        op, input=new(op.input), key=new(op.key), value=new(op.value), residual=new(op.residual), output=new(op.output)
    )
