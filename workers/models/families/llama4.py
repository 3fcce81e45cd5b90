"""Llama 4's language model: layers with rope attend within chunks; a token takes one routed expert and the shared one."""

from __future__ import annotations

import numpy as np

from outrider.kernels import arithmetic
from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Routing, Slice
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import Experts, Router, Shared, mixture
from outrider.workers.models.families.parts import FULL, Begin, Linear, activation, paired_rows
from outrider.workers.models.families.skeleton import Mixer, Sizes, Style, decoder, read_sizes, rotate
from outrider.workers.models.rope import Rope, read_rope

CHUNKED = "chunked_attention"


def llama4(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, head_size=128, epsilon=1e-5, layers=48, heads=40, ffn=8192)
    turned = _turned(config, sizes.layers)
    rope = read_rope(config, sizes.head_size, sizes.context, theta=500000.0)
    ropes, chunks = [rope if each else None for each in turned], _chunks(config, turned)
    return decoder(
        config, begin, sizes, Style(attention=_attention(config, sizes, ropes, chunks), mixer=_mixer(config, sizes))
    )


def _mixer(config: Config, sizes: Sizes) -> Mixer:
    # An expert's input is multiplied by the sigmoid of its score, so several experts of a token would differ in input,
    # for which there is no operation.
    config.only("num_experts_per_tok", 1)
    sparse, function = _sparse(config, sizes.layers), activation(config, "hidden_act", "silu")
    experts = Experts(
        config.size("num_local_experts", 16),
        1,
        sizes.ffn,
        function,
        Router(Routing.SIGMOID_EACH, "router"),
        scales_input=True,
        shared=Shared(sizes.ffn, "feed_forward.shared_expert."),
        sparse=lambda layer: layer in sparse,
        prefix="feed_forward.",
    )
    return mixture(sizes, experts, dense=config.size("intermediate_size_mlp", 16384))


def _sparse(config: Config, layers: int) -> set[int]:
    """The layers with experts: "moe_layers", else every "interleave_moe_layer_step"-th layer."""
    step, named = config.size("interleave_moe_layer_step", 1), config.get("moe_layers")
    if named is None:
        return set(range(step - 1, layers, step))
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise ModelError(f'{config.source}: the native engine cannot follow "moe_layers": {named!r}')
    return set(named)


def _turned(config: Config, layers: int) -> list[bool]:
    """Whether each layer has rope."""
    interval, stated = config.size("no_rope_layer_interval", 4), config.get("no_rope_layers")
    if not stated:
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(stated, list) or len(stated) < layers or not all(each in (0, 1) for each in stated):
        raise ModelError(f'{config.source}: the native engine cannot follow "no_rope_layers": {stated!r}')
    return [bool(each) for each in stated[:layers]]


def _chunks(config: Config, turned: list[bool]) -> list[int]:
    """The size of each layer's chunks; 0: a token attends to all tokens before it."""
    # Here null is a value: no chunks.
    none = config.stated("attention_chunk_size", 8192) is None
    size = 0 if none else config.size("attention_chunk_size", 8192)
    types = config.get("layer_types")
    if types is None:
        types = [CHUNKED if each and size else FULL for each in turned]
    if len(types) != len(turned) or not set(types) <= ({CHUNKED, FULL} if size else {FULL}):
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r} in chunks of {size}')
    return [size if kind == CHUNKED else 0 for kind in types]


def _factors(config: Config, context: int) -> tuple[tuple[float, ...], int] | None:
    """The factors of queries without rope, 1 + scale * log(1 + k) with k = (position + 1) // floor, and floor. None: they
    are turned off, or k is 0 in all rows."""
    # transformers up to 5.3 wrote 4 for true.
    tuned = config.get("attn_temperature_tuning") == 4 or config.flag("attn_temperature_tuning", True)
    floor = config.size("floor_scale", 8192)
    scale = np.float32(config.number("attn_scale", 0.1))
    if not tuned or context < floor:
        return None
    passed = np.arange(context // floor + 1, dtype=np.float64)
    factors = arithmetic.log(1.0 + passed).astype(np.float32) * scale + np.float32(1.0)
    return tuple(float(factor) for factor in factors), floor


def _attention(config: Config, sizes: Sizes, ropes: list[Rope | None], chunks: list[int]) -> Mixer:
    heads, kv_heads, size = sizes.heads, sizes.kv_heads, sizes.head_size
    width, kv_width = heads * size, kv_heads * size
    bias, normalised = config.flag("attention_bias", False), config.flag("use_qk_norm", True)
    factors = _factors(config, sizes.context)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        names, rope = Linear(f"model.layers.{layer}.self_attn."), ropes[layer]
        # Rope rotates neighbouring columns.
        orders = [paired_rows(count, size, size) if rope else () for count in (heads, kv_heads)] + [()]
        projections = list(zip(("q_proj", "k_proj", "v_proj"), (width, kv_width, kv_width), orders, strict=True))
        matrices = [names.weight(name, rows, h.width, order) for name, rows, order in projections]
        shifts = [names.bias(name, rows, order) for name, rows, order in projections] if bias else []
        query, key, value = builder.linear(h, matrices, biases=shifts).split(width, kv_width, kv_width)
        if rope is not None:
            for part, count in ((query, heads), (key, kv_heads)):
                rotate(builder, part, rope, count)
                if normalised:
                    builder.head_norm(part, None, heads=count, epsilon=sizes.epsilon)
        elif factors is not None:
            builder.scale_by_position(query, *factors, ahead=1)
        a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads, chunk=chunks[layer])
        output, shifts = [names.weight("o_proj", h.width, width)], list(names.biases(bias, ("o_proj", h.width)))
        return builder.linear(a, output, biases=shifts, residual=residual)

    return attention
