"""``quantization_config``: which layers are quantised, and how; understood whole, or refused in a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.awq import AwqMatrix
from outrider.workers.models.formats.compressed import PackedMatrix, PlainMatrix, Weights
from outrider.workers.models.formats.gptq import GptqMatrix
from outrider.workers.models.formats.matrix import Matrix, Parts
from outrider.workers.models.formats.mxfp4 import expert_matrix
from outrider.workers.models.formats.patterns import UnusablePattern, compiled
from outrider.workers.models.formats.raw import RawTensors
from outrider.workers.models.headers import quoted

KEY = "quantization_config"
FORMATS = "awq (gemm), gptq, compressed-tensors, fp8 and mxfp4"
PACKED, PLAIN = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")


class Quantisation(Protocol):
    """How a checkpoint is quantised."""

    @property
    def name(self) -> str:
        """Of the format, for sentences and job.json."""

    @property
    def made_for(self) -> str:
        """The precision whose arithmetic the checkpoint was made for."""

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        """The reader of one layer's weight; None where the checkpoint leaves that layer as it was."""


def read_quantisation(values: Mapping[str, Any], source: str) -> Quantisation | None:
    """From a config.json's content; None where there is no ``quantization_config``."""
    stated = values.get(KEY)
    if not stated:
        return None
    section = Section(stated, f"{source}: {KEY}")
    method = section.text("quant_method", "")
    readers: dict[str, Callable[[Section], Quantisation]] = {
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "mxfp4": _mxfp4,
    }
    if method not in readers:
        found = f'"quant_method" {quoted(method)}' if method else 'no "quant_method"'
        raise ModelError(f"{section.source} has {found}: of quantised checkpoints, {FORMATS} are read")
    return readers[method](section)


