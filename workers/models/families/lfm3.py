"""LFM3: layers of short convolutions, and of attention, with a window or without, whose heads have gates."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Slice
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.lfm2 import CONVOLUTION, convolution
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, Linear, gate_heads
from outrider.workers.models.families.skeleton import Mixer, Norms, Sizes, Style, decoder, rotate
from outrider.workers.models.rope import read_ropes, require_bases

ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}


def lfm3(config: Config, begin: Begin) -> Program:
    sizes = Sizes(
        hidden=config.size("hidden_size", 2048),
        ffn=config.size("intermediate_size", 7680),
        layers=config.size("num_hidden_layers", 24),
        heads=config.size("num_attention_heads", 16),
        kv_heads=config.size("num_key_value_heads", 4),
        head_size=config.size("head_dim", 128),
        vocabulary=config.size("vocab_size"),
        context=config.size("max_position_embeddings", 128000),
        epsilon=config.number("norm_eps", 1e-5),
    )
    style = Style(
        norms=Norms.AROUND if config.flag("use_sandwich_norm", True) else Norms.BEFORE,
        first_norm="operator_norm",
        second_norm="ffn_norm",
        norms_behind=("post_operator_norm", "post_ffn_norm"),
        last_norm="embedding_norm",
        tied=True,
        attention=_operator(config, sizes),
        mixer=_feed_forward(sizes),
    )
    return decoder(config, begin, sizes, style)


def _feed_forward(sizes: Sizes) -> Mixer:
    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        mlp, ffn = Linear(f"model.layers.{layer}.feed_forward."), sizes.ffn
        m = builder.gated(h, mlp.weight("w1", ffn, h.width), mlp.weight("w3", ffn, h.width), Activation.SILU)
        return builder.linear(m, [mlp.weight("w2", h.width, ffn)], residual=residual)

    return mixer


def _operator(config: Config, sizes: Sizes) -> Mixer:
    types = config.get("layer_types") or [_usual(layer) for layer in range(sizes.layers)]
    if len(types) != sizes.layers or not set(types) <= {CONVOLUTION, SLIDING, FULL}:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    window = config.window(256)
    if SLIDING in types and not window:
        raise ModelError(
            f'{config.source}: the native engine cannot follow "layer_types": {types!r} without a "sliding_window"'
        )
    config.only("rope_scaling", None)
    kinds = {kind: sizes.head_size for kind in dict.fromkeys(types) if kind != CONVOLUTION}
    require_bases(config, kinds)
    bases = {SLIDING: 0.0, FULL: 0.0}  # not used: each type's rope states its base
    ropes = read_ropes(config, kinds, sizes.context, bases, usual=ROPES, proportional=True)
    taps, bias = config.size("conv_L_cache", 7), config.flag("conv_bias", False)
    gates, shifted = config.flag("use_attention_gate", True), config.flag("attention_bias", False)
    heads, kv_heads, size = sizes.heads, sizes.kv_heads, sizes.head_size
    width, kv_width = heads * size, kv_heads * size

    def operator(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        block, kind = f"model.layers.{layer}.", types[layer]
        if kind == CONVOLUTION:
            return convolution(builder, h, residual, Linear(f"{block}conv."), taps, bias)
        names = Linear(f"{block}self_attn.")
        projections = [("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)]
        matrices = [names.weight(name, rows, h.width) for name, rows in projections]
        qkv = builder.linear(h, matrices, biases=names.biases(shifted, *projections))
        query, key, value = qkv.split(width, kv_width, kv_width)
        for part, name, count in ((query, "q_norm", heads), (key, "k_norm", kv_heads)):
            builder.head_norm(part, names.vector(name, size), heads=count, epsilon=sizes.epsilon)
            rotate(builder, part, ropes[kind], count)
        a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads, window=window if kind == SLIDING else 0)
        if gates:
            gate_heads(builder, a, builder.linear(h, [names.weight("gate_proj", heads, h.width)]), heads)
        output, biases = [names.weight("o_proj", h.width, width)], names.biases(shifted, ("o_proj", h.width))
        return builder.linear(a, output, biases=biases, residual=residual)

    return operator


def _usual(layer: int) -> str:
    if layer % 4 == 2:
        return FULL
    return SLIDING if layer % 4 == 0 and layer else CONVOLUTION
