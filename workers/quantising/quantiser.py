"""Quantises a checkpoint, one decoder layer after the other: one layer and the activations are in memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.kernels.program import Format, Kind, Program
from outrider.kernels.program import Tensor as Named
from outrider.workers.errors import ModelError, UsageError
from outrider.workers.models.checkpoint import Checkpoint, open_checkpoint
from outrider.workers.models.checkpoint_program import as_stored
from outrider.workers.models.families import build_mtp, build_program
from outrider.workers.models.families.mistral_large4 import frequency_factors
from outrider.workers.models.head_checkpoint import own_layer
from outrider.workers.models.model_info import check_unchanged, read_model_info
from outrider.workers.models.mtp import LAYOUTS
from outrider.workers.models.tied_head import has_untied_head
from outrider.workers.quantising.compressed import description, tensors_of
from outrider.workers.quantising.folder import THREADS, Folder, digest_of_tokens
from outrider.workers.quantising.forward import Buffers, Forward
from outrider.workers.quantising.grids import Form
from outrider.workers.quantising.layers import Layer, layers_of
from outrider.workers.quantising.methods import (
    GPTQ,
    Choice,
    best_of,
    rounded_in_all_ways,
    run_layer,
)
from outrider.workers.quantising.quantisable import check_free, described_program, group_of
from outrider.workers.quantising.summary import QuantiseSummary

# Raised with every change of the bytes that a plan gives: a killed run is continued by the same version only.
VERSION = 6
# One window in this many is held out of calibration; recipes are compared by it.
HELD_OUT_EVERY = 8
EXPERT = re.compile(r"\.experts\.\d+\.")
# The key in a layer's record for the number of its experts with too few tokens.
FEW = "few"
SCALE_TYPES = {"bfloat16": torch.bfloat16}

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of a quantisation. ``windows`` of calibration text have equal lengths; empty for a method that needs
    none."""

    path: str
    out: str
    bits: int
    method: str
    group: int | None
    windows: tuple[tuple[int, ...], ...]
    digest: str
    allow_pickle: bool = False
    threads: int = 0


def program_of(path: Path, allow_pickle: bool = False) -> tuple[Program, dict[str, Any]]:
    """The program of a checkpoint that can be quantised, with its own LM head if it has one, and its configuration."""
    program, values = described_program(path)
    checkpoint = open_checkpoint(path, allow_pickle)
    try:
        untied = has_untied_head(program, checkpoint)
        stored = as_stored(values, checkpoint)
    finally:
        checkpoint.close()
    own_head = {"tie_word_embeddings": False} if untied else {}
    if untied or stored != values:
        program = build_program(stored | own_head, Format.W4A8, source=str(path / "config.json"))
    return program, values | own_head


def choice_of(bits: int, method: str, group: int | None, program: Program, dtype: str) -> Choice:
    """The form of the quantised matrices; a UsageError where it is not possible."""
    form = Form(bits, group_of(program, bits, group), True, SCALE_TYPES.get(dtype, torch.float16))
    return Choice(method, form, activations=bits == 8)


def quantise(wanted: Wanted, tell: Tell) -> QuantiseSummary:
    """``tell`` gets lines of progress. A killed run is continued at its layer, with the same bytes as result."""
    model_info = read_model_info(wanted.path)
    check_unchanged(model_info.path, wanted.digest)
    source, out = Path(model_info.path), Path(wanted.out)
    check_free(out, source)
    program, values = program_of(source, wanted.allow_pickle)
    choice = choice_of(wanted.bits, wanted.method, wanted.group, program, model_info.dtype)
    windows = torch.tensor(wanted.windows, dtype=torch.int64)
    if choice.calibrated and len(windows) < 2:
        raise UsageError("--calibration: the text is too short; give some thousand tokens")
    plan = {
        "version": VERSION,
        "model": model_info.digest,
        "bits": wanted.bits,
        "method": wanted.method,
        "group": choice.form.group,
        "calibration": digest_of_tokens(windows),
        "torch": torch.__version__,
        THREADS: wanted.threads or torch.get_num_threads(),
    }
    layers = layers_of(program)
    folder = Folder(out, plan, len(layers))
    torch.set_num_threads(folder.threads)
    if folder.threads != plan[THREADS]:
        tell(f"note: this was begun with {folder.threads} threads, which decide bits of it, and goes on with as many")
    checkpoint = open_checkpoint(source, wanted.allow_pickle)
    try:
        with torch.inference_mode():
            _Quantiser(program, layers, choice, checkpoint, folder, windows, tell).run()
            check_unchanged(model_info.path, wanted.digest)
            return _finished(program, layers, choice, checkpoint, folder, source, values)
    finally:
        checkpoint.close()


