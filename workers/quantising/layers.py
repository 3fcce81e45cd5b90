"""A program seen layer by layer: the matrices of each, and what feeds them and could take a factor of theirs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

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

    ``readers`` are these matrices, as weights of the program. Either a norm's ``vectors`` (gain, and bias where it has
    one), or ``rows`` of the matrix that makes the channels, with those of its bias. ``repeats``: each channel of the rows
    is read so many times, ``head_size`` channels after each other (keys and values that several heads share).
    """

    readers: tuple[int, ...]
    vectors: tuple[str, ...] = ()
    rows: tuple[Rows, ...] = ()
    bias_rows: tuple[Rows, ...] = ()
    head_size: int = 0
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Layer:
    """Operations ``start`` to ``stop`` of a program; ``rounded`` are those of its weights that are, in the order in which
    the operations read them, and ``experts`` those among them that only some tokens come to."""

    index: int
    start: int
    stop: int
    rounded: tuple[int, ...]
    experts: frozenset[int]
    feeders: tuple[Feeder, ...]

    def tensors(self, program: Program) -> list[Tensor]:
        """All that the layer reads, each once."""
        return named(program, (number for op in program.ops[self.start : self.stop] for number in weights_of(op)))

    def matrices(self, program: Program) -> list[Tensor]:
        """Those that are rounded."""
        return named(program, self.rounded)


def named(program: Program, weights: Iterable[int]) -> list[Tensor]:
    """What these are made from, each tensor once."""
    return list({source.name: source for number in weights for source in program.weights[number].sources}.values())


def weights_of(op: Op) -> list[int]:
    """Of experts and of heads there are several, one behind the other."""
    count = op.heads if op.kind in (Kind.EXPERTS, Kind.HEADS) else 1
    return [number for first in (op.weight, op.bias) if first >= 0 for number in range(first, first + count)]


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
        while program.ops[stop].kind is Kind.MIX:  # has no weights of its own
            stop += 1
        ops = program.ops[start:stop]
        # What other tensors are weighed by (routers, Gemma 3n's coefficients of its streams) stays in fp32.
        rounded = [number for op in ops for number in _matrices_of(op) if program.weights[number].format.integer]
        experts = frozenset(number for op in ops if op.kind is Kind.EXPERTS for number in _matrices_of(op))
        found.append(Layer(index, start, stop, tuple(rounded), experts, tuple(_feeders(program, start, stop))))
    if any(behind.start < before.stop for before, behind in pairwise(found)):
        raise ModelError("a text goes through the model's layers again and again, so they are not rounded layer by layer")
    names = [tensor.name for layer in found for tensor in layer.matrices(program)]
    if len(set(names)) < len(names):
        raise ModelError("the model's layers share weights, which are not rounded layer by layer")
    return found


def _matrices_of(op: Op) -> range:
    """Those that multiply what an operation reads, as weights of the program."""
    count = {Kind.LINEAR: 1, Kind.EXPERTS: op.heads}.get(op.kind, 0)
    return range(op.weight, op.weight + count)


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
    numbers = {int(found[1]) for source in named(program, weights_of(op)) if (found := LAYER.search(source.name))}
    return numbers.pop() if len(numbers) == 1 else None


def _feeders(program: Program, start: int, stop: int) -> Iterable[Feeder]:
    """Those of the layer's norms and matrices whose outputs nothing but matrices of the layer read.

    A norm that a router reads is none of them: of a router's weights not a bit may change.
    """
    ops = program.ops
    inside = {op.weight for op in ops[start:stop] if op.kind is Kind.LINEAR}
    for pair in norm_groups(program):
        # What is added to a norm's weights when they are read (Gemma's) is nothing that a checkpoint could divide.
        sources = [program.weights[index].sources[0] for index in pair.vectors]
        if set(pair.matrices) <= inside and not any(source.plus for source in sources):
            yield Feeder(pair.matrices, vectors=tuple(source.name for source in sources))
    for number in range(start, stop):
        op = ops[number]
        if op.kind is Kind.ATTENTION:
            yield from _through_attention(program, number, start, stop)
        elif op.kind is Kind.LINEAR and op.residual.buffer < 0 and (program.weights[op.weight].gated or _homogeneous(op)):
            readers = _readers(program, number, stop)
            if readers:
                yield _inside(program, op.weight, op.bias, tuple(readers))
        elif op.kind is Kind.EXPERTS and not op.integer and op.activation is not Activation.CLAMPED_SWIGLU:
            behind = next((later for later in ops[number + 1 : stop] if later.kind is Kind.EXPERTS), None)
            if behind is not None and behind.input == op.output and program.weights[op.weight].gated:
                for expert in range(op.heads):
                    bias = op.bias + expert if op.bias >= 0 else -1
                    yield _inside(program, op.weight + expert, bias, (behind.weight + expert,))


def _inside(program: Program, number: int, shift: int, readers: tuple[int, ...]) -> Feeder:
    """A feed-forward's: of a gated one the rows of up."""
    weight = program.weights[number]
    first = weight.rows // 2 if weight.gated else 0
    bias = () if shift < 0 else _rows(program.weights[shift], first, weight.rows)
    return Feeder(readers, rows=_rows(weight, first, weight.rows), bias_rows=bias)


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
        made_by = _rows(program.weights[ops[maker].weight], first, last)
        yield Feeder(tuple(readers), (), made_by, bias, op.value_size, repeats)


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
