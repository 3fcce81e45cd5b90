"""kv_b_proj of latent attention, which makes all heads' keys and values from the latent vector: one matrix for families,
two tensors in newer GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.formats.gguf.architectures.architecture import Values
from outrider.workers.models.formats.gguf.blocks import BY_NAME
from outrider.workers.models.formats.gguf.matrix import GgufMatrix
from outrider.workers.models.formats.gguf.names import of_all_heads
from outrider.workers.models.formats.raw import Array, RawTensors, to_float32
from outrider.workers.models.headers import Entry, quoted

WHOLE, KEYS, VALUES = ("attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight")


@dataclass(frozen=True, slots=True)
class KeysAndValues:
    """The matrix has for each head ``key`` rows, then ``value`` rows, of ``rank`` columns.

    In the file keys are transposed, [heads, rank, key]; values are [heads, value, rank]. So a block of quantised keys has
    weights of several rows of the matrix, and keys are dequantised.
    """

    raw: RawTensors
    keys: str
    values: str
    heads: int
    key: int
    value: int
    rank: int

    def parts(self, tensor: Tensor) -> list[str]:
        return [self.keys] * self._has_keys(tensor) + [self.values] * self._has_values(tensor)

    def _has_keys(self, tensor: Tensor) -> bool:
        each = self.key + self.value
        return any(start % each < self.key or stop - start > each - start % each for start, stop in tensor.ranges)

    def _has_values(self, tensor: Tensor) -> bool:
        return any(start % (self.key + self.value) + stop - start > self.key for start, stop in tensor.ranges)

    def check(self) -> None:
        shapes = {self.keys: (self.heads, self.rank, self.key), self.values: (self.heads, self.value, self.rank)}
        for name, asked in shapes.items():
            entry = self.raw.entries[name]
            if entry.shape != asked:
                raise ModelError(
                    f"{entry.file}: the tensor {quoted(name)} has shape {entry.shape}, its metadata asks for {asked}"
                )

    def type_of(self, tensor: Tensor) -> str:
        types = {self.raw.entries[name].type for name in self.parts(tensor)}
        first = types.pop()
        return "F32" if types or BY_NAME[first].scheme is not None else first

    def matrix(self, tensor: Tensor) -> GgufMatrix | None:
        """The quantised matrix, if all rows of the tensor are values and these are quantised; else None."""
        if self._has_keys(tensor) or BY_NAME[self.raw.entries[self.values].type].scheme is None:
            return None
        row = np.arange(tensor.shape[0])
        head, within = row // (self.key + self.value), row % (self.key + self.value)
        places = head * self.value + np.maximum(within - self.key, 0)
        return self._quantised(self.values, (tensor.shape[0], self.rank), places)

    def _quantised(self, name: str, shape: tuple[int, int], places: NDArray[np.int64] | None = None) -> GgufMatrix:
        kind = BY_NAME[self.raw.entries[name].type]
        assert kind.scheme is not None
        return GgufMatrix(of_all_heads(name), self.raw, kind, kind.scheme, shape, places)

    def rows(self, start: int, stop: int) -> Array:
        each = self.key + self.value
        found: list[Array] = []
        for head in range(start // each, -(-stop // each)):
            low, high = max(start - head * each, 0), min(stop - head * each, each)
            if low < self.key:
                columns = self._stored(self.keys, head * self.rank, (head + 1) * self.rank, self.key)
                found.append(columns[:, low : min(high, self.key)].T)
            if high > self.key:
                first = head * self.value - self.key
                found.append(self._stored(self.values, first + max(low, self.key), first + high, self.rank))
        if len({part.dtype for part in found}) > 1:
            found = [to_float32(part) for part in found]
        return np.ascontiguousarray(np.concatenate(found))

    def _stored(self, name: str, start: int, stop: int, columns: int) -> Array:
        entry = self.raw.entries[name]
        if BY_NAME[entry.type].scheme is None:
            return self.raw.rows(of_all_heads(name), start, stop)
        rows: Array = self._quantised(name, (entry.shape[0] * entry.shape[1], columns)).rows(start, stop).dequantise()
        return rows


def keys_and_values(name: str, raw: RawTensors, config: Values) -> KeysAndValues | None:
    """``name`` is GGUF's name of the matrix; None where the file has that matrix, or neither."""
    if not name.endswith(WHOLE) or name in raw.entries:
        return None
    before = name.removesuffix(WHOLE)
    keys, values = before + KEYS, before + VALUES
    if not _of_heads(raw.entries, keys) or not _of_heads(raw.entries, values):
        return None
    sizes = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"))
    return KeysAndValues(raw, keys, values, *sizes)


def _of_heads(entries: Mapping[str, Entry], name: str) -> bool:
    return name in entries and len(entries[name].shape) == 3
