"""bitsandbytes: four-bit codes that index a table (``nf4``, ``fp4``), and int8 with a scale for each row (LLM.int8).

Four bits: ``weight`` uint8 [N K/2, 1] has two codes in a byte, the upper one first. ``weight.absmax`` are the scales of
groups of ``blocksize`` weights; with double quantisation they are bytes that index another table, and ``nested_absmax`` are
the scales of these. ``weight.quant_state…`` has the parameters as JSON in bytes. Eight bits: ``weight`` int8 [N, K], and a
row's scale is ``SCB`` [N] / 127.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import FP4, NF4, QuantisedRows, Scheme, Values
from outrider.workers.models.formats.matrix import Held, Matrix, Parts
from outrider.workers.models.formats.raw import RawTensors
from outrider.workers.models.formats.section import Section
from outrider.workers.models.headers import quoted

NAME = "bitsandbytes"
STATE = "weight.quant_state.bitsandbytes__{}"
TABLES = {"nf4": (Values.NF4, NF4), "fp4": (Values.FP4, FP4)}
LONGEST_STATE = 1 << 12
MIDDLE, LARGEST = 128, 127
BY_ROWS = 0
# Keys that only concern transformers: how the checkpoint was made, and how it is run there.
KEYS = frozenset(
    (
        *("quant_method", "_load_in_4bit", "_load_in_8bit", "load_in_4bit", "load_in_8bit", "llm_int8_threshold"),
        *("llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "bnb_4bit_quant_type"),
        *("bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"),
    )
)


@dataclass(frozen=True, slots=True)
class TableMatrix:
    source: Parts
    scheme: Scheme
    shape: tuple[int, int]
    # With double quantisation: how many scales share one of ``nested_absmax``, and the offset of all scales.
    nested: tuple[int, float] | None
    order: None = None
    _scales: Held[NDArray[np.float32]] = field(default_factory=Held)

    @classmethod
    def of(cls, source: Parts, shape: tuple[int, int], kind: str) -> TableMatrix:
        rows, columns = shape
        stated = _state(source, STATE.format(kind))
        group = stated.number("blocksize")
        if group < 1 or columns % group:
            source.refuse(f"has {columns} columns, which its blocks of {group} do not divide")
        if (said := stated.values.get("shape")) != [rows, columns]:
            source.refuse(f"is of the shape {quoted(said)}, config.json says {shape}")
        values, table = TABLES[kind]
        source.entry("weight", (rows * columns // 2, 1), "U8")
        source.entry("weight.quant_map", (16,), "F32")
        if not np.array_equal(source.whole("weight.quant_map"), table):
            source.refuse(f"has another table than {kind}")
        blocks = rows * columns // group
        nested = None
        if "nested_blocksize" in stated.values:
            size = stated.number("nested_blocksize")
            offset = stated.real("nested_offset", 0.0)
            if size < 1 or not math.isfinite(offset):
                source.refuse(f"has scales in blocks of {size} with an offset of {offset}")
            source.entry("weight.absmax", (blocks,), "U8")
            source.entry("weight.nested_absmax", (-(-blocks // size),), "F32")
            source.entry("weight.nested_quant_map", (256,), "F32")
            nested = (size, offset)
        else:
            source.entry("weight.absmax", (blocks,), "F32")
        return cls(source, Scheme(f"{NAME} {kind}", 4, group, values, scale_type="F32"), shape, nested)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.source.used)

    def rows(self, start: int, stop: int) -> QuantisedRows:
        columns = self.shape[1]
        stored = self.source.rows("weight", start * columns // 2, stop * columns // 2).reshape(-1)
        codes = np.stack((stored >> 4, stored & 15), axis=1).reshape(stop - start, columns)
        scales = self._scales.get(self._read_scales)[start:stop]
        return QuantisedRows(self.scheme, codes, scales, np.zeros(scales.shape, np.uint8))

    def _read_scales(self) -> NDArray[np.float32]:
        scales = self.source.scales("weight.absmax") if self.nested is None else self._unnested(*self.nested)
        return scales.reshape(self.shape[0], -1)

    def _unnested(self, size: int, offset: float) -> NDArray[np.float32]:
        table, codes = self.source.scales("weight.nested_quant_map"), self.source.whole("weight.absmax")
        largest = np.repeat(self.source.scales("weight.nested_absmax"), size)[: len(codes)]
        result: NDArray[np.float32] = table[codes] * largest + np.float32(offset)
        return self.source.finite("weight.absmax", result)

    def done(self) -> None:
        self._scales.clear()


@dataclass(frozen=True, slots=True)
class EightBits:
    source: Parts
    scheme: Scheme
    shape: tuple[int, int]
    order: None = None

    @classmethod
    def of(cls, source: Parts, shape: tuple[int, int]) -> EightBits:
        source.entry("weight", shape, "I8")
        source.entry("SCB", (shape[0],), "F32")
        if source.has("weight_format"):
            source.entry("weight_format", source.of_one("weight_format"), "U8")
            if (said := int(source.whole("weight_format").reshape(-1)[0])) != BY_ROWS:
                source.refuse(f'has the "weight_format" {said}; {BY_ROWS}, by rows, is read')
        return cls(source, Scheme(f"{NAME} int8", 8, shape[1], scale_type="F32"), shape)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.source.used)

    def rows(self, start: int, stop: int) -> QuantisedRows:
        codes = (self.source.rows("weight", start, stop).astype(np.int16) + MIDDLE).astype(np.uint8)
        largest = self.source.finite("SCB", self.source.rows("SCB", start, stop))
        scales = (largest / np.float32(LARGEST)).reshape(-1, 1)
        return QuantisedRows(self.scheme, codes, scales, np.full(scales.shape, MIDDLE, np.uint8))

    def done(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """``section`` is for sentences. Which layers are quantised is seen from their tensors."""

    section: Section
    made_for: str
    name: str = NAME

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        parts = Parts(raw, module, self.name)
        kind = next((kind for kind in TABLES if parts.has(STATE.format(kind))), None)
        if kind is not None:
            return TableMatrix.of(parts, shape, kind)
        if parts.has("SCB"):
            return EightBits.of(parts, shape)
        if not any(name.endswith((".weight.absmax", ".SCB")) for name in raw.entries):
            raise self.section.refuse(
                "is of weights that transformers quantises as it loads them, which the native engine does not: remove it, "
                "and --precision rounds them; or take --engine hf"
            )
        return None


def read_bitsandbytes(section: Section) -> BitsAndBytes:
    for key, value in section.values.items():
        if key not in KEYS and value not in (None, False):
            raise section.refuse(f"has {quoted(key)}, which is not known here")
    eight = section.flag("load_in_8bit", False)
    if eight == section.flag("load_in_4bit", False):
        raise section.refuse('has to say one of "load_in_4bit" and "load_in_8bit"')
    # LLM.int8 rounds activations except outliers, which matter most; here no activations are rounded.
    return BitsAndBytes(section, "w8af32" if eight else "bf16")


def _state(source: Parts, name: str) -> Section:
    source.entry(name, (None,), "U8")
    stored = source.whole(name)
    try:
        values: Any = json.loads(stored[:LONGEST_STATE].tobytes())
    except (ValueError, RecursionError):
        source.refuse(f"has no JSON in its {quoted(name)}")
    if not isinstance(values, Mapping):
        source.refuse(f"has no JSON object in its {quoted(name)}")
    return Section(dict(values), f"the weight {quoted(source.module)}: {quoted(name)}")
