"""Families whose layers are not gated, with relu squared: Nemotron and its smaller Minitrons, Arcee's and Jais 2."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import Heads, LayerNorm, Stack, attend, finish, plain, projected
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.families.skeleton import Sizes, Style, decoder, read_sizes
from outrider.workers.models.rope import Rope, read_rope

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
    sizes, partial = read_sizes(config, heads=48), config.number("partial_rotary_factor", 0.5)
    rope = read_rope(config, sizes.head_size, sizes.context, partial=partial)
    norm = LayerNorm(sizes.hidden, config.number("norm_eps", 1e-5), plus=1.0)
    return _normed(config, begin, sizes, norm, rope, biased=False)


def jais2(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, heads=26)
    norm = LayerNorm(sizes.hidden, config.number("layer_norm_eps", 1e-5))
    return _normed(config, begin, sizes, norm, read_rope(config, sizes.head_size, sizes.context), biased=True)


def _normed(config: Config, begin: Begin, sizes: Sizes, norm: LayerNorm, rope: Rope, *, biased: bool) -> Program:
    """Llama's order of things, with layer norms. ``biased``: where the configuration does not say."""
    heads, hidden = Heads(sizes.heads, sizes.kv_heads, sizes.head_size), sizes.hidden
    bias, function = config.flag("attention_bias", biased), activation(config, "hidden_act", "relu2")
    mixer = plain(LAYER, hidden, sizes.ffn, function, NAMES, bias=config.flag("mlp_bias", biased))

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
