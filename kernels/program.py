"""A decoder as a flat list of operations over packed weights.

Nothing here touches a tensor: a weight names the checkpoint tensors that it is packed from, so a program can be laid out,
hashed and checked before a single byte is read. kernels/builder.py puts programs together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
        """Whether a weight is a code, with a scale for each group of channels."""
        return self not in (Format.FP32, Format.BF16, Format.FP16)

    @property
    def fp32(self) -> bool:
        """Whether only weights are rounded below fp32."""
        return self in (Format.FP32, Format.W8AF32)


class Codes(IntEnum):
    """The type of a quantised weight; the numbers are the C interface's ``outrider_codes``. Integers are unsigned."""

    NONE = 0
    INT4 = 1
    INT5 = 2
    INT6 = 3
    INT8 = 4
    E2M1 = 5
    E4M3 = 6
    NF4 = 7
    FP4 = 8
    INT2 = 9
    IQ4 = 10


class Scales(IntEnum):
    """How the scales of the groups are stored; the numbers are the C interface's ``outrider_scales``."""

    WORDS = 0
    F32 = 1
    F16 = 2
    BF16 = 3
    E8M0 = 4
    SIX_BITS = 5
    EIGHT_BITS = 6
    FACTORS = 7
    HALF_MINIMA = 8
    FOUR_BITS = 9


@dataclass(frozen=True, slots=True)
class Storage:
    """How the codes and scales of a matrix are stored: kernels/storage.py is the definition.

    ``zeros``: every group has a zero point of its own (with WORDS always); else it is the middle of the codes' range.
    """

    codes: Codes
    scales: Scales
    zeros: bool = False


NO_STORAGE = Storage(Codes.NONE, Scales.WORDS)
# The default storage of floats that are rounded to four bits: groups of 32, 4.5 bits a weight, scales included.
FACTORS = Storage(Codes.INT4, Scales.FACTORS)
# The smallest groups of codes with zero points of their own, and of codes around a fixed middle.
SMALLEST_ASYMMETRIC_GROUP, SMALLEST_SYMMETRIC_GROUP = 32, 16
# The storage of four-bit weights in groups of 32 with a scale and a zero point each: 4.75 bits a weight.
INT4_GROUPS_OF_32 = Storage(Codes.INT4, Scales.BF16, zeros=True)

# kLanes of the kernels: in the cache a head's values are padded to a multiple of this.
CACHE_LANES = 16


class Cache(IntEnum):
    """The type of keys and values in the cache; the numbers are the C interface's ``outrider_cache``."""

    BF16 = 0
    FP32 = 1
    INT8 = 2

    @property
    def element_bytes(self) -> int:
        return {Cache.BF16: 2, Cache.FP32: 4, Cache.INT8: 1}[self]

    def token_bytes(self, op: Op) -> int:
        """Bytes of a token's keys and values in one layer; a head's values are padded to CACHE_LANES. With INT8 each key
        and each value has a scale, and values that are columns of the keys are not stored again."""
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
    HIDDEN_OUT = 12
    HIDDEN_IN = 13
    LOAD_HIDDEN = 14
    STORE_HIDDEN = 15
    SCATTER = 16
    CONVOLVE = 17
    DELTA = 18
    SCALE = 19
    XIELU = 20
    HEADS = 21
    GAUSSIAN_TOP_K = 22
    BLEND = 23
    MATCH_RMS = 24
    SCAN = 25
    CONNECT = 26


# Operations that add ``residual``, if they have one, to their output. In DELTA and SCAN it is an input of another kind.
ADD_RESIDUAL = frozenset((Kind.NORM, Kind.LINEAR, Kind.MIX, Kind.GATE, Kind.SCALE, Kind.BLEND, Kind.MATCH_RMS))
# Operations with a recurrent state of each row. Unlike a KV cache it cannot be truncated; kernels/src/recurrence.h says
# what is kept to go back to.
RECURRENT = (Kind.CONVOLVE, Kind.DELTA, Kind.SCAN)
# The recurrent operations whose state is a matrix for each head, to which every token adds an outer product.
OUTER_PRODUCTS = (Kind.DELTA, Kind.SCAN)
# kMostHeadParts of the kernels: the heads of a scan that share a KV head are divided further, into this many parts at most.
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
    SOFTPLUS = 9
    BOUNDED_SILU = 10
    RETAINED = 11


