"""The decoder layers of a program: the matrices of each, and the producers of their inputs, to which scales can be
moved."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from outrider.kernels.program import Activation, Kind, Op, Program, Slice, Tensor, Weight
from outrider.workers.errors import ModelError
from outrider.workers.models.outlier_channels import norm_groups

LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
# act(s x) = s act(x) for s > 0.
HOMOGENEOUS = (Activation.NONE, Activation.RELU)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a checkpoint's tensor, in the order of an operation's outputs."""

    tensor: str
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Feeder:
    """The producer of the channels that some matrices read: dividing it by a factor for each channel, and multiplying the
    columns of the matrices by that factor, leaves the function unchanged.

    ``readers`` are these matrices, as weights of the program. The producer is either a norm's ``vectors`` (gain, and bias
    where it has one), or ``rows`` of a matrix, with those of its bias. ``repeats``: this many heads read the same channel
    (grouped-query attention), at intervals of ``head_size`` channels.
    """

    readers: tuple[int, ...]
    vectors: tuple[str, ...] = ()
    rows: tuple[Rows, ...] = ()
    bias_rows: tuple[Rows, ...] = ()
    head_size: int = 0
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Layer:
    """Operations ``start`` to ``stop`` of a program; ``rounded`` are the weights that are quantised, in the order in which
    operations read them, and ``experts`` those of them that belong to experts."""

    index: int
    start: int
    stop: int
    rounded: tuple[int, ...]
    experts: frozenset[int]
    feeders: tuple[Feeder, ...]

    def tensors(self, program: Program) -> list[Tensor]:
        """All tensors of the layer, each once."""
        return named(program, (number for op in program.ops[self.start : self.stop] for number in weights_of(op)))

    def matrices(self, program: Program) -> list[Tensor]:
        """The tensors that are quantised."""
        return named(program, self.rounded)


def named(program: Program, weights: Iterable[int]) -> list[Tensor]:
    """The tensors of these weights, each once."""
    return list({source.name: source for number in weights for source in program.weights[number].sources}.values())


def weights_of(op: Op) -> list[int]:
    """The weights of an operation. Those of experts and heads are consecutive."""
    count = op.heads if op.kind in (Kind.EXPERTS, Kind.HEADS) else 1
    return [number for first in (op.weight, op.bias) if first >= 0 for number in range(first, first + count)]


def layers_of(program: Program) -> list[Layer]:
    """The layers in order; operations before the first and after the last belong to none."""
    owners = [_owner(program, op) for op in program.ops]
    count = max((owner for owner in owners if owner is not None), default=-1) + 1
    found: list[Layer] = []
    for index in range(count):
        places = [place for place, owner in enumerate(owners) if owner == index]
        if not places:  # it computes nothing (Llama 3.2 Vision's that attend to pictures)
            continue
        start, stop = places[0], places[-1] + 1
        while program.ops[stop].kind is Kind.MIX:  # has no weights of its own
            stop += 1
        ops = program.ops[start:stop]
        # Routers, and the coefficients of streams (Gemma 3n's, hyper-connections), stay in fp32.
        rounded = [number for op in ops for number in _matrices_of(op) if program.weights[number].format.integer]
        experts = frozenset(number for op in ops if op.kind is Kind.EXPERTS for number in _matrices_of(op))
        found.append(Layer(len(found), start, stop, tuple(rounded), experts, tuple(_feeders(program, start, stop))))
    if any(behind.start < before.stop for before, behind in pairwise(found)):
        raise ModelError("a text passes through the model's layers repeatedly, so they cannot be rounded layer by layer")
    names = [tensor.name for layer in found for tensor in layer.matrices(program)]
    if len(set(names)) < len(names):
        raise ModelError("the model's layers share weights, so they cannot be rounded layer by layer")
    return found


def _matrices_of(op: Op) -> range:
    """The matrices by which an operation multiplies its input, as weights of the program."""
    count = {Kind.LINEAR: 1, Kind.EXPERTS: op.heads}.get(op.kind, 0)
    return range(op.weight, op.weight + count)


def live_buffers(program: Program, stop: int) -> list[int]:
    """The buffers that operations from ``stop`` on read before they write them."""
    needed: set[int] = set()
    written: set[int] = set()
    for op in program.ops[stop:]:
        needed |= {part.buffer for part in op.reads} - written
        # A partial write leaves the other columns, but no operation reads columns that were never written.
        written.add(op.output.buffer)
    return sorted(needed)


def _owner(program: Program, op: Op) -> int | None:
    numbers = {int(found[1]) for source in named(program, weights_of(op)) if (found := LAYER.search(source.name))}
    return numbers.pop() if len(numbers) == 1 else None


