"""GPT-NeoX Japanese: GPT-NeoX with rope on whole heads and one half of a layer after the other, without biases but one."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import LayerNorm, Stack, attend, even_heads, finish, fused, plain
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.rope import read_rope


def gpt_neox_japanese(config: Config, begin: Begin) -> Program:
    hidden, count = config.size("hidden_size", 2560), config.size("num_attention_heads", 32)
    ffn = hidden * config.size("intermediate_multiple_size", 4)
    vocabulary, context = config.size("vocab_size", 32000), config.size("max_position_embeddings", 2048)
    heads, layers = even_heads(config, hidden, count, count), config.size("num_hidden_layers", 32)
    norm = LayerNorm(hidden, config.number("layer_norm_eps", 1e-5))
    base = config.number("rotary_emb_base", 10000.0)
    config.only("rope_theta", base)
    rope = read_rope(config, heads.size, context, partial=config.number("rotary_pct", 1.0), theta=base)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"gpt_neox_japanese.layers.{layer}.attention.")
        projections = fused(under, "query_key_value", heads, hidden, False, heads.side_by_side)
        a = attend(builder, h, projections, heads, rope=rope)
        # Only the last layer's attention has a bias.
        biases = [Tensor(f"{under.prefix}dense_bias", (hidden,))] if layer == layers - 1 else []
        return builder.linear(a, [under.weight("dense", hidden, hidden)], biases=biases, residual=residual)

    builder, root = begin(vocabulary, context), Linear("gpt_neox_japanese.")
    embedding = root.weight("embed_in", vocabulary, hidden)
    stack = Stack("gpt_neox_japanese.layers.", layers, norm, "input_layernorm", "post_attention_layernorm")
    names = ("dense_h_to_4h", "dense_4h_to_h")
    mixer = plain(
        "gpt_neox_japanese.layers.{}.mlp.", hidden, ffn, activation(config, "hidden_act", "gelu"), names, bias=False
    )
    x = norm(builder, stack(builder, builder.embed(embedding), attention, mixer), root, "final_layer_norm")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", True))
