"""Command A's mixtures (cohere2_moe): Cohere 2 with experts behind some layers, which may be chosen by sigmoids."""

from __future__ import annotations

from dataclasses import replace

from outrider.kernels.builder import Builder
from outrider.kernels.program import Norm, Program, Routing, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import (
    Experts,
    Router,
    Shared,
    chosen_experts,
    mixture,
    number_of_experts,
    sparse_layers,
)
from outrider.workers.models.families.layer_norm import Heads, LayerNorm, Stack, attend, finish, projected
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


def cohere2_moe(config: Config, begin: Begin) -> Program:
    """Layers without a window have no rope, except dense layers whose pattern is 1."""
    sizes = read_sizes(config, head_size=128, layers=40, heads=64)
    heads, hidden = Heads(sizes.heads, sizes.kv_heads, sizes.head_size), sizes.hidden
    dense, pattern = config.whole("first_k_dense_replace", 0), config.size("sliding_window_pattern", 4)
    of_dense = config.size("prefix_dense_sliding_window_pattern", 1)

    def usual(layer: int) -> str:
        slides = (layer + 1) % of_dense if layer < dense else (layer - dense + 1) % pattern
        return SLIDING if slides else FULL

    types = layer_types(config, sizes.layers, usual)
    sparse = sparse_layers(config, sizes.layers, dense)
    spans, bias = windows(config, types, config.window(4096)), config.flag("attention_bias", False)
    rope = read_rope(config, heads.size, sizes.context)
    ropes = [rope if span or (not sparse[layer] and of_dense == 1) else None for layer, span in enumerate(spans)]
    taken = [paired_rows(count, heads.size, heads.size) for count in (heads.count, heads.kv_count)]
    mixer = mixture(*_experts(config, sizes, sparse))
    # Layer norms, unless there is an epsilon of RMS norms.
    kind = Norm.LAYER if config.get("rms_norm_eps") is None else Norm.RMS
    epsilon = config.number("rms_norm_eps", config.number("layer_norm_eps", 1e-5))

    norm = LayerNorm(hidden, epsilon, bias=False, kind=kind)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"model.layers.{layer}.self_attn.")
        order = (*taken, ()) if ropes[layer] else ((), (), ())
        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, bias, order)
        a = attend(builder, h, projections, heads, rope=ropes[layer], window=spans[layer])
        biases = under.biases(bias, ("o_proj", hidden))
        return builder.linear(a, [under.weight("o_proj", hidden, a.width)], biases=biases, residual=residual)

    builder, root = begin(sizes.vocabulary, sizes.context), Linear("model.")
    embedding = root.weight("embed_tokens", sizes.vocabulary, hidden)
    stack = Stack("model.layers.", sizes.layers, norm, "input_layernorm", parallel=True)
    x = norm(builder, stack(builder, builder.embed(embedding), attention, mixer), root, "norm")
    tied, scale = config.flag("tie_word_embeddings", True), config.number("logit_scale", 0.0625)
    return finish(builder, x, embedding, tied, scale=scale)


def _experts(config: Config, sizes: Sizes, sparse: list[bool]) -> tuple[Sizes, Experts]:
    count, shared = number_of_experts(config, 8), config.whole("num_shared_experts", 0)
    by, together = config.get("expert_selection_fn", "softmax"), config.get("shared_expert_combination_strategy", "average")
    if by not in ("softmax", "sigmoid"):
        raise config.unknown(f'"expert_selection_fn": {by!r}')
    if together not in ("average", "sum"):
        raise config.unknown(f'"shared_expert_combination_strategy": {together!r}')
    # A softmax over the chosen experts sums to 1 already.
    share = config.flag("norm_topk_prob", True)
    of_sigmoids = Routing.SIGMOID_SHARE if share else Routing.SIGMOID_EACH
    experts = Experts(
        count,
        chosen_experts(config, count, 2),
        sizes.ffn,
        activation(config, "hidden_act", "silu"),
        Router(of_sigmoids if by == "sigmoid" else Routing.SOFTMAX_CHOSEN),
        shared=Shared(sizes.ffn * shared) if shared else None,
        sparse=sparse.__getitem__,
        scale=0.5 if shared and together == "average" else 1.0,
    )
    dense = config.size("prefix_dense_intermediate_size", sizes.ffn)
    return replace(sizes, ffn=dense), experts
