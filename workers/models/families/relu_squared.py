"""Families whose layers are not gated, with relu squared: Nemotron and its smaller Minitrons, and Arcee's."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import Heads, LayerNorm, Stack, attend, finish, plain, projected
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.families.skeleton import Style, decoder, read_sizes
from outrider.workers.models.rope import read_rope

LAYER = "model.layers.{}.mlp."
NAMES = ("up_proj", "down_proj")


def arcee(config: Config, begin: Begin) -> Program:
    """Llama's but for the layer behind the attention."""
    sizes, function = read_sizes(config, epsilon=1e-5), activation(config, "hidden_act", "relu2")
    bias, biased = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    mixer = plain(LAYER, sizes.hidden, sizes.ffn, function, NAMES, bias=biased)
    return decoder(config, begin, sizes, Style(qkv_bias=bias, output_bias=bias, mixer=mixer))


def nemotron(config: Config, begin: Begin) -> Program:
    """Layer norms that multiply by 1 + w, and rope on a part of a head."""
    sizes, epsilon = read_sizes(config, heads=48), config.number("norm_eps", 1e-5)
    heads, hidden = Heads(sizes.heads, sizes.kv_heads, sizes.head_size), sizes.hidden
    partial, bias = config.number("partial_rotary_factor", 0.5), config.flag("attention_bias", False)
    rope = read_rope(config, heads.size, sizes.context, partial=partial)
    function = activation(config, "hidden_act", "relu2")
    mixer = plain(LAYER, hidden, sizes.ffn, function, NAMES, bias=config.flag("mlp_bias", False))

    norm = LayerNorm(hidden, epsilon, plus=1.0)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"model.layers.{layer}.self_attn.")
        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, bias)
        a = attend(builder, h, projections, heads, rope=rope)
        biases = under.biases(bias, ("o_proj", hidden))
        return builder.linear(a, [under.weight("o_proj", hidden, a.width)], biases=biases, residual=residual)

    builder, root = begin(sizes.vocabulary, sizes.context), Linear("model.")
    embedding = root.weight("embed_tokens", sizes.vocabulary, hidden)
    stack = Stack("model.layers.", sizes.layers, norm, "input_layernorm", "post_attention_layernorm")
    x = norm(builder, stack(builder, builder.embed(embedding), attention, mixer), root, "norm")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", False))
