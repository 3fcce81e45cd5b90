"""BLOOM: a norm behind the embedding, fused queries, keys and values, and ALiBi in place of positions."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.alibi import slopes_of
from outrider.workers.models.families.layer_norm import LayerNorm, Stack, attend, even_heads, finish, fused, plain
from outrider.workers.models.families.parts import Begin, Linear

# Keys of training, and of the order in which partial products of divided matrices are summed.
OF_TRAINING = ("bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact")
# ALiBi has one form only.
UNUSED = ("n_inner", "offset_alibi")


def bloom(config: Config, begin: Begin) -> Program:
    for key in (*OF_TRAINING, *UNUSED):
        config.get(key)
    hidden = config.size("n_embed", config.size("hidden_size", 64))
    layers = config.either("n_layer", "num_hidden_layers", 2)
    count = config.either("n_head", "num_attention_heads", 8)
    vocabulary, context = config.size("vocab_size", 250880), config.context(2048)
    heads, slopes = even_heads(config, hidden, count, count), slopes_of(count)
    norm = LayerNorm(hidden, config.number("layer_norm_epsilon", 1e-5))
    of_norms = config.flag("apply_residual_connection_post_layernorm", False)
    feed_forward = plain(
        "transformer.h.{}.mlp.", hidden, 4 * hidden, Activation.GELU_TANH, ("dense_h_to_4h", "dense_4h_to_h")
    )

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"transformer.h.{layer}.self_attention.")
        projections = fused(under, "query_key_value", heads, hidden, True, heads.side_by_side)
        a = attend(builder, h, projections, heads, slopes=slopes)
        matrix, bias = under.weight("dense", hidden, hidden), under.bias("dense", hidden)
        return builder.linear(a, [matrix], biases=[bias], residual=h if of_norms else residual)

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        return feed_forward(builder, h, layer, h if of_norms else residual)

    builder, root = begin(vocabulary, context), Linear("transformer.")
    embedding = root.weight("word_embeddings", vocabulary, hidden)
    x = norm(builder, builder.embed(embedding), root, "word_embeddings_layernorm")
    stack = Stack("transformer.h.", layers, norm, "input_layernorm", "post_attention_layernorm")
    x = norm(builder, stack(builder, x, attention, mixer), root, "ln_f")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", True))
