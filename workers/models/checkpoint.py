"""The tensors of a checkpoint, read row by row from disk: safetensors, sharded or not, and pickled ``.bin`` files.

safetensors files are read with plain ``pread`` rather than mapped: what is packed is read once, and mapped pages would
count as this process's memory although nothing needs them any more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import Tensor
from outrider.workers.errors import ModelError, first_line
from outrider.workers.models.cards import weight_files
from outrider.workers.models.files import open_ordinary
from outrider.workers.models.headers import ZIP, read_entries

# safetensors' names of number types, and how their values are handed on; bf16 has no NumPy type, its bits travel as uint16.
TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
MADV_DONTNEED = 4
# What says that it is torch's, its version, its machine, and the weights.
PICKLES_BEFORE_1_6 = 4

Rows = NDArray[Any]
Found = TypeVar("Found")


class Checkpoint(Protocol):
    def has(self, name: str) -> bool: ...

    def check(self, tensor: Tensor) -> None:
        """A ModelError that names the tensor if it is missing or has another shape."""

    def rows(self, tensor: Tensor, start: int, stop: int) -> Rows:
        """Rows (or elements of a vector) as float32, float16, or bf16 bits in uint16."""

    def done(self, tensor: Tensor) -> None:
        """The tensor will not be read again."""

    def close(self) -> None: ...


def open_checkpoint(path: Path, allow_pickle: bool = False) -> Checkpoint:
    files = weight_files(path)
    if not files:
        raise ModelError(f"{path} holds no weights: neither *.safetensors nor *.bin")
    if files[0].suffix == ".safetensors":
        return SafetensorsCheckpoint(path, files)
    return PickledCheckpoint(path, files, allow_pickle)


def _find(entries: dict[str, Found], tensor: Tensor, path: Path) -> Found:
    """By its full name, or by the name that a checkpoint of the bare decoder gives it."""
    for name in (tensor.name, tensor.name.split(".", 1)[1]):
        if name in entries:
            return entries[name]
    raise ModelError(f'{path} lacks the weight "{tensor.name}"')


def _check_shape(tensor: Tensor, shape: tuple[int, ...], path: Path) -> None:
    if shape != tensor.shape:
        raise ModelError(f'{path}: the weight "{tensor.name}" has shape {shape}, config.json asks for {tensor.shape}')


class SafetensorsCheckpoint:
    def __init__(self, path: Path, files: list[Path]) -> None:
        self._path = path
        self._entries = read_entries(path, files)
        self._open: dict[Path, int] = {}

    def has(self, name: str) -> bool:
        return name in self._entries

    def check(self, tensor: Tensor) -> None:
        entry = _find(self._entries, tensor, self._path)
        _check_shape(tensor, entry.shape, entry.file)
        if entry.type not in TYPES:
            raise ModelError(f'{entry.file}: the weight "{tensor.name}" is of type {entry.type}, which is not supported')

    def rows(self, tensor: Tensor, start: int, stop: int) -> Rows:
        entry = _find(self._entries, tensor, self._path)
        if entry.file not in self._open:
            self._open[entry.file] = open_ordinary(entry.file)
        type_ = TYPES[entry.type]
        values = np.empty((stop - start, *entry.shape[1:]), dtype=type_)
        row_bytes = values.nbytes // max(1, stop - start)
        buffer, taken = values.view(np.uint8).reshape(-1).data, 0
        while taken < values.nbytes:
            count = os.preadv(self._open[entry.file], [buffer[taken:]], entry.offset + start * row_bytes + taken)
            if count == 0:
                raise ModelError(f'{entry.file} ends inside the weight "{tensor.name}": the file is truncated')
            taken += count
        return values.astype(np.float32) if entry.type == "F64" else values

    def done(self, tensor: Tensor) -> None:
        pass

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


class PickledCheckpoint:
    """``.bin`` files, mapped by torch; ``weights_only`` keeps a pickle from running code unless that was asked for."""

    def __init__(self, path: Path, files: list[Path], allow_pickle: bool) -> None:
        self._path = path
        self._tensors: dict[str, Any] = {}
        for file in files:
            self._tensors |= _load_pickled(file, allow_pickle)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def check(self, tensor: Tensor) -> None:
        _check_shape(tensor, tuple(_find(self._tensors, tensor, self._path).shape), self._path)

    def rows(self, tensor: Tensor, start: int, stop: int) -> Rows:
        import torch

        part = _find(self._tensors, tensor, self._path).detach()[start:stop]
        if part.dtype == torch.bfloat16:
            return np.ascontiguousarray(part.contiguous().view(torch.int16).numpy()).view(np.uint16)
        if part.dtype not in (torch.float16, torch.float32):
            part = part.float()
        values: Rows = np.ascontiguousarray(part.numpy())
        return values

    def done(self, tensor: Tensor) -> None:
        """Gives the mapped pages back; they can be read again from the file."""
        storage = _find(self._tensors, tensor, self._path).untyped_storage()
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and storage.filename is not None:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_DONTNEED)

    def close(self) -> None:
        self._tensors.clear()


def _whole_pickle(file: Path) -> bool:
    """Whether it can be followed to its end, without doing anything that it says."""
    try:
        with file.open("rb") as stream:
            if stream.read(len(ZIP)) == ZIP:
                with zipfile.ZipFile(stream) as members:
                    name = next(name for name in members.namelist() if name.endswith("data.pkl"))
                    for _ in pickletools.genops(members.read(name)):
                        pass
                return True
            stream.seek(0)
            for _ in range(PICKLES_BEFORE_1_6):
                for _ in pickletools.genops(stream):
                    pass
    except Exception:  # the ways in which a pickle can be broken
        return False
    return True


def _load_pickled(file: Path, allow_pickle: bool) -> dict[str, Any]:
    import torch

    try:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=not allow_pickle, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used with files saved" not in str(error):
                raise
            loaded = torch.load(file, map_location="cpu", weights_only=not allow_pickle)  # the format before torch 1.6
    except pickle.UnpicklingError as error:
        if allow_pickle or not _whole_pickle(file):
            raise ModelError(f"{file} is damaged: its pickle cannot be read") from error
        raise ModelError(f"{file} holds more than weights; --allow-pickle runs what is in it") from error
    except Exception as error:  # a pickle can be wrong in every way that a program can
        raise ModelError(f"{file} cannot be read, it may be truncated: {first_line(error)}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{file} does not hold named weights")
    return {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
