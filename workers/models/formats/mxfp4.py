"""gpt-oss's experts in MXFP4: two codes in a byte, the lower one first, and a power of two as scale of every 32 columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import QuantisedRows, Scheme, Values
from outrider.workers.errors import ModelError
from outrider.workers.models.formats.experts import NAME
from outrider.workers.models.formats.matrix import Parts
from outrider.workers.models.formats.raw import POWERS_OF_TWO, RawTensors, nibbles
from outrider.workers.models.headers import quoted

GROUP = 32
SCHEME = Scheme("mxfp4", 4, GROUP, Values.E2M1, scale_type="E8M0")


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """Rows ``first``, ``first + step`` … of one expert."""

    raw: RawTensors
    blocks: str
    scales: str
    expert: int
    first: int
    step: int
    shape: tuple[int, int]
    scheme: Scheme = SCHEME
    order: None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.blocks, self.scales)

    def rows(self, start: int, stop: int) -> QuantisedRows:
        codes = nibbles(self._of(self.blocks, start, stop).reshape(stop - start, -1))
        scales = POWERS_OF_TWO[self._of(self.scales, start, stop)]
        if not np.isfinite(scales).all():
            raise ModelError(f"{quoted(self.scales)} (mxfp4) holds a scale that is not a finite number")
        return QuantisedRows(SCHEME, codes, scales, np.zeros(scales.shape, np.uint8))

    def _of(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Read only the range of rows that contains those asked for."""
        entry = self.raw.entries[name]
        begin, end = self.first + start * self.step, self.first + (stop - 1) * self.step + 1
        values = np.empty((end - begin, *entry.shape[2:]), np.uint8)
        row_bytes = values.nbytes // len(values)
        offset = entry.offset + (self.expert * entry.shape[1] + begin) * row_bytes
        self.raw.fill(entry.file, offset, values.reshape(-1), name)
        return values[:: self.step]

    def done(self) -> None: ...


def expert_matrix(raw: RawTensors, module: str, shape: tuple[int, int]) -> ExpertMatrix | None:
    """None where the checkpoint has no blocks for that expert."""
    found = NAME.fullmatch(f"{module}.weight")
    if found is None:
        return None
    down = found[3] == "down"
    name = f"{found[1]}.{'down_proj' if down else 'gate_up_proj'}"
    if f"{name}_blocks" not in raw.entries:
        return None
    parts = Parts(raw, found[1], "mxfp4")
    stem = name.rpartition(".")[2]
    rows = shape[0] * (1 if down else 2)
    experts = parts.entry(f"{stem}_blocks", (None, rows, shape[1] // GROUP, GROUP // 2), "U8").shape[0]
    parts.entry(f"{stem}_scales", (experts, rows, shape[1] // GROUP), "U8")
    if int(found[2]) >= experts or shape[1] % GROUP:
        parts.refuse(f"has {experts} experts of {shape[1]} columns, of which expert {found[2]} is none")
    step = 1 if down else 2
    return ExpertMatrix(raw, f"{name}_blocks", f"{name}_scales", int(found[2]), int(found[3] == "up"), step, shape)
