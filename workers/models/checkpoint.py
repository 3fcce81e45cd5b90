"""The tensors of a checkpoint, read row by row from disk: safetensors, sharded or not, and pickled ``.bin`` files.

safetensors may be quantised (formats/): then a tensor is either a quantised matrix, whose codes can be read, or a plain
one.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import pickletools
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import Tensor
from outrider.kernels.quantised import natural_order
from outrider.workers.errors import ModelError, first_line
from outrider.workers.models.config_file import NAME, quantisation_of
from outrider.workers.models.files import read_json
from outrider.workers.models.formats import mistral_names
from outrider.workers.models.formats.configuration import Quantisation
from outrider.workers.models.formats.experts import Place, place_of
from outrider.workers.models.formats.gguf.checkpoint import GgufCheckpoint
from outrider.workers.models.formats.gguf.file import is_gguf
from outrider.workers.models.formats.joined_experts import joined_matrix
from outrider.workers.models.formats.matrix import Matrix
from outrider.workers.models.formats.mlx import Mlx
from outrider.workers.models.formats.mlx_families import as_transformers_names
from outrider.workers.models.formats.other_names import HEAD, HEADS, names_of
from outrider.workers.models.formats.raw import RawTensors
from outrider.workers.models.formats.section import KEY
from outrider.workers.models.formats.unexpected_tensors import check_plain
from outrider.workers.models.headers import ZIP, read_entries
from outrider.workers.models.language_model import (
    MAYBE_TRANSPOSED_EXPERTS,
    TRANSPOSED_EXPERTS,
    is_multimodal,
    language_name,
)
from outrider.workers.models.model_info import weight_files

# The types of plain weights, by safetensors' names.
FLOATS = ("F32", "BF16", "F16", "F64")
# The types of integers and booleans (which some tools write as bytes).
NUMBERS = ("I64", "I32", "I8", "U8", "BOOL")
WEIGHT = ".weight"
MADV_DONTNEED = 4
# The pickles in a file of torch before 1.6: its magic number, its version, the machine, and the weights.
PICKLES_BEFORE_1_6 = 4

Rows = NDArray[Any]
Found = TypeVar("Found")


class Checkpoint(Protocol):
    # How the checkpoint is quantised; None where it is not.
    quantisation: Quantisation | None

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors, without biases of zeros that some tools add."""

    def has(self, name: str) -> bool: ...

    def check(self, tensor: Tensor) -> None:
        """A ModelError that names the tensor if it is missing or has another shape."""

    def rows(self, tensor: Tensor, start: int, stop: int) -> Rows:
        """Rows (or elements of a vector) as float32, float16, or bf16 bits in uint16."""

    def matrix(self, tensor: Tensor) -> Matrix | None:
        """A quantised matrix with its codes; None where the tensor is plain."""

    def type_of(self, tensor: Tensor) -> str:
        """The type of a plain tensor, by safetensors' names."""

    def numbers(self, name: str) -> NDArray[np.int64]:
        """A vector of integers, or of booleans as 0 and 1."""

    def parts(self, tensor: Tensor) -> Collection[str]:
        """The names of the stored tensors that it is read from."""

    def file_of(self, tensor: Tensor) -> Path:
        """The file that it is read from, for a sentence."""

    def done(self, tensor: Tensor) -> None:
        """The tensor will not be read again."""

    def close(self) -> None: ...


def open_checkpoint(path: Path, allow_pickle: bool = False) -> Checkpoint:
    files = weight_files(path)
    if not files:
        raise ModelError(f"{path} holds no weights: neither *.safetensors nor *.bin")
    if is_gguf(path):
        return GgufCheckpoint(path)
    quantisation = quantisation_of(path)
    values = read_json(path / NAME)
    kind = str(values.get("model_type"))
    if files[0].suffix == ".safetensors":
        transposed = True if kind in TRANSPOSED_EXPERTS else None if kind in MAYBE_TRANSPOSED_EXPERTS else False
        return SafetensorsCheckpoint(path, files, quantisation, kind, transposed)
    if quantisation is not None:
        raise ModelError(f"{path} is quantised ({quantisation.name}) and lies in .bin files; it is read from safetensors")
    return PickledCheckpoint(path, files, allow_pickle, kind)


def _of_language(tensors: Mapping[str, Found], kind: str) -> dict[str, Found]:
    """The tensors of the language model, by the names that text-only checkpoints have. ``kind``: the "model_type"."""
    if is_multimodal({"model_type": kind}):
        tensors = {own: tensor for name, tensor in tensors.items() if (own := language_name(name)) is not None}
    return mistral_names.as_transformers_names(tensors) if kind in mistral_names.KINDS else dict(tensors)


