"""Phi-3.5-MoE: layer norms, and two experts of which each is weighed among those near to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Routing, Slice
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import Experts, Router, mixture, number_of_experts
from outrider.workers.models.families.layer_norm import Heads, LayerNorm, Stack, attend, finish, projected
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.families.skeleton import read_sizes
from outrider.workers.models.rope import LONG, Rope, read_rope

THETA = 1000000.0
# What multiplies sines and cosines of rows up to the original length, and of longer ones.
FACTORS = ("short_mscale", "long_mscale")


def phimoe(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, epsilon=1e-5)
    heads, hidden = Heads(sizes.heads, sizes.kv_heads, sizes.head_size), sizes.hidden
    config.get("input_jitter_noise")  # of training only
    config.only("num_experts_per_tok", 2)
    count, function = number_of_experts(config, 16), activation(config, "hidden_act", "silu")
    # Scores further from the best than twice this part of it have no share.
    router = Router(Routing.SPARSE_MIXER, "router", epsilon=2.0 * config.number("router_jitter_noise", 0.01))
    if count < 2:
        raise ModelError(f"{config.source}: a token takes two experts, there is {count}")
    window, bias = config.window(None), config.flag("attention_bias", False)
    rope = _rope(config, heads.size, sizes.context)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"model.layers.{layer}.self_attn.")
        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, bias)
        a = attend(builder, h, projections, heads, rope=rope, window=window)
        biases = under.biases(bias, ("o_proj", hidden))
        return builder.linear(a, [under.weight("o_proj", hidden, a.width)], biases=biases, residual=residual)

    builder, root, norm = begin(sizes.vocabulary, sizes.context), Linear("model."), LayerNorm(hidden, sizes.epsilon)
    embedding = root.weight("embed_tokens", sizes.vocabulary, hidden)
    stack = Stack("model.layers.", sizes.layers, norm, "input_layernorm", "post_attention_layernorm")
    mixer = mixture(sizes, Experts(count, 2, sizes.ffn, function, router))
    x = norm(builder, stack(builder, builder.embed(embedding), attention, mixer), root, "norm")
    tied = config.flag("tie_word_embeddings", False)
    return finish(builder, x, embedding, tied, bias=config.flag("lm_head_bias", False))


def _rope(config: Config, head_size: int, context: int) -> Rope:
    """As in transformers, long rope's short frequencies are used for all rows; both factors must be equal."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    stated = config.get(key) or {}
    kind = stated.get("rope_type") or stated.get("type") or "default" if isinstance(stated, Mapping) else "default"
    if kind == "default":
        return read_rope(config, head_size, context, theta=THETA)
    factors = {stated.get(name) for name in FACTORS}
    factor = next(iter(factors))
    if kind != LONG or len(factors) > 1 or not isinstance(factor, (int, float)):
        raise config.unknown(
            f'"{key}" of the type {kind!r} whose {" and ".join(FACTORS)} are {stated.get(FACTORS[0])!r} '
            f"and {stated.get(FACTORS[1])!r}"
        )
    for read in ("rope_theta", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"):
        config.get(read)
    known: dict[str, Any] = {name: value for name, value in stated.items() if name not in FACTORS}
    original = config.get("original_max_position_embeddings") or known.get("original_max_position_embeddings")
    if not isinstance(original, int) or original < 1:
        raise ModelError(
            f'{config.source}: "original_max_position_embeddings" must be a positive whole number, got {original!r}'
        )
    plain = Config({**config.values, "rope_scaling": None, "rope_parameters": known}, config.source)
    rope = read_rope(plain, head_size, context, theta=THETA, long_from=original)
    return replace(rope, factor=float(factor), long_frequencies=(), longest=0)
