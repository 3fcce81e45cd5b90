"""Reads ``quantization_config``: which layers are quantised, and how. Anything unknown in it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.bitsandbytes import read_bitsandbytes
from outrider.workers.models.formats.compressed import GLOBAL_SCALE, FourBitFloats, PackedMatrix, PlainMatrix, Weights
from outrider.workers.models.formats.matrix import Matrix, Parts
from outrider.workers.models.formats.mlx import KEY as OF_MLX
from outrider.workers.models.formats.mlx import read_mlx
from outrider.workers.models.formats.modelopt import read_modelopt
from outrider.workers.models.formats.mxfp4 import expert_matrix
from outrider.workers.models.formats.packed_words import read_auto_round, read_awq, read_gptq
from outrider.workers.models.formats.raw import RawTensors
from outrider.workers.models.formats.section import KEY, Section, either, names_of_layer, pattern_of, refuse_kept_plain
from outrider.workers.models.headers import quoted

FORMATS = "awq (gemm), gptq, auto-round, bitsandbytes, compressed-tensors, fp8, mxfp4, modelopt (fp8, nvfp4) and MLX's"
MXFP4, NVFP4, MXFP8 = "mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"
PACKED, PLAIN = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized", MXFP8)
# The groups of four-bit floats.
GROUPS = {MXFP4: 32, NVFP4: 16}
# What turns the inputs of weights; formats differ in where they state it.
ROTATIONS = ("transform_config", "rotation", "rotation_config", "spinquant_config")
Meant = TypeVar("Meant")


class Quantisation(Protocol):
    """How a checkpoint is quantised."""

    @property
    def name(self) -> str:
        """The format's name, for sentences and job.json."""

    @property
    def made_for(self) -> str:
        """The precision whose arithmetic the checkpoint was made for."""

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        """The reader of one layer's weight; None where that layer is not quantised."""


def read_quantisation(values: Mapping[str, Any], source: str) -> Quantisation | None:
    """From a config.json's content; None where there is no ``quantization_config``, nor MLX's ``quantization``."""
    if values.get(OF_MLX):
        return read_mlx(values, source)
    stated = values.get(KEY)
    if not stated:
        return None
    section = Section(stated, f"{source}: {KEY}")
    in_bits = section.values.get("load_in_8bit") or section.values.get("load_in_4bit")
    method = section.text("quant_method", "bitsandbytes" if in_bits else "")
    readers: dict[str, Callable[[Section], Quantisation]] = {
        "awq": read_awq,
        "gptq": read_gptq,
        "auto-round": read_auto_round,
        "intel/auto-round": read_auto_round,
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "modelopt": read_modelopt,
        "bitsandbytes": read_bitsandbytes,
    }
    if method not in readers:
        of_mlx = f', as MLX writes it, and no "{OF_MLX}" beside it' if {"bits", "group_size"} <= set(section.values) else ""
        found = f'"quant_method" {quoted(method)}' if method else f'no "quant_method"{of_mlx}'
        raise ModelError(f"{section.source} has {found}: of quantised checkpoints, {FORMATS} are read")
    for key in ROTATIONS:
        section.absent(key)
    return readers[method](section)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """gpt-oss: only its experts are quantised."""

    name: str = "mxfp4"
    made_for: str = "w4abf16"

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        return expert_matrix(raw, module, shape)


def _mxfp4(section: Section) -> Mxfp4:
    # Which layers are quantised is seen from their tensors ("blocks"), so this list is only checked for its type.
    section.names("modules_to_not_convert")
    section.flag("dequantize", False)
    return Mxfp4()


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are quantised alike. ``targets`` are names, patterns ("re:...") or "Linear" for all linear layers."""

    targets: tuple[str, ...]
    format: str
    weights: Weights
    activation_bits: int
    float_activations: bool


@dataclass(frozen=True, slots=True)
class Targets(Generic[Meant]):
    """A mapping from layers' names, and from patterns of names, to their meaning; it may have thousands of entries."""

    named: Mapping[str, Meant]
    patterns: tuple[tuple[re.Pattern[str], Meant], ...]

    @classmethod
    def of(cls, section: Section, meant: Mapping[str, Meant]) -> Targets[Meant]:
        """Patterns in alphabetical order, in which the library tries them."""
        named = {name: each for name, each in meant.items() if not name.startswith("re:")}
        patterns = sorted(name for name in meant if name.startswith("re:"))
        return cls(named, tuple((pattern_of(section, name[3:], quoted(name)), meant[name]) for name in patterns))

    @property
    def all(self) -> tuple[Meant, ...]:
        return (*self.named.values(), *(meant for _, meant in self.patterns))

    def find(self, names: Sequence[str]) -> Meant | None:
        """The entry of a layer with these names: names take precedence over patterns."""
        named = (self.named[name] for name in names if name in self.named)
        matched = (meant for pattern, meant in self.patterns if any(map(pattern.match, names)))
        return next(named, next(matched, None))


