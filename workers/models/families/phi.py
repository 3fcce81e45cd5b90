"""Phi 1 to 2: attention and a plain layer side by side behind one norm, rope on half of each head, a head with a bias."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import (
    Heads,
    LayerNorm,
    Stack,
    attend,
    even_heads,
    finish,
    norm_of_heads,
    plain,
    projected,
)
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.rope import read_rope


def phi(config: Config, begin: Begin) -> Program:
    hidden, ffn = config.size("hidden_size", 2048), config.size("intermediate_size", 8192)
    vocabulary, context = config.size("vocab_size", 51200), config.size("max_position_embeddings", 2048)
    heads = _heads(config, hidden)
    norm = LayerNorm(hidden, config.number("layer_norm_eps", 1e-5))
    normed = config.flag("qk_layernorm", False)
    rope = read_rope(config, heads.size, context, partial=config.number("partial_rotary_factor", 0.5))
    function = activation(config, "hidden_act", "gelu_new")

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"model.layers.{layer}.self_attn.")
        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, True)
        each = norm_of_heads(builder, under, heads.size, norm.epsilon) if normed else None
        a = attend(builder, h, projections, heads, rope=rope, norm=each)
        biases = under.biases(True, ("dense", hidden))
        return builder.linear(a, [under.weight("dense", hidden, a.width)], biases=biases, residual=residual)

    builder = begin(vocabulary, context)
    root = Linear("model.")
    embedding = root.weight("embed_tokens", vocabulary, hidden)
    stack = Stack("model.layers.", config.size("num_hidden_layers", 24), norm, "input_layernorm", parallel=True)
    mixer = plain("model.layers.{}.mlp.", hidden, ffn, function, ("fc1", "fc2"))
    x = norm(builder, stack(builder, builder.embed(embedding), attention, mixer), root, "final_layernorm")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", False), bias=True)


def _heads(config: Config, hidden: int) -> Heads:
    count = config.size("num_attention_heads", 32)
    return even_heads(config, hidden, count, config.size("num_key_value_heads", count))
