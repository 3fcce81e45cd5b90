"""Whether a head fits a target: it reads the target's hidden states, and chooses among the target's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from outrider.kernels.builder import LAST_STATE
from outrider.kernels.program import Format
from outrider.workers.errors import ModelError, PairError
from outrider.workers.models.checkpoint import open_checkpoint
from outrider.workers.models.config_file import config_path, read_config
from outrider.workers.models.families import build_program
from outrider.workers.models.head_checkpoint import own_layer
from outrider.workers.models.heads import HeadConfig, read_head
from outrider.workers.models.model_info import ModelInfo, weight_files
from outrider.workers.models.mtp import LAYOUTS, model_of


def states_of(target: ModelInfo, draft: ModelInfo) -> tuple[int, ...]:
    """The layers of the target whose inputs the head reads; LAST_STATE for an MTP layer.

    A PairError where the head does not fit, or the native engine cannot hand out these inputs.
    """
    path = Path(target.path)
    values = read_config(path)
    model, head = model_of(draft.path), read_head(draft.path)
    misfit = _misfit(head, values, target) if head is not None else _misplaced(model, target)
    if misfit is not None:
        raise PairError(
            f'the head "{draft.name}" does not fit "{target.name}": {misfit}; choose a head made for this target, or '
            "--draft lookup"
        )
    layers = (LAST_STATE,) if head is None else head.layers_of(_layers(values))
    try:
        build_program(values, Format.BF16, source=str(config_path(path)), states=layers)
    except ModelError as error:
        raise PairError(
            f'the head "{draft.name}" cannot be used with "{target.name}", whose hidden states the native engine '
            "does not return: "
            f"{error}; choose a draft with a model of its own, or --draft lookup"
        ) from error
    return layers


def has_mtp(model: Path) -> bool:
    """Whether the checkpoint has a layer for multi-token prediction that can be a draft. Not one that the native engine
    does not read."""
    values, source = read_config(model), str(config_path(model))
    if str(values.get("model_type")) not in LAYOUTS or weight_files(model)[0].suffix == ".bin":
        return False
    try:
        with closing(open_checkpoint(model)) as checkpoint:
            own_layer(checkpoint, values, source)
    except ModelError:
        return False
    return True


def _misplaced(model: Path | None, target: ModelInfo) -> str | None:
    """What is wrong with a target of the MTP layer of ``model``."""
    if model is not None and model.samefile(target.path):
        return None
    return f"it is the layer for multi-token prediction of {model}"


def _layers(values: Mapping[str, Any]) -> int:
    count = values.get("num_hidden_layers")
    return count if type(count) is int else 0


def _misfit(head: HeadConfig, target: Mapping[str, Any], info: ModelInfo) -> str | None:
    hidden, count = target.get("hidden_size"), _layers(target)
    if hidden != head.target_hidden:
        return f"it reads states of {head.target_hidden:,} numbers, the target's have {hidden}"
    if head.vocabulary != info.vocabulary:
        return f"it was made for {head.vocabulary:,} tokens, the target has {info.vocabulary:,}"
    if outside := [layer for layer in head.layers_of(count) if not 0 <= layer < count]:
        return f"it reads the input of layer {outside[0]}, the target has layers 0 to {count - 1}"
    return None
