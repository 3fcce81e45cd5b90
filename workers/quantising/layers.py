"""A program seen layer by layer: the matrices of each, and what feeds them and could take a factor of theirs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.kernels.program import Activation, Kind, Op, Program, Slice, Tensor, Weight
from outrider.workers.errors import ModelError
from outrider.workers.models.outlier_channels import norm_groups

LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
# act(s x) = s act(x) for s > 0.
HOMOGENEOUS = (Activation.NONE, Activation.RELU)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a checkpoint's tensor, in the order in which they are outputs of an operation."""

    tensor: str
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Feeder:
    """What the channels that some matrices read can be divided by a factor in, so that they are multiplied by it.

    Either a norm's ``vectors`` (gain, and bias where it has one), or ``rows`` of the matrix that makes the channels, with
    those of its bias. ``repeats``: each channel of the rows is read so many times, ``head_size`` channels after each other
    (keys and values that several heads share).
    """

    readers: tuple[int, ...]
    vectors: tuple[str, ...] = ()
    rows: tuple[Rows, ...] = ()
    bias_rows: tuple[Rows, ...] = ()
    head_size: int = 0
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Layer:
    """Operations ``start`` to ``stop`` of a program; ``linears`` are those of its matrices that are rounded."""

    index: int
    start: int
    stop: int
    linears: tuple[int, ...]
    feeders: tuple[Feeder, ...]

    def tensors(self, program: Program) -> list[Tensor]:
        """All that the layer reads, each once."""
        found: dict[str, Tensor] = {}
        for op in program.ops[self.start : self.stop]:
            for weight in (op.weight, op.bias):
                if weight >= 0:
                    found |= {source.name: source for source in program.weights[weight].sources}
        return list(found.values())

    def matrices(self, program: Program) -> list[Tensor]:
        """Those that are rounded."""
        found = {source.name: source for number in self.linears for source in matrix_of(program, number).sources}
        return list(found.values())


def matrix_of(program: Program, number: int) -> Weight:
    return program.weights[program.ops[number].weight]


def layers_of(program: Program) -> list[Layer]:
    """In order; what stands before the first and behind the last belongs to none."""
    owners = [_owner(program, op) for op in program.ops]
    count = max((owner for owner in owners if owner is not None), default=-1) + 1
    found = []
    for index in range(count):
        places = [place for place, owner in enumerate(owners) if owner == index]
        if not places:
            raise ModelError(f"the model lacks its decoder layer {index}: it cannot be taken layer by layer")
        start, stop = places[0], places[-1] + 1
        linears = tuple(n for n in range(start, stop) if program.ops[n].kind is Kind.LINEAR and _is_rounded(program, n))
        found.append(Layer(index, start, stop, linears, tuple(_feeders(program, start, stop))))
    names = [tensor.name for layer in found for tensor in layer.matrices(program)]
    if len(set(names)) < len(names):
        raise ModelError("the model's layers share weights, which are not rounded layer by layer")
    return found


def _is_rounded(program: Program, number: int) -> bool:
    """What other tensors are weighed by (Gemma 3n's coefficients of its streams) stays in fp32."""
    return matrix_of(program, number).format.integer


def live_behind(program: Program, stop: int) -> list[int]:
    """The buffers whose content operations from ``stop`` on still need."""
    needed: set[int] = set()
    written: set[int] = set()
    for op in program.ops[stop:]:
        needed |= {part.buffer for part in op.reads} - written
        # Whoever writes a part of a buffer leaves the rest, but nobody reads columns that nobody has written.
        written.add(op.output.buffer)
    return sorted(needed)


def _owner(program: Program, op: Op) -> int | None:
    sources = [source for weight in (op.weight, op.bias) if weight >= 0 for source in program.weights[weight].sources]
    numbers = {int(found[1]) for source in sources if (found := LAYER.search(source.name))}
    return numbers.pop() if len(numbers) == 1 else None


def _feeders(program: Program, start: int, stop: int) -> Iterable[Feeder]:
    """Those of the layer's norms and matrices whose outputs nothing but matrices of the layer read."""
    ops = program.ops
    by_weight = {ops[number].weight: number for number in range(start, stop) if ops[number].kind is Kind.LINEAR}
    for pair in norm_groups(program):
        # What is added to a norm's weights when they are read (Gemma's) is nothing that a checkpoint could divide.
        sources = [program.weights[index].sources[0] for index in pair.vectors]
        if set(pair.matrices) <= by_weight.keys() and not any(source.plus for source in sources):
            vectors = tuple(source.name for source in sources)
            yield Feeder(tuple(by_weight[index] for index in pair.matrices), vectors=vectors)
    for number in range(start, stop):
        op = ops[number]
        if op.kind is Kind.ATTENTION:
            yield from _through_attention(program, number, start, stop)
        elif op.kind is Kind.LINEAR and op.residual.buffer < 0 and (matrix_of(program, number).gated or _homogeneous(op)):
            readers = _readers(program, number, stop)
            if readers:
                weight = matrix_of(program, number)
                first = weight.rows // 2 if weight.gated else 0
                bias = () if op.bias < 0 else _rows(program.weights[op.bias], first, weight.rows)
                yield Feeder(tuple(readers), rows=_rows(weight, first, weight.rows), bias_rows=bias)


def _homogeneous(op: Op) -> bool:
    return op.activation in HOMOGENEOUS and not op.cap


def _through_attention(program: Program, number: int, start: int, stop: int) -> Iterable[Feeder]:
    """A factor on channels of the values goes through the attention as it is."""
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
    if ops[maker].activation is Activation.NONE and not _touched(ops[maker + 1 : number], op.value):
        bias = () if ops[maker].bias < 0 else _rows(program.weights[ops[maker].bias], first, last)
        repeats = op.heads // op.kv_heads
        yield Feeder(tuple(readers), (), _rows(matrix_of(program, maker), first, last), bias, op.value_size, repeats)


def _touched(ops: Iterable[Op], part: Slice) -> bool:
    """Whether any of them writes into these columns."""
    for op in ops:
        out = op.input if op.kind is Kind.ROPE else op.output
        apart = out.buffer != part.buffer or out.offset >= part.offset + part.width or part.offset >= out.offset + out.width
        if not apart:
            return True
    return False


def _readers(program: Program, number: int, stop: int) -> list[int]:
    """The matrices before ``stop`` that read what an operation writes; none where something else reads of it, too."""
    output, found = program.ops[number].output, []
    for later in range(number + 1, len(program.ops)):
        op = program.ops[later]
        if any(part.buffer == output.buffer for part in op.reads):
            if op.kind is Kind.SELECT:
                inner = _readers(program, later, stop)
                if not inner:
                    return []
                found += inner
            elif op.kind is Kind.LINEAR and op.input == output and op.residual.buffer != output.buffer:
                found.append(later)
            else:
                return []
        if op.output.buffer == output.buffer:
            break
    return found if all(reader < stop for reader in found) else []


def _rows(weight: Weight, first: int, last: int) -> tuple[Rows, ...]:
    """Where the rows (or elements) ``first`` to ``last`` of a packed weight lie in the checkpoint."""
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
