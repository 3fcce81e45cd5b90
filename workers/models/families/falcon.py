"""Falcon: one key head or several, norms before attention and the plain layer or before both, side by side or not; rope,
or ALiBi in bf16."""

from __future__ import annotations

from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.alibi import bf16_slopes_of
from outrider.workers.models.families.layer_norm import Heads, LayerNorm, Stack, attend, even_heads, finish, fused, plain
from outrider.workers.models.families.parts import Begin, Linear, Ranges, activation
from outrider.workers.models.rope import read_rope


def falcon(config: Config, begin: Begin) -> Program:
    hidden = config.size("hidden_size", 4544)
    ffn = config.size("ffn_hidden_size", 4 * hidden)
    vocabulary, context = config.size("vocab_size", 65024), config.size("max_position_embeddings", 2048)
    config.only("ff_factor", ffn // hidden)  # Falcon 2 says its width twice
    heads, taken = _heads(config, hidden)
    norm, bias = LayerNorm(hidden, config.number("layer_norm_epsilon", 1e-5)), config.flag("bias", False)
    rope, function = read_rope(config, heads.size, context), activation(config, "activation", "gelu")
    positions: dict[str, Any] = {"rope": rope}
    if config.flag("alibi", False):
        positions = {"slopes": bf16_slopes_of(heads.count), "bf16_biases": True}

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"transformer.h.{layer}.self_attention.")
        projections = fused(under, "query_key_value", heads, hidden, bias, taken)
        a = attend(builder, h, projections, heads, **positions)
        biases = under.biases(bias, ("dense", hidden))
        return builder.linear(a, [under.weight("dense", hidden, hidden)], biases=biases, residual=residual)

    builder = begin(vocabulary, context)
    root = Linear("transformer.")
    embedding = root.weight("word_embeddings", vocabulary, hidden)
    layers, names = config.size("num_hidden_layers", 32), ("dense_h_to_4h", "dense_4h_to_h")
    stack = Stack("transformer.h.", layers, norm, *_norms(config))
    mixer = plain("transformer.h.{}.mlp.", hidden, ffn, function, names, bias=bias)
    x = norm(builder, stack(builder, builder.embed(embedding), attention, mixer), root, "ln_f")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", True))


def _heads(config: Config, hidden: int) -> tuple[Heads, list[Ranges]]:
    """The heads, and the rows of the fused tensor that are queries, keys and values."""
    count = config.size("num_attention_heads", 71)
    kv_count, size = config.size("num_kv_heads", count), hidden // count
    if config.flag("new_decoder_architecture", False):
        config.get("multi_query")
        each = count // kv_count + 2  # heads of a group: its queries, then its key and value
        starts = [group * each * size for group in range(kv_count)]
        lengths = (0, (each - 2) * size, (each - 1) * size, each * size)
        taken: list[Ranges] = [
            tuple((start + lengths[part], start + lengths[part + 1]) for start in starts) for part in range(3)
        ]
        return even_heads(config, hidden, count, kv_count), taken
    if config.flag("multi_query", True):
        return even_heads(config, hidden, count, 1), [
            ((0, hidden),),
            ((hidden, hidden + size),),
            ((hidden + size, hidden + 2 * size),),
        ]
    config.only("num_kv_heads", count)
    heads = even_heads(config, hidden, count, count)
    return heads, heads.side_by_side


def _norms(config: Config) -> tuple[str, str, bool]:
    """The names of a layer's two norms (the second may be ""), and whether attention and feed-forward are parallel."""
    new, parallel = config.flag("new_decoder_architecture", False), config.flag("parallel_attn", True)
    norms = config.size("num_ln_in_parallel_attn", 2 if new else 1)
    if norms not in ((1, 2) if new else (1,)) or (new and not parallel):
        raise config.unknown(
            f'"num_ln_in_parallel_attn": {norms} with "new_decoder_architecture": {new} and "parallel_attn": {parallel}'
        )
    if norms == 2:
        return "ln_attn", "ln_mlp", True
    return "input_layernorm", "" if parallel else "post_attention_layernorm", parallel
