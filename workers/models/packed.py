"""Loads a model's packed weights: from the cache if they are there, else packed from the checkpoint tensor by tensor.

All packed weights are one piece of memory. A tensor is read in chunks of rows, each packed to its final address, so only a
few chunks are in memory beside the packed model.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import FACTORS, Program, Tensor, Weight
from outrider.kernels.quantised import QuantisedRows
from outrider.workers.errors import ModelError
from outrider.workers.models import packed_cache
from outrider.workers.models.checkpoint import Checkpoint, Rows, open_checkpoint
from outrider.workers.models.head_checkpoint import open_head
from outrider.workers.models.model_info import ModelInfo, check_unchanged
from outrider.workers.models.outlier_channels import Float32Array, channel_factors, norm_groups

# Raised with every change of what this module does to weights, or of the cache's files. (The kernels version the layout.)
LOADING_VERSION = 2
ALIGNMENT = 64
TILE_ROWS = 32
CHUNK_BYTES = 16 << 20

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


class Memory(Protocol):
    """Zeroed memory, whose address is fixed for the lifetime of this object."""

    @property
    def address(self) -> int: ...

    @property
    def view(self) -> memoryview: ...


class NotFiniteError(Exception):
    """A weight to be packed is NaN or infinite, or overflows in the requested precision."""


class Packer(Protocol):
    """The packing half of the kernels."""

    @property
    def version(self) -> str:
        """Changes with the layout of any packed format."""

    def allocate(self, size: int) -> Memory: ...

    def packed_bytes(self, weight: Weight) -> int: ...

    def pack_rows(self, weight: Weight, address: int, first_row: int, rows: Rows) -> None:
        """Pack rows (float32, float16, or bf16 bits as uint16) into the weight at the address."""

    def pack_codes(self, weight: Weight, address: int, first_row: int, rows: QuantisedRows) -> None:
        """Pack the codes and scales of quantised rows unchanged."""

    def pack_order(self, weight: Weight, address: int, order: NDArray[np.int32]) -> None:
        """Pack the input channel of each column, for weights whose columns have another order (GPTQ's act-order)."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A program and the address of each of its weights. ``cached``: they were read from the cache."""

    program: Program
    memory: Memory
    addresses: tuple[int, ...]
    size: int
    cached: bool
    notes: tuple[str, ...]


def load_packed(
    model_info: ModelInfo,
    program: Program,
    packer: Packer,
    threads: int = 1,
    allow_pickle: bool = False,
    progress: Progress = lambda done, total: None,
    target: ModelInfo | None = None,
) -> PackedModel:
    """Read the packed weights from the cache, or pack them and store them there. ``progress``: (bytes done, bytes in all).

    ``target`` is the target of a head, whose embedding the head may use.
    """
    offsets, size = _weight_offsets(program, packer)
    key = _cache_key(model_info, program, packer, offsets)
    if target is not None:
        key["target"] = target.digest
    name = hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:32]
    file = packed_cache.cache_directory() / f"{name}.packed"
    notes: list[str] = []
    memory = _from_cache(file, key, packer, size, threads, progress, notes)
    cached = memory is not None
    if memory is None:
        memory = packer.allocate(size)
        checkpoint: Checkpoint
        if target is None:
            checkpoint = open_checkpoint(Path(model_info.path), allow_pickle)
        else:
            checkpoint = open_head(Path(model_info.path), Path(target.path), allow_pickle)
        _pack(checkpoint, program, packer, memory, offsets, threads, progress)
        # Checked before storing: files that changed meanwhile must not be cached under this digest.
        for each in (model_info, target):
            if each is not None:
                check_unchanged(each.path, each.digest)
        _store(file, key, memory, threads, notes)
    for note in notes:
        logger.warning("%s: %s", model_info.name, note)
    addresses = tuple(memory.address + offset for offset in offsets)
    return PackedModel(program, memory, addresses, size, cached, tuple(notes))


