"""``quantization_config`` of ModelOpt (NVIDIA's): fp8 with one scale for a matrix, and nvfp4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.workers.models.formats.compressed import FourBitFloats, PlainMatrix, Weights
from outrider.workers.models.formats.matrix import Matrix, Parts
from outrider.workers.models.formats.raw import RawTensors
from outrider.workers.models.formats.section import KEY, Section, names_of_layer
from outrider.workers.models.headers import quoted

FP8, OF_FOUR_BITS, MIXED = "FP8", ("NVFP4", "W4A16_NVFP4"), "MIXED_PRECISION"
GROUP = 16


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """``algorithm`` is that of all quantised layers, or "" where ``layers`` has one for each."""

    algorithm: str
    layers: Mapping[str, str]
    name: str = "modelopt"

    @property
    def made_for(self) -> str:
        stated = self.layers.values() if self.mixed else (self.algorithm,)
        return "w4abf16" if any(each in OF_FOUR_BITS for each in stated) else "bf16"

    @property
    def mixed(self) -> bool:
        """Whether layers may be of either algorithm."""
        return not self.algorithm

    def matrix(self, raw: RawTensors, module: str, shape: tuple[int, int]) -> Matrix | None:
        parts = Parts(raw, module, self.name)
        if not parts.has("weight_scale"):
            return None
        stated = (self.layers[name] for name in names_of_layer(module) if name in self.layers)
        algorithm = self.algorithm or next(stated, "")
        name = f"{self.name} {algorithm}"
        if not algorithm:
            parts.refuse(f'is quantised, "quantized_layers" in {KEY} does not say how')
        if algorithm == FP8:
            return PlainMatrix.of(parts, shape, Weights(8, True, True, "tensor"), name=name)
        return FourBitFloats.of(parts, shape, GROUP, name=name, codes="weight", common="weight_scale_2")


def read_modelopt(section: Section) -> ModelOpt:
    algorithm = section.one_of("quant_algo", (FP8, *OF_FOUR_BITS, MIXED), None)
    if algorithm != MIXED:
        return ModelOpt(algorithm, {})
    layers = Section(section.values.get("quantized_layers") or {}, f'{section.source}: "quantized_layers"')
    each = {name: Section(values, f"{layers.source}: {quoted(name)}") for name, values in layers.values.items()}
    return ModelOpt("", {name: inner.one_of("quant_algo", (FP8, *OF_FOUR_BITS), None) for name, inner in each.items()})
