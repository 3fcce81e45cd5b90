"""Builds the native engine's program for a checkpoint, and checks that the checkpoint has exactly the tensors it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.kernels.program import Format, Program, Tensor, Weight
from outrider.kernels.quantised import Scheme
from outrider.kernels.weights import StorageChoice
from outrider.workers.errors import ModelError
from outrider.workers.models.checkpoint import Checkpoint, open_checkpoint
from outrider.workers.models.config_file import config_path, read_config
from outrider.workers.models.families import build_mtp, build_program
from outrider.workers.models.families.latent import BEHIND_EXPERTS, BY_HEADS, CORRECTIONS
from outrider.workers.models.families.mistral_large4 import FREQUENCY_FACTORS, frequency_factors
from outrider.workers.models.families.mixtures import FUSED
from outrider.workers.models.formats.configuration import Compressed
from outrider.workers.models.formats.exact_storage import AsInCheckpoint, FloatCodes
from outrider.workers.models.formats.gguf.checkpoint import GgufCheckpoint
from outrider.workers.models.formats.mlx import Mlx
from outrider.workers.models.formats.mlx_families import FIRST_HEAD
from outrider.workers.models.formats.modelopt import ModelOpt
from outrider.workers.models.formats.raw import to_float32
from outrider.workers.models.formats.unexpected_tensors import (
    of_cross_attention,
    of_further_layer,
    of_idle_experts,
    of_indexers,
    of_mtp,
    of_shared_keys,
    of_vision_experts,
    refuse_unexpected,
)
from outrider.workers.models.head_checkpoint import head_program, own_layer
from outrider.workers.models.heads import read_head
from outrider.workers.models.mtp import MtpLayer, model_of
from outrider.workers.models.tied_head import has_untied_head
from outrider.workers.precisions import Precision, rounding

# Parts of names of tensors with gate and up, of MiniMax M3 as transformers writes it.
FUSED_LAYERS = (".mlp.gate_up_proj.", ".shared_experts.gate_up_proj.")


@dataclass(frozen=True, slots=True)
class CheckpointProgram:
    """A program, and how the checkpoint is quantised: each scheme with the number of its matrices.

    ``dequantised`` are the schemes of matrices that are dequantised, if the program keeps the codes of others. ``rounded``
    says how floats are rounded on load.
    """

    program: Program
    quantised: str = ""
    schemes: tuple[tuple[Scheme, int], ...] = ()
    dequantised: tuple[tuple[Scheme, int], ...] = ()
    rounded: str = ""

    @property
    def kept(self) -> bool:
        """Whether codes are kept, rather than dequantised."""
        return any(weight.storage is not None for weight in self.program.weights)

    @property
    def weights(self) -> str:
        """How the weights are quantised, for job.json; empty for plain floats."""
        if self.rounded:
            return self.rounded
        said = ((self.schemes, "" if self.kept else "dequantised from "), (self.dequantised, "dequantised from "))
        lists = (("; ".join(f"{scheme} ({count})" for scheme, count in counted), before) for counted, before in said)
        return "; ".join(f"{before}{schemes}" for schemes, before in lists if schemes)


def read_program(
    path: Path, precision: Precision, allow_pickle: bool = False, states: Sequence[int] = ()
) -> CheckpointProgram:
    """Raises a ModelError if a tensor is missing, has another shape or type, or is unknown.

    ``states`` are the layers whose inputs a pass returns for a head. ``path`` may be that of a model's MTP layer.
    """
    if (head := read_head(path)) is not None:
        return CheckpointProgram(head_program(path, head, precision, allow_pickle), rounded=rounding(precision))
    model = model_of(path)
    checkpoint = open_checkpoint(model or path, allow_pickle)
    try:
        return _read_program(model or path, precision, checkpoint, states, mtp=model is not None)
    finally:
        checkpoint.close()


def as_stored(values: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """The configuration with what only the checkpoint's tensors say."""
    kind, names = values.get("model_type"), checkpoint.names
    # Published checkpoints of A.X-K1 lack the router's corrections, for which transformers takes zeros.
    if kind == "axk1" and not any(name.endswith(CORRECTIONS) for name in names):
        values = values | {CORRECTIONS: False}
    if any(name.endswith(FIRST_HEAD) for name in names):
        values = values | {BY_HEADS: True}
    if kind == "granitemoehybrid" and "model.layers.0.mlp.gate_proj.weight" in names:
        values = values | {FUSED: False}
    if kind == "minimax_m3_vl_text" and any(part in name for name in names for part in FUSED_LAYERS):
        values = values | {FUSED: True}
    if (factors := frequency_factors(values)) is not None:
        checkpoint.check(factors)
        values = values | {FREQUENCY_FACTORS: to_float32(checkpoint.rows(factors, 0, factors.count)).tolist()}
    return values