class Section:
    """An object of the configuration, read with sentences for what has the wrong type."""

    def __init__(self, values: Any, source: str) -> None:
        if not isinstance(values, dict):
            raise ModelError(f"{source} must be an object, got {quoted(values)}")
        self.values: dict[str, Any] = values
        self.source = source

    def refuse(self, what: str) -> ModelError:
        return ModelError(f"{self.source} {what}")

    def _typed(self, key: str, kind: type | tuple[type, ...], said: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise self.refuse(f'has "{key}": {quoted(value)}, where {said} is needed')
        return value

    def text(self, key: str, default: str) -> str:
        value: str = self._typed(key, str, "a text", default)
        return value.lower()

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._typed(key, bool, "true or false", default)
        return value

    def number(self, key: str, default: int | None = None) -> int:
        value: int | None = self._typed(key, int, "a whole number", default)
        if value is None:
            raise self.refuse(f'has no "{key}"')
        return value

    def names(self, key: str) -> tuple[str, ...]:
        value = self._typed(key, list, "a list of names", [])
        if not all(isinstance(each, str) for each in value):
            raise self.refuse(f'has "{key}": {quoted(value)}, where a list of names is needed')
        return tuple(value)

    def one_of(self, key: str, known: Sequence[Any], default: Any) -> Any:
        value = self.values.get(key, default)
        value = default if value is None else value
        if value not in known:
            said = ", ".join(str(each) for each in known)
            raise self.refuse(f'has "{key}": {quoted(value)}; {said} {"is" if len(known) == 1 else "are"} known')
        return value

    def absent(self, key: str) -> None:
        if self.values.get(key):
            raise self.refuse(f'has "{key}", which is not known here: {quoted(self.values[key])}')


def _either(parts: Parts, quantised: str, plain: Sequence[str] = ("weight",)) -> bool:
    """Whether a layer is there in its quantised form; both forms at once are refused."""
    if not parts.has(quantised):
        return False
    for other in plain:
        if parts.has(other):
            parts.refuse(f'is there twice, as "{quantised}" and as "{other}"')
    return True


def _kept_plain(parts: Parts, names: Sequence[str]) -> None:
    """Refuse a quantised layer whose name ``modules_to_not_convert`` (or the like) holds."""
    if any(name and name in parts.module for name in names):
        parts.refuse(f"is quantised, {KEY} names it among the layers that are not")


@dataclass(frozen=True, slots=True)
class Awq:
    group: int
    symmetric: bool
    plain: tuple[str, ...]
    name: str = "awq"
    made_for: str = "w4abf16"

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        parts = Parts(raw, module, self.name)
        if not _either(parts, "qweight"):
            return None
        _kept_plain(parts, self.plain)
        return AwqMatrix.of(parts, shape, self.group, self.symmetric)


def _awq(section: Section) -> Awq:
    section.one_of("bits", (4,), section.values.get("w_bit", 4))
    for key in ("version", "format", "checkpoint_format"):
        if (layout := section.text(key, "gemm")) != "gemm":
            raise section.refuse(
                f"is AWQ in the layout {quoted(layout)}: only gemm is read, which AWQ's tools write by default"
            )
    group = section.number("group_size", section.values.get("q_group_size"))
    return Awq(group, not section.flag("zero_point", True), section.names("modules_to_not_convert"))


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Of gpt-oss: its experts, and nothing else."""

    name: str = "mxfp4"
    made_for: str = "w4abf16"

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        return expert_matrix(raw, module, shape)


def _mxfp4(section: Section) -> Mxfp4:
    # What is quantised shows in the tensors themselves: those that this names have no blocks.
    section.names("modules_to_not_convert")
    section.flag("dequantize", False)
    return Mxfp4()


@dataclass(frozen=True, slots=True)
class Layer:
    """What GPTQ's configuration says of a layer."""

    bits: int
    group: int
    symmetric: bool


@dataclass(frozen=True, slots=True)
class Gptq:
    layer: Layer
    # By pattern of a layer's name: other settings, or None for layers that are left as they were.
    others: tuple[tuple[re.Pattern[str], Layer | None], ...]
    stored_less_one: bool
    plain: tuple[str, ...]
    name: str = "gptq"

    @property
    def made_for(self) -> str:
        return "w4abf16" if self.layer.bits == 4 else "w8af32"

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        parts = Parts(raw, module, self.name)
        if not _either(parts, "qweight"):
            return None
        _kept_plain(parts, self.plain)
        layer = next((other for pattern, other in self.others if pattern.match(module)), self.layer)
        if layer is None:
            parts.refuse(f'is quantised, "dynamic" in {KEY} says that it is not')
        bits, group, symmetric = layer.bits, layer.group, layer.symmetric
        return GptqMatrix.of(
            parts, shape, bits=bits, group=group, symmetric=symmetric, stored_less_one=self.stored_less_one
        )


def _gptq(section: Section) -> Gptq:
    if section.flag("is_marlin_format", False):
        raise section.refuse("is GPTQ in the layout of marlin, which is not read; gptq and gptq_v2 are")
    version = section.text("checkpoint_format", section.text("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise section.refuse(f"is GPTQ in the layout {quoted(version)}, which is not read; gptq and gptq_v2 are")
    section.one_of("pack_dtype", ("int32",), "int32")
    base = _gptq_layer(section, None)
    others: list[tuple[re.Pattern[str], Layer | None]] = []
    dynamic = section.values.get("dynamic") or {}
    for name, override in Section(dynamic, f'{section.source}: "dynamic"').values.items():
        negative = name.startswith("-:")
        try:
            pattern = compiled(name.removeprefix("-:").removeprefix("+:"))
        except UnusablePattern as error:
            raise section.refuse(f'has "dynamic": {quoted(name)}, which {error}') from None
        inner = Section(override or {}, f'{section.source}: "dynamic": {quoted(name)}')
        others.append((pattern, None if negative else _gptq_layer(inner, base)))
    return Gptq(base, tuple(others), version == "gptq", section.names("modules_to_not_convert"))


def _gptq_layer(section: Section, base: Layer | None) -> Layer:
    bits = section.one_of("bits", (4, 8), base.bits if base else None)
    group = section.number("group_size", base.group if base else None)
    return Layer(bits, group, section.flag("sym", base.symmetric if base else True))


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are quantised alike. ``targets`` are names, patterns ("re:...") or the class of all linear layers."""

    targets: tuple[str, ...]
    format: str
    weights: Weights
    activation_bits: int
    float_activations: bool


@dataclass(frozen=True, slots=True)
class Compressed:
    groups: tuple[Group, ...]
    plain: tuple[str, ...]
    name: str = "compressed-tensors"

    @property
    def made_for(self) -> str:
        first = self.groups[0]
        if first.weights.float:
            return "bf16"
        if first.activation_bits == 8 and not first.float_activations:
            return "w8a8" if first.weights.bits == 8 else "w4a8"
        return "w8af32" if first.weights.bits == 8 else "w4abf16"

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        parts = Parts(raw, module, self.name)
        packed = _either(parts, "weight_packed")
        if not packed and not parts.has("weight_scale"):
            return None
        if any(_names(name, module) for name in self.plain):
            parts.refuse(f'is quantised, "ignore" in {KEY} says that it is not')
        group = self._group(module)
        if group is None:
            parts.refuse(f"is quantised, but no target in {KEY} names it")
        if packed != (group.format == PACKED):
            parts.refuse(f"does not lie there as the format {quoted(group.format)} has it, which {KEY} states")
        if packed:
            return PackedMatrix.of(parts, shape, group.weights)
        return PlainMatrix.of(parts, shape, group.weights, name=f"compressed-tensors {group.format}")

    def _group(self, module: str) -> Group | None:
        """As the library has it: by name before pattern before class, patterns in alphabetical order, and the last of
        several groups that have the same target."""
        by_target = {target: group for group in self.groups for target in group.targets}
        patterns = sorted(target for target in by_target if target.startswith("re:"))
        found = next((target for target in (module, *patterns) if target in by_target and _names(target, module)), "Linear")
        return by_target.get(found)


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module


def _compressed(section: Section) -> Compressed:
    # Rotations and sparsity change what the weights are multiplied with, or how they lie.
    section.absent("transform_config")
    sparsity = section.values.get("sparsity_config")
    if sparsity and Section(sparsity, f'{section.source}: "sparsity_config"').text("format", "dense") != "dense":
        raise section.refuse('has a "sparsity_config", which is not known here')
    section.one_of("quantization_status", ("compressed",), "compressed")
    stated = Section(section.values.get("config_groups") or {}, f'{section.source}: "config_groups"').values
    if not stated:
        raise section.refuse('has no "config_groups"')
    common = section.text("format", "")
    groups = []
    for name, values in stated.items():
        inner = Section(values, f'{section.source}: "config_groups": {quoted(name)}')
        groups.append(_group(inner, common))
    for name in (*section.names("ignore"), *(target for group in groups for target in group.targets)):
        _check_pattern(section, name)
    return Compressed(tuple(groups), section.names("ignore"))


def _check_pattern(section: Section, name: str) -> None:
    if name.startswith("re:"):
        try:
            compiled(name[3:])
        except UnusablePattern as error:
            raise section.refuse(f"has {quoted(name)}, which {error}") from None


def _group(section: Section, common: str) -> Group:
    format = section.text("format", common)
    if format not in (PACKED, *PLAIN):
        raise section.refuse(f"has the format {quoted(format)}; {PACKED}, {', '.join(PLAIN)} are read")
    weights = Section(section.values.get("weights"), f'{section.source}: "weights"')
    bits = weights.number("num_bits", 8)
    kind = weights.one_of("type", ("int", "float"), "int")
    if kind == "float" and (bits != 8 or format == PACKED):
        raise weights.refuse(f"has floats of {bits} bits in {format}: only fp8 as it is can be read")
    if not 2 <= bits <= 8:
        raise weights.refuse(f'has "num_bits": {bits}; 2 to 8 are read')
    group = weights.number("group_size", 0)
    default = "group" if group > 0 else "channel" if group == -1 else "tensor"
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), default)
    block = weights.values.get("block_structure")
    if strategy == "block":
        block = _block(weights, block)
        if format == PACKED or kind == "int":
            raise weights.refuse(f"has blocks of scales in {format}; only fp8 with blocks can be read")
    if format == PACKED and strategy == "tensor":
        raise weights.refuse(f'has the "strategy" tensor in {PACKED}, which the format does not know')
    if strategy == "group" and group < 1:
        raise weights.refuse('has the "strategy" group and no "group_size"')
    if weights.values.get("dynamic"):
        raise weights.refuse("has weights that are quantised while the model runs, which is not known here")
    activations = section.values.get("input_activations")
    described = Section(activations or {}, f'{section.source}: "input_activations"')
    return Group(
        section.names("targets"),
        format,
        Weights(
            bits,
            kind == "float",
            weights.flag("symmetric", True),
            strategy,
            group if strategy == "group" else 0,
            block if strategy == "block" else None,
        ),
        described.number("num_bits", 8) if activations else 16,
        described.text("type", "int") == "float",
    )


def _block(section: Section, value: Any) -> tuple[int, int]:
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in value)
    ):
        return value[0], value[1]
    raise section.refuse(f"has blocks of {quoted(value)}, where two positive whole numbers are needed")


@dataclass(frozen=True, slots=True)
class Fp8:
    """fp8 as DeepSeek and Qwen publish it: ``weight_scale_inv`` for each block; or one scale for a matrix, in Mistral's
    under the same name, else ``weight_scale``. Either multiplies."""

    block: tuple[int, int] | None
    plain: tuple[str, ...]
    name: str = "fp8"
    made_for: str = "bf16"

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        parts = Parts(raw, module, self.name)
        scale = "weight_scale_inv"
        if self.block is None and not _either(parts, scale, ("weight_scale",)):
            scale = "weight_scale"
        if not parts.has(scale):
            return None
        _kept_plain(parts, self.plain)
        weights = Weights(8, True, True, "tensor" if self.block is None else "block", block=self.block)
        return PlainMatrix.of(parts, shape, weights, name=self.name, scale=scale)


def _fp8(section: Section) -> Fp8:
    section.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    section.one_of("scale_fmt", ("float", "ue8m0"), "float")
    section.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    stated = section.values.get("weight_block_size")
    block = None if stated is None else _block(section, stated)
    return Fp8(block, section.names("modules_to_not_convert") + section.names("ignored_layers"))