class Routing(IntEnum):
    """How the weights of a token's experts follow from the router's scores (Builder.route); the numbers are the C
    interface's ``outrider_route``."""

    SOFTMAX = 0
    SOFTMAX_CHOSEN = 1
    SIGMOID_EACH = 2
    SIGMOID_SHARE = 3
    SOFTMAX_SHARE = 4
    SPARSE_MIXER = 5
    SOFTMAX_GROUPS = 6
    SIGMOID_EACH_BY_SCORE = 7
    SIGMOID_SHARE_BY_SCORE = 8


# Kinds of routing by sigmoids; those whose corrections are added to scores; and those whose weights are not divided by
# their sum.
SIGMOIDS = frozenset(routing for routing in Routing if routing.name.startswith("SIGMOID"))
BY_SCORE = frozenset((Routing.SIGMOID_EACH_BY_SCORE, Routing.SIGMOID_SHARE_BY_SCORE))
NOT_NORMALISED = frozenset((Routing.SOFTMAX, Routing.SIGMOID_EACH, Routing.SIGMOID_EACH_BY_SCORE, Routing.SOFTMAX_GROUPS))
# kMostRouted of the kernels: the most experts with any routing but SOFTMAX and SOFTMAX_CHOSEN.
MOST_ROUTED = 1024


