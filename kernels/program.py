"""A decoder as a flat list of operations over packed weights.

Nothing here touches a tensor: a weight names the checkpoint tensors that it is packed from, so a program can be laid out,
hashed and checked before a single byte is read. kernels/builder.py puts programs together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any


class Format(IntEnum):
    """How a matrix is stored; the numbers are the C interface's ``outrider_format``."""

    FP32 = 0
    BF16 = 1
    W4A8 = 2
    W8A8 = 3
    W4ABF16 = 4
    W8AF32 = 5
    FP16 = 6

    @property
    def integer(self) -> bool:
        """Codes with scales, in groups of channels."""
        return self not in (Format.FP32, Format.BF16, Format.FP16)

    @property
    def fp32(self) -> bool:
        """Nothing but weights is rounded below fp32."""
        return self in (Format.FP32, Format.W8AF32)


class Codes(IntEnum):
    """What a weight's code is; the numbers are the C interface's ``outrider_codes``. Integers are unsigned."""

    NONE = 0
    INT4 = 1
    INT5 = 2
    INT6 = 3
    INT8 = 4
    E2M1 = 5
    E4M3 = 6


class Scales(IntEnum):
    """How the scales of the groups lie before their codes; the numbers are the C interface's ``outrider_scales``."""

    WORDS = 0
    F32 = 1
    F16 = 2
    BF16 = 3
    E8M0 = 4
    SIX_BITS = 5
    EIGHT_BITS = 6
    FACTORS = 7
    HALF_MINIMA = 8


@dataclass(frozen=True, slots=True)
class Storage:
    """How the codes and scales of a matrix are kept: kernels/storage.py is the definition.

    ``zeros``: every group has a zero point of its own (of WORDS always), else it is the middle of the codes' range.
    """

    codes: Codes
    scales: Scales
    zeros: bool = False


NO_STORAGE = Storage(Codes.NONE, Scales.WORDS)
# How floats are rounded to four bits where errors should be least: groups of 32, 4.5 bits a weight, scales included.
FACTORS = Storage(Codes.INT4, Scales.FACTORS)
# And where every 32 have a scale and a zero point of their own: 4.75 bits a weight.
SMALLEST_GROUP = 32
BY_SMALL_GROUPS = Storage(Codes.INT4, Scales.BF16, zeros=True)

# kLanes of the kernels: values of the cache lie in vectors of so many.
CACHE_LANES = 16


