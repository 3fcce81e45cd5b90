"""Checkpoints that MLX has quantised: config.json's ``quantization``, and of a layer ``weight``, ``scales``, ``biases``.

The words of ``weight`` uint32 [N, K bits/32] have codes one after the other, the first lowest and without gaps. Affine ones
stand for code * scale + bias, in groups that the shapes tell; of floats of four or eight bits (``mode``: mxfp4, nvfp4,
mxfp8) there are ``scales`` alone, in bytes. All experts of a layer lie in one tensor, [experts, N, K bits/32].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.kernels.quantised import E4M3, QuantisedRows, Scheme, Values
from outrider.workers.models.formats.matrix import Matrix, Parts
from outrider.workers.models.formats.raw import POWERS_OF_TWO, RawTensors, nibbles, to_float32, unpacked
from outrider.workers.models.formats.section import Section, names_of_layer
from outrider.workers.models.headers import BITS, Entry, quoted

# The key of config.json; newer ones have the same under "quantization_config" as well.
KEY = "quantization"
AFFINE, SIZES = "affine", (2, 3, 4, 5, 6, 8)
# What scales in bytes are of, by the bits of codes and their group.
FLOATS = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}
SCHEMES = {
    "mxfp4": Scheme("mlx mxfp4", 4, 32, Values.E2M1, scale_type="E8M0"),
    "nvfp4": Scheme("mlx nvfp4", 4, 16, Values.E2M1, scale_type="F32"),
    "mxfp8": Scheme("mlx mxfp8", 8, 32, Values.E4M3, scale_type="BF16"),
}
KEYS = frozenset(("group_size", "bits", "mode"))
ELSEWHERE = "take it in another format"
# By "model_type": whose tensors mlx-lm keeps with transformers' names and values, but for experts that lie together and
# convolutions' taps; of each a converted model gave mlx-lm's own logits. Others differ: one is added to Qwen3-Next's norms.
FAMILIES = frozenset(
    (
        *("llama", "mistral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2"),
        *("gemma3_text", "phi", "phi3", "phimoe", "granite", "granitemoe", "smollm3", "olmo2", "olmo3", "olmoe", "glm4"),
        *("glm4_moe", "cohere", "cohere2", "exaone4", "ernie4_5", "lfm2", "stablelm", "starcoder2"),
    )
)


@dataclass(frozen=True, slots=True)
class MlxMatrix:
    """``biases`` are there of affine codes alone."""

    source: Parts
    scheme: Scheme
    shape: tuple[int, int]
    order: None = None

    @classmethod
    def of(cls, source: Parts, shape: tuple[int, int]) -> MlxMatrix:
        rows, columns = shape
        words = source.entry("weight", (rows, None), "U32").shape[1]
        scales = source.entry("scales", (rows, None), "F16", "BF16", "F32", "U8")
        bits, rest = divmod(32 * words, columns)
        group = columns // max(1, scales.shape[1])
        if rest or group * scales.shape[1] != columns:
            source.refuse(f"has {words} words and {scales.shape[1]} groups in a row, which {columns} columns do not fill")
        if scales.type == "U8":
            mode = FLOATS.get((bits, group))
            if mode is None:
                source.refuse(f"has floats of {bits} bits in groups of {group}; {', '.join(FLOATS.values())} are read")
            if source.has("global_scale"):
                source.refuse('has a "global_scale", which is not read')
            return cls(source, SCHEMES[mode], shape)
        if bits not in SIZES:
            source.refuse(f"has codes of {bits} bits; {', '.join(map(str, SIZES))} are read")
        source.entry("biases", scales.shape, scales.type)
        return cls(source, Scheme("mlx", bits, group, symmetric=False, minima=True, scale_type=scales.type), shape)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.source.used)

    def rows(self, start: int, stop: int) -> QuantisedRows:
        source, scheme = self.source, self.scheme
        words, stored = source.rows("weight", start, stop), source.rows("scales", start, stop)
        minima = None
        if scheme.values is Values.INTEGER:
            scales = to_float32(stored)
            minima = -source.finite("biases", to_float32(source.rows("biases", start, stop)))
        else:
            scales = (E4M3 if scheme.group == 16 else POWERS_OF_TWO)[stored]
        source.finite("scales", scales)
        codes = nibbles(words) if scheme.bits == 4 else unpacked(words, scheme.bits, self.shape[1])
        if scheme.values is Values.E4M3 and ((codes & 127) == 127).any():
            source.refuse("holds a value that is not a finite number")
        return QuantisedRows(scheme, np.ascontiguousarray(codes), scales, np.zeros(scales.shape, np.uint8), minima)

    def done(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Mlx:
    """``named``: what is said of layers of their own, False of those that are left as they were."""

    usual: Mapping[str, Any]
    named: Mapping[str, Any]
    name: str = "mlx"

    @property
    def made_for(self) -> str:
        # What has minima by groups of more than 32, or in bf16, the kernels do not keep.
        return "w4abf16" if self.usual["mode"] == "mxfp4" else "bf16"

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        parts = Parts(raw, module, self.name)
        if not parts.has("scales"):
            return None
        found = MlxMatrix.of(parts, shape)
        for name in (each for of_layer in names_of_layer(module) for each in _names_in_mlx(of_layer)):
            stated = self.named.get(name)
            if stated is False:
                parts.refuse(f'is quantised, "{KEY}" says that it is not')
            if isinstance(stated, dict):
                said = {"bits": found.scheme.bits, "group_size": found.scheme.group}
                if any(stated.get(key, value) != value for key, value in said.items()):
                    parts.refuse(f'is of {said["bits"]} bits in groups of {said["group_size"]}, "{KEY}" says otherwise')
        return found


def read_mlx(values: Mapping[str, Any], source: str) -> Mlx:
    section = Section(values[KEY], f"{source}: {KEY}")
    family = values.get("model_type")
    if family not in FAMILIES:
        raise section.refuse(f"is MLX's, and how MLX keeps a model of type {quoted(family)} is not known here: {ELSEWHERE}")
    usual = _settings(section, {key: value for key, value in section.values.items() if not isinstance(value, dict | bool)})
    if not {"group_size", "bits"} <= usual.keys():
        raise section.refuse('has no "group_size" and "bits"')
    named: dict[str, Any] = {}
    for name, value in section.values.items():
        if isinstance(value, dict):
            value = _settings(Section(value, f"{section.source}: {quoted(name)}"), value)
        if isinstance(value, dict | bool):
            named[name] = value
    return Mlx(usual, named)


def _settings(section: Section, values: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(key for key, value in values.items() if key not in KEYS and value not in (None, False))
    if unknown:
        raise section.refuse(f"has {quoted(unknown[0])}, which is not known here")
    mode = section.one_of("mode", (AFFINE, *SCHEMES), AFFINE)
    return {key: section.number(key) for key in ("group_size", "bits") if values.get(key) is not None} | {"mode": mode}


STACKED = re.compile(r"(.*)\.switch_mlp\.(gate_proj|up_proj|down_proj)\.(weight|scales|biases)")
# What Mixtral's makers call the matrices of an expert, whose names other_names.py knows.
OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
OF_AN_EXPERT = re.compile(r"(.*)\.experts\.\d+\.(\w+)")


def _names_in_mlx(module: str) -> Iterator[str]:
    """What a layer may be called in ``quantization``."""
    yield module
    if found := OF_AN_EXPERT.fullmatch(module):
        matrix = next((ours for ours, theirs in OF_MIXTRAL.items() if theirs == found[2]), found[2])
        yield f"{found[1]}.switch_mlp.{matrix}"


def as_transformers_names(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Single experts by the names that they have elsewhere, and convolutions' taps as they lie elsewhere."""
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        if name.endswith("conv.conv.weight") and len(entry.shape) == 3 and entry.shape[2] == 1:
            found[name] = replace(entry, shape=(entry.shape[0], 1, entry.shape[1]))
            continue
        stacked = STACKED.fullmatch(name)
        if stacked is None or len(entry.shape) != 3:
            found[name] = entry
            continue
        block, matrix, part = stacked.groups()
        matrix = OF_MIXTRAL[matrix] if block.endswith("block_sparse_moe") else matrix
        shape = entry.shape[1:]
        size = math.prod(shape) * BITS.get(entry.type, 8) // 8
        for expert in range(entry.shape[0]):
            found[f"{block}.experts.{expert}.{matrix}.{part}"] = replace(
                entry, shape=shape, offset=entry.offset + expert * size
            )
    return found
