"""The Mamba 2 layer, which several families have in place of attention in most layers, or beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import FULL, Linear, activation

MAMBA = "linear_attention"
# How older versions of transformers name the kinds of layers.
OLDER_NAMES = {"mamba": MAMBA, "attention": FULL}
SIZES = """
mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_conv_bias mamba_proj_bias
time_step_limit
"""
# Keys of implementation or training, which change no logit.
UNUSED = """
mamba_chunk_size chunk_size use_mamba_kernels mamba_ssm_cache_dtype time_step_min time_step_max time_step_floor
time_step_rank init_method rescale_prenorm_residual residual_in_fp32 num_logits_to_keep z_loss_coefficient
"""


@dataclass(frozen=True, slots=True)
class Mamba:
    """Sizes of a layer: ``heads`` of ``head_size`` columns each, whose states have ``state`` rows.

    ``groups``: the number of B and C, each shared by heads / groups heads. ``normed``: the scan's output passes an RMS
    norm, each group by itself; ``norm_first``: before it is multiplied by the gate, not after. ``function`` is the
    activation after the convolution; the gate's is SiLU. ``multipliers`` are the factors of gate, x, B, C and dt.
    """

    heads: int
    head_size: int
    groups: int
    state: int
    taps: int
    conv_bias: bool
    bias: bool
    epsilon: float
    function: Activation = Activation.SILU
    normed: bool = True
    norm_first: bool = False
    multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner(self) -> int:
        return self.heads * self.head_size


def read_mamba(config: Config, inner: int, epsilon: float) -> Mamba:
    """A layer of ``inner`` columns, from the keys that all families but Nemotron H use."""
    heads, head_size = config.size("mamba_n_heads", 128), config.get("mamba_d_head", "auto")
    if inner % heads or head_size not in ("auto", inner // heads):
        raise ModelError(f'{config.source}: {heads} heads of "mamba_d_head": {head_size!r} are not {inner} columns')
    check_steps(config)
    return Mamba(
        heads=heads,
        head_size=inner // heads,
        groups=config.size("mamba_n_groups", 1),
        state=config.size("mamba_d_state", 256),
        taps=config.size("mamba_d_conv", 4),
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
        epsilon=epsilon,
        function=activation(config, "hidden_act", "silu"),
    )


def check_steps(config: Config) -> None:
    """Refuse bounds of dt, which transformers applies in passes over several tokens, but not in those over one."""
    limit = config.get("time_step_limit", [0.0, math.inf])
    # As transformers 5 and others write infinity.
    if limit not in ([0.0, {"__float__": "Infinity"}], [0.0, math.inf]):
        raise config.unknown(f'"time_step_limit": {limit!r}')
    for key in UNUSED.split():
        config.get(key)


def pass_over(config: Config) -> None:
    """Mark the keys of Mamba layers as read, for a model without such layers that states them all the same."""
    for key in (*SIZES.split(), *UNUSED.split()):
        config.get(key)


def kinds_of(config: Config, key: str, stated: Sequence[str], layers: int, known: Sequence[str]) -> list[str]:
    """The kind of each layer, from what ``key`` states."""
    kinds = [OLDER_NAMES.get(kind, kind) for kind in stated]
    if len(kinds) != layers or not set(kinds) <= set(known):
        raise ModelError(f'{config.source}: the native engine cannot follow "{key}": {kinds!r}')
    if FULL not in kinds:
        raise config.unknown("a model without a layer of attention")
    return kinds


def mamba_layer(
    builder: Builder, h: Slice, names: Linear, mamba: Mamba, residual: Slice | None, scale: float = 1.0
) -> Slice:
    """The layer's output times ``scale``, plus ``residual``."""
    inner, shared, hidden = mamba.inner, mamba.groups * mamba.state, h.width
    mixed, rows = inner + 2 * shared, 2 * inner + 2 * shared + mamba.heads
    weight, bias = names.weight("in_proj", rows, hidden), names.bias("in_proj", rows)

    def project(first: int, last: int, precision: Format | None = None) -> Slice:
        taken = ((first, last),)
        biases = [replace(bias, rows=taken)] if mamba.bias else []
        return builder.linear(h, [replace(weight, rows=taken)], biases=biases, precision=precision)

    both = project(0, inner + mixed)
    # A state's decay depends on dt, so like a router's this projection is in fp32.
    steps = project(inner + mixed, rows, Format.FP32)
    if set(mamba.multipliers) != {1.0}:
        widths = (inner, inner, shared, shared)
        factors = [factor for factor, width in zip(mamba.multipliers, widths, strict=False) for _ in range(width)]
        both = builder.scale_columns(both, factors)
        builder.scale(steps, mamba.multipliers[-1], output=steps)
    gate, values = both.split(inner, mixed)
    taps = Tensor(f"{names.prefix}conv1d.weight", (mixed, 1, mamba.taps))
    shift = names.bias("conv1d", mixed) if mamba.conv_bias else None
    x, key, query = builder.convolve(values, taps, bias=shift, activation=mamba.function).split(inner, shared, shared)
    y = builder.scan(
        query,
        key,
        x,
        steps,
        decay=Tensor(f"{names.prefix}A_log", (mamba.heads,)),
        skip=Tensor(f"{names.prefix}D", (mamba.heads,)),
        shift=Tensor(f"{names.prefix}dt_bias", (mamba.heads,)),
        heads=mamba.heads,
        kv_heads=mamba.groups,
    )
    output, biases = [names.weight("out_proj", hidden, inner)], names.biases(mamba.bias, ("out_proj", hidden))
    y = _gated_norm(builder, y, gate, names, mamba)
    return builder.linear(y, output, biases=biases, residual=residual, scale=scale)


def _gated_norm(builder: Builder, y: Slice, gate: Slice, names: Linear, mamba: Mamba) -> Slice:
    if not mamba.normed:
        return builder.gate(y, gate, activation=Activation.SILU)
    if not mamba.norm_first:
        y = builder.gate(y, gate, activation=Activation.SILU)
    weight = names.vector("norm", mamba.inner)
    if mamba.groups == 1:
        builder.head_norm(y, weight, heads=1, epsilon=mamba.epsilon)
    else:
        builder.head_norm(y, None, heads=mamba.groups, epsilon=mamba.epsilon)
        y = builder.scale_columns(y, weight)
    return builder.gate(y, gate, activation=Activation.SILU) if mamba.norm_first else y
