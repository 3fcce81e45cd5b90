"""Persimmon: rope on half of each head behind layer norms of heads, and a plain layer with a squared ReLU."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import (
    LayerNorm,
    Stack,
    attend,
    even_heads,
    finish,
    fused,
    norm_of_heads,
    plain,
)
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.rope import read_rope


def persimmon(config: Config, begin: Begin) -> Program:
    hidden, ffn = config.size("hidden_size", 4096), config.size("intermediate_size", 16384)
    vocabulary, context = config.size("vocab_size", 262144), config.size("max_position_embeddings", 16384)
    count = config.size("num_attention_heads", 64)
    heads = even_heads(config, hidden, count, count)
    config.only("num_key_value_heads", count)
    norm, normed = LayerNorm(hidden, config.number("layer_norm_eps", 1e-5)), config.flag("qk_layernorm", True)
    rope = read_rope(config, heads.size, context, partial=config.number("partial_rotary_factor", 0.5))
    function = activation(config, "hidden_act", "relu2")

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"model.layers.{layer}.self_attn.")
        projections = fused(under, "query_key_value", heads, hidden, True, heads.side_by_side)
        each = norm_of_heads(builder, under, heads.size, norm.epsilon) if normed else None
        a = attend(builder, h, projections, heads, rope=rope, norm=each)
        biases = under.biases(True, ("dense", hidden))
        return builder.linear(a, [under.weight("dense", hidden, hidden)], biases=biases, residual=residual)

    builder = begin(vocabulary, context)
    root = Linear("model.")
    embedding = root.weight("embed_tokens", vocabulary, hidden)
    layers = config.size("num_hidden_layers", 36)
    stack = Stack("model.layers.", layers, norm, "input_layernorm", "post_attention_layernorm")
    mixer = plain("model.layers.{}.mlp.", hidden, ffn, function, ("dense_h_to_4h", "dense_4h_to_h"))
    x = norm(builder, stack(builder, builder.embed(embedding), attention, mixer), root, "final_layernorm")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", False))