def _from_cache(
    file: Path, key: dict[str, Any], packer: Packer, size: int, threads: int, progress: Progress, notes: list[str]
) -> Memory | None:
    """The packed weights from the cache; None where they are not there, or with a note where they cannot be used."""
    if not os.path.isfile(file):  # noqa: PTH113  (Path.is_file raises where a cache of another user's may not be looked into)
        return None
    memory = packer.allocate(size)
    try:
        packed_cache.load(file, key, memory.view, threads, progress)
    except (packed_cache.CacheUnusable, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        notes.append(f"packed weights in the cache were not used: {error}")
        return None
    return memory


def _store(file: Path, key: dict[str, Any], memory: Memory, threads: int, notes: list[str]) -> None:
    try:
        packed_cache.store(file, key, memory.view, threads)
    except OSError as error:
        notes.append(
            "packed weights were not cached, since this user has no home; the next start packs them again "
            "(OUTRIDER_CACHE names a folder)"
            if file.parent == packed_cache.NOWHERE
            else f"packed weights were not cached in {file.parent}: {error.strerror or error}; "
            "the next start packs them again (OUTRIDER_CACHE names another folder)"
        )


def _weight_offsets(program: Program, packer: Packer) -> tuple[list[int], int]:
    offsets, end = [], 0
    for weight in program.weights:
        offsets.append(end)
        end += -(-packer.packed_bytes(weight) // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _cache_key(model_info: ModelInfo, program: Program, packer: Packer, offsets: list[int]) -> dict[str, Any]:
    return {
        "model": model_info.digest,
        # Which channels are balanced depends on the operations that read a norm.
        "program": _digest((program.weights, norm_groups(program))),
        "packing": packer.version,
        "loading": LOADING_VERSION,
        "layout": _digest(offsets),
    }


def _digest(of: object) -> str:
    return hashlib.sha256(repr(of).encode()).hexdigest()


def _pack(
    checkpoint: Checkpoint,
    program: Program,
    packer: Packer,
    memory: Memory,
    offsets: list[int],
    threads: int,
    progress: Progress,
) -> None:
    try:
        # All tensors are checked before the long work begins.
        for weight in program.weights:
            for source in weight.sources:
                checkpoint.check(source)
        with ThreadPoolExecutor(max(1, threads)) as pool:
            # A quantised checkpoint is not rounded again, so balancing would be of no use.
            factors = _balance(checkpoint, program, pool) if checkpoint.quantisation is None else {}
            for index, (weight, offset) in enumerate(zip(program.weights, offsets, strict=True)):
                _pack_weight(checkpoint, weight, memory.address + offset, packer, pool, factors.get(index))
                progress(offset + packer.packed_bytes(weight), len(memory.view))
    finally:
        checkpoint.close()


def _balance(checkpoint: Checkpoint, program: Program, pool: ThreadPoolExecutor) -> dict[int, Float32Array]:
    """By the index of the weight: factors for the columns of a matrix, or for the elements of a norm's vectors."""
    found: dict[int, Float32Array] = {}
    for group in norm_groups(program):
        gain = _vector(checkpoint, program.weights[group.vectors[0]])
        maxima = np.max([_column_maxima(checkpoint, program.weights[index], pool) for index in group.matrices], axis=0)
        factors = channel_factors(gain, maxima)
        if factors is not None:
            found |= dict.fromkeys(group.matrices, factors) | dict.fromkeys(group.vectors, np.reciprocal(factors))
    return found


def _column_maxima(checkpoint: Checkpoint, weight: Weight, pool: ThreadPoolExecutor) -> Float32Array:
    maxima = np.zeros(weight.columns, dtype=np.float32)
    for source in weight.sources:
        chunks = [chunk for run in _runs(source) for chunk in _chunks(run.start, run.stop, 0, source)]

        def greatest(chunk: tuple[int, int], source: Tensor = source) -> Float32Array:
            rows = checkpoint.rows(source, *chunk)
            # The bits of non-negative bf16 numbers are ordered like the numbers.
            return _to_float32((rows & 0x7FFF).max(axis=0) if rows.dtype == np.uint16 else np.abs(rows).max(axis=0))

        # fmax ignores NaN, which is reported when it is packed.
        maxima = np.fmax(maxima, np.fmax.reduce(list(pool.map(greatest, chunks))))
    return maxima


def _pack_weight(
    checkpoint: Checkpoint,
    weight: Weight,
    address: int,
    packer: Packer,
    pool: ThreadPoolExecutor,
    factors: Float32Array | None,
) -> None:
    if weight.values:
        packer.pack_rows(weight, address, 0, np.asarray(weight.values, dtype=np.float32)[None])
        return
    if all(len(source.shape) == 1 for source in weight.sources):
        vector = _vector(checkpoint, weight)
        packer.pack_rows(weight, address, 0, (vector if factors is None else vector * factors)[None])
        return
    row = 0
    if weight.ordered:
        packer.pack_order(weight, address, _order(checkpoint, weight))
    for source in weight.sources:
        if source.transposed:
            rows = np.concatenate([_to_float32(checkpoint.rows(source, *taken)) for taken in source.ranges])
            _pack_named(checkpoint, packer, weight, address, row, np.ascontiguousarray(rows.T), source)
            row += source.count
            checkpoint.done(source)
            continue
        # In a gated weight, gate and up each begin at a tile.
        first_of_tiles = row if weight.gated else 0
        for run in _runs(source):

            def pack(
                chunk: tuple[int, int], source: Tensor = source, run: _Run = run, shift: int = row - run.start
            ) -> None:
                low, high, wanted = run.reading(*chunk)
                if weight.storage not in (None, FACTORS):
                    codes = _codes(checkpoint, source, low, high)
                    packer.pack_codes(weight, address, chunk[0] + shift, codes if wanted is None else codes.taken(wanted))
                    return
                rows = checkpoint.rows(source, low, high)
                rows = rows if wanted is None else rows[wanted]
                rows = rows.reshape(len(rows), -1)  # taps of a convolution have a dimension more
                rows = rows if factors is None else _to_float32(rows) * factors
                _pack_named(checkpoint, packer, weight, address, chunk[0] + shift, rows, source)

            # Chunks of one range share no tile, but neighbouring ranges may, so ranges are packed one after the other.
            for _ in pool.map(pack, _chunks(run.start, run.stop, row - first_of_tiles, source)):
                pass
            row += run.stop - run.start
        checkpoint.done(source)


def _codes(checkpoint: Checkpoint, source: Tensor, start: int, stop: int) -> QuantisedRows:
    matrix = checkpoint.matrix(source)
    if matrix is None:
        raise ModelError(f'the weight "{source.name}" is not quantised any more: the checkpoint has changed')
    return matrix.rows(start, stop)


def _order(checkpoint: Checkpoint, weight: Weight) -> NDArray[np.int32]:
    """The order of a weight's columns. All matrices of a weight have the same, or they would not be stacked; some experts
    may have none, beside others that have one."""
    matrix = checkpoint.matrix(weight.sources[0])
    if matrix is None:
        raise ModelError(f'"{weight.sources[0].name}" has lost its activation order: the checkpoint has changed')
    return np.arange(weight.columns, dtype=np.int32) if matrix.order is None else matrix.order


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive rows ``start`` to ``stop`` of a tensor; with ``order``, position i takes row order[i]."""

    start: int
    stop: int
    order: NDArray[np.int64] | None = None

    def reading(self, start: int, stop: int) -> tuple[int, int, NDArray[np.int64] | None]:
        """For positions ``start`` to ``stop``: the range of rows to read, and the indices within it (None: all in
        order)."""
        if self.order is None:
            return start, stop, None
        wanted = self.order[start - self.start : stop - self.start]
        low = int(wanted.min())
        return low, int(wanted.max()) + 1, wanted - low


def _runs(source: Tensor) -> list[_Run]:
    """The source's ranges; single rows that are a permutation of consecutive ones (interleaved rope) become one run."""
    ranges = source.ranges
    if all(stop - start > 1 for start, stop in ranges):
        return [_Run(start, stop) for start, stop in ranges]
    order = np.concatenate([np.arange(start, stop) for start, stop in ranges])
    start, stop = int(order.min()), int(order.max()) + 1
    if not np.array_equal(np.sort(order), np.arange(start, stop)):
        return [_Run(start, stop) for start, stop in ranges]
    return [_Run(start, stop, None if len(ranges) == 1 else order)]


def _chunks(start: int, stop: int, packed_row: int, source: Tensor) -> Iterator[tuple[int, int]]:
    """Divide rows ``start`` to ``stop`` into chunks that end at tiles."""
    rows = max(TILE_ROWS, CHUNK_BYTES // (4 * source.shape[1]) // TILE_ROWS * TILE_ROWS)
    end = start + rows - packed_row % TILE_ROWS
    while start < stop:
        yield start, min(end, stop)
        start, end = min(end, stop), end + rows


def _vector(checkpoint: Checkpoint, weight: Weight) -> Float32Array:
    parts = []
    for source in weight.sources:
        for run in _runs(source):
            low, high, wanted = run.reading(run.start, run.stop)
            rows = checkpoint.rows(source, low, high)
            part = _to_float32(rows if wanted is None else rows[wanted]) + np.float32(source.plus)
            if not np.isfinite(part).all():
                raise _not_finite(checkpoint, source)
            parts.append(part)
    return np.concatenate(parts)


def _pack_named(
    checkpoint: Checkpoint, packer: Packer, weight: Weight, address: int, row: int, rows: Rows, source: Tensor
) -> None:
    try:
        packer.pack_rows(weight, address, row, rows)
    except NotFiniteError as error:
        if np.isfinite(_to_float32(rows)).all():
            raise ModelError(
                f'{checkpoint.file_of(source)}: the weight "{source.name}" holds a value that is too large for this '
                "precision; choose fp32 (--precision, of a draft --draft-precision)"
            ) from error
        raise _not_finite(checkpoint, source) from error


def _not_finite(checkpoint: Checkpoint, source: Tensor) -> ModelError:
    file = checkpoint.file_of(source)
    return ModelError(f'{file}: the weight "{source.name}" holds a value that is not a finite number')


def _to_float32(values: Rows) -> Float32Array:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
