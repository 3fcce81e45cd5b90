"""Jamba: Mamba 1 in most layers, attention without rope in the others, and experts in every second layer."""

from __future__ import annotations

from collections.abc import Callable

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Routing, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import Experts, Router, chosen_experts, mixture
from outrider.workers.models.families.layer_norm import Heads, attend, projected
from outrider.workers.models.families.mamba1 import Keys, NormsOfParts, mamba_layer, read_mamba
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.families.skeleton import Mixer, Sizes, Style, decoder, read_sizes

# Keys of implementation, which change no logit.
UNUSED = ("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep", "layers_block_type")
OF_MAMBA = Keys(
    state="mamba_d_state", rank="mamba_dt_rank", taps="mamba_d_conv", conv_bias="mamba_conv_bias", bias="mamba_proj_bias"
)


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
    mamba = read_mamba(
        config,
        OF_MAMBA,
        sizes.hidden,
        inner=config.size("mamba_expand", 2) * sizes.hidden,
        norms=NormsOfParts.WEIGHTED,
        epsilon=sizes.epsilon,
        function=function,
    )
    heads = Heads(sizes.heads, sizes.kv_heads, sizes.head_size)

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        block = f"model.layers.{layer}."
        if not attends(layer):
            return mamba_layer(builder, h, Linear(f"{block}mamba."), mamba, residual)
        under = Linear(f"{block}self_attn.")
        a = attend(builder, h, projected(under, ("q_proj", "k_proj", "v_proj"), heads, h.width, False), heads)
        return builder.linear(a, [under.weight("o_proj", h.width, a.width)], residual=residual)

    return mixer
