"""The program of a layer for multi-token prediction (workers/models/mtp.py): a model of this one layer, whose embedding is
joined with the target's last state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from outrider.kernels.builder import Builder
from outrider.kernels.program import Format, Kind, Norm, Program, Slice, Tensor
from outrider.kernels.weights import StorageChoice, StoredAs
from outrider.workers.errors import ModelError
from outrider.workers.models.mtp import TARGETS_NORM, MtpLayer

# How many weights share a scale where an unquantised matrix of a quantised checkpoint is rounded.
ROUNDED_GROUP = 128


@dataclass
class MtpBuilder(Builder):
    """``norm_like`` adds a norm like the layer's last one, as its two norms before the projection are."""

    layer: MtpLayer = field(kw_only=True)
    norm_like: Callable[[Builder, Slice, str, Slice], Slice] = field(kw_only=True)

    def embed(self, table: Tensor, scale: float = 1.0) -> Slice:
        embedded = super().embed(table, scale)
        hidden = embedded.width
        # The target returns its state without its last norm, whose weights may have been balanced with those of its LM head
        # (outlier_channels.py).
        given = self.hidden_in(hidden)
        state = self.load_hidden(self.norm_like(self, given, TARGETS_NORM, self.room(hidden)))
        both = self.room(2 * hidden)
        self.norm_like(self, embedded, self.layer.name(self.layer.layout.embedding_norm), both.part(0, hidden))
        self.norm_like(self, state, self.layer.name(self.layer.layout.state_norm), both.part(hidden, hidden))
        return self.linear(both, [Tensor(self.layer.name(self.layer.layout.projection), (hidden, 2 * hidden))])

    def finish(self, logits: Slice) -> Program:
        self.store_last()
        program = super().finish(logits)
        weights = (
            replace(weight, sources=tuple(map(self.layer.own, weight.sources))) if weight.sources else weight
            for weight in program.weights
        )
        return replace(program, weights=tuple(weights))


def stored_as(layer: MtpLayer, storage_choice: StorageChoice | None, precision: Format) -> StorageChoice | None:
    """How the layer's tensors are stored, asked for by the names that they have in a model of this layer alone.

    What a quantised checkpoint leaves unquantised, often the whole layer and the LM head, is rounded, since no text depends
    on it.
    """
    if storage_choice is None:
        return None
    choice = storage_choice

    def stored(tensor: Tensor, table: bool) -> StoredAs:
        kept = choice(layer.own(tensor), table)
        rounded = precision.integer and kept.storage is None and not table
        return StoredAs(precision, ROUNDED_GROUP) if rounded else kept

    return stored


def norm_like(program: Program) -> Callable[[Builder, Slice, str, Slice], Slice]:
    """Adds a norm of another name like the program's last one: with its epsilon, and what it adds to weights."""
    last = next(op for op in reversed(program.ops) if op.kind is Kind.NORM)
    (weight,) = program.weights[last.weight].sources
    if last.integer != Norm.RMS or last.bias >= 0:
        raise ModelError("layers for multi-token prediction with other norms than RMS norms are not supported")
    plus, epsilon = weight.plus, last.epsilon

    def norm(builder: Builder, x: Slice, name: str, output: Slice) -> Slice:
        tensor = Tensor(name, (x.width,), plus=plus)
        return builder.norm(x, tensor, kind=Norm.RMS, epsilon=epsilon, output=output)

    return norm
