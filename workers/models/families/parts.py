"""Shared by the builders of several families: names of tensors, activations, types of layers and windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Norm, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config

ACTIVATIONS = {
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "gelu": Activation.GELU_ERF,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}
SLIDING, FULL = "sliding_attention", "full_attention"

# Ranges of a tensor's rows, (start, stop) each, in the order in which they are used.
Ranges = tuple[tuple[int, int], ...]
# (vocabulary, context) -> a Builder for the program.
Begin = Callable[[int, int], Builder]


def activation(config: Config, key: str, default: str) -> Activation:
    name = config.get(key, default)
    if name not in ACTIVATIONS:
        raise config.unknown(f'the activation "{name}"')
    return ACTIVATIONS[name]


def layer_types(config: Config, layers: int, usual: Callable[[int], str]) -> list[str]:
    """ "layer_types" of the configuration, or ``usual(layer)`` for each layer."""
    types = config.get("layer_types") or [usual(layer) for layer in range(layers)]
    if len(types) != layers or not set(types) <= {SLIDING, FULL}:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    return list(types)


def windows(config: Config, types: Sequence[str], window: int) -> list[int]:
    """The window of each layer. Refuses sliding layers if ``window`` is 0: it has no size, or is turned off."""
    if SLIDING in types and not window:
        raise ModelError(
            f'{config.source}: the native engine cannot follow "layer_types": {types!r} without a "sliding_window"'
        )
    return [window if kind == SLIDING else 0 for kind in types]


@dataclass(frozen=True, slots=True)
class Linear:
    """Names the weight and bias of the linear layers under one prefix."""

    prefix: str

    def weight(self, name: str, rows: int, columns: int, taken: Ranges = ()) -> Tensor:
        """``taken``: the ranges of rows that are used, by default all."""
        return Tensor(f"{self.prefix}{name}.weight", (rows, columns), taken)

    def vector(self, name: str, size: int, plus: float = 0.0) -> Tensor:
        return Tensor(f"{self.prefix}{name}.weight", (size,), plus=plus)

    def bias(self, name: str, size: int, taken: Ranges = ()) -> Tensor:
        return Tensor(f"{self.prefix}{name}.bias", (size,), taken)

    def biases(self, present: bool, *named: tuple[str, int]) -> tuple[Tensor, ...]:
        return tuple(self.bias(name, size) for name, size in named) if present else ()


def paired_rows(heads: int, head_size: int, rotated: int, first: int = 0) -> Ranges:
    """The rows of queries or keys for rope on neighbours (2i, 2i + 1), permuted for the kernels' rope, which rotates
    halves.

    A pair becomes rows (i, i + rotated / 2) of every head's first ``rotated`` rows. Scores are sums over a head's columns,
    so the order changes none, as long as queries, keys, their biases and the norms of their heads share it. ``first``: the
    row where the heads begin.
    """
    ranges: list[tuple[int, int]] = []
    for start in range(first, first + heads * head_size, head_size):
        turned = [*range(start, start + rotated, 2), *range(start + 1, start + rotated, 2)]
        ranges += [(row, row + 1) for row in turned]
        if rotated < head_size:
            ranges.append((start + rotated, start + head_size))
    return tuple(ranges)


def gate_heads(builder: Builder, x: Slice, gates: Slice, heads: int, function: Activation = Activation.SIGMOID) -> None:
    """Multiplies each head's columns by function(the head's gate), in place."""
    size = x.width // heads
    for head in range(heads):
        part = x.part(head * size, size)
        builder.gate(part, gates.part(head, 1), activation=function, output=part)


def rms_norm(builder: Builder, x: Slice, under: Linear, name: str, epsilon: float, residual: Slice | None = None) -> Slice:
    return builder.norm(x, under.vector(name, x.width), kind=Norm.RMS, epsilon=epsilon, residual=residual)
