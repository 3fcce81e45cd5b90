"""GPTBigCode: StarCoder and its kin, one key head for all queries."""

from __future__ import annotations

from outrider.kernels.program import Norm, Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Begin, Linear, activation


def gpt_bigcode(config: Config, begin: Begin) -> Program:
    hidden = config.size("n_embd", 768)
    ffn = config.size("n_inner", 4 * hidden)
    layers, heads = config.size("n_layer", 12), config.size("n_head", 12)
    vocabulary, context = config.size("vocab_size", 50257), config.size("n_positions", 1024)
    epsilon = config.number("layer_norm_epsilon", 1e-5)
    function = activation(config, "activation_function", "gelu_pytorch_tanh")
    head_size = hidden // heads
    kv_heads = 1 if config.flag("multi_query", True) else heads
    config.only("num_key_value_heads", kv_heads)
    config.only("add_cross_attention", False)
    scale = None if config.flag("scale_attn_weights", True) else 1.0
    widths = (hidden, kv_heads * head_size, kv_heads * head_size)
    # With one key head c_attn is queries, key, value; otherwise each head's query, key and value lie side by side.
    parts: list[tuple[tuple[int, int], ...]] = [()]
    if kv_heads > 1:
        starts = [[3 * head * head_size + part * head_size for head in range(heads)] for part in range(3)]
        parts = [tuple((start, start + head_size) for start in part) for part in starts]
    builder = begin(vocabulary, context)
    root = Linear("transformer.")

    def norm(x: Slice, under: Linear, name: str) -> Slice:
        weight, shift = under.vector(name, hidden), under.bias(name, hidden)
        return builder.norm(x, weight, kind=Norm.LAYER, epsilon=epsilon, bias=shift)

    embedding = root.weight("wte", vocabulary, hidden)
    x = builder.positions(builder.embed(embedding), root.weight("wpe", context, hidden))
    for layer in range(layers):
        block = Linear(f"transformer.h.{layer}.")
        c_attn, rows = f"{block.prefix}attn.c_attn", sum(widths)
        matrices = [Tensor(f"{c_attn}.weight", (rows, hidden), part) for part in parts]
        biases = [Tensor(f"{c_attn}.bias", (rows,), part) for part in parts]
        query, key, value = builder.linear(norm(x, block, "ln_1"), matrices, biases=biases).split(*widths)
        a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads, scale=scale)
        output = [block.weight("attn.c_proj", hidden, hidden)]
        x = builder.linear(a, output, biases=[block.bias("attn.c_proj", hidden)], residual=x)
        first, second = [block.weight("mlp.c_fc", ffn, hidden)], [block.weight("mlp.c_proj", hidden, ffn)]
        h = norm(x, block, "ln_2")
        m = builder.linear(h, first, biases=[block.bias("mlp.c_fc", ffn)], activation=function)
        x = builder.linear(m, second, biases=[block.bias("mlp.c_proj", hidden)], residual=x)
    x = norm(x, root, "ln_f")
    tied = config.flag("tie_word_embeddings", True)
    return builder.finish(builder.linear(x, [embedding if tied else Tensor("lm_head.weight", (vocabulary, hidden))]))
