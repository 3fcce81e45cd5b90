"""Checkpoints quantised by MLX: ``quantization`` in config.json, and ``weight``, ``scales`` and ``biases`` of each layer.

``weight`` uint32 [N, K bits/32] holds codes without gaps, the first one in the lowest bits. Affine codes stand for
code * scale + bias, with groups that follow from the shapes; four- and eight-bit floats (``mode``: mxfp4, nvfp4, mxfp8)
have ``scales`` only, in bytes. For names, and other changes by mlx-lm, see mlx_families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import SMALLEST_ASYMMETRIC_GROUP
from outrider.kernels.quantised import E4M3, QuantisedRows, Scheme, Values
from outrider.workers.models.files import state_of
from outrider.workers.models.formats.halves import exact
from outrider.workers.models.formats.matrix import Matrix, Parts
from outrider.workers.models.formats.mlx_families import FAMILIES, WITH_WHOLE_NORMS, alike, names_in_mlx
from outrider.workers.models.formats.raw import POWERS_OF_TWO, RawTensors, nibbles, to_float32, unpacked
from outrider.workers.models.formats.section import Section, names_of_layer
from outrider.workers.models.headers import quoted

# The key in config.json; newer files have a copy under "quantization_config".
KEY = "quantization"
AFFINE, SIZES = "affine", (2, 3, 4, 5, 6, 8)
# The kind of floats, by (bits, group), where scales are bytes.
FLOATS = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}
SCHEMES = {
    "mxfp4": Scheme("mlx mxfp4", 4, 32, Values.E2M1, scale_type="E8M0"),
    "nvfp4": Scheme("mlx nvfp4", 4, 16, Values.E2M1, scale_type="F32"),
    "mxfp8": Scheme("mlx mxfp8", 8, 32, Values.E4M3, scale_type="BF16"),
}
OF_FOUR_BITS = ("mxfp4", "nvfp4")
KEYS = frozenset(("group_size", "bits", "mode"))
ELSEWHERE = "take it in another format"


@dataclass(frozen=True, slots=True)
class MlxMatrix:
    """``biases`` exist for affine codes only."""

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
        """Whether fp16 represents all minima, and all scales that multiply a code. Experts of a layer must be stored alike,
        and so must heads, so this includes theirs."""
        source = self.source
        modules = alike(source.module, source.raw.entries)
        entries = tuple(source.raw.entries[f"{modules[0]}.{part}"] for part in ("weight", "scales", "biases"))
        asked = (*entries, *(state_of(each.file).st_mtime_ns for each in entries))
        if asked not in _FITS:
            each = (MlxMatrix.of(Parts(source.raw, module, source.format), self.shape) for module in modules)
            _FITS[asked] = all(matrix._fits_halves() for matrix in each)
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
        """Whether each group has a code other than 0. (For a group of equal weights MLX writes a scale of 1e-7, which fp16
        does not represent.)"""
        return np.asarray(codes.reshape(len(codes), -1, self.scheme.group).any(axis=2))

    def done(self) -> None: ...


# Results of ``fits_halves`` in this process, which lays out a checkpoint more than once.
_FITS: dict[tuple[object, ...], bool] = {}


@dataclass(frozen=True, slots=True)
class Mlx:
    """``named``: the settings of single layers, False for those that are not quantised. ``whole_norms``: norms are stored
    as 1 + w."""

    usual: Mapping[str, Any]
    named: Mapping[str, Any]
    whole_norms: bool = False
    name: str = "mlx"

    @property
    def made_for(self) -> str:
        """By the settings of most layers; bf16 where the kernels do not have their codes with other precisions."""
        kept = self.usual["group_size"] % SMALLEST_ASYMMETRIC_GROUP == 0
        return "w4abf16" if self.usual["mode"] in OF_FOUR_BITS or (self.usual["mode"] == AFFINE and kept) else "bf16"

    @property
    def mixed(self) -> bool:
        """Whether layers that the kernels cannot keep are dequantised beside those that they keep."""
        return self.made_for != "bf16"

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        parts = Parts(raw, module, self.name)
        if not parts.has("scales"):
            return None
        found = MlxMatrix.of(parts, shape)
        for name in (each for of_layer in names_of_layer(module) for each in names_in_mlx(of_layer)):
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
        raise section.refuse(
            f"is quantised by MLX, whose layout of the type {quoted(family)} is not supported: {ELSEWHERE}"
        )
    usual = _settings(section, {key: value for key, value in section.values.items() if not isinstance(value, dict | bool)})
    if not {"group_size", "bits"} <= usual.keys():
        raise section.refuse('has no "group_size" and "bits"')
    named: dict[str, Any] = {}
    for name, value in section.values.items():
        if isinstance(value, dict):
            value = _settings(Section(value, f"{section.source}: {quoted(name)}"), value)
        if isinstance(value, dict | bool):
            named[name] = value
    return Mlx(usual, named, family in WITH_WHOLE_NORMS)


def _settings(section: Section, values: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(key for key, value in values.items() if key not in KEYS and value not in (None, False))
    if unknown:
        raise section.refuse(f"has {quoted(unknown[0])}, which is not known here")
    mode = section.one_of("mode", (AFFINE, *SCHEMES), AFFINE)
    return {key: section.number(key) for key in ("group_size", "bits") if values.get(key) is not None} | {"mode": mode}
