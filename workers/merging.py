"""Merges a LoRA adapter into a model: W + scale B A for each matrix that it changes.

The model's files are copied, and the changed matrices are overwritten in the copies.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.packing import to_bf16
from outrider.workers.errors import ModelError, UsageError
from outrider.workers.models.adapter import FLOATS, Adapter, Change
from outrider.workers.models.files import SETTINGS, TEMPLATE_SUFFIX, holds_tokenizer, read_json, sync
from outrider.workers.models.formats.gguf.file import is_gguf
from outrider.workers.models.formats.mlx import KEY as OF_MLX
from outrider.workers.models.formats.other_names import HEAD, OTHER_HEADS
from outrider.workers.models.formats.raw import TYPES, RawTensors, to_float32
from outrider.workers.models.formats.section import KEY, names_of_layer
from outrider.workers.models.headers import Entry, quoted, read_entries, safetensors_of
from outrider.workers.models.language_model import language_name
from outrider.workers.models.model_info import described

CONFIG = "config.json"
SUFFIX = ".unfinished"
# The ends of embeddings' names. A model with tied embeddings uses that matrix as its LM head, too.
EMBEDDINGS = tuple(f"{name}.weight" for name in ("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings"))
# Families that store the transpose of a linear layer's matrix: [inputs, outputs] (transformers' Conv1D).
TRANSPOSED = ("gpt2", "openai-gpt")
# This many rows of a matrix are merged at a time.
ROWS = 1024
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Merged:
    """How many matrices were changed, how many tensors replaced, and the bytes of all weights."""

    changed: int
    replaced: int
    size: int


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The model's tensors that the adapter changes, by the adapter's names. ``transposed``: the model stores its matrices
    as [inputs, outputs]."""

    entries: Mapping[str, Entry]
    transposed: bool


def check_mergeable(base: Path, adapter: Adapter) -> MergePlan:
    """The tensors to change; a ModelError where the adapter cannot be merged into this model."""
    if is_gguf(base):
        raise ModelError(
            f"{base} is a GGUF file, and adapters are merged into safetensors only; name the checkpoint that it was "
            "made from"
        )
    values = read_json(base / CONFIG)
    if values.get(KEY) or values.get(OF_MLX):
        raise ModelError(
            f"{base} is quantised, and adapters are merged into unquantised weights only: name the checkpoint that it was "
            "made from (--model)"
        )
    files = safetensors_of(base)
    if not files:
        raise ModelError(f"{base} holds no safetensors, and adapters are merged into safetensors only")
    stored = read_entries(base, files)
    tied = not any(map(_is_head, stored))
    found = {name: _entry(stored, adapter, name) for name in (*map(weight_of, adapter.changes), *adapter.whole)}
    of_tokens = {weight_of(change) for change in adapter.changes if change.embedding}
    for name in found:
        if tied and (name in of_tokens or name.endswith(EMBEDDINGS)):
            raise ModelError(
                f"{adapter.path} changes {quoted(name)}, which is tied to the LM head: the adapter does not change the "
                "head, and merging would"
            )
    plan = MergePlan(found, values.get("model_type") in TRANSPOSED)
    for change in adapter.changes:
        _check_shape(adapter, weight_of(change), _shape_and_orientation(plan, change)[0], found[weight_of(change)])
    for name, entry in adapter.whole.items():
        _check_shape(adapter, name, entry.shape, found[name])
    _check_copies(stored, adapter, tied)
    return plan


def _is_head(name: str) -> bool:
    """Whether a tensor is the LM head. The other names are also ends of names of layers' matrices."""
    return name.endswith(HEAD) or (language_name(name) or name) in OTHER_HEADS


def _check_copies(stored: Mapping[str, Entry], adapter: Adapter, tied: bool) -> None:
    model, own = RawTensors(stored), RawTensors(adapter.copies)
    try:
        for name, entry in adapter.copies.items():
            of_model = (
                next((each for each in stored if each.endswith(EMBEDDINGS)), name) if tied and _is_head(name) else name
            )
            tensor = _entry(stored, adapter, of_model)
            _check_shape(adapter, name, entry.shape, tensor)
            of_model = next(each for each in stored if stored[each] is tensor)
            if not np.array_equal(to_float32(model.whole(of_model)), to_float32(own.whole(name))):
                raise ModelError(
                    f"{adapter.path} holds {quoted(name)}, which is not the model's: it was made for another model, or "
                    "trained that as well and does not say so"
                )
    finally:
        model.close()
        own.close()


def _check_shape(adapter: Adapter, name: str, shape: tuple[int, ...], tensor: Entry) -> None:
    if shape != tensor.shape:
        raise ModelError(
            f"{adapter.path} changes {quoted(name)} by a matrix of the shape {shape}, the model's has {tensor.shape}: the "
            "adapter is for another model, or for one with added tokens, which is not supported"
        )


