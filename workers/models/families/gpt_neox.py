"""GPT-NeoX and Pythia: attention and the layer behind it read the same residual, rope on a quarter of each head."""

from __future__ import annotations

from outrider.kernels.program import Norm, Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.families.skeleton import rotate
from outrider.workers.models.rope import read_rope


def gpt_neox(config: Config, begin: Begin) -> Program:
    hidden, ffn = config.size("hidden_size", 6144), config.size("intermediate_size", 24576)
    layers, heads = config.size("num_hidden_layers", 44), config.size("num_attention_heads", 64)
    vocabulary, context = config.size("vocab_size", 50432), config.size("max_position_embeddings", 2048)
    epsilon, bias = config.number("layer_norm_eps", 1e-5), config.flag("attention_bias", True)
    parallel = config.flag("use_parallel_residual", True)
    function = activation(config, "hidden_act", "gelu")
    head_size = hidden // heads
    config.only("head_dim", head_size)
    config.only("rope_theta", config.get("rotary_emb_base", 10000.0))
    partial = config.number("rotary_pct", 0.25)
    rope = read_rope(config, head_size, context, partial=partial, theta=config.number("rotary_emb_base", 10000.0))
    # Each head's query, key and value lie side by side.
    starts = [[(3 * head + part) * head_size for head in range(heads)] for part in range(3)]
    parts = [tuple((start, start + head_size) for start in part) for part in starts]
    builder = begin(vocabulary, context)
    root = Linear("gpt_neox.")

    def norm(x: Slice, under: Linear, name: str) -> Slice:
        weight, shift = under.vector(name, hidden), under.bias(name, hidden)
        return builder.norm(x, weight, kind=Norm.LAYER, epsilon=epsilon, bias=shift)

    embedding = root.weight("embed_in", vocabulary, hidden)
    x = builder.embed(embedding)
    for layer in range(layers):
        block = Linear(f"gpt_neox.layers.{layer}.")
        fused, rows = f"{block.prefix}attention.query_key_value", 3 * hidden
        matrices = [Tensor(f"{fused}.weight", (rows, hidden), part) for part in parts]
        biases = [Tensor(f"{fused}.bias", (rows,), part) for part in parts] if bias else []
        query, key, value = builder.linear(norm(x, block, "input_layernorm"), matrices, biases=biases).split(*3 * (hidden,))
        rotate(builder, query, rope, heads)
        rotate(builder, key, rope, heads)
        a = builder.attention(query, key, value, heads=heads, kv_heads=heads)
        output = [block.weight("attention.dense", hidden, hidden)]
        attended = builder.linear(a, output, biases=block.biases(bias, ("attention.dense", hidden)), residual=x)
        h = norm(x if parallel else attended, block, "post_attention_layernorm")
        up, down = block.weight("mlp.dense_h_to_4h", ffn, hidden), block.weight("mlp.dense_4h_to_h", hidden, ffn)
        m = builder.linear(h, [up], biases=[block.bias("mlp.dense_h_to_4h", ffn)], activation=function)
        x = builder.linear(m, [down], biases=[block.bias("mlp.dense_4h_to_h", hidden)], residual=attended)
    x = norm(x, root, "final_layer_norm")
    tied = config.flag("tie_word_embeddings", False)
    return builder.finish(builder.linear(x, [embedding if tied else Tensor("lm_head.weight", (vocabulary, hidden))]))
