"""The tensors of a GGUF file under the names, and in the order of rows, that the native engine's families ask for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import Tensor
from outrider.kernels.quantised import QuantisedRows, Scheme
from outrider.workers.errors import ModelError
from outrider.workers.models.formats.configuration import Quantisation
from outrider.workers.models.formats.gguf.blocks import BY_NAME, Kind
from outrider.workers.models.formats.gguf.config import ROPE_FACTORS, config_of
from outrider.workers.models.formats.gguf.file import gguf_quantisation, read_gguf
from outrider.workers.models.formats.raw import Array, RawTensors
from outrider.workers.models.headers import Entry, quoted

LLAMA = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
GPT_OSS = {"mlp.router": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm"}
BIGCODE = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}
WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
BLOCK = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")
SINKS = re.compile(r"model\.layers\.(\d+)\.self_attn\.sinks")
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
# A layer's experts lie together, and the gate of a shared expert is a vector.
TOGETHER = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)_exps\.(?:weight|bias)")
SHARED_GATE = "ffn_gate_inp_shexp.weight"
# Rows that were put in another order for llama.cpp's way of rotating: each head's two halves lie interleaved.
ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(frozen=True, slots=True)
class GgufMatrix:
    """``order_of_rows``: where in the file each row lies, where not in its own place."""

    name: str
    raw: RawTensors
    kind: Kind
    scheme: Scheme
    shape: tuple[int, int]
    order_of_rows: NDArray[np.int64] | None
    order: None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name,)

    def rows(self, start: int, stop: int) -> QuantisedRows:
        first, wanted = start, None
        if self.order_of_rows is not None:
            wanted = self.order_of_rows[start:stop]
            first, stop = int(wanted.min()), int(wanted.max()) + 1
        entry = self.raw.entries[self.name]
        row_bytes = self.shape[1] // self.kind.values * self.kind.bytes
        packed = np.empty((stop - first, self.shape[1] // self.kind.values, self.kind.bytes), np.uint8)
        self.raw.fill(entry.file, entry.offset + first * row_bytes, packed.reshape(-1), self.name)
        if wanted is not None:
            packed = packed[wanted - first]
        assert self.kind.unpack is not None
        with np.errstate(invalid="ignore", over="ignore"):
            rows = self.kind.unpack(self.scheme, packed)
        if not np.isfinite(rows.scales).all() or (rows.minima is not None and not np.isfinite(rows.minima).all()):
            raise ModelError(f"{entry.file}: {quoted(self.name)} ({self.scheme.source}) holds a scale that is not finite")
        return rows

    def done(self) -> None:
        pass


class GgufCheckpoint:
    """A ``Checkpoint`` over one file."""

    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        self._entries = self._file.tensors | _seen_otherwise(self._file.tensors)
        self._raw = RawTensors(self._entries)
        self._config = config_of(self._file)
        architecture = self._file.metadata["general.architecture"]
        self._rotated = architecture == "llama"
        self._modules = LLAMA | BIGCODE | (GPT_OSS if architecture == "gpt-oss" else {})
        self.quantisation: Quantisation | None = gguf_quantisation(self._file)

    @property
    def names(self) -> Collection[str]:
        # The rope's factors are part of the configuration.
        return self._file.tensors.keys() - {ROPE_FACTORS}

    def has(self, name: str) -> bool:
        return self._stored_name(name) in self._entries

    def type_of(self, tensor: Tensor) -> str:
        return self._find(tensor)[1].type

    def numbers(self, name: str) -> NDArray[np.int64]:
        raise ModelError(f"{quoted(name)} is not read from GGUF files")

    def parts(self, tensor: Tensor) -> Collection[str]:
        return [self._find(tensor)[0].partition(" ")[0]]

    def file_of(self, tensor: Tensor) -> Path:
        return self._file.path

    def _find(self, tensor: Tensor) -> tuple[str, Entry]:
        name = self._stored_name(tensor.name)
        if name not in self._entries:
            raise ModelError(f"{self._file.path} lacks the tensor {quoted(name)}")
        return name, self._entries[name]

    def check(self, tensor: Tensor) -> None:
        name, entry = self._find(tensor)
        if entry.shape != tensor.shape:
            raise ModelError(
                f"{entry.file}: the tensor {quoted(name)} has shape {entry.shape}, its metadata asks for {tensor.shape}"
            )

    def matrix(self, tensor: Tensor) -> GgufMatrix | None:
        name = self._stored_name(tensor.name)
        entry = self._entries.get(name)
        if entry is None or len(tensor.shape) != 2:
            return None
        self.check(tensor)
        kind = BY_NAME[entry.type]
        if kind.scheme is None:
            return None
        shape = (tensor.shape[0], tensor.shape[1])
        return GgufMatrix(name, self._raw, kind, kind.scheme, shape, self._order_of_rows(tensor))

    def rows(self, tensor: Tensor, start: int, stop: int) -> Array:
        matrix = self.matrix(tensor)
        if matrix is not None:
            return matrix.rows(start, stop).dequantise()
        name, entry = self._find(tensor)
        if BY_NAME[entry.type].scheme is not None:
            raise ModelError(f"{entry.file}: the tensor {quoted(name)} is a vector of the type {entry.type}")
        order = self._order_of_rows(tensor)
        if order is None:
            return self._raw.rows(name, start, stop)
        wanted = order[start:stop]
        first = int(wanted.min())
        values: Array = self._raw.rows(name, first, int(wanted.max()) + 1)[wanted - first]
        return values

    def _order_of_rows(self, tensor: Tensor) -> NDArray[np.int64] | None:
        """Row i of a head's first half lies at 2i, row i of its second at 2i + 1."""
        if not self._rotated or not any(part in tensor.name for part in ROTATED):
            return None
        size = self._config["head_dim"]
        rows = np.arange(tensor.shape[0])
        half, within = rows % size // (size // 2), rows % (size // 2)
        places: NDArray[np.int64] = rows // size * size + 2 * within + half
        return places

    def done(self, tensor: Tensor) -> None:
        pass

    def close(self) -> None:
        self._raw.close()

    def _stored_name(self, name: str) -> str:
        """GGUF's name of a tensor."""
        if expert := EXPERT.fullmatch(name):
            return _of_expert(f"blk.{expert[1]}.ffn_{expert[3]}_exps.{expert[4]}", int(expert[2]))
        if sinks := SINKS.fullmatch(name):
            return f"blk.{sinks[1]}.attn_sinks.weight"
        module, _, part = name.rpartition(".")
        if module in WHOLE:
            return f"{WHOLE[module]}.{part}"
        found = BLOCK.fullmatch(module)
        known = None if found is None else self._modules.get(found[2])
        return name if found is None or known is None else f"blk.{found[1]}.{known}.{part}"


def _seen_otherwise(tensors: Mapping[str, Entry]) -> dict[str, Entry]:
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