def _read_program(
    path: Path, precision: Precision, checkpoint: Checkpoint, states: Sequence[int], mtp: bool
) -> CheckpointProgram:
    file, values = config_path(path), read_config(path)
    quantised = checkpoint.quantisation is not None
    if quantised and precision.group:
        raise ModelError(
            f"{path}: the checkpoint comes quantised and has groups of its own; name the precision without a group"
        )
    format = precision.format
    storage_choice: StorageChoice | None = None
    if quantised and format.integer:
        # Checkpoints that mix schemes: the kernels keep the codes of most, those of fp8 in bf16, and dequantise the others.
        mixed = isinstance(checkpoint.quantisation, Mlx | ModelOpt | Compressed) and checkpoint.quantisation.mixed
        storage_choice = AsInCheckpoint(checkpoint, format, mixed)
    elif quantised and format is Format.BF16:
        storage_choice = FloatCodes(checkpoint)
    values = as_stored(values, checkpoint)
    layer = own_layer(checkpoint, values, str(file)) if mtp else None

    def build(**changes: Any) -> Program:
        if layer is None:
            return build_program(values | changes, format, precision.group, str(file), storage_choice, states)
        changed = replace(layer, values={**layer.values, **changes})
        return build_mtp(changed, format, precision.group, str(file), storage_choice)

    program = build()
    sources = _sources(program.weights)
    for source in sources:
        checkpoint.check(source)
    if has_untied_head(program, checkpoint):
        program = build(tie_word_embeddings=False)
        sources = _sources(program.weights)
    if isinstance(checkpoint.quantisation, Mlx) and checkpoint.quantisation.whole_norms:
        program = _with_whole_norms(program)
    factors = frequency_factors(values)
    asked = {name for source in (*sources, *([factors] if factors else [])) for name in checkpoint.parts(source)}
    left = (set(checkpoint.names) if layer is None else _of_layer(checkpoint, layer)) - asked
    passed_over = [of_shared_keys, of_indexers, of_cross_attention, of_vision_experts, of_idle_experts]
    passed_over += [of_further_layer, of_mtp] if layer is None else []
    left = {name for name in left if not any(is_so(name, values) for is_so in passed_over)}
    if values.get("model_type") == "axk1":  # its layers without experts have that norm in the checkpoint, but do not use it
        left = {name for name in left if not name.endswith(f".{BEHIND_EXPERTS}.weight")}
    refuse_unexpected(left, quantised)
    if checkpoint.quantisation is None:
        return CheckpointProgram(program, rounded=rounding(precision))
    counted: tuple[Counter[Scheme], Counter[Scheme]] = Counter(), Counter()
    apart = storage_choice.dequantised if isinstance(storage_choice, AsInCheckpoint) else set()
    for source in sources:
        if (matrix := checkpoint.matrix(source)) is not None:
            counted[source in apart][matrix.scheme] += 1
    kept, dequantised = (tuple(each.most_common()) for each in counted)
    return CheckpointProgram(program, checkpoint.quantisation.name, kept, dequantised)


def _of_layer(checkpoint: Checkpoint, layer: MtpLayer) -> set[str]:
    """The names of an MTP layer's own tensors."""
    if isinstance(checkpoint, GgufCheckpoint):
        return set(checkpoint.names_of_further(layer.target_layers))
    return set(filter(layer.holds, checkpoint.names))


def _with_whole_norms(program: Program) -> Program:
    """The program for a checkpoint whose norms are stored as 1 + w: nothing is added to them on load."""
    weights = (
        replace(weight, sources=tuple(replace(each, plus=0.0) for each in weight.sources)) for weight in program.weights
    )
    return replace(program, weights=tuple(weights))


def _sources(weights: tuple[Weight, ...]) -> list[Tensor]:
    return list(dict.fromkeys(source for weight in weights for source in weight.sources))
