"""fp8 experts that are stored in one tensor for a whole layer (experts.py), one code for each weight.

``…experts.gate_up_proj`` [experts, rows, columns] has scales in ``…experts.gate_up_proj_scale_inv`` (or ``_scale``), whose
first dimension is the expert and the others those of a single matrix's scales. A block may have rows of both gate and up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import QuantisedRows, Scheme
from outrider.workers.models.formats.configuration import Quantisation
from outrider.workers.models.formats.experts import Place
from outrider.workers.models.formats.matrix import Matrix
from outrider.workers.models.formats.raw import TYPES, RawTensors
from outrider.workers.models.headers import Entry

SCALES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True, slots=True)
class SomeRows:
    """Consecutive rows of a matrix as a matrix; ``parts`` are the tensors that hold all experts."""

    whole: Matrix
    first: int
    shape: tuple[int, int]
    parts: tuple[str, ...]

    @property
    def scheme(self) -> Scheme:
        return self.whole.scheme

    @property
    def order(self) -> NDArray[np.int32] | None:
        return self.whole.order

    def rows(self, start: int, stop: int) -> QuantisedRows:
        return self.whole.rows(self.first + start, self.first + stop)

    def done(self) -> None:
        self.whole.done()


def joined_matrix(quantisation: Quantisation, raw: RawTensors, place: Place, shape: tuple[int, int]) -> Matrix | None:
    """None where the tensor has no scales, or is transposed or interleaved."""
    entry, module = raw.entries[place.source], place.source.removesuffix(".weight")
    scales = {part: f"{place.source}{part.removeprefix('weight')}" for part in SCALES}
    found = {part: name for part, name in scales.items() if name in raw.entries and len(raw.entries[name].shape) == 3}
    if place.transposed or place.bias or place.step != 1 or not found or place.shape(entry) != shape:
        return None
    names = {"weight": place.source} | found
    single = {f"{module}.{part}": _of_one(raw.entries[name], place.expert) for part, name in names.items()}
    whole = quantisation.matrix(raw.seen_as(single), module, (entry.shape[1], entry.shape[2]))
    return None if whole is None else SomeRows(whole, place.first, shape, tuple(names.values()))


def _of_one(entry: Entry, expert: int) -> Entry:
    """The entry of one expert's part of a tensor."""
    shape = entry.shape[1:]
    size = TYPES[entry.type].itemsize if entry.type in TYPES else 1  # other types are refused where the tensor is read
    return replace(entry, shape=shape, offset=entry.offset + expert * math.prod(shape) * size)
