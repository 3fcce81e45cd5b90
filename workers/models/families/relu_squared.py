"""Families whose layers are not gated, with relu squared: Nemotron and its smaller Minitrons, and Arcee's."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Norm, Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import Heads, attend, finish, plain, projected
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

    def norm(x: Slice, under: Linear, name: str) -> Slice:
        weight, shift = under.vector(name, hidden, plus=1.0), under.bias(name, hidden)
        return builder.norm(x, weight, kind=Norm.LAYER, epsilon=epsilon, bias=shift)

    def attention(h: Slice, under: Linear, residual: Slice) -> Slice:
        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, bias)
        a = attend(builder, h, projections, heads, rope=rope)
        biases = under.biases(bias, ("o_proj", hidden))
        return builder.linear(a, [under.weight("o_proj", hidden, a.width)], biases=biases, residual=residual)

    builder: Builder = begin(sizes.vocabulary, sizes.context)
    root = Linear("model.")
    embedding = root.weight("embed_tokens", sizes.vocabulary, hidden)
    x = builder.embed(embedding)
    for layer in range(sizes.layers):
        block = Linear(f"model.layers.{layer}.")
        x = attention(norm(x, block, "input_layernorm"), Linear(f"{block.prefix}self_attn."), x)
        x = mixer(builder, norm(x, block, "post_attention_layernorm"), layer, x)
    return finish(builder, norm(x, root, "norm"), embedding, config.flag("tie_word_embeddings", False))
