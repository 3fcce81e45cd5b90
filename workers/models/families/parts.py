"""What the builders of several families share: names of tensors, activations, which layers have a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU_ERF,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}
SLIDING, FULL = "sliding_attention", "full_attention"

# Begins the program of a model of so large a vocabulary and so long a context.
Begin = Callable[[int, int], Builder]


def activation(config: Config, key: str, default: str) -> Activation:
    name = config.get(key, default)
    if name not in ACTIVATIONS:
        raise config.unknown(f'the activation "{name}"')
    return ACTIVATIONS[name]


def layer_types(config: Config, layers: int, usual: Callable[[int], str]) -> list[str]:
    """Of each layer whether its attention has a window; ``usual`` where the configuration does not say."""
    types = config.get("layer_types") or [usual(layer) for layer in range(layers)]
    if len(types) != layers or not set(types) <= {SLIDING, FULL}:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    return list(types)


def windows(config: Config, types: Sequence[str], window: int) -> list[int]:
    """Of each layer its window. Types with one where no size is stated (0), or its use is off, contradict each other."""
    if SLIDING in types and not window:
        raise ModelError(
            f'{config.source}: the native engine cannot follow "layer_types": {types!r} without a "sliding_window"'
        )
    return [window if kind == SLIDING else 0 for kind in types]


@dataclass(frozen=True, slots=True)
class Linear:
    """Names the weight and bias of the linear layers under one prefix."""

    prefix: str

    def weight(self, name: str, rows: int, columns: int) -> Tensor:
        return Tensor(f"{self.prefix}{name}.weight", (rows, columns))

    def vector(self, name: str, size: int, plus: float = 0.0) -> Tensor:
        return Tensor(f"{self.prefix}{name}.weight", (size,), plus=plus)

    def bias(self, name: str, size: int) -> Tensor:
        return Tensor(f"{self.prefix}{name}.bias", (size,))

    def biases(self, present: bool, *named: tuple[str, int]) -> tuple[Tensor, ...]:
        return tuple(self.bias(name, size) for name, size in named) if present else ()