@dataclass(frozen=True, slots=True)
class Compressed:
    """``first`` is the group whose precision stands for the checkpoint's."""

    first: Group
    groups: Targets[Group]
    ignored: Targets[bool]
    name: str = "compressed-tensors"

    @property
    def made_for(self) -> str:
        first = self.first
        if self.mixed:
            return "w4abf16"
        if first.weights.float:
            return "w4abf16" if first.format in GROUPS else "bf16"
        if first.activation_bits == 8 and not first.float_activations:
            return "w8a8" if first.weights.bits == 8 else "w4a8"
        return "w8af32" if first.weights.bits == 8 else "w4abf16"

    @property
    def mixed(self) -> bool:
        """Whether some layers are floats of four bits, and some of eight."""
        formats = {each.format for each in self.groups.all if each.weights.float}
        return bool(formats & GROUPS.keys()) and bool(formats - GROUPS.keys())

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        parts = Parts(raw, module, self.name)
        packed = either(parts, "weight_packed")
        if not packed and not parts.has("weight_scale"):
            return None
        names = names_of_layer(module)
        if self.ignored.find(names):
            parts.refuse(f'is quantised, "ignore" in {KEY} says that it is not')
        # "Linear" has the lowest precedence.
        group = self.groups.find(names) or self.groups.named.get("Linear")
        if group is None:
            parts.refuse(f"is quantised, but no target in {KEY} names it")
        if packed != (group.format not in PLAIN):
            parts.refuse(f"does not lie there as the format {quoted(group.format)} has it, which {KEY} states")
        name = f"compressed-tensors {group.format}"
        if group.format in GROUPS:
            common = "" if group.format == MXFP4 else GLOBAL_SCALE
            return FourBitFloats.of(parts, shape, group.weights.group, name=name, common=common)
        if packed:
            return PackedMatrix.of(parts, shape, group.weights)
        return PlainMatrix.of(parts, shape, group.weights, name=name)


def _compressed(section: Section) -> Compressed:
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
    # If several groups have the same target, the library uses the last one.
    by_target = {target: group for group in groups for target in group.targets}
    ignored = Targets.of(section, dict.fromkeys(section.names("ignore"), True))
    return Compressed(groups[0], Targets.of(section, by_target), ignored)


def _group(section: Section, common: str) -> Group:
    format = section.text("format", common)
    if format not in (PACKED, *PLAIN, *GROUPS):
        raise section.refuse(f"has the format {quoted(format)}; {', '.join((PACKED, *PLAIN, *GROUPS))} are read")
    weights = Section(section.values.get("weights"), f'{section.source}: "weights"')
    bits = weights.number("num_bits", 8)
    kind = weights.one_of("type", ("int", "float"), "int")
    of_floats = 4 if format in GROUPS else 8
    if kind == "float" and (bits != of_floats or format == PACKED):
        raise weights.refuse(f"has floats of {bits} bits in {format}: only fp8 as it is, mxfp4 and nvfp4 can be read")
    if kind == "int" and format in (*GROUPS, MXFP8):
        raise weights.refuse(f"has whole numbers in {format}, which is of floats")
    if not 2 <= bits <= 8:
        raise weights.refuse(f'has "num_bits": {bits}; 2 to 8 are read')
    group = weights.number("group_size", 0)
    default = "group" if group > 0 else "channel" if group == -1 else "tensor"
    # "tensor_group": group scales, and one scale for the whole tensor.
    strategies = ("tensor_group", "group") if format in GROUPS else ("tensor", "channel", "group", "block")
    strategy = weights.one_of("strategy", strategies, default)
    if format in GROUPS and (group != GROUPS[format] or not weights.flag("symmetric", True)):
        raise weights.refuse(f"has groups of {group} in {format}; {GROUPS[format]}, symmetric, are read")
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
            group if "group" in strategy else 0,
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
        if self.block is None and not either(parts, scale, ("weight_scale",)):
            scale = "weight_scale"
        if not parts.has(scale):
            return None
        refuse_kept_plain(parts, self.plain)
        weights = Weights(8, True, True, "tensor" if self.block is None else "block", block=self.block)
        return PlainMatrix.of(parts, shape, weights, name=self.name, scale=scale)


def _fp8(section: Section) -> Fp8:
    section.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    section.one_of("scale_fmt", ("float", "ue8m0"), "float")
    section.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    stated = section.values.get("weight_block_size")
    block = None if stated is None else _block(section, stated)
    return Fp8(block, section.names("modules_to_not_convert") + section.names("ignored_layers"))
