"""GPT-J and CodeGen: attention and a plain layer side by side behind one norm, rope of neighbouring columns."""

from __future__ import annotations

from collections.abc import Callable

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import (
    Heads,
    LayerNorm,
    Stack,
    attend,
    even_heads,
    finish,
    plain,
    projected,
)
from outrider.workers.models.families.parts import Begin, Linear, Ranges, activation, paired_rows
from outrider.workers.models.rope import plain_rope

# CodeGen's fused tensor has this many shares (one for each machine of its training), each with the queries, values and keys
# of a part of the heads.
SHARES = 4

# Matrices of queries, keys and values under a prefix: (prefix, heads, width of the model, rotated columns of a head).
Projections = Callable[[Linear, Heads, int, int], list[Tensor]]


def gptj(config: Config, begin: Begin) -> Program:
    return _decoder(config, begin, _apart)


def codegen(config: Config, begin: Begin) -> Program:
    if config.size("n_head", 16) % SHARES:
        raise config.unknown(f'"n_head" that is no multiple of {SHARES}')
    return _decoder(config, begin, _in_shares)


def _decoder(config: Config, begin: Begin, matrices: Projections) -> Program:
    hidden = config.size("n_embd", 4096)
    ffn = config.size("n_inner", 4 * hidden)
    vocabulary, context = config.size("vocab_size", 50400), config.size("n_positions", 2048)
    count = config.size("n_head", 16)
    heads = even_heads(config, hidden, count, count)
    rotated = config.size("rotary_dim", 64)
    stated = config.stated("rotary_dim", rotated)
    if stated is None or rotated % 2 or rotated > heads.size:
        raise config.unknown(f'"rotary_dim": {stated!r} with heads of {heads.size}')
    for key in ("rotary", "scale_attn_weights"):  # of the first releases
        config.only(key, True)
    norm = LayerNorm(hidden, config.number("layer_norm_epsilon", 1e-5))
    function, rope = activation(config, "activation_function", "gelu_new"), plain_rope(rotated)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"transformer.h.{layer}.attn.")
        a = attend(builder, h, (matrices(under, heads, hidden, rotated), ()), heads, rope=rope)
        return builder.linear(a, [under.weight("out_proj", hidden, hidden)], residual=residual)

    builder = begin(vocabulary, context)
    root = Linear("transformer.")
    embedding = root.weight("wte", vocabulary, hidden)
    stack = Stack("transformer.h.", config.size("n_layer", 28), norm, "ln_1", parallel=True)
    mixer = plain("transformer.h.{}.mlp.", hidden, ffn, function, ("fc_in", "fc_out"))
    x = norm(builder, stack(builder, builder.embed(embedding), attention, mixer), root, "ln_f")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", False), bias=True)


def _apart(under: Linear, heads: Heads, hidden: int, rotated: int) -> list[Tensor]:
    order = paired_rows(heads.count, heads.size, rotated)
    return projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, False, (order, order, ()))[0]


def _in_shares(under: Linear, heads: Heads, hidden: int, rotated: int) -> list[Tensor]:
    """Each share of one tensor is its heads' queries, values and keys."""
    each, width = heads.count // SHARES, hidden // SHARES

    def part(place: int, paired: bool) -> list[Tensor]:
        starts = [(3 * share + place) * width for share in range(SHARES)]
        taken: list[Ranges] = [
            paired_rows(each, heads.size, rotated, start) if paired else ((start, start + width),) for start in starts
        ]
        return [under.weight("qkv_proj", 3 * hidden, hidden, rows) for rows in taken]

    return [*part(0, True), *part(2, True), *part(1, False)]
