"""A decoder as a flat list of operations over packed weights.

Nothing here touches a tensor: a weight names the checkpoint tensors that it is packed from, so a program can be laid out,
hashed and checked before a single byte is read. kernels/builder.py puts programs together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import IntEnum


class Format(IntEnum):
    """How a matrix is stored; the numbers are the C interface's ``outrider_format``."""

    FP32 = 0
    BF16 = 1
    W4A8 = 2
    W8A8 = 3
    W4ABF16 = 4
    W8AF32 = 5

    @property
    def integer(self) -> bool:
        return self not in (Format.FP32, Format.BF16)


class Cache(IntEnum):
    """How keys and values are kept; the numbers are the C interface's ``outrider_cache``."""

    BF16 = 0
    FP32 = 1
    INT8 = 2

    @property
    def element_bytes(self) -> int:
        return {Cache.BF16: 2, Cache.FP32: 4, Cache.INT8: 1}[self]


class Kind(IntEnum):
    EMBED = 0
    POSITION = 1
    NORM = 2
    LINEAR = 3
    ROPE = 4
    ATTENTION = 5
    SELECT = 6
    CHOOSE = 7


class Activation(IntEnum):
    NONE = 0
    RELU = 1
    GELU_ERF = 2
    GELU_TANH = 3
    SILU = 4


class Norm(IntEnum):
    RMS = 0
    LAYER = 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the checkpoint: its name, the shape it must have, and which of its rows are taken (all, unless said).

    ``rows`` are (start, stop) ranges in the order in which they are wanted: GPTBigCode stores queries, keys and values of
    a head next to each other, for example.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...] = ()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return self.rows or ((0, self.shape[0]),)

    @property
    def count(self) -> int:
        """Rows of a matrix, or elements of a vector, that are taken."""
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class Weight:
    """One packed piece of memory. A matrix in tiles, unless ``table``: then rows one after the other (vectors have one).

    ``sources`` are stacked in order, or ``values`` are the content itself (rope's frequencies). ``gated``: gate over up,
    their tiles alternate.
    """

    format: Format
    rows: int
    columns: int
    sources: tuple[Tensor, ...] = ()
    values: tuple[float, ...] = ()
    group: int = 0
    gated: bool = False
    table: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """Columns of a buffer; a buffer holds one fp32 vector for every token."""

    buffer: int
    offset: int
    width: int

    def part(self, offset: int, width: int) -> Slice:
        if offset < 0 or width < 1 or offset + width > self.width:
            raise ValueError(f"columns {offset}..{offset + width} of a slice that has {self.width}")
        return Slice(self.buffer, self.offset + offset, width)

    def split(self, *widths: int) -> tuple[Slice, ...]:
        if sum(widths) != self.width:
            raise ValueError(f"widths {widths} add up to {sum(widths)}, the slice has {self.width} columns")
        starts = [sum(widths[:index]) for index in range(len(widths))]
        return tuple(self.part(start, width) for start, width in zip(starts, widths, strict=True))


ABSENT = Slice(-1, 0, 0)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation; field by field the C interface's ``outrider_op``."""

    kind: Kind
    input: Slice = ABSENT
    key: Slice = ABSENT
    value: Slice = ABSENT
    residual: Slice = ABSENT
    output: Slice = ABSENT
    weight: int = -1
    bias: int = -1
    activation: Activation = Activation.NONE
    integer: int = 0
    heads: int = 1
    kv_heads: int = 1
    head_size: int = 0
    window: int = 0
    epsilon: float = 0.0
    scale: float = 1.0

    @property
    def reads(self) -> tuple[Slice, ...]:
        return tuple(s for s in (self.input, self.key, self.value, self.residual) if s.buffer >= 0)


@dataclass(frozen=True, slots=True)
class Program:
    ops: tuple[Op, ...]
    weights: tuple[Weight, ...]
    buffers: tuple[int, ...]
    layers: int
    vocabulary: int
    context: int
    cache: Cache

    @property
    def integer(self) -> bool:
        """Whether every matrix is of an integer format, so that results are the same on every instruction set."""
        return all(weight.table or weight.format.integer for weight in self.weights)

    def digest(self) -> str:
        """Names the program: equal digests mean equal operations over equally packed tensors of the same names.

        How keys and values are kept makes no difference to what is packed.
        """
        return hashlib.sha256(repr(replace(self, cache=Cache.BF16)).encode()).hexdigest()
