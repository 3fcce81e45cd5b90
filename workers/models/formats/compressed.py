"""compressed-tensors: integers packed into words ("pack-quantized"), int8 and fp8 one a byte ("int-quantized",
"float-quantized", "naive-quantized", "mxfp8-quantized"), or four-bit floats ("mxfp4-pack-quantized",
"nvfp4-pack-quantized")."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import E4M3, QuantisedRows, Scheme, Values
from outrider.workers.models.formats.gptq import group_order
from outrider.workers.models.formats.matrix import Held, Parts, in_groups
from outrider.workers.models.formats.raw import POWERS_OF_TWO, nibbles, to_float32, unpacked

SCALE_TYPES = ("F16", "BF16", "F32")
# Types of scales that are powers of two, stored as an exponent in a byte (e8m0).
EXPONENTS = ("U8", "F8_E8M0")
GLOBAL_SCALE = "weight_global_scale"


@dataclass(frozen=True, slots=True)
class Weights:
    """The quantisation of a group of layers in the configuration. ``group`` 0: one scale for a row, or for the matrix.
    ``block``: (rows, columns) of a block with one scale."""

    bits: int
    float: bool
    symmetric: bool
    strategy: str
    group: int = 0
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """``weight_packed`` int32 [N, K bits/32] holds code = value + 2^(bits-1), ``weight_scale`` [N, K/G],
    ``weight_zero_point`` (asymmetric only) likewise packed along N, ``weight_shape`` N and K, ``weight_g_idx`` the group of
    each column."""

    source: Parts
    scheme: Scheme
    shape: tuple[int, int]
    order: NDArray[np.int32] | None
    _zeros: Held[NDArray[np.uint8]] = field(default_factory=Held)

    @classmethod
    def of(cls, source: Parts, shape: tuple[int, int], weights: Weights) -> PackedMatrix:
        rows, columns = shape
        group = source.check_group(weights.group or columns, columns)
        source.entry("weight_packed", (rows, -(-columns * weights.bits // 32)), "I32")
        scales = source.entry("weight_scale", (rows, columns // group), *SCALE_TYPES)
        if source.has("weight_shape"):
            source.entry("weight_shape", (2,), "I64", "I32")
            if tuple(source.whole("weight_shape")) != shape:
                source.refuse(f'has a "weight_shape" of {source.whole("weight_shape").tolist()}, config.json says {shape}')
        if not weights.symmetric:
            source.entry("weight_zero_point", (-(-rows * weights.bits // 32), columns // group), "I32")
        order = None
        if source.has("weight_g_idx"):
            source.entry("weight_g_idx", (columns,), "I32", "I64")
            order = group_order(source, source.whole("weight_g_idx"), group)
        scheme = Scheme(
            "compressed-tensors pack-quantized",
            weights.bits,
            group,
            symmetric=weights.symmetric,
            scale_type=scales.type,
            ordered=order is not None,
        )
        return cls(source, scheme, shape, order)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.source.used)

    def rows(self, start: int, stop: int) -> QuantisedRows:
        bits = self.scheme.bits
        codes = unpacked(self.source.rows("weight_packed", start, stop), bits, self.shape[1])
        if self.order is not None:
            codes = codes[:, self.order]
        scales = self.source.finite("weight_scale", to_float32(self.source.rows("weight_scale", start, stop)))
        if self.scheme.symmetric:
            zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
        else:
            stored = self._zeros.get(lambda: unpacked(self.source.whole("weight_zero_point").T, bits, self.shape[0]))
            zeros = np.ascontiguousarray(stored[:, start:stop].T)
        return QuantisedRows(self.scheme, np.ascontiguousarray(codes), scales, zeros)

    def done(self) -> None:
        self._zeros.clear()


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """``weight`` int8 or e4m3 [N, K] with one scale for the matrix, each row, each group of a row, or each block (the last
    blocks may be smaller). ``scale`` is the scales' name: "weight_scale" or "weight_scale_inv", both of which multiply.
    Scales of e4m3 may be e8m0 exponents."""

    source: Parts
    scheme: Scheme
    shape: tuple[int, int]
    scale: str
    # How many rows (0: all) and columns share a scale.
    scale_rows: int
    scale_columns: int
    order: None = None

    @classmethod
    def of(
        cls, source: Parts, shape: tuple[int, int], weights: Weights, *, name: str, scale: str = "weight_scale"
    ) -> PlainMatrix:
        rows, columns = shape
        scale_columns, scale_rows = weights.group or columns, 1
        if weights.block is not None:
            scale_rows, scale_columns = weights.block
            group = source.whole_groups(scale_columns, columns)
        else:
            group = source.check_group(scale_columns, columns)
        source.entry("weight", shape, "F8_E4M3" if weights.float else "I8")
        if weights.strategy == "tensor":
            scales = source.entry(scale, source.of_one(scale), *SCALE_TYPES)
            scale_rows = 0
        else:
            types = (*SCALE_TYPES, *EXPONENTS) if weights.float else SCALE_TYPES
            scales = source.entry(scale, (-(-rows // scale_rows), -(-columns // scale_columns)), *types)
        if not weights.symmetric:
            source.entry("weight_zero_point", scales.shape, "I8")
        values = Values.E4M3 if weights.float else Values.INTEGER
        # bf16 represents every power of two.
        type_ = "BF16" if scales.type in EXPONENTS else scales.type
        scheme = Scheme(name, weights.bits, group, values, symmetric=weights.symmetric, scale_type=type_)
        return cls(source, scheme, shape, scale, scale_rows, scale_columns)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.source.used)

    def rows(self, start: int, stop: int) -> QuantisedRows:
        codes = self.source.rows("weight", start, stop)
        stored = self.source.whole(self.scale)
        values = POWERS_OF_TWO[stored] if stored.dtype == np.uint8 else to_float32(stored)
        scales = self.source.finite(self.scale, self._for_rows(values, start, stop))
        if self.scheme.values is Values.E4M3:
            if ((codes & 127) == 127).any():
                self.source.refuse("holds a value that is not a finite number")
            return QuantisedRows(self.scheme, codes, scales, np.zeros(scales.shape, np.uint8))
        middle = 1 << (self.scheme.bits - 1)
        if self.scheme.bits < 8 and (codes.min() < -middle or codes.max() >= middle):
            self.source.refuse(f"holds values beyond {self.scheme.bits} bits")
        zeros = np.full(scales.shape, middle, np.uint8)
        if not self.scheme.symmetric:
            stored = self._for_rows(self.source.whole("weight_zero_point"), start, stop)
            zeros = (stored.astype(np.int16) + middle).astype(np.uint8)
        return QuantisedRows(self.scheme, (codes.astype(np.int16) + middle).astype(np.uint8), scales, zeros)

    def _for_rows(self, values: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """Scales or zero points [n, groups] of these rows, from one for each row, for several rows, or for all."""
        if self.scale_rows == 0:
            return np.broadcast_to(values.reshape(1, 1), (stop - start, 1)).copy()
        of_rows = values[np.arange(start, stop) // self.scale_rows]
        return np.ascontiguousarray(in_groups(of_rows, self.scale_columns, self.scheme.group, self.shape[1]))

    def done(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class FourBitFloats:
    """``weight_packed`` [N, K/2] has two e2m1 codes in a byte, the lower one first. ``weight_scale`` [N, K/G] are e8m0
    exponents (mxfp4), or e4m3 numbers divided by ``weight_global_scale`` (nvfp4). ModelOpt's codes are called ``weight``,
    and its e4m3 scales are multiplied by ``weight_scale_2``."""

    source: Parts
    scheme: Scheme
    shape: tuple[int, int]
    codes: str
    # The name of the scale that all scales share; "" without one.
    common: str
    order: None = None

    @classmethod
    def of(
        cls,
        source: Parts,
        shape: tuple[int, int],
        group: int,
        *,
        name: str,
        codes: str = "weight_packed",
        common: str = GLOBAL_SCALE,
    ) -> FourBitFloats:
        rows, columns = shape
        group = source.check_group(group, columns)
        source.entry(codes, (rows, columns // 2), "U8")
        source.entry("weight_scale", (rows, columns // group), *(("F8_E4M3",) if common else EXPONENTS))
        if common:
            source.entry(common, source.of_one(common), "F32")
        type_ = "F32" if common else "E8M0"
        return cls(source, Scheme(name, 4, group, Values.E2M1, scale_type=type_), shape, codes, common)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.source.used)

    def rows(self, start: int, stop: int) -> QuantisedRows:
        codes = nibbles(self.source.rows(self.codes, start, stop))
        stored = self.source.rows("weight_scale", start, stop)
        scales = (E4M3 if self.common else POWERS_OF_TWO)[stored]
        if self.common:
            common = self.source.scales(self.common).reshape(-1)[0]
            with np.errstate(all="ignore"):  # values that are not finite are refused below
                scales = scales / common if self.common == GLOBAL_SCALE else scales * common
        scales = self.source.finite("weight_scale", scales)
        return QuantisedRows(self.scheme, codes, scales, np.zeros(scales.shape, np.uint8))

    def done(self) -> None:
        pass
