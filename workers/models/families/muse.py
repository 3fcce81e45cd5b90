"""Muse Glimmer: gated attention whose queries and keys have norms without weights, norms around both halves of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Norm, Program, Slice
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import (
    FULL,
    SLIDING,
    Begin,
    Linear,
    activation,
    layer_types,
    rms_norm,
    windows,
)
from outrider.workers.models.families.skeleton import Sizes, gated, read_sizes, rotate
from outrider.workers.models.rope import Rope, read_rope


def muse_glimmer(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=2, head_size=128, epsilon=1e-5, layers=52, ffn=19968)
    behind, bias = config.number("post_norm_eps", 1e-8), config.flag("attention_bias", False)
    # Every fourth layer, counted from the last, attends to all tokens, and has no rope.
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (sizes.layers - 1 - layer) % 4 else FULL)
    each = windows(config, types, config.window(2048))
    ropes, function = ropes_of_layers(config, sizes), activation(config, "hidden_activation", "silu")
    config.get("hidden_act")  # transformers does not read it
    scale = config.positive("qk_scale_factor", 3.87) * sizes.head_size**-0.5
    cap = config.positive("final_logit_softcapping", 20.0)
    factor = config.positive("output_multiplier", 256**0.5 / 6656**0.5)
    tied = config.flag("tie_word_embeddings", False)

    builder, root = begin(sizes.vocabulary, sizes.context), Linear("model.")
    embedding = root.weight("embed_tokens", sizes.vocabulary, sizes.hidden)
    x = builder.norm(builder.embed(embedding), None, kind=Norm.RMS, epsilon=sizes.epsilon)

    def norm(y: Slice, block: Linear, name: str, epsilon: float, residual: Slice | None = None) -> Slice:
        weight = block.vector(name, sizes.hidden, 1.0)
        return builder.norm(y, weight, kind=Norm.RMS, epsilon=epsilon, residual=residual)

    for layer in range(sizes.layers):
        builder.layer_input(layer, x)
        block = Linear(f"model.layers.{layer}.")
        h = norm(x, block, "input_layernorm", sizes.epsilon)
        a = muse_attention(builder, h, Linear(f"{block.prefix}self_attn."), sizes, ropes[layer], each[layer], scale, bias)
        x = norm(a, block, "post_attention_layernorm", behind, x)
        h = norm(x, block, "pre_feedforward_layernorm", sizes.epsilon)
        mlp = Linear(f"{block.prefix}mlp.")
        m = gated(builder, h, mlp, sizes.ffn, function)
        m = builder.linear(m, [mlp.weight("down_proj", sizes.hidden, sizes.ffn)])
        x = norm(m, block, "post_feedforward_layernorm", behind, x)
    x = rms_norm(builder, x, root, "norm", sizes.epsilon)
    head = embedding if tied else Linear("").weight("lm_head", sizes.vocabulary, sizes.hidden)
    # cap * tanh(factor * y / cap)
    return builder.finish(builder.linear(x, [head], scale=factor, cap=cap / factor))


def ropes_of_layers(config: Config, sizes: Sizes, usual: Mapping[str, Any] | None = None) -> list[Rope | None]:
    """``usual``: the parameters of a configuration without some."""
    rope = read_rope(config, sizes.head_size, sizes.context, usual=usual)
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return [rope if (sizes.layers - 1 - layer) % 4 else None for layer in range(sizes.layers)]
    if not isinstance(thetas, list) or len(thetas) != sizes.layers:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_rope_theta": {thetas!r}')
    # transformers takes one base for all layers, and reads here only which of them have none.
    return [rope if theta else None for theta in thetas]


def muse_attention(
    builder: Builder,
    h: Slice,
    names: Linear,
    sizes: Sizes,
    rope: Rope | None,
    window: int,
    scale: float,
    bias: bool,
    normed: bool = False,
) -> Slice:
    """``normed``: each head's output has a norm before its gates."""
    heads, kv_heads = sizes.heads, sizes.kv_heads
    width, kv_width = heads * sizes.head_size, kv_heads * sizes.head_size
    projections = [("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)]
    matrices = [names.weight(name, rows, h.width) for name, rows in projections]
    query, key, value = builder.linear(h, matrices, biases=names.biases(bias, *projections)).split(
        width, kv_width, kv_width
    )
    gate = builder.linear(h, [names.weight("gate_proj", width, h.width)])
    for part, count in ((query, heads), (key, kv_heads)):
        builder.head_norm(part, None, heads=count, epsilon=sizes.epsilon)
        if rope is not None:
            rotate(builder, part, rope, count)
    a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads, scale=scale, window=window)
    if normed:
        builder.head_norm(a, None, heads=heads, epsilon=sizes.epsilon)
    biases = names.biases(bias, ("o_proj", h.width))
    return builder.linear(builder.gate(a, gate), [names.weight("o_proj", h.width, width)], biases=biases)
