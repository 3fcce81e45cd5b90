"""The interface between readers of quantised formats and the loader: one matrix, its scheme, and its rows."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.quantised import QuantisedRows, Scheme
from outrider.workers.errors import ModelError
from outrider.workers.models.formats.raw import RawTensors, to_float32
from outrider.workers.models.headers import Entry, quoted

Kept = TypeVar("Kept")
# The smallest group into which an incomplete group is divided: that of the kernels.
SMALLEST = 32


def in_groups(values: NDArray[Any], stated: int, group: int, columns: int) -> NDArray[Any]:
    """Values of groups of ``stated`` columns [n, ceil(columns / stated)], repeated for groups of ``group`` columns."""
    return values if stated == group else np.repeat(values, stated // group, axis=1)[:, : columns // group]


class Held(Generic[Kept]):
    """A value that is read once for all rows of a matrix, by the thread that needs it first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value: Kept | None = None

    def get(self, read: Callable[[], Kept]) -> Kept:
        with self._lock:
            if self._value is None:
                self._value = read()
            return self._value

    def clear(self) -> None:
        self._value = None


class Matrix(Protocol):
    """A quantised matrix of a checkpoint. Its constructor checks types and shapes, and reads nothing but the order."""

    @property
    def scheme(self) -> Scheme: ...

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs)."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensors that it is read from."""

    @property
    def order(self) -> NDArray[np.int32] | None:
        """The input channel of each stored column; None where they are in order."""

    def rows(self, start: int, stop: int) -> QuantisedRows: ...

    def done(self) -> None:
        """Release what is held: the matrix will not be read again."""


class Parts:
    """The tensors under one module's name, each checked when it is asked for."""

    def __init__(self, raw: RawTensors, module: str, format: str) -> None:
        self.raw = raw
        self.module = module
        self.format = format
        self.used: list[str] = []

    def has(self, part: str) -> bool:
        return f"{self.module}.{part}" in self.raw.entries

    def entry(self, part: str, shape: tuple[int | None, ...], *types: str) -> Entry:
        """The tensor's entry; a ModelError unless it has this shape (None: any extent) and one of these types."""
        name = f"{self.module}.{part}"
        entry = self.raw.entries.get(name)
        if entry is None:
            raise ModelError(f'the weight {quoted(self.module)} ({self.format}) lacks its "{part}"')
        if entry.type not in types:
            raise ModelError(
                f"{entry.file}: {quoted(name)} ({self.format}) must be of type {' or '.join(types)}, it is {entry.type}"
            )
        same = len(shape) == len(entry.shape) and all(
            wanted in (None, found) for wanted, found in zip(shape, entry.shape, strict=True)
        )
        if not same:
            raise ModelError(
                f"{entry.file}: {quoted(name)} ({self.format}) has shape {entry.shape}, "
                f"{tuple('any' if extent is None else extent for extent in shape)} is asked for"
            )
        self.used.append(name)
        return entry

    def of_one(self, part: str) -> tuple[int, ...]:
        """The shape of a tensor with one number, which may have 0, 1 or 2 dimensions."""
        entry = self.raw.entries.get(f"{self.module}.{part}")
        return entry.shape if entry is not None and entry.shape in ((), (1,), (1, 1)) else (1,)

    def whole(self, part: str) -> NDArray[Any]:
        return self.raw.whole(f"{self.module}.{part}")

    def rows(self, part: str, start: int, stop: int) -> NDArray[Any]:
        return self.raw.rows(f"{self.module}.{part}", start, stop)

    def scales(self, part: str) -> NDArray[np.float32]:
        """All scales of a tensor; a ModelError unless all are finite."""
        return self.finite(part, to_float32(self.whole(part)))

    def finite(self, part: str, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        if not np.isfinite(scales).all():
            raise ModelError(f"{quoted(f'{self.module}.{part}')} ({self.format}) holds a scale that is not a finite number")
        return scales

    def refuse(self, what: str) -> NoReturn:
        raise ModelError(f"the weight {quoted(self.module)} ({self.format}) {what}")

    def check_symmetric(self, zeros: NDArray[np.uint8], bits: int) -> None:
        """Refuse zero points that are not in the middle, where the configuration says "symmetric"."""
        if (zeros != 1 << (bits - 1)).any():
            self.refuse(f"has zero points other than {1 << (bits - 1)}, quantization_config says that it is symmetric")

    def check_group(self, group: int, columns: int) -> int:
        """The group; all columns where it stands for "no groups" (-1)."""
        group = columns if group == -1 else group
        if group < 1 or columns % group:
            self.refuse(f"has {columns} columns, which its groups of {group} do not divide")
        return group

    def whole_groups(self, group: int, columns: int) -> int:
        """The group; if the last one is incomplete, a smaller group that divides both."""
        smaller = math.gcd(group, columns) if group > 0 else 0
        return smaller if smaller and smaller % SMALLEST == 0 else self.check_group(group, columns)
