"""The checkpoint of a head (EAGLE-3): its own tensors, and the target's embedding if it has none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.program import Program, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.checkpoint import Checkpoint, Rows, open_checkpoint
from outrider.workers.models.families import build_head
from outrider.workers.models.families.eagle3 import OWN_EMBEDDING, TARGETS_EMBEDDING
from outrider.workers.models.formats.configuration import Quantisation
from outrider.workers.models.formats.matrix import Matrix
from outrider.workers.models.formats.mlx import Mlx
from outrider.workers.models.formats.unexpected_tensors import refuse_unexpected
from outrider.workers.models.heads import HeadConfig
from outrider.workers.models.mtp import MtpLayer, model_of, mtp_layer
from outrider.workers.precisions import Precision

# d2t: target id - head id of each of the head's tokens. t2d: for each of the target's tokens, whether the head has it.
OFFSETS, KNOWN = "d2t", "t2d"
# Tensors that are not needed to run a head.
OF_TRAINING = frozenset((KNOWN, OFFSETS, "verifier_lm_head.weight", "verifier_norm.weight"))


class HeadCheckpoint:
    """Reads the target's embedding from the target, all other tensors from the head."""

    def __init__(self, head: Checkpoint, target: Checkpoint) -> None:
        self._head, self._target = head, target
        self.quantisation: Quantisation | None = None

    def _of(self, tensor: Tensor) -> Checkpoint:
        return self._target if tensor.name == TARGETS_EMBEDDING else self._head

    @property
    def names(self) -> Collection[str]:
        return self._head.names

    def has(self, name: str) -> bool:
        return self._head.has(name)

    def check(self, tensor: Tensor) -> None:
        self._of(tensor).check(tensor)

    def rows(self, tensor: Tensor, start: int, stop: int) -> Rows:
        return self._of(tensor).rows(tensor, start, stop)

    def matrix(self, tensor: Tensor) -> Matrix | None:
        return None

    def type_of(self, tensor: Tensor) -> str:
        return self._of(tensor).type_of(tensor)

    def numbers(self, name: str) -> NDArray[np.int64]:
        return self._head.numbers(name)

    def parts(self, tensor: Tensor) -> Collection[str]:
        return self._of(tensor).parts(tensor)

    def file_of(self, tensor: Tensor) -> Path:
        return self._of(tensor).file_of(tensor)

    def done(self, tensor: Tensor) -> None:
        self._of(tensor).done(tensor)

    def close(self) -> None:
        self._head.close()
        self._target.close()


def open_head(head: Path, target: Path, allow_pickle: bool = False) -> Checkpoint:
    """The head's own tensors and the target's embedding; or of an MTP layer the target's checkpoint, which has both."""
    if model_of(head) is not None:
        return open_checkpoint(target, allow_pickle)
    return HeadCheckpoint(open_checkpoint(head, allow_pickle), open_checkpoint(target, allow_pickle))


def own_layer(checkpoint: Checkpoint, values: Mapping[str, Any], source: str) -> MtpLayer:
    """The checkpoint's layer for multi-token prediction; a ModelError where it has none that can be a draft."""
    layer = mtp_layer(values, source)
    if isinstance(checkpoint.quantisation, Mlx):
        raise ModelError(f"{source}: multi-token prediction (--draft mtp) is not supported for MLX's checkpoints")
    projection = layer.name(layer.layout.projection)
    # A quantised projection has codes in place of the weight.
    stored = checkpoint.has(projection) or any(
        name.startswith(projection.removesuffix("weight")) for name in checkpoint.names
    )
    if not stored:
        raise ModelError(
            f'{source}: the checkpoint has no layer for multi-token prediction, "{projection}" is missing; leave out '
            "--draft mtp"
        )
    return layer


def head_program(path: Path, head: HeadConfig, precision: Precision, allow_pickle: bool = False) -> Program:
    """The head's program; a ModelError where it lacks a tensor or has unknown ones."""
    checkpoint = open_checkpoint(path, allow_pickle)
    try:
        if checkpoint.quantisation is not None:
            raise ModelError(
                f"{path}: a quantised head is not supported; give an unquantised one, which --draft-precision rounds "
                "on load"
            )
        own = checkpoint.has(OWN_EMBEDDING)
        if not own and head.hidden != head.target_hidden:
            raise ModelError(
                f'{path}: the head has no "{OWN_EMBEDDING}", and the target\'s embeddings are {head.target_hidden:,} wide, '
                f"not {head.hidden:,}"
            )
        program = build_head(head, precision.format, precision.group, _tokens(path, head, checkpoint), own)
        sources = list(dict.fromkeys(source for weight in program.weights for source in weight.sources))
        for source in sources:
            if source.name != TARGETS_EMBEDDING:
                checkpoint.check(source)
        asked = {name for source in sources if source.name != TARGETS_EMBEDDING for name in checkpoint.parts(source)}
        refuse_unexpected(set(checkpoint.names) - asked - OF_TRAINING, False)
        return program
    finally:
        checkpoint.close()


def _tokens(path: Path, head: HeadConfig, checkpoint: Checkpoint) -> list[int] | None:
    """The target's token of each row of the head's LM head; None: all of the target's tokens in their order."""
    if not checkpoint.has(OFFSETS):
        if head.draft_vocabulary != head.vocabulary:
            raise ModelError(f'{path}: the head has {head.draft_vocabulary:,} tokens, and no "{OFFSETS}" that says which')
        return None
    offsets = checkpoint.numbers(OFFSETS)
    tokens = offsets + np.arange(len(offsets))
    fits = len(tokens) == head.draft_vocabulary and tokens.min(initial=0) >= 0 and len(np.unique(tokens)) == len(tokens)
    if not fits or tokens.max(initial=0) >= head.vocabulary:
        raise ModelError(
            f'{path}: "{OFFSETS}" must name {head.draft_vocabulary:,} different tokens of {head.vocabulary:,}, as '
            "config.json has them"
        )
    if checkpoint.has(KNOWN) and not np.array_equal(np.flatnonzero(checkpoint.numbers(KNOWN)), np.sort(tokens)):
        raise ModelError(f'{path}: "{KNOWN}" and "{OFFSETS}" do not name the same tokens')
    found: list[int] = tokens.tolist()
    return found
