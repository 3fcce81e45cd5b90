"""GGUF's names of a family's tensors, and tensors that lie together in the file, each by a name of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from outrider.workers.models.formats.gguf.architectures.architecture import Architecture
from outrider.workers.models.formats.gguf.blocks import BY_NAME
from outrider.workers.models.headers import Entry

EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
# A layer's experts lie together, and the gate of a shared expert is a vector.
TOGETHER = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)_exps\.(?:weight|bias)")
SHARED_GATE = "ffn_gate_inp_shexp.weight"


def part_of(architecture: Architecture, name: str) -> tuple[str, str]:
    """The number of a tensor's layer ("" where it is of none), and its name behind that."""
    if not name.startswith(architecture.layers):
        return "", name
    layer, _, part = name.removeprefix(architecture.layers).partition(".")
    return layer, part


def module_of(part: str) -> str:
    """Without what tells a weight from a bias."""
    return part.rpartition(".")[0] if part.endswith((".weight", ".bias")) else part


def stored_name(architecture: Architecture, name: str) -> str:
    """GGUF's name of a family's tensor; its own where there is none."""
    layer, part = part_of(architecture, name)
    names = architecture.parts if layer else architecture.whole
    before = f"blk.{layer}." if layer else ""
    if layer and (expert := EXPERT.fullmatch(part)):
        return _of_expert(f"{before}ffn_{expert[2]}_exps.{expert[3]}", int(expert[1]))
    if part in names:
        return before + names[part]
    module, _, ending = part.rpartition(".")
    return f"{before}{names[module]}.{ending}" if module in names else name


def seen_otherwise(tensors: Mapping[str, Entry]) -> dict[str, Entry]:
    """Each expert as a tensor of its own, "… of expert 3", and the gate of a shared expert as a matrix of one row."""
    found = {}
    for name, entry in tensors.items():
        if TOGETHER.fullmatch(name) and len(entry.shape) > 1:
            kind, shape = BY_NAME[entry.type], entry.shape[1:]
            size = prod(shape) // kind.values * kind.bytes
            for expert in range(entry.shape[0]):
                found[_of_expert(name, expert)] = replace(entry, shape=shape, offset=entry.offset + expert * size)
        if name.endswith(SHARED_GATE) and len(entry.shape) == 1:
            found[name] = replace(entry, shape=(1, *entry.shape))
    return found


def _of_expert(name: str, expert: int) -> str:
    return f"{name} of expert {expert}"
