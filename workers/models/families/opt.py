"""OPT, with opt-350m's norms behind and its projections too."""

from __future__ import annotations

from outrider.kernels.program import Norm, Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Begin, Linear, activation


def opt(config: Config, begin: Begin) -> Program:
    hidden, ffn = config.size("hidden_size", 768), config.size("ffn_dim", 3072)
    layers, heads = config.size("num_hidden_layers", 12), config.size("num_attention_heads", 12)
    vocabulary, context = config.size("vocab_size", 50272), config.size("max_position_embeddings", 2048)
    embedded = config.size("word_embed_proj_dim", hidden)
    before, bias = config.flag("do_layer_norm_before", True), config.flag("enable_bias", True)
    config.only("layer_norm_elementwise_affine", True)
    function = activation(config, "activation_function", "relu")
    builder = begin(vocabulary, context)
    root = Linear("model.decoder.")

    def norm(x: Slice, under: Linear, name: str) -> Slice:
        weight, shift = under.vector(name, hidden), under.bias(name, hidden)
        return builder.norm(x, weight, kind=Norm.LAYER, epsilon=1e-5, bias=shift)

    embedding = root.weight("embed_tokens", vocabulary, embedded)
    x = builder.embed(embedding)
    if embedded != hidden:
        x = builder.linear(x, [root.weight("project_in", hidden, embedded)])
    # The first two rows of OPT's position table stood for padding.
    x = builder.positions(x, root.weight("embed_positions", context + 2, hidden), offset=2)
    for layer in range(layers):
        block = Linear(f"model.decoder.layers.{layer}.")
        attention = Linear(f"{block.prefix}self_attn.")
        projections = (("q_proj", hidden), ("k_proj", hidden), ("v_proj", hidden))
        h = norm(x, block, "self_attn_layer_norm") if before else x
        matrices = [attention.weight(name, rows, hidden) for name, rows in projections]
        qkv = builder.linear(h, matrices, biases=attention.biases(bias, *projections))
        query, key, value = qkv.split(hidden, hidden, hidden)
        a = builder.attention(query, key, value, heads=heads, kv_heads=heads)
        output = [attention.weight("out_proj", hidden, hidden)]
        x = builder.linear(a, output, biases=attention.biases(bias, ("out_proj", hidden)), residual=x)
        x = x if before else norm(x, block, "self_attn_layer_norm")
        h = norm(x, block, "final_layer_norm") if before else x
        first, second = [block.weight("fc1", ffn, hidden)], [block.weight("fc2", hidden, ffn)]
        m = builder.linear(h, first, biases=block.biases(bias, ("fc1", ffn)), activation=function)
        x = builder.linear(m, second, biases=block.biases(bias, ("fc2", hidden)), residual=x)
        x = x if before else norm(x, block, "final_layer_norm")
    if before and not config.flag("_remove_final_layer_norm", False):
        x = norm(x, root, "final_layer_norm")
    if embedded != hidden:
        x = builder.linear(x, [root.weight("project_out", embedded, hidden)])
    tied = config.flag("tie_word_embeddings", True)
    return builder.finish(builder.linear(x, [embedding if tied else Tensor("lm_head.weight", (vocabulary, embedded))]))
