"""StarCoder 2: layer norms, grouped queries, windows, and a plain layer behind the attention."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import Heads, LayerNorm, Stack, attend, finish, plain, projected
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.rope import read_rope


def starcoder2(config: Config, begin: Begin) -> Program:
    hidden, ffn = config.size("hidden_size", 3072), config.size("intermediate_size", 12288)
    count = config.size("num_attention_heads", 24)
    size = config.size("head_dim", hidden // count)
    heads = Heads(count, config.size("num_key_value_heads", 2), size)
    vocabulary, context = config.size("vocab_size", 49152), config.size("max_position_embeddings", 4096)
    bias, window = config.flag("use_bias", True), config.window(None)
    norm = LayerNorm(hidden, config.number("norm_epsilon", 1e-5))
    rope = read_rope(config, size, context)
    function = activation(config, "hidden_act", "gelu_pytorch_tanh")
    # Left over from the first StarCoder: "hidden_act" and "norm_epsilon" are what counts, as in transformers.
    for key in ("activation_function", "layer_norm_epsilon"):
        config.get(key)
    for key, value in (("mlp_type", "default"), ("norm_type", "layer_norm"), ("scale_attn_weights", True)):
        config.only(key, value)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"model.layers.{layer}.self_attn.")
        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, bias)
        a = attend(builder, h, projections, heads, rope=rope, window=window)
        biases = under.biases(bias, ("o_proj", hidden))
        return builder.linear(a, [under.weight("o_proj", hidden, a.width)], biases=biases, residual=residual)

    builder = begin(vocabulary, context)
    root = Linear("model.")
    embedding = root.weight("embed_tokens", vocabulary, hidden)
    layers = config.size("num_hidden_layers", 30)
    stack = Stack("model.layers.", layers, norm, "input_layernorm", "post_attention_layernorm")
    mixer = plain("model.layers.{}.mlp.", hidden, ffn, function, ("c_fc", "c_proj"), bias=bias)
    x = norm(builder, stack(builder, builder.embed(embedding), attention, mixer), root, "norm")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", True))
