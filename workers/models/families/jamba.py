"""Jamba: Mamba 1 in most layers, attention without rope in the others, and experts in every second layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Program, Routing, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import Experts, Router, chosen_experts, mixture
from outrider.workers.models.families.layer_norm import Heads, attend, projected
from outrider.workers.models.families.parts import Begin, Linear, activation, rms_norm
from outrider.workers.models.families.skeleton import Mixer, Sizes, Style, decoder, read_sizes

# Keys of implementation, which change no logit.
UNUSED = ("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep", "layers_block_type")
# The columns of a head: the kernels divide a state by columns, whose steps and decays do not depend on each other.
HEAD_COLUMNS = (64, 16)


@dataclass(frozen=True, slots=True)
class Mamba:
    """Sizes of a layer. ``rank``: the columns from which the steps of all ``inner`` columns are computed."""

    inner: int
    state: int
    rank: int
    taps: int
    conv_bias: bool
    bias: bool
    epsilon: float
    function: Activation


def jamba(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, layers=32)
    for key in UNUSED:
        config.get(key)
    attends = _every(config, "attn_layer", 8, 4)
    if not any(map(attends, range(sizes.layers))):
        raise config.unknown("a model without a layer of attention")
    sparse, count = _every(config, "expert_layer", 2, 1), config.size("num_experts", config.get("num_local_experts", 16))
    config.only("num_local_experts", count)
    function, chosen = activation(config, "hidden_act", "silu"), config.size("num_experts_per_tok", 2)
    # One expert is a plain gated layer.
    chosen = chosen_experts(config, count, 2) if count > 1 else chosen
    experts = Experts(
        count,
        chosen,
        sizes.ffn,
        function,
        Router(Routing.SOFTMAX, "router"),
        sparse=lambda layer: count > 1 and sparse(layer),
        prefix="feed_forward.",
    )
    style = Style(
        second_norm="pre_ff_layernorm",
        last_norm="final_layernorm",
        attention=_mixer(config, sizes, attends, function),
        mixer=mixture(sizes, experts),
    )
    return decoder(config, begin, sizes, style)


def _every(config: Config, what: str, period: int, offset: int) -> Callable[[int], bool]:
    """Whether a layer is of a kind: one in each ``period`` layers."""
    period, offset = config.size(f"{what}_period", period), config.whole(f"{what}_offset", offset)
    if offset >= period:
        raise config.unknown(f'"{what}_offset": {offset} with "{what}_period": {period}')
    return lambda layer: layer % period == offset


def _mixer(config: Config, sizes: Sizes, attends: Callable[[int], bool], function: Activation) -> Mixer:
    rank = config.get("mamba_dt_rank", "auto")
    mamba = Mamba(
        inner=config.size("mamba_expand", 2) * sizes.hidden,
        state=config.size("mamba_d_state", 16),
        rank=-(-sizes.hidden // 16) if rank == "auto" else config.size("mamba_dt_rank"),
        taps=config.size("mamba_d_conv", 4),
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
        epsilon=sizes.epsilon,
        function=function,
    )
    if mamba.inner % HEAD_COLUMNS[-1]:
        raise config.unknown(f'"mamba_expand" with {mamba.inner} columns, no multiple of {HEAD_COLUMNS[-1]}')
    heads = Heads(sizes.heads, sizes.kv_heads, sizes.head_size)

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        block = f"model.layers.{layer}."
        if not attends(layer):
            return _mamba_layer(builder, h, Linear(f"{block}mamba."), mamba, residual)
        under = Linear(f"{block}self_attn.")
        a = attend(builder, h, projected(under, ("q_proj", "k_proj", "v_proj"), heads, h.width, False), heads)
        return builder.linear(a, [under.weight("o_proj", h.width, a.width)], residual=residual)

    return mixer


def _mamba_layer(builder: Builder, h: Slice, names: Linear, mamba: Mamba, residual: Slice | None) -> Slice:
    inner, state, rank = mamba.inner, mamba.state, mamba.rank
    biases = names.biases(mamba.bias, ("in_proj", 2 * inner))
    x, gate = builder.linear(h, [names.weight("in_proj", 2 * inner, h.width)], biases=biases).split(inner, inner)
    shift = names.bias("conv1d", inner) if mamba.conv_bias else None
    taps = Tensor(f"{names.prefix}conv1d.weight", (inner, 1, mamba.taps))
    x = builder.convolve(x, taps, bias=shift, activation=mamba.function)
    narrow, key, query = builder.linear(x, [names.weight("x_proj", rank + 2 * state, inner)]).split(rank, state, state)
    narrow = rms_norm(builder, narrow, names, "dt_layernorm", mamba.epsilon)
    key = rms_norm(builder, key, names, "b_layernorm", mamba.epsilon)
    query = rms_norm(builder, query, names, "c_layernorm", mamba.epsilon)
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