class Norm(IntEnum):
    RMS = 0
    LAYER = 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the checkpoint: its name, the shape it must have, and which of its rows are used (by default all).

    ``rows`` are (start, stop) ranges in the order of their use; GPTBigCode, for example, stores queries, keys and values of
    a head next to each other. ``plus`` is added to a vector's elements (Gemma's norms multiply by 1 + w). ``stored`` is the
    shape in the checkpoint if it differs: of a transposed matrix [inputs, outputs] (GPT-2's), or of a vector that is stored
    as a matrix, row by row (Command R's norms of heads). ``transposed``: the matrix is the transpose of the rows that are
    used.
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
        """Rows of the matrix, or elements of the vector."""
        return self.shape[1] if self.transposed else self._taken

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return self._taken if self.transposed else self.shape[1]

    @property
    def _taken(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class Weight:
    """A packed weight: a matrix in tiles, or a ``table``, which is row-major (a vector has one row).

    ``sources`` are stacked in order, or ``values`` are the content itself (rope's frequencies). ``gated``: gate stacked
    over up, whose tiles alternate. ``storage`` is that of a quantised checkpoint's codes, or FACTORS, to which floats are
    rounded; with it ``format`` only decides how activations are rounded. ``ordered``: the columns are in activation order:
    column j multiplies input channel order[j], and the order is packed with the codes.
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
        """``storage``, or the format's default."""
        if self.storage is not None or not self.format.integer:
            return self.storage or NO_STORAGE
        four = self.format in (Format.W4A8, Format.W4ABF16)
        if four and self.group == SMALLEST_ASYMMETRIC_GROUP:
            return INT4_GROUPS_OF_32
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
        """The first positions to which the tokens at ``positions`` attend; with a window they may be negative. ``window``
        is -n where a token attends to its own chunk of n tokens."""
        if self.window < 0:
            return positions // -self.window * -self.window
        return positions + 1 - self.window if self.window else 0 * positions

    @property
    def value_size(self) -> int:
        """Columns of a head's values; those of its keys are ``head_size``."""
        return self.value.width // self.kv_heads

    @property
    def value_in_key(self) -> bool:
        """Whether attention has one KV head, whose values are the last columns of its keys (latent attention)."""
        key, value = self.key, self.value
        ends = key.offset + key.width == value.offset + value.width
        return self.kv_heads == 1 and key.buffer == value.buffer and value.width < key.width and ends

    def alibi(self, slopes: Any, positions: Any, bf16: Callable[[Any], Any]) -> Any:
        """What ATTENTION adds to its scaled scores: a matrix [queries, keys] for each head. ``bf16`` rounds an array."""
        slopes, places = slopes.reshape(-1, 1, 1), positions.reshape(1, 1, -1)
        if not self.rotated:
            return slopes * (places - positions.reshape(1, -1, 1))
        biases = bf16(slopes * bf16(places))
        return (biases - biases.swapaxes(1, 2)) * self.scale

    @property
    def decays(self) -> int:
        """The numbers by which states decay that are kept of a token in OUTER_PRODUCTS: one for each head, row, or (the
        steps of Mamba 1) column."""
        return self.residual.width - self.heads if self.kind is Kind.DELTA else self.residual.width

    @property
    def connections(self) -> tuple[int, ...]:
        """The widths of the parts that CONNECT reads and writes: for reads, writes and mixes, or only the first of them."""
        widths = (self.heads, self.heads, self.heads**2)
        return next((widths[:count] for count in (1, 2, 3) if sum(widths[:count]) == self.output.width), ())

    @property
    def by_column(self) -> bool:
        """Whether a SCAN has a step for each column of a state (Mamba 1), not one for each head."""
        return self.residual.width == self.value.width

    @property
    def parts(self) -> int:
        """The number of parts into which the heads of OUTER_PRODUCTS are divided; each stores a token's key for itself."""
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

        Allowed besides are the fp32 matrices of routers, of gates and of weights of streams, and the fp32 or fp16 ones of
        HEADS: their products are summed in the same order on every instruction set.
        """
        gating: set[int] = set()
        heads: set[int] = set()
        # The weights by which the content of each slice was computed.
        made: dict[Slice, set[int]] = {}
        before: dict[int, set[int]] = {}

        def makers(part: Slice) -> set[int]:
            return {weight for slice, weights in made.items() if slice.overlaps(part) for weight in weights}

        for op in self.ops:
            if op.kind in (Kind.LINEAR, Kind.CONNECT):
                before[op.weight] = makers(op.input)
            if op.kind is Kind.ROUTE:
                gating |= makers(op.input)
            elif op.kind is Kind.HEADS:
                heads |= set(range(op.weight, op.weight + op.heads))
            elif op.kind in (Kind.GATE, Kind.BLEND) or op.kind in OUTER_PRODUCTS:
                # The weights of the coefficients or gates, and of the inputs from which these are computed.
                coefficients = makers(op.residual if op.kind in OUTER_PRODUCTS else op.key)
                gating |= coefficients.union(*(before.get(weight, ()) for weight in coefficients))
            of_output = makers(op.input) if op.kind in (Kind.SELECT, Kind.SCALE) else {op.weight}
            made = {slice: weights for slice, weights in made.items() if not slice.overlaps(op.output)}
            made[op.output] = of_output
        return all(
            weight.table
            or weight.format.integer
            or (weight.format is Format.FP32 and number in gating | heads)
            or (weight.format is Format.FP16 and number in heads)
            for number, weight in enumerate(self.weights)
        )

    @property
    def caches(self) -> tuple[Op, ...]:
        """The operation that fills each KV cache; later ones may share it."""
        first = {op.integer: op for op in reversed(self.ops) if op.kind is Kind.ATTENTION}
        return tuple(first[number] for number in sorted(first))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the KV cache, without the recurrent states of a row, which do not grow."""
        return sum(self.cache.token_bytes(op) for op in self.caches)

    @property
    def hidden_out(self) -> int:
        """Columns of the hidden states that a pass returns with its tokens; 0: none."""
        return max((op.integer + op.input.width for op in self.ops if op.kind is Kind.HIDDEN_OUT), default=0)

    @property
    def hidden_in(self) -> int:
        """Columns of the hidden states that are given with tokens; 0: none."""
        return next((op.output.width for op in self.ops if op.kind is Kind.HIDDEN_IN), 0)
