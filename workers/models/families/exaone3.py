"""EXAONE 3 and 3.5: Llama under other names, of its keys and of its tensors."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Norm, Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.families.skeleton import Sizes, read_sizes, rotate
from outrider.workers.models.rope import Rope, read_rope


def exaone(config: Config, begin: Begin) -> Program:
    # transformers takes either name of these.
    layers, epsilon = config.size("num_layers", 32), config.number("layer_norm_epsilon", 1e-5)
    sizes = read_sizes(config, kv_heads=8, epsilon=epsilon, layers=layers, ffn=14336)
    named = config.get("activation_function", config.get("hidden_act", "silu"))
    function = activation(config, "activation_function", named)
    for key, value in (("num_layers", sizes.layers), ("layer_norm_epsilon", sizes.epsilon), ("hidden_act", named)):
        # Where both names are there and differ, which counts depends on their order.
        config.only(key, value)
    config.get("embed_dropout")  # of training only
    for key in ("attention_bias", "mlp_bias"):
        config.only(key, False)
    rope = read_rope(config, sizes.head_size, sizes.context, theta=500000.0)
    builder = begin(sizes.vocabulary, sizes.context)
    embedding = Tensor("transformer.wte.weight", (sizes.vocabulary, sizes.hidden))
    x = builder.embed(embedding)
    for layer in range(sizes.layers):
        builder.layer_input(layer, x)
        block = Linear(f"transformer.h.{layer}.")
        attended = _attention(builder, _norm(builder, x, block.vector("ln_1", sizes.hidden), sizes), block, rope, sizes, x)
        h = _norm(builder, attended, block.vector("ln_2", sizes.hidden), sizes)
        gate, up = (block.weight(f"mlp.{name}", sizes.ffn, sizes.hidden) for name in ("c_fc_0", "c_fc_1"))
        down = block.weight("mlp.c_proj", sizes.hidden, sizes.ffn)
        x = builder.linear(builder.gated(h, gate, up, function), [down], residual=attended)
    x = _norm(builder, x, Tensor("transformer.ln_f.weight", (sizes.hidden,)), sizes)
    tied = config.flag("tie_word_embeddings", False)
    head = embedding if tied else Tensor("lm_head.weight", (sizes.vocabulary, sizes.hidden))
    return builder.finish(builder.linear(x, [head]))


def _norm(builder: Builder, x: Slice, weight: Tensor, sizes: Sizes) -> Slice:
    return builder.norm(x, weight, kind=Norm.RMS, epsilon=sizes.epsilon)


def _attention(builder: Builder, h: Slice, block: Linear, rope: Rope, sizes: Sizes, residual: Slice) -> Slice:
    width, kv_width = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    projections = (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width))
    matrices = [block.weight(f"attn.attention.{name}", rows, sizes.hidden) for name, rows in projections]
    query, key, value = builder.linear(h, matrices).split(width, kv_width, kv_width)
    rotate(builder, query, rope, sizes.heads)
    rotate(builder, key, rope, sizes.kv_heads)
    a = builder.attention(query, key, value, heads=sizes.heads, kv_heads=sizes.kv_heads)
    return builder.linear(a, [block.weight("attn.attention.out_proj", sizes.hidden, width)], residual=residual)
