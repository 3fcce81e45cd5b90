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
from numpy.typing import NDArray

from outrider.kernels.program import SMALLEST_GROUP
from outrider.kernels.quantised import E4M3, QuantisedRows, Scheme, Values
from outrider.workers.models.files import state_of
from outrider.workers.models.formats.halves import exact
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
# The bits that the kernels have with minima.
KEPT = (2, 3, 4, 5)
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
        codes = nibbles(words) if scheme.bits == 4 else unpacked(words, scheme.bits, self.shape[1])
        minima = None
        if scheme.values is Values.INTEGER:
            scales = source.finite("scales", to_float32(stored))
            if not (halves := exact(stored)).all():
                scales = np.where(halves | self._used(codes), scales, np.float32(0))
            minima = -source.finite("biases", to_float32(source.rows("biases", start, stop)))
        else:
            scales = source.finite("scales", (E4M3 if scheme.group == 16 else POWERS_OF_TWO)[stored])
        if scheme.values is Values.E4M3 and ((codes & 127) == 127).any():
            source.refuse("holds a value that is not a finite number")
        return QuantisedRows(scheme, np.ascontiguousarray(codes), scales, np.zeros(scales.shape, np.uint8), minima)

    def fits_halves(self) -> bool:
        """Whether fp16 has all scales, but those of groups without a code that they multiply, and all minima."""
        source = self.source
        entries = [source.raw.entries[name] for name in self.parts]
        asked = (*entries, *(state_of(each.file).st_mtime_ns for each in entries))
        if asked not in _FITS:
            _FITS[asked] = self._fits_halves()
        return _FITS[asked]

    def _fits_halves(self) -> bool:
        source = self.source
        if self.scheme.scale_type == "F16":
            return True
        if not exact(source.whole("biases")).all():
            return False
        halves = exact(source.whole("scales"))
        for row in np.flatnonzero(~halves.all(axis=1)).tolist():
            codes = unpacked(source.rows("weight", row, row + 1), self.scheme.bits, self.shape[1])
            if not (halves[row] | ~self._used(codes)[0]).all():
                return False
        return True

    def _used(self, codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Of each group whether it has a code that its scale multiplies: where all are one number, MLX makes the scale
        1e-7, which fp16 has not."""
        return np.asarray(codes.reshape(len(codes), -1, self.scheme.group).any(axis=2))

    def done(self) -> None: ...


# What was found of matrices that were looked at in this process, which lays a checkpoint out more than once.
_FITS: dict[tuple[object, ...], bool] = {}


@dataclass(frozen=True, slots=True)
class Mlx:
    """``named``: what is said of layers of their own, False of those that are left as they were."""

    usual: Mapping[str, Any]
    named: Mapping[str, Any]
    name: str = "mlx"

    @property
    def made_for(self) -> str:
        """What most layers are like decides, and more than 5 bits with minima the kernels do not have."""
        kept = self.usual["bits"] in KEPT and self.usual["group_size"] % SMALLEST_GROUP == 0
        return "w4abf16" if self.usual["mode"] == "mxfp4" or (self.usual["mode"] == AFFINE and kept) else "bf16"

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
