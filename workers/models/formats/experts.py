"""Experts that a checkpoint stores in one tensor for a whole layer, addressed as the tensors of single experts.

Builders ask for ``…mlp.experts.3.gate_proj.weight``. Checkpoints may have one of these layouts instead (names after
``.experts.``):

1. ``gate_up_proj`` [experts, 2 ffn, hidden], gate rows before up rows, and ``down_proj`` [experts, hidden, ffn].
   Granite calls them ``input_linear.weight`` and ``output_linear.weight``, without ``.experts``.
2. gpt-oss: ``gate_up_proj`` [experts, hidden, 2 ffn], gate and up columns alternating, and ``down_proj`` [experts, ffn,
   hidden], with biases ``gate_up_proj_bias`` [experts, 2 ffn] and ``down_proj_bias`` [experts, hidden]. Experts with biases
   are read in this layout.
3. Llama 4, and Aria with the names ``fc1.weight`` and ``fc2.weight``: ``gate_up_proj`` [experts, hidden, 2 ffn], gate
   columns before up columns, and ``down_proj`` [experts, ffn, hidden].
4. Qwen3-VL: layout 3 or 1, decided by the shapes, as in transformers.
5. Step 3.7: each kind of matrix in one tensor [experts, outputs, inputs], with names ``…moe.gate_proj.weight``.
6. gpt-oss in MXFP4 (formats/mxfp4.py): rows are outputs, gate and up rows alternating.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from outrider.kernels.program import Tensor
from outrider.workers.models.formats.raw import TYPES, Array, RawTensors
from outrider.workers.models.headers import Entry

NAME = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


# The names of tensors that hold gate and up.
BOTH = ("gate_up_proj", "input_linear", "experts.fc1")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an expert's matrix or bias: outputs ``first``, ``first + step``, … of the tensor that holds it."""

    source: str
    expert: int
    first: int
    step: int
    transposed: bool = False
    bias: bool = False

    def shape(self, entry: Entry) -> tuple[int, ...]:
        """The shape of one expert's part of a tensor of that shape."""
        outputs = entry.shape[-1] if self.transposed or self.bias else entry.shape[1]
        count = outputs // 2 if any(name in self.source for name in BOTH) else outputs
        return (count,) if self.bias else (count, entry.shape[1] if self.transposed else entry.shape[-1])

    def rows(self, raw: RawTensors, start: int, stop: int) -> Array:
        if self.bias:
            return np.ascontiguousarray(
                raw.rows(self.source, self.expert, self.expert + 1)[0, self.first :: self.step][start:stop]
            )
        if self.transposed:
            whole = raw.rows(self.source, self.expert, self.expert + 1)[0]
            return np.ascontiguousarray(whole[:, self.first :: self.step][:, start:stop].T)
        entry = raw.entries[self.source]
        values = np.empty((stop - start, entry.shape[2]), TYPES[entry.type])
        row = (self.expert * entry.shape[1] + self.first + start) * entry.shape[2]
        raw.fill(entry.file, entry.offset + row * values.itemsize, values.reshape(-1).view(np.uint8), self.source)
        return values


def place_of(tensor: Tensor, entries: Mapping[str, Entry], transposed: bool | None = False) -> Place | None:
    """None where the name is not an expert's, or the expert has a tensor of its own.

    ``transposed``: whether experts are stored transposed; None: the shapes tell.
    """
    found = NAME.fullmatch(tensor.name)
    if found is None:
        return None
    experts, expert, kind, part = found[1], int(found[2]), found[3], found[4]
    joined = f"{experts}.{'down_proj' if kind == 'down' else 'gate_up_proj'}"
    if joined not in entries:
        granite = f"{experts.removesuffix('.experts')}.{'output' if kind == 'down' else 'input'}_linear.weight"
        aria = f"{experts}.fc{2 if kind == 'down' else 1}.weight"
        joined = next((name for name in (granite, aria) if name in entries), joined)
    apart = f"{experts.removesuffix('mlp.experts')}moe.{kind}_proj.weight"
    if part == "weight" and len(getattr(entries.get(apart), "shape", ())) == 3:
        return Place(apart, expert, 0, 1) if expert < entries[apart].shape[0] else None
    biased = f"{joined}_bias" in entries
    source = f"{joined}_bias" if part == "bias" else joined
    entry = entries.get(source)
    rank = 2 if part == "bias" else 3
    if entry is None or len(entry.shape) != rank or expert >= entry.shape[0]:
        return None
    if part == "bias" or biased:
        step = 1 if kind == "down" else 2
        return Place(source, expert, int(kind == "up"), step, transposed=part == "weight", bias=part == "bias")
    width = tensor.shape[0]
    if transposed is None:
        transposed = entry.shape[1:] != (width if kind == "down" else 2 * width, tensor.shape[1])
    return Place(source, expert, width if kind == "up" else 0, 1, transposed)
