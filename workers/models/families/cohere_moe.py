"""Command A's mixtures (cohere2_moe): Cohere 2 with experts behind some layers, which may be chosen by sigmoids."""

from __future__ import annotations

from dataclasses import replace

from outrider.kernels.builder import Builder
from outrider.kernels.program import Norm, Program, Routing, Slice
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import Experts, Router, Shared, chosen_experts, mixture, number_of_experts
from outrider.workers.models.families.layer_norm import Heads, attend, finish, projected
from outrider.workers.models.families.parts import (
    FULL,
    SLIDING,
    Begin,
    Linear,
    activation,
    layer_types,
    paired_rows,
    windows,
)
from outrider.workers.models.families.skeleton import Sizes, read_sizes
from outrider.workers.models.rope import read_rope

DENSE, SPARSE = "dense", "sparse"


def cohere2_moe(config: Config, begin: Begin) -> Program:
    """Layers without a window have no rope, but for dense ones where these have a pattern of 1."""
    sizes = read_sizes(config, head_size=128, layers=40, heads=64)
    heads, hidden = Heads(sizes.heads, sizes.kv_heads, sizes.head_size), sizes.hidden
    dense, pattern = config.whole("first_k_dense_replace", 0), config.size("sliding_window_pattern", 4)
    of_dense = config.size("prefix_dense_sliding_window_pattern", 1)

    def usual(layer: int) -> str:
        slides = (layer + 1) % of_dense if layer < dense else (layer - dense + 1) % pattern
        return SLIDING if slides else FULL

    types = layer_types(config, sizes.layers, usual)
    kinds = config.get("mlp_layer_types") or [DENSE if layer < dense else SPARSE for layer in range(sizes.layers)]
    if len(kinds) != sizes.layers or not set(kinds) <= {DENSE, SPARSE}:
        raise ModelError(f'{config.source}: the native engine cannot follow "mlp_layer_types": {kinds!r}')
    spans, bias = windows(config, types, config.window(4096)), config.flag("attention_bias", False)
    rope = read_rope(config, heads.size, sizes.context)
    ropes = [rope if span or (kind == DENSE and of_dense == 1) else None for span, kind in zip(spans, kinds, strict=True)]
    taken = [paired_rows(count, heads.size, heads.size) for count in (heads.count, heads.kv_count)]
    mixer = mixture(*_experts(config, sizes, kinds))
    # Without an epsilon of RMS norms they are layer norms.
    kind = Norm.LAYER if config.get("rms_norm_eps") is None else Norm.RMS
    epsilon = config.number("rms_norm_eps", config.number("layer_norm_eps", 1e-5))

    def norm(x: Slice, name: str) -> Slice:
        return builder.norm(x, Linear("model.").vector(name, hidden), kind=kind, epsilon=epsilon)

    def attention(h: Slice, layer: int, residual: Slice) -> Slice:
        under = Linear(f"model.layers.{layer}.self_attn.")
        order = (*taken, ()) if ropes[layer] else ((), (), ())
        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, bias, order)
        a = attend(builder, h, projections, heads, rope=ropes[layer], window=spans[layer])
        biases = under.biases(bias, ("o_proj", hidden))
        return builder.linear(a, [under.weight("o_proj", hidden, a.width)], biases=biases, residual=residual)

    builder: Builder = begin(sizes.vocabulary, sizes.context)
    embedding = Linear("model.").weight("embed_tokens", sizes.vocabulary, hidden)
    x = builder.embed(embedding)
    for layer in range(sizes.layers):
        h = norm(x, f"layers.{layer}.input_layernorm")
        x = mixer(builder, h, layer, attention(h, layer, x))
    tied, scale = config.flag("tie_word_embeddings", True), config.number("logit_scale", 0.0625)
    return finish(builder, norm(x, "norm"), embedding, tied, scale=scale)


def _experts(config: Config, sizes: Sizes, kinds: list[str]) -> tuple[Sizes, Experts]:
    count, shared = number_of_experts(config, 8), config.whole("num_shared_experts", 0)
    by, together = config.get("expert_selection_fn", "softmax"), config.get("shared_expert_combination_strategy", "average")
    if by not in ("softmax", "sigmoid"):
        raise config.unknown(f'"expert_selection_fn": {by!r}')
    if together not in ("average", "sum"):
        raise config.unknown(f'"shared_expert_combination_strategy": {together!r}')
    # Of a softmax over the chosen ones the sum is 1 already.
    share = config.flag("norm_topk_prob", True)
    of_sigmoids = Routing.SIGMOID_SHARE if share else Routing.SIGMOID_EACH
    experts = Experts(
        count,
        chosen_experts(config, count, 2),
        sizes.ffn,
        activation(config, "hidden_act", "silu"),
        Router(of_sigmoids if by == "sigmoid" else Routing.SOFTMAX_CHOSEN),
        shared=Shared(sizes.ffn * shared) if shared else None,
        sparse=lambda layer: kinds[layer] == SPARSE,
        scale=0.5 if shared and together == "average" else 1.0,
    )
    dense = config.size("prefix_dense_intermediate_size", sizes.ffn)
    return replace(sizes, ffn=dense), experts