def _find(entries: Mapping[str, Found], tensor: Tensor, path: Path) -> Found:
    for name in names_of(tensor.name):
        if name in entries:
            return entries[name]
    raise ModelError(f'{path} lacks the weight "{tensor.name}"')


def _check_shape(tensor: Tensor, shape: tuple[int, ...], path: Path) -> None:
    asked = tensor.stored or tensor.shape
    if shape != asked and (shape, asked) != ((), (1,)):  # a scalar is a vector of one
        raise ModelError(f'{path}: the weight "{tensor.name}" has shape {shape}, config.json asks for {asked}')


def _as_asked(tensor: Tensor, whole: Any) -> Any:
    """A tensor that is stored transposed, or with other dimensions, in the shape that the program asks for (NumPy or
    torch)."""
    return whole.T if len(tensor.shape) == 2 else whole.reshape(-1)


class SafetensorsCheckpoint:
    """Plain tensors as stored, and quantised ones dequantised.

    ``kind``: the "model_type". ``transposed``: whether experts that are stored in one
    tensor are transposed (None: the shapes tell).
    """

    def __init__(
        self,
        path: Path,
        files: list[Path],
        quantisation: Quantisation | None = None,
        kind: str = "",
        transposed: bool | None = False,
    ) -> None:
        self._path = path
        entries = _of_language(read_entries(path, files), kind)
        if isinstance(quantisation, Mlx):
            entries = as_transformers_names(entries)
        self._raw = RawTensors(entries)
        self._transposed = transposed
        self._entries = self._raw.entries
        self.quantisation = quantisation
        self._matrices: dict[Tensor, Matrix | None] = {}
        if quantisation is None:
            check_plain(self._entries)

    @property
    def names(self) -> Collection[str]:
        return [name for name in self._entries if not self._is_idle_bias(name)]

    def _is_idle_bias(self, name: str) -> bool:
        """AutoGPTQ wrote a bias of zeros with the codes of every layer, even where the model has none."""
        module, _, last = name.rpartition(".")
        return last == "bias" and f"{module}.qweight" in self._entries and not self._raw.whole(name).any()

    def has(self, name: str) -> bool:
        return any(each in self._entries for each in (HEADS if name == HEAD else (name,)))

    def matrix(self, tensor: Tensor) -> Matrix | None:
        if tensor not in self._matrices:
            self._matrices[tensor] = self._matrix(tensor)
        return self._matrices[tensor]

    def _matrix(self, tensor: Tensor) -> Matrix | None:
        if self.quantisation is None or len(tensor.shape) != 2 or not tensor.name.endswith(WEIGHT):
            return None
        shape = (tensor.shape[0], tensor.shape[1])
        if (place := self._place(tensor)) is not None:
            return joined_matrix(self.quantisation, self._raw, place, shape)
        modules = (name.removesuffix(WEIGHT) for name in names_of(tensor.name))
        found = (self.quantisation.matrix(self._raw, module, shape) for module in modules)
        return next((matrix for matrix in found if matrix is not None), None)

    def _place(self, tensor: Tensor) -> Place | None:
        """The place of an expert's matrix in a tensor that holds all experts; None where it has a tensor of its own."""
        if any(name in self._entries for name in names_of(tensor.name)):
            return None
        return place_of(tensor, self._entries, self._transposed)

    def type_of(self, tensor: Tensor) -> str:
        place = self._place(tensor)
        return _find(self._entries, tensor, self._path).type if place is None else self._entries[place.source].type

    def numbers(self, name: str) -> NDArray[np.int64]:
        entry = self._entries[name]
        if entry.type not in NUMBERS or len(entry.shape) != 1:
            raise ModelError(f'{entry.file}: "{name}" must be a vector of whole numbers')
        return self._raw.whole(name).astype(np.int64)

    def parts(self, tensor: Tensor) -> Collection[str]:
        matrix = self.matrix(tensor)
        if matrix is not None:
            return matrix.parts
        if (place := self._place(tensor)) is not None:
            return (place.source,)
        return [name for name in names_of(tensor.name) if name in self._entries][:1]

    def file_of(self, tensor: Tensor) -> Path:
        return self._entries[next(iter(self.parts(tensor)))].file

    def check(self, tensor: Tensor) -> None:
        if self.matrix(tensor) is not None:
            return
        place = self._place(tensor)
        entry = _find(self._entries, tensor, self._path) if place is None else self._entries[place.source]
        _check_shape(tensor, entry.shape if place is None else place.shape(entry), entry.file)
        if entry.type not in FLOATS:
            known = "" if self.quantisation is None else f", and {KEY} ({self.quantisation.name}) does not say what it is"
            raise ModelError(
                f'{entry.file}: the weight "{tensor.name}" is of type {entry.type}, which is not supported{known}'
            )

    def rows(self, tensor: Tensor, start: int, stop: int) -> Rows:
        matrix = self.matrix(tensor)
        if matrix is not None:
            return natural_order(matrix.rows(start, stop).dequantise(), matrix.order)
        if (place := self._place(tensor)) is not None:
            entry, values = self._entries[place.source], place.rows(self._raw, start, stop)
        else:
            entry = _find(self._entries, tensor, self._path)
            name = next(name for name in names_of(tensor.name) if name in self._entries)
            values = self._rows(name, tensor, start, stop)
        return values.astype(np.float32) if entry.type == "F64" else values

    def _rows(self, name: str, tensor: Tensor, start: int, stop: int) -> Rows:
        if not tensor.stored:
            return self._raw.rows(name, start, stop)
        return np.ascontiguousarray(_as_asked(tensor, self._raw.whole(name))[start:stop])

    def done(self, tensor: Tensor) -> None:
        matrix = self.matrix(tensor)
        if matrix is not None:
            matrix.done()

    def close(self) -> None:
        self._raw.close()


