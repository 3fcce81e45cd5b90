"""The tensors of a GGUF file under the names, and in the order of rows, that the native engine's families ask for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import Tensor
from outrider.kernels.quantised import natural_order
from outrider.workers.errors import ModelError
from outrider.workers.models.formats.configuration import Quantisation
from outrider.workers.models.formats.gguf.architectures import architecture_of
from outrider.workers.models.formats.gguf.architectures.left_out import further_layers
from outrider.workers.models.formats.gguf.blocks import BY_NAME
from outrider.workers.models.formats.gguf.config import config_of
from outrider.workers.models.formats.gguf.file import gguf_quantisation
from outrider.workers.models.formats.gguf.keys_and_values import KeysAndValues, keys_and_values
from outrider.workers.models.formats.gguf.matrix import GgufMatrix
from outrider.workers.models.formats.gguf.metadata import Metadata
from outrider.workers.models.formats.gguf.names import (
    apart,
    block_of,
    expert_of,
    holder,
    module_of,
    part_of,
    seen_otherwise,
    stored_name,
)
from outrider.workers.models.formats.gguf.split import read_gguf
from outrider.workers.models.formats.raw import Array, RawTensors, to_float32
from outrider.workers.models.headers import Entry, quoted

# Its blocks' scales are multiplied by a number of the matrix, in a tensor of its own.
OF_TWO_SCALES = "NVFP4"


class GgufCheckpoint:
    """A ``Checkpoint`` over one file."""

    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        self._config = config_of(self._file)
        metadata = Metadata(self._file)
        self._architecture = architecture_of(metadata)
        together = apart(self._architecture, self._config, self._file.tensors)
        self._entries = together | self._file.tensors | seen_otherwise(self._file.tensors)
        self._raw = RawTensors(self._entries)
        self._further = further_layers(metadata)
        self.quantisation: Quantisation | None = gguf_quantisation(self._file)

    @property
    def names(self) -> Collection[str]:
        tensors = self._file.tensors.keys() - self._architecture.in_config
        return [name for name in tensors if block_of(name) not in self._further]

    def names_of_further(self, block: int) -> Collection[str]:
        """The names of a multi-token prediction layer's tensors, without its copies of the embedding and the LM head."""
        copies = (f"blk.{block}.nextn.embed_tokens.weight", f"blk.{block}.nextn.shared_head_head.weight")
        return [name for name in self._file.tensors if block_of(name) == block and name not in copies]

    def has(self, name: str) -> bool:
        found = stored_name(self._architecture, name) in self._entries
        return found or self._in_two(name) is not None or self._key(name) is not None

    def _in_two(self, name: str) -> KeysAndValues | None:
        return keys_and_values(stored_name(self._architecture, name), self._raw, self._config)

    def _key(self, name: str) -> str | None:
        """The metadata key that holds this scalar tensor; None where it is a stored tensor."""
        return self._architecture.numbers.get(part_of(self._architecture, name)[1])

    def type_of(self, tensor: Tensor) -> str:
        if self._key(tensor.name) is not None:
            return "F32"
        if (two := self._in_two(tensor.name)) is not None:
            return two.type_of(tensor)
        return self._find(tensor)[1].type

    def numbers(self, name: str) -> NDArray[np.int64]:
        raise ModelError(f"{quoted(name)} is not read from GGUF files")

    def parts(self, tensor: Tensor) -> Collection[str]:
        if self._key(tensor.name) is not None:
            return ()
        if (two := self._in_two(tensor.name)) is not None:
            return two.parts(tensor)
        name = self._find(tensor)[0]
        common = self._common_scale(name)
        return [holder(name, self._file.tensors), *(() if common is None else common[:1])]

    def file_of(self, tensor: Tensor) -> Path:
        return self._file.path

    def _find(self, tensor: Tensor) -> tuple[str, Entry]:
        name = stored_name(self._architecture, tensor.name)
        if name not in self._entries:
            raise ModelError(f"{self._file.path} lacks the tensor {quoted(name)}")
        return name, self._entries[name]

    def check(self, tensor: Tensor) -> None:
        if self._key(tensor.name) is not None:
            self._number(tensor)
            return
        if (two := self._in_two(tensor.name)) is not None:
            two.check()
            return
        name, entry = self._find(tensor)
        found, asked = entry.shape, tensor.shape
        if tensor.stored and len(asked) == 1 and len(self._file.tensors[name].shape) > 1:
            # Norms of heads, with a row for each head as in checkpoints; llama.cpp drops the dimension of a single row when
            # it quantises.
            found, asked = self._file.tensors[name].shape, tensor.stored
        if found != asked:
            raise ModelError(f"{entry.file}: the tensor {quoted(name)} has shape {found}, its metadata asks for {asked}")

    def matrix(self, tensor: Tensor) -> GgufMatrix | None:
        if (two := self._in_two(tensor.name)) is not None:
            return two.matrix(tensor)
        name = stored_name(self._architecture, tensor.name)
        entry = self._entries.get(name)
        if entry is None or len(tensor.shape) != 2:
            return None
        self.check(tensor)
        kind = BY_NAME[entry.type]
        if kind.scheme is None:
            return None
        shape, order = (tensor.shape[0], tensor.shape[1]), self._order_of_columns(tensor)
        scheme = kind.scheme if order is None else replace(kind.scheme, ordered=True)
        common = self._common_scale(name)
        return GgufMatrix(name, self._raw, kind, scheme, shape, self._order_of_rows(tensor), order, common)

    def _common_scale(self, name: str) -> tuple[str, int] | None:
        """NVFP4: the tensor with the number that multiplies all scales of a matrix, and its place there (the expert's)."""
        if self._entries[name].type != OF_TWO_SCALES:
            return None
        scale = holder(name, self._file.tensors).removesuffix(".weight") + ".scale"
        if scale not in self._file.tensors:
            return None
        entry, expert = self._file.tensors[scale], expert_of(name)
        if entry.type != "F32" or prod(entry.shape) <= (expert or 0) or (expert is None and prod(entry.shape) != 1):
            raise ModelError(
                f"{entry.file}: the tensor {quoted(scale)} ({entry.type}) has shape {entry.shape}, one F32 number for each "
                f"matrix of {quoted(holder(name, self._file.tensors))} is needed"
            )
        return scale, expert or 0

    def rows(self, tensor: Tensor, start: int, stop: int) -> Array:
        if self._key(tensor.name) is not None:
            return np.array([self._number(tensor)], np.float32)[start:stop]
        matrix = self.matrix(tensor)
        if matrix is not None:
            return natural_order(matrix.rows(start, stop).dequantise(), matrix.order)
        if (two := self._in_two(tensor.name)) is not None:
            return two.rows(start, stop)
        name, entry = self._find(tensor)
        if BY_NAME[entry.type].scheme is not None:
            raise ModelError(f"{entry.file}: the tensor {quoted(name)} is a vector of the type {entry.type}")
        values = natural_order(
            self._plain_rows(name, self._order_of_rows(tensor), start, stop), self._order_of_columns(tensor)
        )
        changes, part = self._architecture.changes, part_of(self._architecture, tensor.name)[1]
        change = changes.get(part, changes.get(module_of(part)))
        if change is None:
            return values
        try:
            return change(to_float32(values))
        except ValueError as error:
            raise ModelError(
                f"{entry.file}: the tensor {quoted(name)} holds values that its model cannot have: {error}"
            ) from None

    def _number(self, tensor: Tensor) -> float:
        """The scalar from metadata, which has one value for all layers or one for each layer."""
        key, layer = self._key(tensor.name), part_of(self._architecture, tensor.name)[0]
        values = self._file.metadata.get(str(key))
        count = self._config["num_hidden_layers"]
        each: list[Any] = values if isinstance(values, list) else [values] * count
        if len(each) != count or not all(type(value) is float for value in each):
            raise ModelError(f"{self._file.path} has {quoted(key)}: {quoted(values)}, where {count} values are needed")
        return float(each[int(layer)])

    def _plain_rows(self, name: str, order: NDArray[np.int64] | None, start: int, stop: int) -> Array:
        if order is None:
            return self._raw.rows(name, start, stop)
        wanted = order[start:stop]
        first = int(wanted.min())
        values: Array = self._raw.rows(name, first, int(wanted.max()) + 1)[wanted - first]
        return values

    def _order_of_rows(self, tensor: Tensor) -> NDArray[np.int64] | None:
        return self._architecture.order(self._config, self._module(tensor), tensor.shape[0])

    def _order_of_columns(self, tensor: Tensor) -> NDArray[np.int32] | None:
        if len(tensor.shape) != 2:
            return None
        order = self._architecture.columns(self._config, self._module(tensor), tensor.shape[1])
        return None if order is None else order.astype(np.int32)

    def _module(self, tensor: Tensor) -> str:
        """The name of a layer's tensor after the layer's number."""
        return module_of(part_of(self._architecture, tensor.name)[1])

    def done(self, tensor: Tensor) -> None:
        pass

    def close(self) -> None:
        self._raw.close()
