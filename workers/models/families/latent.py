"""Latent attention: the keys and values of all heads are projections of one latent vector a token.

DeepSeek V2 and V3 (Moonlight and Kimi K2 among them), Mistral 4, A.X-K1 and K2, Sarvam's larger model, GLM-4.7-Flash,
Youtu, MiniCPM 3, LongCat-Flash (longcat_flash.py), Mistral Large 4 (mistral_large4.py), and some layers of Kimi Linear
(kimi_linear.py).
The cache stores the latent vector as the key and the value of all heads. A head's query is multiplied by the rows of
kv_b_proj that compute its keys, and its output of attention by the rows that compute its values; the reasons stand in
docs/inside-the-engines.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.kernels import arithmetic
from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Norm, Program, Routing, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.corrected_mixtures import (
    SMALLEST_SUM,
    check_sarvam,
    deepseek_experts,
    deepseek_router,
    listed_experts,
)
from outrider.workers.models.families.experts import Router, groups_of, mixture, sparse_layers
from outrider.workers.models.families.gemma import in_type_of_embeddings
from outrider.workers.models.families.ministral3 import BETA, ORIGINAL, QueryFactors, query_factors
from outrider.workers.models.families.parts import Begin, Linear, Ranges, gate_heads, rms_norm
from outrider.workers.models.families.skeleton import Mixer, Sizes, Style, decoder, read_sizes, rotate
from outrider.workers.models.rope import LONG, Rope, latent_factor, read_rope

# The epsilon of the norms of latent vectors in most families; configurations state that of the other norms.
EPSILON = 1e-6
# The kernels' attention requires sizes of keys and values that are multiples of this.
HEAD_UNIT = 8
# checkpoint_program.py sets this key where the checkpoint has the two halves of kv_b_proj as separate matrices of each
# head, as MLX's have (formats/mlx_families.py).
BY_HEADS = "kv_b_proj_by_heads"
# A.X-K1's: a key for whether the router has corrections, and the norm after its experts.
CORRECTIONS, BEHIND_EXPERTS = "e_score_correction_bias", "post_mlp_layernorm"
# What transformers takes where a Mistral 4 has no rope, and keys among those of rope that do not change it.
MISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    ORIGINAL: 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA: 0.1,
}
NOT_OF_ROPE = ("partial_rotary_factor", "max_position_embeddings")
# Keys of training, and of multi-token prediction layers (formats/unexpected_tensors.py).
UNUSED = ("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers")


@dataclass(frozen=True, slots=True)
class Latent:
    """A head's queries and keys have ``plain`` columns without rope and ``turned`` ones with it; its values have ``value``.

    Queries are computed from a latent vector of ``query_rank`` columns (0: from the layer's input), keys and values from
    one of ``rank``. ``paired``: rope rotates neighbouring columns. The rotated columns of keys are shared by all heads.
    ``query_factors`` are those of ``Style``. ``head_gates``: each head is multiplied by the sigmoid of its own gate;
    ``column_gates``: so is each column of the heads; ``joined_gates``: these gates are computed as the queries are, by the
    same matrix, from the latent vector both with its norm and without. ``sinks``: scores have an attention sink for each
    head. ``position_factors``: at position p a head's query is multiplied by its scale * log(p + 1) + its bias.
    ``sources`` (empty: each its own) are the layers whose keys and values each layer reads. ``latent_scale`` multiplies the
    vector of keys and values behind its norm. ``epsilon`` is that of the latent vectors' norms. ``prefix`` follows the
    layer's prefix in names.
    """

    query_rank: int
    rank: int
    plain: int
    turned: int
    value: int
    paired: bool
    bias: bool
    scale: float
    rope: Rope | None
    by_heads: bool = False
    query_factors: QueryFactors | None = None
    head_gates: bool = False
    column_gates: bool = False
    joined_gates: bool = False
    sinks: bool = False
    position_factors: bool = False
    sources: Sequence[int] = ()
    latent_scale: float = 1.0
    epsilon: float = EPSILON
    prefix: str = "self_attn."


def deepseek_v2(config: Config, begin: Begin) -> Program:
    sizes = latent_sizes(config, layers=32, ffn=11008, heads=32)
    for key, always in (("rope_interleave", True), ("mlp_bias", False), ("norm_topk_prob", False)):
        config.only(key, always)
    check_experts(config, "softmax")
    dense, method = config.whole("first_k_dense_replace", 0), config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.unknown(f'"topk_method": {method!r}')

    def router(count: int, chosen: int) -> Router:
        # "greedy" chooses among all experts, without groups.
        groups, kept = groups_of(config, count, chosen) if method != "greedy" else (1, 1)
        for unused in ("n_group", "topk_group"):
            config.get(unused)
        scale = config.number("routed_scaling_factor", 1.0)
        routing = Routing.SOFTMAX_GROUPS if kept < groups else Routing.SOFTMAX
        return Router(routing, groups=groups, groups_kept=kept, scale=scale)

    shared = config.size("n_shared_experts", 2)
    count = config.size("n_routed_experts", config.get("num_experts", 64))
    experts = deepseek_experts(config, count, None, 1407, shared, router, lambda layer: layer >= dense)
    latent = read_latent(config, sizes, query_rank=1536, plain=128, value=128)
    return decoder(config, begin, sizes, Style(attention=latent_attention(sizes, latent), mixer=mixture(sizes, experts)))


def deepseek_v3(config: Config, begin: Begin) -> Program:
    sizes = latent_sizes(config, layers=61, ffn=18432, heads=128)
    shared = config.size("n_shared_experts", 1)
    count = config.size("n_routed_experts", config.get("num_local_experts", 256))
    latent = read_latent(config, sizes, query_rank=1536, plain=128, value=128)
    return _as_deepseek_v3(config, begin, sizes, latent, count, shared, dense=3, groups=(8, 4))


def _as_deepseek_v3(
    config: Config,
    begin: Begin,
    sizes: Sizes,
    latent: Latent,
    count: int,
    shared: int,
    *,
    dense: int,
    groups: tuple[int, int],
) -> Program:
    """``dense`` and ``groups`` are the family's defaults."""
    check_experts(config, "sigmoid")
    config.only("topk_method", "noaux_tc")
    first, router = config.whole("first_k_dense_replace", dense), deepseek_router(config, scale=2.5, groups=groups)
    experts = deepseek_experts(config, count, 8, 2048, shared, router, lambda layer: layer >= first)
    return decoder(config, begin, sizes, Style(attention=latent_attention(sizes, latent), mixer=mixture(sizes, experts)))


def sarvam_mla(config: Config, begin: Begin) -> Program:
    """DeepSeek V3 under other keys; by default queries are projections of the layer's input, not of a latent vector."""
    said = _sarvam_as_deepseek(config)
    for key in config.values:
        config.get(key)  # said.check_all_read() refuses unknown keys
    check_sarvam(said)
    sizes = latent_sizes(said, layers=32, ffn=16384, heads=64)
    latent = read_latent(said, sizes, query_rank=None, plain=128, value=128)
    shared = said.size("n_shared_experts", said.get("num_shared_experts", 1))
    count = said.size("n_routed_experts", said.get("num_experts", said.get("num_local_experts", 128)))
    program = _as_deepseek_v3(said, begin, sizes, latent, count, shared, dense=1, groups=(1, 1))
    said.check_all_read()
    return program


def _sarvam_as_deepseek(config: Config) -> Config:
    """The configuration as transformers reads it: Sarvam's "head_dim" is the size of a cached vector, not of a head, and
    yarn has a name of its own."""
    values = {key: value for key, value in config.values.items() if key not in ("head_dim", "q_head_dim")}
    scaling = values.get("rope_scaling")
    if isinstance(scaling, Mapping) and "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        kept = {key: value for key, value in scaling.items() if key != "type"}
        values |= {"rope_scaling": None, "rope_parameters": kept | {"rope_type": "yarn"}}
    return Config(values, config.source)


def axk1(config: Config, begin: Begin) -> Program:
    """DeepSeek V3 with a norm after the experts, and corrections where the checkpoint has some (checkpoint_program.py)."""
    sizes = latent_sizes(config, layers=61, ffn=18432, heads=64)
    check_experts(config, "sigmoid", every=None)
    config.only("topk_method", "noaux_tc")
    sparse = _sparse_of_axk(config, sizes.layers)
    corrected = config.flag(CORRECTIONS, True)
    router = deepseek_router(config, scale=2.5, groups=(8, 4), corrected=corrected)
    shared, count = (
        config.size("n_shared_experts", 1),
        config.size("n_routed_experts", config.get("num_local_experts", 192)),
    )
    experts = deepseek_experts(config, count, 8, 2048, shared, router, sparse.__getitem__)
    latent, inner = read_latent(config, sizes, query_rank=1536, plain=128, value=128), mixture(sizes, experts)
    if not latent.query_rank:
        raise config.unknown('"q_lora_rank": null')

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        if not sparse[layer]:
            return inner(builder, h, layer, residual)
        names, made = Linear(f"model.layers.{layer}."), inner(builder, h, layer, None)
        return rms_norm(builder, made, names, BEHIND_EXPERTS, sizes.epsilon, residual)

    return decoder(config, begin, sizes, Style(attention=latent_attention(sizes, latent), mixer=mixer))


def mistral4(config: Config, begin: Begin) -> Program:
    """DeepSeek's attention with Ministral 3's factors of queries, and experts by a softmax."""
    said = _mistral_as_deepseek(config)
    for key in config.values:
        config.get(key)  # said.check_all_read() refuses unknown keys
    sizes = latent_sizes(said, layers=36, ffn=12288, heads=32)
    check_experts(said, "softmax")
    first, share = said.whole("first_k_dense_replace", 0), said.flag("norm_topk_prob", True)

    def router(count: int, chosen: int) -> Router:
        groups, kept = groups_of(said, count, chosen)
        if kept < groups and not share:
            raise said.unknown('"norm_topk_prob": false with groups of experts', hf="does")
        scale = said.number("routed_scaling_factor", 1.0)
        if not share:
            return Router(Routing.SOFTMAX, scale=scale)
        return Router(Routing.SOFTMAX_SHARE, groups=groups, groups_kept=kept, epsilon=SMALLEST_SUM, scale=scale)

    shared = said.size("n_shared_experts", 1)
    count = said.size("n_routed_experts", said.get("num_local_experts", said.get("num_experts", 128)))
    experts = deepseek_experts(said, count, 4, 2048, shared, router, lambda layer: layer >= first)
    latent = read_latent(said, sizes, query_rank=1024, plain=64, value=128, rank=256, passed_over=(BETA,))
    latent = replace(latent, query_factors=query_factors(said, sizes.context))
    program = decoder(said, begin, sizes, Style(attention=latent_attention(sizes, latent), mixer=mixture(sizes, experts)))
    said.check_all_read()
    return program


def _mistral_as_deepseek(config: Config) -> Config:
    """The configuration with DeepSeek's meaning of "head_dim", and of rope's part of a head, which Mistral states twice."""
    values = dict(config.values)
    plain, turned = config.size("qk_nope_head_dim", 64), config.size("qk_rope_head_dim", 64)
    config.only("head_dim", plain + turned)
    values.pop("head_dim", None)
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(key) or MISTRAL_ROPE
    if isinstance(rope, Mapping):
        if rope.get("partial_rotary_factor", turned / (plain + turned)) != turned / (plain + turned):
            raise config.unknown(f'"partial_rotary_factor": {rope["partial_rotary_factor"]!r}', hf="does")
        values[key] = {name: each for name, each in rope.items() if name not in NOT_OF_ROPE}
    return Config(values, config.source)


def glm4_moe_lite(config: Config, begin: Begin) -> Program:
    sizes = latent_sizes(config, layers=47, ffn=10240, heads=20, epsilon=1e-5)
    check_experts(config, "sigmoid")
    config.only("topk_method", "noaux_tc")
    experts = listed_experts(config, sizes.layers, dense=1, count=64, chosen=4, width=1536, scale=1.8)
    latent = read_latent(config, sizes, query_rank=768, plain=192, value=256)
    return decoder(config, begin, sizes, Style(attention=latent_attention(sizes, latent), mixer=mixture(sizes, experts)))


def deepseek_v32(config: Config, begin: Begin) -> Program:
    """DeepSeek V3 for rows of up to "index_topk" tokens: the indexer would choose all earlier tokens, so it is left out."""
    return _of_short_rows(config, begin, latent_sizes(config, layers=61, ffn=18432, heads=128), (8, 4), (1536, 128, 128))


def glm_moe_dsa(config: Config, begin: Begin) -> Program:
    for unused in ("indexer_types", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"):
        config.get(unused)
    sizes = latent_sizes(config, layers=78, ffn=12288, heads=64, epsilon=1e-5)
    return _of_short_rows(config, begin, sizes, (1, 1), (2048, 192, 256))


def _of_short_rows(
    config: Config, begin: Begin, sizes: Sizes, groups: tuple[int, int], usual: tuple[int, int, int]
) -> Program:
    """Defaults: ``groups``, and ``usual``: the rank of queries, a head's columns without rope, and those of its values."""
    _check_short_rows(config, sizes)
    check_experts(config, "sigmoid")
    sparse = sparse_layers(config, sizes.layers, config.whole("first_k_dense_replace", 3))
    shared, router = config.size("n_shared_experts", 1), deepseek_router(config, scale=2.5, groups=groups)
    count = config.size("num_experts", config.size("n_routed_experts", config.get("num_local_experts", 256)))
    experts = deepseek_experts(config, count, 8, 2048, shared, router, sparse.__getitem__)
    latent = read_latent(config, sizes, query_rank=usual[0], plain=usual[1], value=usual[2])
    if not latent.query_rank:
        raise config.unknown('"q_lora_rank": null')
    return decoder(config, begin, sizes, Style(attention=latent_attention(sizes, latent), mixer=mixture(sizes, experts)))


def check_rows(config: Config, sizes: Sizes, key: str = "index_topk", usual: int | None = 2048) -> None:
    """Refuse rows that may be so long that an indexer would not choose all earlier tokens."""
    seen = config.size(key, usual)
    if sizes.context > seen:
        raise config.unknown(
            f'rows of up to {sizes.context} tokens where a token sees {seen} of them ("{key}"); it runs rows of up to '
            f'{seen}: write "max_position_embeddings": {seen} for those',
            hf="does",
        )


def _check_short_rows(config: Config, sizes: Sizes) -> None:
    check_rows(config, sizes)
    config.only("layer_types", ["indexed_attention"] * sizes.layers)
    for unused in ("index_head_dim", "index_n_heads"):
        config.get(unused)
    for key, always in (("rope_interleave", True), ("mlp_bias", False), ("topk_method", "noaux_tc")):
        config.only(key, always)


def axk2(config: Config, begin: Begin) -> Program:
    """As DeepSeek V3.2 for short rows, with gates behind norms and of attention's output."""
    sizes = latent_sizes(config, layers=48, ffn=5120, heads=32)
    _check_short_rows(config, sizes)
    check_experts(config, "sigmoid", every=None)
    sparse, rank = _sparse_of_axk(config, sizes.layers), config.size("gated_norm_rank", 16)
    count = config.size("n_routed_experts", config.get("num_local_experts", 128))
    if (config.get("n_group") is None) != (config.get("topk_group") is None):
        raise config.unknown('one of "n_group" and "topk_group" without the other')
    shared, router = config.size("n_shared_experts", 1), deepseek_router(config, scale=2.5)
    experts = deepseek_experts(config, count, 8, 512, shared, router, sparse.__getitem__)
    latent = read_latent(config, sizes, query_rank=384, plain=64, value=64, rank=128, turned=32)
    if not latent.query_rank:
        raise config.unknown('"q_lora_rank": null')
    before, behind = "input_layernorm.", "post_attention_layernorm."
    attention, inner = latent_attention(sizes, replace(latent, joined_gates=True)), mixture(sizes, experts)

    def gated_attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        return attention(builder, _gated_norm(builder, h, f"model.layers.{layer}.{before}", rank), layer, residual)

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        h = _gated_norm(builder, h, f"model.layers.{layer}.{behind}", rank) if sparse[layer] else h
        return inner(builder, h, layer, residual)

    style = Style(
        first_norm=f"{before}norm",
        second_norm=[f"{behind}norm" if each else "" for each in sparse],
        attention=gated_attention,
        mixer=mixer,
    )
    return decoder(config, begin, sizes, style)


def _gated_norm(builder: Builder, y: Slice, under: str, rank: int) -> Slice:
    """``y * sigmoid(silu(y D^T) U^T)``; the narrow matrices are in fp32, as are the routers that read the result."""
    names = Linear(under)
    narrow = [names.weight("W_down", rank, y.width)]
    low = builder.linear(y, narrow, activation=Activation.SILU, precision=Format.FP32)
    return builder.gate(y, builder.linear(low, [names.weight("W_up", y.width, rank)], precision=Format.FP32))


def _sparse_of_axk(config: Config, layers: int) -> list[bool]:
    first, step = config.whole("first_k_dense_replace", 1), config.size("moe_layer_freq", 1)
    if config.get("mlp_layer_types"):
        return sparse_layers(config, layers, 0)
    return [layer >= first and layer % step == 0 for layer in range(layers)]


def youtu(config: Config, begin: Begin) -> Program:
    sizes = latent_sizes(config, layers=32, ffn=6144, heads=16)
    config.get("embedding_initializer_range")  # of training only
    latent = read_latent(config, sizes, query_rank=1536, plain=128, value=128)
    return decoder(config, begin, sizes, Style(attention=latent_attention(sizes, latent), tied=True))


def minicpm3(config: Config, begin: Begin) -> Program:
    """Rope rotates halves; embeddings, what a layer adds to the residual, and logits are each multiplied by a factor."""
    sizes = latent_sizes(config, layers=62, ffn=6400, heads=40, epsilon=1e-5)
    value = sizes.hidden // sizes.heads
    original = _longest(config, sizes.context)
    latent = read_latent(
        config, sizes, query_rank=768, rank=256, plain=64, turned=32, value=value, halves=True, long=original
    )
    # Here null is a value: no factor.
    depth, base = config.stated("scale_depth", 1.4), config.stated("dim_model_base", 256)
    embedding = config.number("scale_emb", 12.0)
    scale = 1.0 if depth is None else config.number("scale_depth", 1.4) / sizes.layers**0.5
    style = Style(
        embedding_scale=lambda builder: in_type_of_embeddings(builder, embedding),
        residual_scale=scale,
        logit_scale=1.0 if base is None else config.positive("dim_model_base", 256) / sizes.hidden,
        tied=True,
    )
    return decoder(config, begin, sizes, replace(style, attention=latent_attention(sizes, latent, scale)))


def _longest(config: Config, context: int) -> int:
    """The original length of long rope, which no row may exceed here; 0 with another rope.

    Beyond it transformers rotates all keys of a pass with the long frequencies, and leaves earlier keys unchanged.
    """
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = stated.get("rope_type") or stated.get("type") if isinstance(stated, Mapping) else None
    if kind != LONG:
        return 0
    key = "original_max_position_embeddings"
    original = config.get(key) or stated.get(key) or context
    if type(original) is not int or original < context:
        raise config.unknown(f'rows of up to {context} tokens where "{key}" is {original!r}')
    return original


def latent_sizes(config: Config, *, layers: int, ffn: int, heads: int, epsilon: float = 1e-6) -> Sizes:
    sizes = read_sizes(config, head_size=64, epsilon=epsilon, layers=layers, ffn=ffn, heads=heads)
    # Every head has keys and values of its own.
    config.only("num_key_value_heads", sizes.heads)
    return replace(sizes, kv_heads=sizes.heads)


def check_experts(config: Config, scoring: str, every: int | None = 1) -> None:
    """Refuse keys that transformers does not read, if their value differs from what it computes.

    ``every``: the only supported "moe_layer_freq" (None: the caller reads it).
    """
    config.only("scoring_func", scoring)
    if every is not None:
        config.only("moe_layer_freq", every)
    for key in UNUSED:
        config.get(key)


def read_latent(
    config: Config,
    sizes: Sizes,
    *,
    query_rank: int | None,
    plain: int,
    value: int,
    rank: int = 512,
    turned: int = 64,
    halves: bool = False,
    long: int = 0,
    turns: bool = True,
    passed_over: Collection[str] = (),
    theta: float = 10000.0,
    usual: Mapping[str, Any] | None = None,
) -> Latent:
    """The sizes and ranks are the family's defaults. ``halves``: its rope always rotates halves; ``long``: the original
    length of its long rope (0: it has none); ``turns``: whether it has rope; with a ``turned`` of 0 heads have no columns
    for it; ``passed_over``, ``theta`` and ``usual`` are ``read_rope``'s."""
    plain = config.size("qk_nope_head_dim", plain)
    if turned:
        turned = config.size("qk_rope_head_dim", turned)
    else:
        config.only("qk_rope_head_dim", 0)
    if turned % HEAD_UNIT:
        raise config.unknown(f'"qk_rope_head_dim": {turned}, which is no multiple of {HEAD_UNIT}')
    rank = config.size("kv_lora_rank", rank)
    if rank % HEAD_UNIT:
        raise config.unknown(f'"kv_lora_rank": {rank}, which is no multiple of {HEAD_UNIT}')
    config.only("head_dim", turned)
    config.only("qk_head_dim", plain + turned)
    # Here null is a value: queries are projections of the layer's input.
    direct = config.stated("q_lora_rank", query_rank) is None
    return Latent(
        query_rank=0 if direct else config.size("q_lora_rank", query_rank),
        rank=rank,
        plain=plain,
        turned=turned,
        value=config.size("v_head_dim", value),
        paired=turns and not halves and config.flag("rope_interleave", True),
        bias=config.flag("attention_bias", False),
        by_heads=config.flag(BY_HEADS, False),
        scale=(plain + turned) ** -0.5 * (latent_factor(config) if turns else 1.0),
        rope=read_rope(config, turned, sizes.context, long_from=long, passed_over=passed_over, theta=theta, usual=usual)
        if turns
        else None,
    )


def latent_attention(sizes: Sizes, latent: Latent, residual_scale: float = 1.0) -> Mixer:
    heads, epsilon = sizes.heads, latent.epsilon
    plain, turned, value = latent.plain, latent.turned, latent.value
    stored: dict[int, tuple[Slice, Slice]] = {}  # the keys and values of the layers before
    logarithm: list[Slice] = []  # computed once, where all tokens of a pass are

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        names = Linear(f"model.layers.{layer}.{latent.prefix}")
        source = latent.sources[layer] if latent.sources else layer

        def norm(x: Slice, name: str, output: Slice | None = None) -> Slice:
            return builder.norm(x, names.vector(name, x.width), kind=Norm.RMS, epsilon=epsilon, output=output)

        beside = value if latent.joined_gates else 0  # a head's gates stand behind its query
        queries, gate = _turned_first(heads, plain, turned, latent.paired, beside=beside), None
        narrow = "kv_a_proj_with_mqa", latent.rank + turned
        rows: Ranges = ((0, latent.rank),)
        if turned:
            rows = (*_turned_first(1, 0, turned, latent.paired, latent.rank), *rows)
        matrices, biases = [names.weight(*narrow, h.width, rows)], [names.bias(*narrow, rows)]
        if latent.query_rank:
            first = "q_a_proj", latent.query_rank
            matrices, biases = [names.weight(*first, h.width), *matrices], [names.bias(*first), *biases]
            rank, rest = latent.query_rank, turned + latent.rank
            # Where queries and gates are joined, the normalised vector stands before the vector itself.
            room = builder.room(2 * rank + rest) if latent.joined_gates else None
            output = room.part(rank, rank + rest) if room else None
            both = builder.linear(h, matrices, biases=biases if latent.bias else (), output=output)
            reduced, key = both.split(rank, rest)
            normed = norm(reduced, "q_a_layernorm", room.part(0, rank) if room else None)
            if room:
                wide = names.weight("q_gate_proj", heads * (plain + turned + value), 2 * rank)
                parts = [replace(wide, rows=queries), replace(wide, rows=_gate_rows(heads, plain + turned, value))]
                width = heads * (plain + turned)
                query, gate = builder.linear(room.part(0, 2 * rank), parts).split(width, heads * value)
            else:
                query = builder.linear(normed, [names.weight("q_b_proj", heads * (plain + turned), rank, queries)])
        else:
            if source == layer:
                key = builder.linear(h, matrices, biases=biases if latent.bias else ())
            query = builder.linear(h, [names.weight("q_proj", heads * (plain + turned), h.width, queries)])
        if source == layer:
            shared, kv = key.split(turned, latent.rank) if turned else (key, key)
            builder.head_norm(kv, names.vector("kv_a_layernorm", latent.rank), heads=1, epsilon=epsilon)
            if latent.latent_scale != 1.0:
                builder.scale(kv, latent.latent_scale, output=kv)
            stored[layer] = key, kv
        if latent.rope is not None:
            rotate(builder, query, latent.rope, heads)
            if source == layer:
                rotate(builder, shared, latent.rope, 1)
        key, kv = stored[source]
        if latent.by_heads:
            to_key = [names.weight(f"embed_q.{head}", latent.rank, plain) for head in range(heads)]
            to_value = [names.weight(f"unembed_out.{head}", value, latent.rank) for head in range(heads)]
        else:
            wide = names.weight("kv_b_proj", heads * (plain + value), latent.rank)
            starts = range(0, heads * (plain + value), plain + value)
            to_key = [replace(wide, rows=((start, start + plain),), transposed=True) for start in starts]
            to_value = [replace(wide, rows=((start + plain, start + plain + value),)) for start in starts]
        if latent.query_factors is not None:
            builder.scale_by_position(query, *latent.query_factors)
        if latent.position_factors:
            if not logarithm:
                logarithm.append(_logarithm(builder, query, sizes.context))
            _scale_heads(builder, query, heads, names, logarithm[0])
        query = builder.heads(query, to_key)
        sinks = Tensor(f"{names.prefix}sinks", (heads,)) if latent.sinks else None
        a = builder.attention(query, key, kv, heads=heads, kv_heads=1, scale=latent.scale, sinks=sinks)
        a = builder.heads(a, to_value)
        if latent.column_gates:
            gate = builder.linear(h, [names.weight("gate_proj", a.width, h.width)])
        a = builder.gate(a, gate) if gate is not None else a
        if latent.head_gates:
            gate_heads(builder, a, builder.linear(h, [names.weight("g_proj", heads, h.width)]), heads)
        back, shift = [names.weight("o_proj", h.width, heads * value)], names.biases(latent.bias, ("o_proj", h.width))
        return builder.linear(a, back, biases=shift, residual=residual, scale=residual_scale)

    return attention


def _logarithm(builder: Builder, x: Slice, context: int) -> Slice:
    """log(p + 1) for the position p, in one column; ``x`` are any finite numbers."""
    table = arithmetic.log(np.arange(1, context + 1, dtype=np.float64)).astype(np.float32)
    found = builder.spread(x.part(0, 1), [1.0])
    builder.scale_by_position(found, [float(each) for each in table], 1)
    return found


def _scale_heads(builder: Builder, query: Slice, heads: int, names: Linear, logarithm: Slice) -> None:
    """Multiplies each head by its scale * ``logarithm`` + its bias, in place."""
    scale, bias = (
        builder.spread(query.part(0, heads), Tensor(f"{names.prefix}softmax_scaling.{name}", (heads,)))
        for name in ("scale", "bias")
    )
    factors = builder.gate(scale, logarithm, residual=bias, activation=Activation.NONE)
    gate_heads(builder, query, factors, heads, Activation.NONE)


def _gate_rows(heads: int, query: int, value: int) -> Ranges:
    """The rows of gates in a matrix that has those of a head's query, then those of its gates, then the next head's."""
    return tuple((start + query, start + query + value) for start in range(0, heads * (query + value), query + value))


def _turned_first(heads: int, plain: int, turned: int, paired: bool, first: int = 0, beside: int = 0) -> Ranges:
    """The rows of heads with the rotated ones (the last ``turned``) first, since the kernels rotate a head's first columns.

    ``beside``: so many other rows follow those of each head. Scores are sums over a head's columns, so the order changes
    none, as long as queries and keys share it.
    """
    ranges: list[tuple[int, int]] = []
    stride = plain + turned + beside
    for start in range(first, first + heads * stride, stride):
        middle, stop = start + plain, start + plain + turned
        if paired:
            ranges += [(row, row + 1) for row in (*range(middle, stop, 2), *range(middle + 1, stop, 2))]
        elif turned:
            ranges.append((middle, stop))
        if plain:
            ranges.append((start, middle))
    return tuple(ranges)
