"""Bamba, with Mamba 2 in most layers and attention in the others, and Falcon H1, with both in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import Heads, attend, projected
from outrider.workers.models.families.mamba2 import mamba_layer, read_mamba
from outrider.workers.models.families.parts import Begin, Linear, activation, rms_norm
from outrider.workers.models.families.skeleton import Sizes, read_sizes
from outrider.workers.models.rope import Rope, read_rope

QKV = ("q_proj", "k_proj", "v_proj")


def bamba(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, epsilon=1e-5)
    mamba = read_mamba(config, config.size("mamba_expand", 2) * sizes.hidden, sizes.epsilon)
    with_attention = config.get("attn_layer_indices") or []
    if not set(with_attention) & set(range(sizes.layers)):
        raise config.unknown("a model without a layer of attention")
    config.get("partial_rotary_factor")  # transformers ignores it, and always takes 0.5
    config.only("attn_rotary_emb", sizes.head_size // 2)  # the same, as its makers say it
    rope = read_rope(config, sizes.head_size, sizes.context, partial=0.5)
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    function = activation(config, "hidden_act", "silu")

    def layer(builder: Builder, x: Slice, number: int) -> Slice:
        block = Linear(f"model.layers.{number}.")
        h = rms_norm(builder, x, block, "input_layernorm", sizes.epsilon)
        if number in with_attention:
            x = _attention(builder, h, Linear(f"{block.prefix}self_attn."), sizes, rope, x, bias=bias)
        else:
            x = mamba_layer(builder, h, Linear(f"{block.prefix}mamba."), mamba, x)
        h = rms_norm(builder, x, block, "pre_ff_layernorm", sizes.epsilon)
        return _feed_forward(builder, h, Linear(f"{block.prefix}feed_forward."), sizes.ffn, function, x, bias=mlp_bias)

    return _decoder(config, begin, sizes, layer)


def falcon_h1(config: Config, begin: Begin) -> Program:
    """The inputs and outputs of a layer's parts are multiplied by factors."""
    sizes = read_sizes(config, kv_heads=8, epsilon=1e-5)
    inner = config.size("mamba_expand", 2) * sizes.hidden
    if config.stated("mamba_d_ssm", 1024) is not None:
        inner = config.size("mamba_d_ssm", 1024)
    mamba = replace(
        read_mamba(config, inner, sizes.epsilon),
        normed=config.flag("mamba_rms_norm", False),
        norm_first=config.flag("mamba_norm_before_gate", True),
        multipliers=_factors(config, "ssm_multipliers", 5),
    )
    config.only("projectors_bias", mamba.bias)
    config.only("mlp_bias", False)
    config.only("mamba_use_mlp", True)
    config.get("mlp_expansion_factor")  # "intermediate_size" says it
    rope = read_rope(config, sizes.head_size, sizes.context)
    bias, function = config.flag("attention_bias", False), activation(config, "hidden_act", "silu")
    gate_factor, down_factor = _factors(config, "mlp_multipliers", 2)
    into_mamba, out_of_mamba = config.number("ssm_in_multiplier", 1.0), config.number("ssm_out_multiplier", 1.0)
    into_attention = config.number("attention_in_multiplier", 1.0)
    # A factor of keys is a factor of scores.
    score_scale = config.number("key_multiplier", 1.0) * sizes.head_size**-0.5
    out_of_attention = config.number("attention_out_multiplier", 1.0)

    def scaled(builder: Builder, h: Slice, factor: float) -> Slice:
        return h if factor == 1.0 else builder.scale(h, factor)

    def layer(builder: Builder, x: Slice, number: int) -> Slice:
        block = Linear(f"model.layers.{number}.")
        h = rms_norm(builder, x, block, "input_layernorm", sizes.epsilon)
        read = scaled(builder, h, into_mamba)
        x = mamba_layer(builder, read, Linear(f"{block.prefix}mamba."), mamba, x, out_of_mamba)
        read, under = scaled(builder, h, into_attention), Linear(f"{block.prefix}self_attn.")
        x = _attention(builder, read, under, sizes, rope, x, bias=bias, scale=score_scale, factor=out_of_attention)
        h, under = rms_norm(builder, x, block, "pre_ff_layernorm", sizes.epsilon), Linear(f"{block.prefix}feed_forward.")
        return _feed_forward(builder, h, under, sizes.ffn, function, x, gate_factor=gate_factor, down_factor=down_factor)

    factors = (config.number("embedding_multiplier", 1.0), config.number("lm_head_multiplier", 1.0))
    return _decoder(config, begin, sizes, layer, *factors)


def _factors(config: Config, key: str, count: int) -> tuple[float, ...]:
    found = config.get(key, [1.0] * count)
    if not isinstance(found, list) or len(found) != count:
        raise ModelError(f'{config.source}: "{key}" must be {count} numbers, got {found!r}')
    return tuple(Config({key: value}, config.source).number(key, 1.0) for value in found)


def _attention(
    builder: Builder,
    h: Slice,
    under: Linear,
    sizes: Sizes,
    rope: Rope,
    residual: Slice,
    *,
    bias: bool,
    scale: float | None = None,
    factor: float = 1.0,
) -> Slice:
    """``scale`` multiplies scores, ``factor`` the output."""
    heads = Heads(sizes.heads, sizes.kv_heads, sizes.head_size)
    a = attend(builder, h, projected(under, QKV, heads, h.width, bias), heads, rope=rope, scale=scale)
    output, biases = [under.weight("o_proj", h.width, a.width)], under.biases(bias, ("o_proj", h.width))
    return builder.linear(a, output, biases=biases, residual=residual, scale=factor)


def _feed_forward(
    builder: Builder,
    h: Slice,
    mlp: Linear,
    ffn: int,
    function: Activation,
    residual: Slice,
    *,
    bias: bool = False,
    gate_factor: float = 1.0,
    down_factor: float = 1.0,
) -> Slice:
    """``gate_factor`` multiplies the activation's input (there are no biases then), ``down_factor`` the output."""
    names = (("gate_proj", ffn), ("up_proj", ffn))
    gate, up = (mlp.weight(name, ffn, h.width) for name, _ in names)
    if gate_factor == 1.0:
        m = builder.gated(h, gate, up, function, biases=mlp.biases(bias, *names))
    else:
        m = builder.gate(builder.linear(h, [up]), builder.linear(h, [gate], scale=gate_factor), activation=function)
    down, biases = [mlp.weight("down_proj", h.width, ffn)], mlp.biases(bias, ("down_proj", h.width))
    return builder.linear(m, down, biases=biases, residual=residual, scale=down_factor)


def _decoder(
    config: Config,
    begin: Begin,
    sizes: Sizes,
    layer: Callable[[Builder, Slice, int], Slice],
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
) -> Program:
    builder = begin(sizes.vocabulary, sizes.context)
    embedding = Tensor("model.embed_tokens.weight", (sizes.vocabulary, sizes.hidden))
    x = builder.embed(embedding, embedding_scale)
    for number in range(sizes.layers):
        builder.layer_input(number, x)
        x = layer(builder, x, number)
    x = rms_norm(builder, x, Linear("model."), "final_layernorm", sizes.epsilon)
    tied = config.flag("tie_word_embeddings", False)
    head = embedding if tied else Tensor("lm_head.weight", (sizes.vocabulary, sizes.hidden))
    return builder.finish(builder.linear(x, [head], scale=logit_scale))