class _Quantiser:
    def __init__(
        self,
        program: Program,
        layers: list[Layer],
        choice: Choice,
        checkpoint: Checkpoint,
        folder: Folder,
        windows: Tensor,
        tell: Tell,
    ) -> None:
        self._program = program
        self._layers = layers
        self._choice = choice
        self._checkpoint = checkpoint
        self._folder = folder
        self._tell = tell
        held = torch.arange(len(windows)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        if len(windows) < HELD_OUT_EVERY:
            held = torch.arange(len(windows)) == len(windows) - 1
        self._length = windows.shape[1] if len(windows) else 0
        # The held-out windows come last.
        self._tokens = torch.cat([windows[~held], windows[held]]).flatten()
        self._calibrating = int((~held).sum()) * self._length

    def run(self) -> None:
        done, state = self._folder.done()
        if self._choice.calibrated and state is None and done < len(self._layers):
            # The run was killed before it kept the first activations.
            done = 0
        if done:
            self._tell(f"going on behind layer {done} of {len(self._layers)}")
        buffers = self._beginning() if state is None and self._choice.calibrated else state or {}
        for layer in self._layers[done:]:
            buffers = self._round(layer, buffers)

    def _beginning(self) -> Buffers:
        """The operations before the first layer, over all calibration text."""
        first = self._layers[0].start
        named = [source for op in self._program.ops[:first] for index in (op.weight, op.bias) if index >= 0
                 for source in self._program.weights[index].sources]  # fmt: skip
        tensors, _ = read(self._checkpoint, named)
        buffers: Buffers = {}
        Forward(self._program, tensors, self._length).run(0, first, buffers, self._tokens)
        return buffers

    def _round(self, layer: Layer, buffers: Buffers) -> Buffers:
        program, choice, length = self._program, self._choice, self._length
        tensors, stored = read(self._checkpoint, layer.tensors(program))
        behind, loss = Buffers(), math.nan
        calibrating = {number: part[: self._calibrating] for number, part in buffers.items()}
        held_out = {number: part[self._calibrating :] for number, part in buffers.items()}
        weights = sum(math.prod(tensor.shape) for tensor in layer.matrices(program))
        recipes = choice.recipes_for(weights, [self._folder.told(index)["method"] for index in range(layer.index)])
        candidates = rounded_in_all_ways(program, layer, choice, tensors, stored, calibrating, length, recipes)
        best = candidates[0]
        if choice.calibrated:
            best, loss, last = best_of(program, layer, choice, candidates, tensors, held_out, length)
            first = best.activations or run_layer(program, layer, best.tensors, calibrating, length, choice.watch())
            behind = {number: torch.cat([first[number], last[number]]) for number in first}
        asked = {tensor.name: tensor for tensor in layer.tensors(program)}
        names = names_in(self._checkpoint, layer.tensors(program))
        vectors = {
            names.get(name, name): _as_in_checkpoint(asked[name], best.tensors[name].to(stored[name]))
            for name in tensors
            if name not in best.rounded
        }
        matrices = {
            part: tensor
            for name, each in best.rounded.items()
            for part, tensor in tensors_of(names.get(name, name), each).items()
        }
        told = {"method": best.name, "loss": repr(loss), FEW: str(best.few)}
        self._folder.keep_layer(layer.index, vectors | matrices, told)
        if choice.calibrated:
            self._folder.keep_state(layer.index + 1, behind)
        how = f"{best.name}, error {100 * loss:.3g}% on text held out" if choice.calibrated else best.name
        how += f", few tokens for {best.few} of {experts_of(program, layer)} experts" if best.few else ""
        self._tell(f"layer {layer.index + 1} of {len(self._layers)}: {how}")
        return behind


def _as_in_checkpoint(asked: Named, values: Tensor) -> Tensor:
    """In the shape in which it is stored there: a vector with other dimensions, a matrix (ERNIE 4.5 VL's router)
    transposed."""
    matrix = values.dim() > 1
    return values.T.contiguous() if asked.stored and matrix else values.reshape(asked.stored or asked.shape)


def _finished(
    program: Program,
    layers: list[Layer],
    choice: Choice,
    checkpoint: Checkpoint,
    folder: Folder,
    source: Path,
    values: Mapping[str, Any],
) -> QuantiseSummary:
    inside = {tensor.name for layer in layers for tensor in layer.tensors(program)}
    outside = {part.name: part for weight in program.weights for part in weight.sources if part.name not in inside}
    factors = frequency_factors(values)  # the program has them as numbers
    tensors, stored = read(checkpoint, [*outside.values(), *([factors] if factors else [])])
    own = names_in(checkpoint, [part for weight in program.weights for part in weight.sources])
    rest = {own.get(name, name): tensor.to(stored[name]) for name, tensor in tensors.items()}
    further = _mtp_tensors(checkpoint, values, source, program)
    rest |= {each.name: _as_stored(checkpoint, each) for each in further}
    # Names to ignore: linear layers outside of the decoder layers (the LM head, also if it is tied, and OPT's projections),
    # and matrices within them that are not quantised (those that latent attention has for each head).
    rounded = {tensor.name for layer in layers for tensor in layer.matrices(program)}
    names = {
        part.name.removesuffix(".weight")
        for op in program.ops
        if op.weight >= 0 and not program.weights[op.weight].table
        for part in program.weights[op.weight].sources
        if part.name not in rounded
    }
    embeddings = {name for name in names if name.rpartition(".")[2] in ("embed_tokens", "tokens_embed", "wte")}
    # Routers by their names here and in the checkpoint, since readers may use either.
    others = {own[f"{name}.weight"].removesuffix(".weight") for name in names if f"{name}.weight" in own}
    others |= {each.name.removesuffix(".weight") for each in further if len(each.shape) == 2}
    ignored = sorted((names - embeddings) | others | {"lm_head"})
    told = [folder.told(layer.index)["method"] for layer in layers]
    few = sum(int(folder.told(layer.index)[FEW]) for layer in layers)
    experts = sum(experts_of(program, layer) for layer in layers)
    ordered = any(GPTQ in method for method in told)
    config = _by_itself(values) | {"quantization_config": description(choice.form, choice.activations, ignored, ordered)}
    folder.finish(source, rest, config)
    counts = {method: told.count(method) for method in sorted(set(told))}
    weights = sum(math.prod(tensor.shape) for layer in layers for tensor in layer.matrices(program))
    bits = _stored_bits(program, layers, choice.form) / weights
    size = sum(file.stat().st_size for file in folder.out.glob("*.safetensors"))
    return QuantiseSummary(counts, bits, choice.form.group, size, few, experts)


def _mtp_tensors(checkpoint: Checkpoint, values: Mapping[str, Any], source: Path, program: Program) -> list[Named]:
    """The tensors of the layer for multi-token prediction, if there is one that can be a draft. They stay as they are: a
    draft is rounded on load."""
    file = str(source / "config.json")
    if values.get("model_type") not in LAYOUTS:
        return []
    of_model = {part.name for weight in program.weights for part in weight.sources}
    try:
        layer = build_mtp(own_layer(checkpoint, values, file), Format.BF16, source=file)
        named = dict.fromkeys(part for weight in layer.weights for part in weight.sources if part.name not in of_model)
        for part in named:
            checkpoint.check(part)
    except ModelError:
        return []
    return [replace(part, rows=(), transposed=False) for part in named]


def _by_itself(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model that is written by itself; that of a multimodal model's part does not name its class,
    by which readers choose."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(values.get("model_type")))
    return dict(values) if "architectures" in values or name is None else {"architectures": [name], **values}


def _stored_bits(program: Program, layers: list[Layer], form: Form) -> int:
    total = 0
    for layer in layers:
        for tensor in layer.matrices(program):
            rows, columns = tensor.shape
            groups = columns // form.width(columns)
            total += rows * (columns * form.bits + groups * (16 + (0 if form.symmetric else form.bits)))
    return total


def experts_of(program: Program, layer: Layer) -> int:
    """The number of experts of a layer."""
    return max((op.heads for op in program.ops[layer.start : layer.stop] if op.kind is Kind.EXPERTS), default=0)


def names_in(checkpoint: Checkpoint, named: list[Named]) -> dict[str, str]:
    """The checkpoint's own names of tensors that have another name here, such as Mixtral's experts: readers expect them.

    Not for experts stored together, nor for a bare decoder (without "model.") or an LM head by another name, which are
    written under the usual names.
    """
    found = {}
    for each in named:
        [name] = checkpoint.parts(each)
        together = ".experts." in each.name and not EXPERT.search(name)
        if not together and ".layers." in name and name not in (each.name, each.name.split(".", 1)[1]):
            found[each.name] = name
    return found


def read(checkpoint: Checkpoint, named: list[Named]) -> tuple[dict[str, Tensor], dict[str, torch.dtype]]:
    """Whole tensors as float32, and the types that they are stored in."""
    tensors: dict[str, Tensor] = {}
    stored: dict[str, torch.dtype] = {}
    for each in named:
        tensor = _as_stored(checkpoint, each)
        stored[each.name] = tensor.dtype
        tensors[each.name] = tensor.float()
        if not torch.isfinite(tensors[each.name]).all():
            file = checkpoint.file_of(each)
            raise ModelError(f'{file}: the weight "{each.name}" holds a value that is not a finite number')
        checkpoint.done(each)
    return tensors, stored


def _as_stored(checkpoint: Checkpoint, named: Named) -> Tensor:
    checkpoint.check(named)
    values = checkpoint.rows(named, 0, named.shape[0])
    if values.dtype == np.uint16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
