"""MiMo-V2-Flash: layers with a window have attention sinks and twice the KV heads; values are narrower than keys, and
scaled."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.corrected_mixtures import deepseek_experts, deepseek_router
from outrider.workers.models.families.experts import mixture, sparse_layers
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, Linear, layer_types, windows
from outrider.workers.models.families.skeleton import Mixer, Sizes, Style, decoder, read_sizes, rotate
from outrider.workers.models.rope import read_ropes

# The share of a head's columns that rope rotates by default.
PART = 0.334
USUAL = {
    FULL: {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": PART},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": PART},
}


def mimo_v2_flash(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=4, head_size=192, epsilon=1e-5, layers=48, heads=64, ffn=16384)
    sparse = sparse_layers(config, sizes.layers, 1)
    count = config.size("n_routed_experts", config.get("num_local_experts", 256))
    experts = deepseek_experts(config, count, 8, 2048, 0, deepseek_router(config), sparse.__getitem__)
    return decoder(config, begin, sizes, Style(attention=_attention(config, sizes), mixer=mixture(sizes, experts)))


def _attention(config: Config, sizes: Sizes) -> Mixer:
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if layer and (layer + 1) % 6 else FULL)
    # "sliding_window_size" does not count the token itself.
    before = config.get("sliding_window_size")
    window = config.window(129) if before is None else config.whole("sliding_window_size", 128) + 1
    config.get("sliding_window")
    each = windows(config, types, window)
    thetas = {FULL: 5000000.0, SLIDING: 10000.0}
    ropes = read_ropes(config, sizes.head_size, sizes.context, thetas, USUAL, partial=PART)
    heads, size, value_size = sizes.heads, sizes.head_size, config.size("v_head_dim", 128)
    bias = config.flag("attention_bias", False)
    # Here null is a value: no factor.
    scale = 1.0 if config.stated("attention_value_scale", 0.707) is None else config.number("attention_value_scale", 0.707)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        names, rope, windowed = Linear(f"model.layers.{layer}.self_attn."), ropes[types[layer]], types[layer] == SLIDING
        kv_heads = 2 * sizes.kv_heads if windowed else sizes.kv_heads
        first = [("q_proj", heads * size), ("k_proj", kv_heads * size)]
        matrices = [names.weight(name, rows, h.width) for name, rows in first]
        query, key = builder.linear(h, matrices, biases=names.biases(bias, *first)).split(*(rows for _, rows in first))
        last = "v_proj", kv_heads * value_size
        value = builder.linear(h, [names.weight(*last, h.width)], biases=names.biases(bias, last), scale=scale)
        rotate(builder, query, rope, heads)
        rotate(builder, key, rope, kv_heads)
        sinks = Tensor(f"{names.prefix}sinks", (heads,)) if windowed else None
        a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads, window=each[layer], sinks=sinks)
        return builder.linear(a, [names.weight("o_proj", h.width, heads * value_size)], residual=residual)

    return attention
