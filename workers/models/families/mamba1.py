"""The Mamba 1 layer: of Mamba and Falcon Mamba, which have nothing else, and of Jamba."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Norm, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Linear

# The columns of a head: the kernels divide a state by columns, whose steps and decays do not depend on each other.
HEAD_COLUMNS = (64, 16)


class NormsOfParts(Enum):
    """The RMS norms of the steps, B and C."""

    NONE = "none"
    WEIGHTLESS = "without weights"
    WEIGHTED = "with weights"


@dataclass(frozen=True, slots=True)
class Keys:
    """How a family names the settings of its layers."""

    state: str = "state_size"
    rank: str = "time_step_rank"
    taps: str = "conv_kernel"
    conv_bias: str = "use_conv_bias"
    bias: str = "use_bias"


@dataclass(frozen=True, slots=True)
class Mamba:
    """Sizes of a layer. ``rank``: the columns from which the steps of all ``inner`` columns are computed."""

    inner: int
    state: int
    rank: int
    taps: int
    conv_bias: bool
    bias: bool
    norms: NormsOfParts
    epsilon: float
    function: Activation


def read_mamba(
    config: Config, keys: Keys, hidden: int, inner: int, *, norms: NormsOfParts, epsilon: float, function: Activation
) -> Mamba:
    """A layer of ``inner`` columns. ``epsilon`` is that of its ``norms``."""
    rank = config.get(keys.rank, "auto")
    if inner % HEAD_COLUMNS[-1]:
        raise config.unknown(f"Mamba of {inner} columns, no multiple of {HEAD_COLUMNS[-1]}")
    return Mamba(
        inner=inner,
        state=config.size(keys.state, 16),
        rank=-(-hidden // 16) if rank == "auto" else config.size(keys.rank),
        taps=config.size(keys.taps, 4),
        conv_bias=config.flag(keys.conv_bias, True),
        bias=config.flag(keys.bias, False),
        norms=norms,
        epsilon=epsilon,
        function=function,
    )


def mamba_layer(builder: Builder, h: Slice, names: Linear, mamba: Mamba, residual: Slice | None) -> Slice:
    inner, state, rank = mamba.inner, mamba.state, mamba.rank
    biases = names.biases(mamba.bias, ("in_proj", 2 * inner))
    x, gate = builder.linear(h, [names.weight("in_proj", 2 * inner, h.width)], biases=biases).split(inner, inner)
    shift = names.bias("conv1d", inner) if mamba.conv_bias else None
    taps = Tensor(f"{names.prefix}conv1d.weight", (inner, 1, mamba.taps))
    x = builder.convolve(x, taps, bias=shift, activation=mamba.function)
    narrow, key, query = builder.linear(x, [names.weight("x_proj", rank + 2 * state, inner)]).split(rank, state, state)
    if mamba.norms is not NormsOfParts.NONE:
        narrow, key, query = (
            _normed(builder, part, names, name, mamba)
            for part, name in ((narrow, "dt_layernorm"), (key, "b_layernorm"), (query, "c_layernorm"))
        )
    # Decays of states depend on the steps, so like a router's this projection is in fp32.
    steps = builder.linear(narrow, [names.weight("dt_proj", inner, rank)], precision=Format.FP32)
    columns = next(columns for columns in HEAD_COLUMNS if inner % columns == 0)
    y = builder.scan(
        query,
        key,
        x,
        steps,
        decay=Tensor(f"{names.prefix}A_log", (inner, state)),
        skip=Tensor(f"{names.prefix}D", (inner,)),
        shift=names.bias("dt_proj", inner),
        heads=inner // columns,
        kv_heads=1,
    )
    y = builder.gate(y, gate, activation=Activation.SILU)
    biases = names.biases(mamba.bias, ("out_proj", h.width))
    return builder.linear(y, [names.weight("out_proj", h.width, inner)], biases=biases, residual=residual)


def _normed(builder: Builder, part: Slice, names: Linear, name: str, mamba: Mamba) -> Slice:
    weight = names.vector(name, part.width) if mamba.norms is NormsOfParts.WEIGHTED else None
    return builder.norm(part, weight, kind=Norm.RMS, epsilon=mamba.epsilon)
