"""StableLM: gated feed-forward after attention or parallel to it, rope on a quarter of each head, a norm for each head."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Norm, Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import (
    LayerNorm,
    Stack,
    attend,
    even_heads,
    finish,
    gated_layer,
    projected,
)
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.rope import read_rope


def stablelm(config: Config, begin: Begin) -> Program:
    hidden, ffn = config.size("hidden_size", 2560), config.size("intermediate_size", 6912)
    vocabulary, context = config.size("vocab_size", 50304), config.size("max_position_embeddings", 4096)
    count, kv_count = config.size("num_attention_heads", 32), config.size("num_key_value_heads", 32)
    heads = even_heads(config, hidden, count, kv_count)
    norm = LayerNorm(hidden, config.number("layer_norm_eps", 1e-5))
    bias, normed = config.flag("use_qkv_bias", False), config.flag("qk_layernorm", False)
    parallel = config.flag("use_parallel_residual", False)
    rope = read_rope(config, heads.size, context, partial=config.number("partial_rotary_factor", 0.25))

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"model.layers.{layer}.self_attn.")

        def each(x: Slice, name: str, count: int) -> None:
            for head in range(count):
                weight = under.vector(f"{name}_layernorm.norms.{head}", heads.size)
                part = x.part(head * heads.size, heads.size)
                builder.head_norm(part, weight, heads=1, epsilon=norm.epsilon, kind=Norm.LAYER)

        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, bias)
        a = attend(builder, h, projections, heads, rope=rope, norm=each if normed else None)
        return builder.linear(a, [under.weight("o_proj", hidden, hidden)], residual=residual)

    builder = begin(vocabulary, context)
    root = Linear("model.")
    embedding = root.weight("embed_tokens", vocabulary, hidden)
    second = "" if parallel else "post_attention_layernorm"
    layers = config.size("num_hidden_layers", 32)
    stack = Stack("model.layers.", layers, norm, "input_layernorm", second, parallel)
    mixer = gated_layer("model.layers.{}.mlp.", hidden, ffn, activation(config, "hidden_act", "silu"))
    x = norm(builder, stack(builder, builder.embed(embedding), attention, mixer), root, "norm")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", False))