class PickledCheckpoint:
    """``.bin`` files, mapped by torch; ``weights_only`` keeps a pickle from running code unless that was asked for."""

    quantisation: Quantisation | None = None

    def __init__(self, path: Path, files: list[Path], allow_pickle: bool, kind: str = "") -> None:
        self._path = path
        self._tensors: dict[str, Any] = {}
        for file in files:
            self._tensors |= _load_pickled(file, allow_pickle)
        self._tensors = _of_language(self._tensors, kind)
        check_plain(self._tensors)

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def has(self, name: str) -> bool:
        return any(each in self._tensors for each in (HEADS if name == HEAD else (name,)))

    def matrix(self, tensor: Tensor) -> None:
        return None

    def type_of(self, tensor: Tensor) -> str:
        types = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
        return types.get(str(_find(self._tensors, tensor, self._path).dtype), "F32")

    def numbers(self, name: str) -> NDArray[np.int64]:
        values = self._tensors[name]
        if values.is_floating_point() or values.is_complex() or values.ndim != 1:
            raise ModelError(f'{self._path}: "{name}" must be a vector of whole numbers')
        found: NDArray[np.int64] = values.numpy().astype(np.int64)
        return found

    def parts(self, tensor: Tensor) -> Collection[str]:
        return [name for name in names_of(tensor.name) if name in self._tensors][:1]

    def file_of(self, tensor: Tensor) -> Path:
        return self._path

    def check(self, tensor: Tensor) -> None:
        _check_shape(tensor, tuple(_find(self._tensors, tensor, self._path).shape), self._path)

    def rows(self, tensor: Tensor, start: int, stop: int) -> Rows:
        import torch

        whole = _find(self._tensors, tensor, self._path).detach()
        whole = whole if whole.ndim else whole[None]
        part = (_as_asked(tensor, whole) if tensor.stored else whole)[start:stop]
        if part.dtype == torch.bfloat16:
            return np.ascontiguousarray(part.contiguous().view(torch.int16).numpy()).view(np.uint16)
        if part.dtype not in (torch.float16, torch.float32):
            part = part.float()
        values: Rows = np.ascontiguousarray(part.numpy())
        return values

    def done(self, tensor: Tensor) -> None:
        """Release the mapped pages; they can be read from the file again."""
        storage = _find(self._tensors, tensor, self._path).untyped_storage()
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and storage.filename is not None:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_DONTNEED)

    def close(self) -> None:
        self._tensors.clear()


def _whole_pickle(file: Path) -> bool:
    """Whether the pickle's operations can be parsed to the end, without executing any."""
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
        raise ModelError(f"{file} holds more than weights; --allow-pickle runs the code in it") from error
    except Exception as error:  # a pickle can be wrong in every way that a program can
        raise ModelError(f"{file} cannot be read, it may be truncated: {first_line(error)}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{file} does not hold named weights")
    return {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
