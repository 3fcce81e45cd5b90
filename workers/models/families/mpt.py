"""MPT: ALiBi in place of positions, or a table of positions; mostly without biases.

transformers reads some of the keys only (unread_keys.py); the others mean what they do in the code of MPT's makers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Slice
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.alibi import mpt_slopes_of
from outrider.workers.models.families.layer_norm import Heads, LayerNorm, Stack, even_heads, finish, plain
from outrider.workers.models.families.parts import Begin, Linear
from outrider.workers.models.families.skeleton import Mixer

# Keys of training, of initialisation, and of the implementation.
HARMLESS = ("emb_pdrop", "embedding_fraction", "init_config", "init_device", "tokenizer_name", "verbose")
HARMLESS_IN_ATTENTION = ("attn_pdrop", "attn_impl", "model_type")
NORMS = ("low_precision_layernorm", "layernorm")


def mpt(config: Config, begin: Begin) -> Program:
    for key in HARMLESS:
        config.get(key)
    if config.get("norm_type", NORMS[0]) not in NORMS:
        raise config.unknown(f'"norm_type": {config.get("norm_type")!r}', hf="does not know it either")
    hidden, layers = config.size("d_model", 2048), config.size("n_layers", 24)
    vocabulary, context = config.size("vocab_size", 50368), config.size("max_seq_len", 2048)
    count, ffn = config.size("n_heads", 16), config.size("expansion_ratio", 4) * hidden
    bias = not config.flag("no_bias", True)
    norm = LayerNorm(hidden, config.number("layer_norm_epsilon", 1e-5), bias=bias)
    attention, positions = _attention(config, even_heads(config, hidden, count, count), norm)
    builder, root = begin(vocabulary, context), Linear("transformer.")
    embedding = root.weight("wte", vocabulary, hidden)
    x = builder.embed(embedding)
    if positions:
        x = builder.positions(x, root.weight("wpe", context, hidden))
    mixer = plain("transformer.blocks.{}.ffn.", hidden, ffn, Activation.GELU_ERF, ("up_proj", "down_proj"), bias=bias)
    stack = Stack("transformer.blocks.", layers, norm, "norm_1", "norm_2")
    x = norm(builder, stack(builder, x, attention, mixer), root, "norm_f")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", True))


def _attention(config: Config, heads: Heads, norm: LayerNorm) -> tuple[Mixer, bool]:
    """Attention, and whether the model has a table of positions."""
    stated = config.get("attn_config", {})
    if not isinstance(stated, Mapping):
        raise ModelError(f'{config.source}: "attn_config" must be an object, got {stated!r}')
    part, hidden = Config(stated, f'{config.source}: "attn_config"'), norm.width
    for key in HARMLESS_IN_ATTENTION:
        part.get(key)
    part.only("attn_type", "multihead_attention")
    alibi, normed = part.flag("alibi", True), part.flag("qk_ln", False)
    most = part.size("alibi_bias_max", 8)
    slopes = mpt_slopes_of(heads.count, most) if alibi else ()
    scale = part.number("softmax_scale", heads.size**-0.5)
    # 0 stands for none, and a bound below 0 makes every number that bound.
    if (bound := part.number("clip_qkv", 0.0)) < 0.0:
        raise part.unknown(f'"clip_qkv": {bound:g}', hf="does")
    positions = config.flag("learned_pos_emb", True) and not alibi
    part.check_all_read()

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"transformer.blocks.{layer}.attn.")
        clip: dict[str, Any] = {"activation": Activation.CLIP, "cap": bound} if bound else {}
        matrix, biases = under.weight("Wqkv", 3 * hidden, hidden), under.biases(norm.bias, ("Wqkv", 3 * hidden))
        qkv = builder.linear(h, [matrix], biases=biases, **clip)
        query, key, value = qkv.split(*heads.widths)
        if normed:
            query, key = (norm(builder, x, under, name) for x, name in ((query, "q_ln"), (key, "k_ln")))
        a = builder.attention(query, key, value, heads=heads.count, kv_heads=heads.kv_count, scale=scale, slopes=slopes)
        matrix, biases = under.weight("out_proj", hidden, hidden), under.biases(norm.bias, ("out_proj", hidden))
        return builder.linear(a, [matrix], biases=biases, residual=residual)

    return attention, positions