def weight_of(change: Change) -> str:
    return f"{change.module}.weight"


def _shape_and_orientation(plan: MergePlan, change: Change) -> tuple[tuple[int, int], bool]:
    """The shape of the matrix that is added to the model's, and whether that is (B A) transposed."""
    transposed = change.embedding or plan.transposed
    return (change.shape[::-1] if transposed else change.shape), transposed


def _entry(stored: Mapping[str, Entry], adapter: Adapter, name: str) -> Entry:
    alone = language_name(name) or name
    own = next((each for each in (name, *names_of_layer(alone)) if each in stored), None)
    if own is None:
        raise ModelError(f"{adapter.path} changes {quoted(name)}, which the model does not have: is it of another model?")
    entry = stored[own]
    if entry.type not in FLOATS or len(entry.shape) not in (1, 2):
        raise ModelError(
            f"{entry.file}: {quoted(own)} is of type {entry.type} and shape {entry.shape}, and adapters change float "
            "vectors and matrices only"
        )
    return entry


def merge(base: Path, adapter: Adapter, out: Path, say: Say) -> Merged:
    """Written to a folder beside ``out`` first, which is renamed once it is complete."""
    plan = check_mergeable(base, adapter)
    partial = out.with_name(out.name + SUFFIX)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        size = _copy(base, adapter, partial, say)
        _write(plan, adapter, partial, say)
        for file in partial.rglob("*"):
            sync(file)
        sync(partial)
        partial.rename(out)
        sync(out.parent)
    except OSError as error:
        raise UsageError(f"--out: {partial} cannot be written: {error.strerror}") from None
    return Merged(len(adapter.changes), len(adapter.whole), size)


def _copy(base: Path, adapter: Adapter, out: Path, say: Say) -> int:
    """Copies the weights and the files that describe the model. The adapter's tokenizer, where it has one, replaces the
    model's. The bytes of the weights."""
    own = [file for file in described(adapter.path) if of_tokenizer(file)]
    brings = any(map(holds_tokenizer, own))
    kept = [file for file in described(base) if not (brings and of_tokenizer(file))]
    for source, files in ((base, kept), (adapter.path, own if brings else [])):
        for file in files:
            copy = out / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    size = 0
    for file in safetensors_of(base):
        say(f"copying {file.name}")
        shutil.copyfile(file, out / file.name)
        size += file.stat().st_size
    return size


def of_tokenizer(file: Path) -> bool:
    return holds_tokenizer(file) or file.name in (*SETTINGS, "chat_template.json") or file.suffix == TEMPLATE_SUFFIX


def _write(plan: MergePlan, adapter: Adapter, out: Path, say: Say) -> None:
    read = RawTensors(plan.entries)
    own = RawTensors({name: entry for change in adapter.changes for name, entry in _named(change)} | dict(adapter.whole))
    try:
        for number, change in enumerate(adapter.changes, 1):
            say(f"merging {change.module} ({number} of {len(adapter.changes)})")
            _add_change(plan, change, read, own, out)
        for name in adapter.whole:
            _overwrite(plan.entries[name], 0, to_float32(own.whole(name)), out)
    finally:
        read.close()
        own.close()


def _named(change: Change) -> tuple[tuple[str, Entry], tuple[str, Entry]]:
    return (f"{change.module} A", change.a), (f"{change.module} B", change.b)


def _add_change(plan: MergePlan, change: Change, read: RawTensors, own: RawTensors, out: Path) -> None:
    """W + scale B A in float64, rounded once."""
    a, b = (to_float32(own.whole(name)).astype(np.float64) for name, _ in _named(change))
    if _shape_and_orientation(plan, change)[1]:
        a, b = b.T, a.T
    name = weight_of(change)
    tensor = plan.entries[name]
    for start in range(0, tensor.shape[0], ROWS):
        stop = min(start + ROWS, tensor.shape[0])
        with np.errstate(all="ignore"):  # NaN and infinity are refused where they are written
            change_of_rows = b[start:stop] @ a * change.scale
            weights = to_float32(read.rows(name, start, stop)) + change_of_rows
        _overwrite(tensor, start, weights, out)


def _overwrite(tensor: Entry, start: int, weights: NDArray[np.floating], out: Path) -> None:
    """Overwrite the rows from ``start`` on of the tensor in the copied file."""
    with np.errstate(over="ignore"):
        single = weights.astype(np.float32)
        stored = to_bf16(single) if tensor.type == "BF16" else single.astype(TYPES[tensor.type])
    if not np.isfinite(to_float32(stored)).all():
        raise ModelError(f"{tensor.file}: a merged weight is no finite number in {tensor.type}")
    offset = tensor.offset + start * stored.nbytes // max(1, len(stored))
    with (out / tensor.file.name).open("r+b") as stream:
        stream.seek(offset)
        stream.write(np.ascontiguousarray(stored).tobytes())
