"""Mistral Large 4: latent attention without a latent vector of queries, each head of which has factors that grow with the
position; rope, whose frequencies have trained factors, in three of four layers; layers that share keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.kernels import arithmetic
from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Routing, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.corrected_mixtures import SMALLEST_SUM, deepseek_experts
from outrider.workers.models.families.experts import Router, groups_of, mixture, sparse_layers
from outrider.workers.models.families.latent import (
    check_experts,
    check_rows,
    latent_attention,
    latent_sizes,
    read_latent,
)
from outrider.workers.models.families.parts import Begin
from outrider.workers.models.families.skeleton import Style, decoder
from outrider.workers.models.rope import Rope

KIND = "mistral_large4_text"
# checkpoint_program.py sets this key to the logarithms of the factors by which rope's frequencies are multiplied: the
# checkpoint has them as a tensor, and no operation reads them.
FREQUENCY_FACTORS = "rope_frequency_factors"
FACTORS = "model.rotary_emb.alpha"
# The exponentials of larger ones are beyond float32.
LARGEST_LOGARITHM = 88.0
# What transformers takes where a configuration has no rope.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
# Keys of what chooses the tokens that are seen.
UNUSED = (
    *("index_head_dim", "index_n_heads", "indexer_types"),
    *("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"),
)


def frequency_factors(values: Mapping[str, Any]) -> Tensor | None:
    """The tensor of ``FREQUENCY_FACTORS`` in this family's checkpoints; None for other families."""
    if values.get("model_type") != KIND:
        return None
    return Tensor(FACTORS, (Config(values).size("qk_rope_head_dim", 64) // 2,))


def mistral_large4(config: Config, begin: Begin) -> Program:
    """For rows of up to "index_topk" tokens: the indexer would choose all earlier tokens, so it is left out."""
    sizes = latent_sizes(config, layers=72, ffn=24576, heads=64, epsilon=1e-5)
    check_rows(config, sizes)
    config.only("layer_types", ["indexed_attention"] * sizes.layers)
    check_experts(config, "softmax")
    for key, always in (("rope_interleave", True), ("mlp_bias", False), ("norm_topk_prob", True), ("q_lora_rank", None)):
        config.only(key, always)
    for unused in UNUSED:
        config.get(unused)

    def router(count: int, chosen: int) -> Router:
        groups, kept = groups_of(config, count, chosen)
        scale = config.number("routed_scaling_factor", 1.0)
        return Router(Routing.SOFTMAX_SHARE, groups=groups, groups_kept=kept, epsilon=SMALLEST_SUM, scale=scale)

    sparse = sparse_layers(config, sizes.layers, config.whole("first_k_dense_replace", 1))
    shared = config.size("n_shared_experts", 1)
    count = config.size("num_experts", config.size("n_routed_experts", config.get("num_local_experts", 128)))
    experts = deepseek_experts(config, count, 4, 6144, shared, router, sparse.__getitem__)
    turns = _turning_layers(config, sizes.layers)
    sources = _sources(config, turns)
    turning = read_latent(config, sizes, query_rank=None, plain=64, value=128, usual=ROPE)
    turning = replace(turning, epsilon=sizes.epsilon, position_factors=True, sources=sources)
    turning = replace(turning, rope=_stretched(config, turning.rope, config.get(FREQUENCY_FACTORS)))
    still = replace(turning, plain=turning.plain + turning.turned, turned=0, rope=None)
    # Keys and values are shared between layers of one kind alone.
    attention = {True: latent_attention(sizes, turning), False: latent_attention(sizes, still)}

    def either(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        return attention[turns[layer]](builder, h, layer, residual)

    cap = config.positive("final_logit_softcapping", 30.0)
    return decoder(config, begin, sizes, Style(attention=either, mixer=mixture(sizes, experts), logit_cap=cap))


def _turning_layers(config: Config, layers: int) -> list[bool]:
    """Whether each layer has rope."""
    interval = config.size("no_rope_layer_interval", 4)
    stated = config.stated("no_rope_layers", None)
    turns = [int((layer + 1) % interval != 0) for layer in range(layers)] if stated is None else stated
    if not isinstance(turns, list) or len(turns) < layers or not set(turns) <= {0, 1}:
        raise ModelError(f'{config.source}: the native engine cannot follow "no_rope_layers": {stated!r}')
    return [bool(each) for each in turns[:layers]]


def _sources(config: Config, turns: Sequence[bool]) -> list[int]:
    """The layer whose keys and values each layer reads.

    transformers keeps those that were shared last, once for layers with rope and once for those without, whichever layer is
    named.
    """
    stated = config.stated("kv_source_layers", None)
    sources = list(range(len(turns))) if stated is None else stated
    known = isinstance(sources, list) and len(sources) == len(turns) and set(map(type, sources)) <= {int}
    borrowed = {source for layer, source in enumerate(sources) if source != layer} if known else set()
    for layer, source in enumerate(sources if known else ()):
        known = known and 0 <= source <= layer and sources[source] == source and turns[source] == turns[layer]
        if source != layer:
            known = known and not any(source < other < layer and turns[other] == turns[layer] for other in borrowed)
    if not known:
        raise ModelError(f'{config.source}: the native engine cannot follow "kv_source_layers": {stated!r}')
    return list(sources)


def _stretched(config: Config, rope: Rope | None, logarithms: Sequence[float] | None) -> Rope | None:
    """Without a checkpoint, as where a model's size is told from its configuration, there are no factors."""
    if rope is None or logarithms is None:
        return rope
    if beyond := [each for each in logarithms if not each <= LARGEST_LOGARITHM]:  # NaN, too
        raise ModelError(f'{config.source}: rope cannot be computed where "{FACTORS}" holds {beyond[0]}')
    factors = arithmetic.exp(np.array(logarithms, np.float64)).astype(np.float32)
    return replace(rope, frequencies=tuple(map(float, np.array(rope.frequencies, np.float32) * factors)))