def _feeders(program: Program, start: int, stop: int) -> Iterable[Feeder]:
    """The norms and matrices of a layer whose outputs are read by nothing but quantised matrices of the layer.

    Not a norm that a router reads, since no bit of a router's weights may change.
    """
    ops = program.ops
    inside = {op.weight for op in ops[start:stop] if op.kind is Kind.LINEAR}
    for pair in norm_groups(program):
        # Gemma's norms multiply by 1 + weight, which cannot be divided in the checkpoint.
        sources = [program.weights[index].sources[0] for index in pair.vectors]
        if set(pair.matrices) <= inside and not any(source.plus for source in sources):
            yield Feeder(pair.matrices, vectors=tuple(source.name for source in sources))
    for number in range(start, stop):
        op = ops[number]
        if op.kind is Kind.ATTENTION:
            yield from _through_attention(program, number, start, stop)
        elif op.kind is Kind.LINEAR and op.residual.buffer < 0 and _linear_in_up(program, op):
            readers = _readers(program, number, stop)
            if readers:
                yield _feed_forward(program, op.weight, op.bias, tuple(readers))
        elif op.kind is Kind.EXPERTS and not op.integer and not op.cap:
            down = next((later for later in ops[number + 1 : stop] if later.kind is Kind.EXPERTS), None)
            if down is not None and down.input == op.output and program.weights[op.weight].gated:
                for expert in range(op.heads):
                    bias = op.bias + expert if op.bias >= 0 else -1
                    yield _feed_forward(program, op.weight + expert, bias, (down.weight + expert,))


def _feed_forward(program: Program, number: int, shift: int, readers: tuple[int, ...]) -> Feeder:
    """The first matrix of a feed-forward layer; of a gated one only the rows of up, since the gate's activation is not
    homogeneous."""
    weight = program.weights[number]
    first = weight.rows // 2 if weight.gated else 0
    bias = () if shift < 0 else _rows(program.weights[shift], first, weight.rows)
    return Feeder(readers, rows=_rows(weight, first, weight.rows), bias_rows=bias)


def _linear_in_up(program: Program, op: Op) -> bool:
    """Whether a factor passes through the product: through a gated one beside its activation, unless up is clamped."""
    if program.weights[op.weight].gated:
        return not op.cap
    return op.activation in HOMOGENEOUS and not op.cap


def _through_attention(program: Program, number: int, start: int, stop: int) -> Iterable[Feeder]:
    """Attention is linear in the values, so a factor on their channels passes through it."""
    ops, op = program.ops, program.ops[number]
    readers = _readers(program, number, stop)
    if not readers:
        return
    makers = [n for n in range(start, number) if ops[n].output.buffer == op.value.buffer and ops[n].kind is Kind.LINEAR]
    if not makers:  # values are normalised, or an earlier layer's
        return
    maker = makers[-1]
    first = op.value.offset - ops[maker].output.offset
    last = first + op.value.width
    if ops[maker].activation is Activation.NONE and not _written(ops[maker + 1 : number], op.value):
        bias = () if ops[maker].bias < 0 else _rows(program.weights[ops[maker].bias], first, last)
        repeats = op.heads // op.kv_heads
        made_by = _rows(program.weights[ops[maker].weight], first, last)
        yield Feeder(tuple(readers), (), made_by, bias, op.value_size, repeats)


def _written(ops: Iterable[Op], part: Slice) -> bool:
    """Whether any of the operations writes to these columns."""
    for op in ops:
        out = op.input if op.kind is Kind.ROPE else op.output
        apart = out.buffer != part.buffer or out.offset >= part.offset + part.width or part.offset >= out.offset + out.width
        if not apart:
            return True
    return False


def _readers(program: Program, number: int, stop: int) -> list[int]:
    """The matrices before ``stop`` that read an operation's output; empty where anything else reads it, too."""
    return [program.ops[reader].weight for reader in _reading(program, number, stop)]


def _reading(program: Program, number: int, stop: int) -> list[int]:
    output, found = program.ops[number].output, []
    for later in range(number + 1, len(program.ops)):
        op = program.ops[later]
        if any(part.buffer == output.buffer for part in op.reads):
            if op.kind is Kind.SELECT:
                inner = _reading(program, later, stop)
                if not inner:
                    return []
                found += inner
            elif _is_rounded(program, op) and op.input == output and op.residual.buffer != output.buffer:
                found.append(later)
            else:
                return []
        if op.output.buffer == output.buffer:
            break
    return found if all(reader < stop for reader in found) else []


def _is_rounded(program: Program, op: Op) -> bool:
    return op.kind is Kind.LINEAR and program.weights[op.weight].format.integer


def _rows(weight: Weight, first: int, last: int) -> tuple[Rows, ...]:
    """The places in the checkpoint of rows (or elements) ``first`` to ``last`` of a packed weight."""
    found, start = [], 0
    for source in weight.sources:
        ranges = []
        for begin, end in source.ranges:
            low, high = max(first, start), min(last, start + end - begin)
            if low < high:
                ranges.append((begin + low - start, begin + high - start))
            start += end - begin
        if ranges:
            found.append(Rows(source.name, tuple(ranges)))
    return tuple(found)