class Cache(IntEnum):
    """How keys and values are kept; the numbers are the C interface's ``outrider_cache``."""

    BF16 = 0
    FP32 = 1
    INT8 = 2

    @property
    def element_bytes(self) -> int:
        return {Cache.BF16: 2, Cache.FP32: 4, Cache.INT8: 1}[self]

    def token_bytes(self, op: Op) -> int:
        """Of a layer's keys and values: in 8 bits each vector has a scale, and values lie in whole vector registers. There
        values that are columns of the keys are kept as these, with a scale of their own."""
        kv_heads, head_size = op.kv_heads, op.head_size
        values = 0 if op.value_in_key and self is Cache.INT8 else -(-op.value_size // CACHE_LANES) * CACHE_LANES
        scales = 8 if self is Cache.INT8 else 0
        return kv_heads * ((head_size + values) * self.element_bytes + scales)


class Kind(IntEnum):
    EMBED = 0
    POSITION = 1
    NORM = 2
    LINEAR = 3
    ROPE = 4
    ATTENTION = 5
    SELECT = 6
    CHOOSE = 7
    ROUTE = 8
    EXPERTS = 9
    MIX = 10
    GATE = 11
    HAND_OUT = 12
    TAKE_IN = 13
    GO_ON = 14
    LEAVE = 15
    SPREAD = 16
    CONVOLVE = 17
    DELTA = 18
    SCALE = 19
    XIELU = 20
    HEADS = 21
    CUT = 22
    BLEND = 23
    MATCH = 24
    SCAN = 25


# A row has a state of each of these, which no truncation brings back: kernels/src/recurrence.h says what serves instead.
RECURRENT = (Kind.CONVOLVE, Kind.DELTA, Kind.SCAN)
# Of these a state is a matrix for each head, to which every token adds a product of two vectors.
OUTER_PRODUCTS = (Kind.DELTA, Kind.SCAN)
# A scan's heads are worked on in at most so many parts where they share few keys: kMostHeadParts of the kernels.
MOST_HEAD_PARTS = 16


class Activation(IntEnum):
    NONE = 0
    RELU = 1
    GELU_ERF = 2
    GELU_TANH = 3
    SILU = 4
    CLAMPED_SWIGLU = 5
    SIGMOID = 6
    RELU_SQUARED = 7
    CLIP = 8


class Routing(IntEnum):
    """What the weights of a token's experts are; the numbers are the C interface's ``outrider_route``."""

    SOFTMAX = 0
    SOFTMAX_CHOSEN = 1
    SIGMOID_EACH = 2
    SIGMOID_SHARE = 3
    SOFTMAX_SHARE = 4
    SPARSE_MIXER = 5
    SOFTMAX_GROUPS = 6


# Where corrections or groups choose experts, or their weights are no plain softmax, there are at most so many: kMostRouted.
MOST_ROUTED = 1024


class Norm(IntEnum):
    RMS = 0
    LAYER = 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the checkpoint: its name, the shape it must have, and which of its rows are taken (all, unless said).

    ``rows`` are (start, stop) ranges in the order in which they are wanted: GPTBigCode stores queries, keys and values of
    a head next to each other, for example. ``plus`` is added to a vector's elements (Gemma's norms multiply by 1 + w).
    ``stored`` is the shape in the checkpoint where it lies there otherwise: a matrix with its inputs as rows (GPT-2's), so
    that this is ``shape`` turned round, or a vector as a matrix, row by row (Command R's norms of heads).
    ``transposed``: the rows that are taken of ``shape`` become the columns of the matrix.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...] = ()
    plus: float = 0.0
    stored: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return self.rows or ((0, self.shape[0]),)

    @property
    def count(self) -> int:
        """Rows of the matrix, or elements of a vector, that are taken."""
        return self.shape[1] if self.transposed else self._taken

    @property
    def columns(self) -> int:
        """Of the matrix."""
        return self._taken if self.transposed else self.shape[1]

    @property
    def _taken(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class Weight:
    """One packed piece of memory. A matrix in tiles, unless ``table``: then rows one after the other (vectors have one).

    ``sources`` are stacked in order, or ``values`` are the content itself (rope's frequencies). ``gated``: gate over up,
    their tiles alternate. ``storage`` is how a quantised checkpoint's own codes are kept, or FACTORS, which floats are
    rounded to; of the format only what it does with activations counts then. ``ordered``: column j multiplies input channel
    order[j], which is packed beside the codes.
    """

    format: Format
    rows: int
    columns: int
    sources: tuple[Tensor, ...] = ()
    values: tuple[float, ...] = ()
    group: int = 0
    gated: bool = False
    table: bool = False
    storage: Storage | None = None
    ordered: bool = False

    @property
    def stored(self) -> Storage:
        """How codes and scales are kept, also where the format alone says it."""
        if self.storage is not None or not self.format.integer:
            return self.storage or NO_STORAGE
        four = self.format in (Format.W4A8, Format.W4ABF16)
        if four and self.group == SMALLEST_GROUP:
            return BY_SMALL_GROUPS
        return Storage(Codes.INT4 if four else Codes.INT8, Scales.WORDS, zeros=True)


@dataclass(frozen=True, slots=True)
class Slice:
    """Columns of a buffer; a buffer holds one fp32 vector for every token."""

    buffer: int
    offset: int
    width: int

    def overlaps(self, other: Slice) -> bool:
        same = self.buffer == other.buffer
        return same and self.offset < other.offset + other.width and other.offset < self.offset + self.width

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
    rotated: int = 0
    longest: int = 0
    epsilon: float = 0.0
    scale: float = 1.0
    cap: float = 0.0

    def first_seen(self, positions: Any) -> Any:
        """Of attention the first position that a token sees, by its own (arrays of them): ``window`` is negative where a
        token sees its own chunk of so many."""
        if self.window < 0:
            return positions // -self.window * -self.window
        return positions + 1 - self.window if self.window else 0 * positions

    @property
    def value_size(self) -> int:
        """Columns of a head's values; those of its keys are ``head_size``."""
        return self.value.width // self.kv_heads

    @property
    def value_in_key(self) -> bool:
        """Of attention: whether the values are the last columns of the only head's keys."""
        key, value = self.key, self.value
        ends = key.offset + key.width == value.offset + value.width
        return self.kv_heads == 1 and key.buffer == value.buffer and value.width < key.width and ends

    @property
    def decays(self) -> int:
        """Of OUTER_PRODUCTS: the decays of a token, one for each head, or for each row of its state."""
        return self.residual.width - self.heads if self.kind is Kind.DELTA else self.heads

    @property
    def parts(self) -> int:
        """Of OUTER_PRODUCTS: into how many parts the heads are divided, each of which keeps its key of a token."""
        if self.kind is Kind.DELTA:
            return self.kv_heads
        group = self.heads // self.kv_heads
        divisors = [d for d in range(1, group + 1) if group % d == 0 and self.kv_heads * d <= MOST_HEAD_PARTS]
        return self.kv_heads * max(divisors, default=1)

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
        """Whether every matrix is of an integer format, so that results are the same on every instruction set.

        So are those of routers and gates that are in fp32, and of heads in fp32 or fp16, whose products have one order.
        """
        routers: set[int] = set()
        heads: set[int] = set()
        # Of each slice that holds something: the weight that it was made with.
        made: dict[Slice, int] = {}
        before: dict[int, set[int]] = {}

        def makers(part: Slice) -> set[int]:
            return {weight for slice, weight in made.items() if slice.overlaps(part)}

        for op in self.ops:
            if op.kind is Kind.LINEAR:
                before[op.weight] = makers(op.input)
            if op.kind is Kind.ROUTE:
                routers |= makers(op.input)
            elif op.kind is Kind.GATE and op.key.width == 1:
                routers |= makers(op.key)
            elif op.kind is Kind.HEADS:
                heads |= set(range(op.weight, op.weight + op.heads))
            elif op.kind is Kind.BLEND or op.kind in OUTER_PRODUCTS:
                # Of its coefficients, or gates, and of what these are made from.
                coefficients = makers(op.key if op.kind is Kind.BLEND else op.residual)
                routers |= coefficients.union(*(before.get(weight, ()) for weight in coefficients))
            made = {slice: weight for slice, weight in made.items() if not slice.overlaps(op.output)}
            made[op.output] = op.weight
        return all(
            weight.table
            or weight.format.integer
            or (weight.format is Format.FP32 and number in routers | heads)
            or (weight.format is Format.FP16 and number in heads)
            for number, weight in enumerate(self.weights)
        )

    def digest(self) -> str:
        """Names the program: equal digests mean equal operations over equally packed tensors of the same names.

        How keys and values are kept makes no difference to what is packed, nor does what is handed out on the way.
        """
        ops = tuple(op for op in self.ops if op.kind is not Kind.HAND_OUT)
        return hashlib.sha256(repr(replace(self, ops=ops, cache=Cache.BF16)).encode()).hexdigest()

    @property
    def caches(self) -> tuple[Op, ...]:
        """Of each cache of keys and values the first operation that stores in it; others may share it."""
        first = {op.integer: op for op in reversed(self.ops) if op.kind is Kind.ATTENTION}
        return tuple(first[number] for number in sorted(first))

    @property
    def token_bytes(self) -> int:
        """What a token of a row takes in the cache of keys and values; states of a row, which do not grow, apart."""
        return sum(self.cache.token_bytes(op) for op in self.caches)

    @property
    def handed_out(self) -> int:
        """Columns of the states that a pass hands out with its tokens; 0: none."""
        return max((op.integer + op.input.width for op in self.ops if op.kind is Kind.HAND_OUT), default=0)

    @property
    def taken_in(self) -> int:
        """Columns of the states that tokens are to come with; 0: none are taken in."""
        return next((op.output.width for op in self.ops if op.kind is Kind.TAKE_IN), 0)
