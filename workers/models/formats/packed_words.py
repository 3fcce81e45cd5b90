"""Reads ``quantization_config`` of AWQ, GPTQ and auto-round, whose codes are packed into words in AWQ's or GPTQ's
layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.workers.models.formats.awq import AwqMatrix
from outrider.workers.models.formats.gptq import GptqMatrix
from outrider.workers.models.formats.matrix import Matrix, Parts
from outrider.workers.models.formats.raw import RawTensors
from outrider.workers.models.formats.section import KEY, Section, either, names_of_layer, pattern_of, refuse_kept_plain
from outrider.workers.models.headers import quoted


@dataclass(frozen=True, slots=True)
class Layer:
    """The settings of a layer."""

    bits: int
    group: int
    symmetric: bool


@dataclass(frozen=True, slots=True)
class Layers:
    """``named`` has the settings of single layers, ``patterns`` those of layers whose names match, ``usual`` those of all
    others; None: not quantised.

    ``plain`` are names of layers that are not quantised. ``stated`` is the key of the configuration, for sentences.
    """

    usual: Layer
    patterns: tuple[tuple[Callable[[str], object], Layer | None], ...] = ()
    plain: tuple[str, ...] = ()
    named: Mapping[str, Layer | None] = field(default_factory=dict)
    stated: str = "dynamic"

    def of(self, parts: Parts) -> Layer:
        refuse_kept_plain(parts, self.plain)
        names = names_of_layer(parts.module)
        matched = (other for matches, other in self.patterns if any(map(matches, names)))
        layer = next((self.named[name] for name in names if name in self.named), next(matched, self.usual))
        if layer is None:
            parts.refuse(f'is quantised, "{self.stated}" in {KEY} says that it is not')
        return layer


@dataclass(frozen=True, slots=True)
class Awq:
    layers: Layers
    name: str = "awq"
    made_for: str = "w4abf16"

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        parts = Parts(raw, module, self.name)
        if not either(parts, "qweight"):
            return None
        layer = self.layers.of(parts)
        return AwqMatrix.of(parts, shape, layer.group, layer.symmetric)


def read_awq(section: Section) -> Awq:
    bits = section.one_of("bits", (4,), section.values.get("w_bit", 4))
    for key in ("version", "format", "checkpoint_format"):
        if (layout := section.text(key, "gemm")) != "gemm":
            raise section.refuse(
                f"is AWQ in the layout {quoted(layout)}: only gemm is read, which AWQ's tools write by default"
            )
    group = section.number("group_size", section.values.get("q_group_size"))
    layer = Layer(bits, group, not section.flag("zero_point", True))
    return Awq(Layers(layer, plain=section.names("modules_to_not_convert")))


@dataclass(frozen=True, slots=True)
class Gptq:
    layers: Layers
    stored_less_one: bool
    name: str = "gptq"

    @property
    def made_for(self) -> str:
        return "w8af32" if self.layers.usual.bits == 8 else "w4abf16"

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        parts = Parts(raw, module, self.name)
        if not either(parts, "qweight"):
            return None
        layer = self.layers.of(parts)
        return GptqMatrix.of(
            parts,
            shape,
            bits=layer.bits,
            group=layer.group,
            symmetric=layer.symmetric,
            stored_less_one=self.stored_less_one,
        )


def read_gptq(section: Section) -> Gptq:
    if section.flag("is_marlin_format", False):
        raise section.refuse("is GPTQ in the layout of marlin, which is not read; gptq and gptq_v2 are")
    version = section.text("checkpoint_format", section.text("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise section.refuse(f"is GPTQ in the layout {quoted(version)}, which is not read; gptq and gptq_v2 are")
    section.one_of("pack_dtype", ("int32",), "int32")
    base = _layer(section, None)
    others: list[tuple[Callable[[str], object], Layer | None]] = []
    dynamic = section.values.get("dynamic") or {}
    for name, override in Section(dynamic, f'{section.source}: "dynamic"').values.items():
        pattern = pattern_of(section, name.removeprefix("-:").removeprefix("+:"), f'"dynamic": {quoted(name)}')
        inner = Section(override or {}, f'{section.source}: "dynamic": {quoted(name)}')
        others.append((pattern.match, None if name.startswith("-:") else _layer(inner, base)))
    return Gptq(Layers(base, tuple(others), section.names("modules_to_not_convert")), version == "gptq")


def _layer(section: Section, base: Layer | None) -> Layer:
    bits = section.one_of("bits", (2, 3, 4, 8), base.bits if base else None)
    group = section.number("group_size", base.group if base else None)
    return Layer(bits, group, section.flag("sym", base.symmetric if base else True))


# auto-round's "packing_format"s: AWQ's layout, GPTQ's version 1, and version 2, which stores zero points unchanged.
AS_AWQ = ("auto_round:auto_awq", "auto_round:awq")
AS_GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", "auto")
AS_GPTQ_V2 = ("auto_round", "auto_round:gptqmodel")
# A layer's name; anything else is a pattern.
NAME = re.compile(r"[\w.]+")


def read_auto_round(section: Section) -> Awq | Gptq:
    section.one_of("data_type", ("int",), "int")
    if (bits := section.number("act_bits", 16)) < 16:
        raise section.refuse(f'has "act_bits": {bits}: only weights that are quantised are read of auto-round')
    packing = section.text("packing_format", "auto_round:gptq" if section.flag("sym", True) else "")
    if packing not in (*AS_AWQ, *AS_GPTQ, *AS_GPTQ_V2):
        found = f'"packing_format": {quoted(packing)}' if packing else 'no "packing_format"'
        raise section.refuse(f"has {found}; {', '.join((*AS_AWQ[:1], *AS_GPTQ[:1], *AS_GPTQ_V2))} are read")
    if packing in AS_AWQ:
        section.one_of("bits", (4,), 4)
    base = _layer(section, None)
    stated: dict[str, Any] = Section(section.values.get("extra_config") or {}, f'{section.source}: "extra_config"').values
    named: dict[str, Layer | None] = {}
    patterns: list[tuple[Callable[[str], object], Layer | None]] = []
    for name, values in stated.items():
        if values:
            layer = _extra(section, name, values, base)
            named[name] = layer
            if not NAME.fullmatch(name):
                patterns.append((pattern_of(section, name, f'"extra_config": {quoted(name)}').search, layer))
    layers = Layers(base, tuple(patterns), section.names("modules_to_not_convert"), named, "extra_config")
    return (
        Awq(layers, "auto-round, as awq") if packing in AS_AWQ else Gptq(layers, packing in AS_GPTQ, "auto-round, as gptq")
    )


def _extra(section: Section, name: str, values: Any, base: Layer) -> Layer | None:
    inner = Section(values, f'{section.source}: "extra_config": {quoted(name)}')
    inner.one_of("data_type", ("int", "float", "fp"), "int")
    if inner.number("bits", base.bits) >= 16:
        return None
    inner.one_of("data_type", ("int",), "int")
    return _layer(inner, base)
