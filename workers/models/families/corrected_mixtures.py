"""Mixtures of experts whose routers use sigmoids, corrections (a bias for the choice only) or groups.

GLM-4.5 (glm4_moe), Sarvam's smaller model, Solar Open, dots.llm1, K-EXAONE, Hy3, MiniMax-M2, Trinity (afmoe), ERNIE 4.5,
Kolibri and Laguna.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Routing, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import (
    Experts,
    Router,
    Shared,
    chosen_experts,
    groups_of,
    mixture,
    number_of_experts,
    sparse_layers,
)
from outrider.workers.models.families.parts import (
    FULL,
    SLIDING,
    Begin,
    Linear,
    activation,
    gate_heads,
    layer_types,
    windows,
)
from outrider.workers.models.families.skeleton import (
    HeadNorms,
    Mixer,
    Norms,
    Sizes,
    Style,
    decoder,
    read_sizes,
    rotate,
    turned_heads,
)
from outrider.workers.models.rope import Rope, read_rope, read_ropes, require_bases

# DeepSeek V3's router adds this to the sum by which weights are divided; several families use that router.
SMALLEST_SUM = 1e-20


def glm4_moe(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, epsilon=1e-5, layers=46, heads=96)
    config.get("num_nextn_predict_layers")  # of multi-token prediction layers (formats/unexpected_tensors.py)
    first, partial = config.whole("first_k_dense_replace", 1), config.number("partial_rotary_factor", 0.5)
    count = config.size("n_routed_experts", config.get("num_local_experts", 128))
    shared, router = config.size("n_shared_experts", 1), deepseek_router(config)
    style = Style(
        qkv_bias=config.flag("attention_bias", False),
        head_norms=HeadNorms.EACH if config.flag("use_qk_norm", False) else HeadNorms.NONE,
        ropes=[read_rope(config, sizes.head_size, sizes.context, partial=partial)] * sizes.layers,
        mixer=mixture(sizes, deepseek_experts(config, count, 8, 1408, shared, router, lambda layer: layer >= first)),
    )
    return decoder(config, begin, sizes, style)


# Keys in Sarvam's configurations that transformers does not read, with the only supported values.
SARVAM_ALWAYS = {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_rmsnorm": True}


def check_sarvam(config: Config) -> None:
    for key, always in SARVAM_ALWAYS.items():
        config.only(key, always)


def sarvam_moe(config: Config, begin: Begin) -> Program:
    """GLM-4.5 with rope on whole heads and a fused projection of queries, keys and values; some keys are Sarvam's own."""
    sizes = read_sizes(config, kv_heads=4, head_size=64, layers=19, heads=64)
    check_sarvam(config)
    config.get("num_nextn_predict_layers")  # of multi-token prediction layers
    first, partial = config.whole("first_k_dense_replace", 1), config.number("partial_rotary_factor", 1.0)
    count = config.size("n_routed_experts", config.get("num_experts", config.get("num_local_experts", 128)))
    shared = config.size("n_shared_experts", config.get("num_shared_experts", 1))
    router = deepseek_router(config, scale=2.5)
    style = Style(
        qkv_bias=config.flag("attention_bias", config.flag("use_qkv_bias", False)),
        fused=True,
        head_norms=HeadNorms.EACH if config.flag("use_qk_norm", True) else HeadNorms.NONE,
        ropes=[read_rope(config, sizes.head_size, sizes.context, theta=8000000.0, partial=partial)] * sizes.layers,
        mixer=mixture(sizes, deepseek_experts(config, count, 6, 1024, shared, router, lambda layer: layer >= first)),
    )
    return decoder(config, begin, sizes, style)


def solar_open(config: Config, begin: Begin) -> Program:
    """GLM-4.5 without norms of heads; every layer has experts, so "intermediate_size" is not used."""
    sizes = read_sizes(config, kv_heads=8, head_size=128, epsilon=1e-5, layers=48, heads=64, ffn=1)
    for key, always in (("use_qk_norm", False), ("first_k_dense_replace", 0)):
        config.only(key, always)
    partial = config.number("partial_rotary_factor", 1.0)
    count = config.size("n_routed_experts", config.get("num_local_experts", 128))
    shared, router = config.size("n_shared_experts", 1), deepseek_router(config)
    style = Style(
        qkv_bias=config.flag("attention_bias", False),
        ropes=[read_rope(config, sizes.head_size, sizes.context, theta=1000000.0, partial=partial)] * sizes.layers,
        mixer=mixture(sizes, deepseek_experts(config, count, 8, 1280, shared, router, lambda layer: True)),
    )
    return decoder(config, begin, sizes, style)


def dots1(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=32, layers=62)
    window, bias = config.window(4096), config.flag("attention_bias", False)
    first, dense = config.number("max_window_layers", 62), config.whole("first_k_dense_replace", 0)
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if window and layer >= first else FULL)
    count = config.size("n_routed_experts", config.get("num_local_experts"))
    shared, router = config.size("n_shared_experts"), deepseek_router(config, normalised=False)
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        head_norms=HeadNorms.EACH,
        windows=windows(config, types, window),
        mixer=mixture(sizes, deepseek_experts(config, count, None, 1408, shared, router, lambda layer: layer >= dense)),
    )
    return decoder(config, begin, sizes, style)


def exaone_moe(config: Config, begin: Begin) -> Program:
    """Where some layers have a window, the others have no rope."""
    sizes = read_sizes(config, kv_heads=32, epsilon=1e-5)
    window, pattern = config.window(4096), config.get("sliding_window_pattern", 4)
    if not config.get("layer_types") and (type(pattern) is not int or pattern < 1):
        raise config.unknown(f'"sliding_window_pattern": {pattern!r} without "layer_types"')
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if window and (layer + 1) % pattern else FULL)
    sparse = sparse_layers(config, sizes.layers, config.whole("first_k_dense_replace", 1))
    count, shared = config.size("num_experts", 64), config.size("num_shared_experts", 1)
    router = deepseek_router(config, scale=2.5)
    rope = read_rope(config, sizes.head_size, sizes.context)
    style = Style(
        head_norms=HeadNorms.EACH,
        windows=windows(config, types, window),
        ropes=[rope if kind == SLIDING or not window else None for kind in types],
        mixer=mixture(sizes, deepseek_experts(config, count, 8, 1024, shared, router, sparse.__getitem__)),
    )
    return decoder(config, begin, sizes, style)


def hy_v3(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, head_size=128, epsilon=1e-5, layers=80, heads=64)
    config.only("mlp_bias", False)
    config.get("enable_moe_fp32_combine")  # matters only below fp32
    config.get("num_nextn_predict_layers")  # of multi-token prediction layers
    sparse, bias = sparse_layers(config, sizes.layers, 1), config.flag("attention_bias", False)
    count, shared = config.size("num_experts", config.get("num_local_experts", 192)), config.size("num_shared_experts", 1)

    def router(count: int, chosen: int) -> Router:
        scale = config.number("router_scaling_factor", 2.826)
        corrections = "e_score_correction_bias"
        return Router(Routing.SIGMOID_SHARE, corrections=corrections, epsilon=SMALLEST_SUM, scale=scale)

    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        head_norms=HeadNorms.EACH,
        ropes=[read_rope(config, sizes.head_size, sizes.context, theta=11158840.0)] * sizes.layers,
        mixer=mixture(sizes, deepseek_experts(config, count, 8, 1536, shared, router, sparse.__getitem__)),
    )
    return decoder(config, begin, sizes, style)


def deepseek_router(
    config: Config,
    *,
    normalised: bool = True,
    scale: float = 1.0,
    groups: tuple[int, int] = (1, 1),
    corrected: bool = True,
) -> Callable[[int, int], Router]:
    """DeepSeek V3's router, as a function of (number of experts, experts of a token).

    ``groups``: the defaults of (number of groups, groups that are chosen from). ``corrected``: corrections are added to the
    scores for the choice.
    """
    routing = Routing.SIGMOID_SHARE if config.flag("norm_topk_prob", normalised) else Routing.SIGMOID_EACH

    def router(count: int, chosen: int) -> Router:
        count_of_groups, kept = groups_of(config, count, chosen, groups)
        return Router(
            routing,
            corrections="gate.e_score_correction_bias" if corrected else "",
            groups=count_of_groups,
            groups_kept=kept,
            epsilon=SMALLEST_SUM,
            scale=config.number("routed_scaling_factor", scale),
        )

    return router


def deepseek_experts(
    config: Config,
    count: int,
    chosen: int | None,
    width: int,
    shared: int,
    router: Callable[[int, int], Router],
    sparse: Callable[[int], bool],
) -> Experts:
    """``shared``: the number of shared experts, which are stored as one feed-forward layer."""
    chosen, width = chosen_experts(config, count, chosen), config.size("moe_intermediate_size", width)
    function = activation(config, "hidden_act", "silu")
    beside = Shared(width * shared) if shared else None
    return Experts(count, chosen, width, function, router(count, chosen), shared=beside, sparse=sparse)


def listed_experts(
    config: Config, layers: int, *, dense: int, count: int, chosen: int, width: int, scale: float
) -> Experts:
    """DeepSeek V3's experts where "mlp_layer_types" lists the layers that have some: by default all but the first
    ``dense``."""
    if not config.get("mlp_layer_types"):
        config.only("first_k_dense_replace", dense)
    config.get("first_k_dense_replace")
    sparse, router = sparse_layers(config, layers, dense), deepseek_router(config, scale=scale)
    shared = config.size("n_shared_experts", 1)
    count = config.size("n_routed_experts", config.get("num_local_experts", count))
    return deepseek_experts(config, count, chosen, width, shared, router, sparse.__getitem__)


# Keys of MiniMax-M2 with the only supported values.
MINIMAX_ALWAYS = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
}
MINIMAX_UNUSED = ["mlp_intermediate_size", "shared_moe_mode", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"]


def minimax_m2(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, head_size=128, layers=62, heads=48)
    for key, always in MINIMAX_ALWAYS.items():
        config.only(key, always)
    config.only("attn_type_list", [1] * sizes.layers)
    for key in MINIMAX_UNUSED:
        config.get(key)
    partial = config.number("partial_rotary_factor", config.number("rotary_dim", sizes.head_size) / sizes.head_size)
    count = config.size("num_local_experts", config.get("num_experts", 256))
    router = Router(Routing.SIGMOID_SHARE, corrections="e_score_correction_bias")
    chosen, function = chosen_experts(config, count, 8), activation(config, "hidden_act", "silu")
    style = Style(
        head_norms=HeadNorms.ALL,
        ropes=[read_rope(config, sizes.head_size, sizes.context, theta=5000000.0, partial=partial)] * sizes.layers,
        mixer=mixture(sizes, Experts(count, chosen, sizes.ffn, function, router)),
    )
    return decoder(config, begin, sizes, style)


# ERNIE 4.5 VL has two routers and experts of two widths in a layer, each second for pictures.
OF_TEXT_AND_VISION = 2
# Keys of Trinity with the only supported values.
AFMOE_ALWAYS = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}


def afmoe(config: Config, begin: Begin) -> Program:
    """Layers with a window have rope, the others none; attention's output is multiplied by sigmoid(gate)."""
    sizes = read_sizes(config, head_size=128, epsilon=1e-5, heads=16)
    for key, always in AFMOE_ALWAYS.items():
        config.only(key, always)
    config.get("load_balance_coeff")  # of training only
    every, dense = config.size("global_attn_every_n_layers", 4), config.whole("num_dense_layers", 1)
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % every else FULL)
    each = windows(config, types, config.window(1024))
    scaled, bias = config.flag("mup_enabled", False), config.flag("attention_bias", False)

    def router(count: int, chosen: int) -> Router:
        scale = config.number("route_scale", 1.0)
        return Router(Routing.SIGMOID_SHARE, "router.gate", "expert_bias", epsilon=SMALLEST_SUM, scale=scale)

    count, shared = config.size("num_experts", 64), config.whole("num_shared_experts", 2)
    rope = read_rope(config, sizes.head_size, sizes.context)
    style = Style(
        norms=Norms.AROUND,
        second_norm="pre_mlp_layernorm",
        norms_behind=("post_attention_layernorm", "post_mlp_layernorm"),
        embedding_scale=lambda builder: sizes.hidden**0.5 if scaled else 1.0,
        attention=gated_attention(sizes, [rope if kind == SLIDING else None for kind in types], each, bias),
        mixer=mixture(sizes, deepseek_experts(config, count, 6, 1408, shared, router, lambda layer: layer >= dense)),
    )
    return decoder(config, begin, sizes, style)


def gated_attention(
    sizes: Sizes,
    ropes: list[Rope | None],
    windows: list[int],
    bias: bool,
    gate_biased: bool = False,
    factors: Sequence[float] = (),
) -> Mixer:
    """``gate_biased``: all gates of a head share a bias. ``factors`` (empty: none) are those of queries by position, in
    layers without rope."""
    heads, kv_heads, size = sizes.heads, sizes.kv_heads, sizes.head_size
    width, kv_width = heads * size, kv_heads * size
    by_head = tuple((head, head + 1) for head in range(heads) for _ in range(size))

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        names, rope = Linear(f"model.layers.{layer}.self_attn."), ropes[layer]
        projections = [("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)]
        matrices = [names.weight(name, rows, h.width) for name, rows in projections]
        qkv = builder.linear(h, matrices, biases=names.biases(bias, *projections))
        shifts = [Tensor(f"{names.prefix}gate_bias", (heads,), by_head)] if gate_biased else []
        gate = builder.linear(h, [names.weight("gate_proj", width, h.width)], biases=shifts)
        query, key, value = qkv.split(width, kv_width, kv_width)
        for part, name, count in ((query, "q_norm", heads), (key, "k_norm", kv_heads)):
            builder.head_norm(part, names.vector(name, size), heads=count, epsilon=sizes.epsilon)
            if rope is not None:
                rotate(builder, part, rope, count)
        if rope is None and factors:
            builder.scale_by_position(query, factors, 1)
        a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads, window=windows[layer])
        output = [names.weight("o_proj", h.width, width)]
        biases = names.biases(bias, ("o_proj", h.width))
        return builder.linear(builder.gate(a, gate), output, biases=biases, residual=residual)

    return attention


def ernie4_5_moe(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=4, epsilon=1e-5, layers=28, heads=20)
    step, first = config.size("moe_layer_interval", 1), config.whole("moe_layer_start_index", 1)
    last = config.get("moe_layer_end_index", -1)
    last = sizes.layers - 1 if last == -1 else config.whole("moe_layer_end_index", 0)
    count = config.size("moe_num_experts", config.get("num_experts", 64))
    sparse = [(layer + 1) % step == 0 and first <= layer <= last for layer in range(sizes.layers)]
    width, router = config.size("moe_intermediate_size", 1536), _ernie_router(config, matrix_of=1)
    return _ernie(config, begin, sizes, count, width, router, sparse, head_biased=True)


def ernie4_5_vl_moe(config: Config, begin: Begin) -> Program:
    """Its text experts, which are the first of a layer, and their router. Rope by three positions is the ordinary one."""
    sizes = read_sizes(config, kv_heads=4, epsilon=1e-5, layers=28, heads=20)
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if isinstance(stated, Mapping) and (stated.get("rope_type") or stated.get("type") or "default") != "default":
        raise config.unknown("a rope type but the default one")
    count, widths = config.size("moe_num_experts", config.get("num_experts", 64)), config.get("moe_intermediate_size")
    widths = [1536, 512] if widths is None else widths
    if not isinstance(widths, list) or len(widths) != OF_TEXT_AND_VISION or type(widths[0]) is not int or widths[0] < 1:
        raise config.unknown(f'"moe_intermediate_size": {widths!r}')
    router = _ernie_router(config, matrix_of=OF_TEXT_AND_VISION, transposed=True)
    return _ernie(config, begin, sizes, count, widths[0], router, sparse_layers(config, sizes.layers, 1))


def _ernie_router(config: Config, *, matrix_of: int, transposed: bool = False) -> Router:
    return Router(
        Routing.SOFTMAX_SHARE,
        corrections="gate.moe_statics.e_score_correction_bias",
        matrix_of=matrix_of,
        transposed=transposed,
        epsilon=config.number("moe_norm_min", 1e-12),
    )


def _ernie(
    config: Config,
    begin: Begin,
    sizes: Sizes,
    count: int,
    width: int,
    router: Router,
    sparse: Sequence[bool],
    head_biased: bool = False,
) -> Program:
    """Corrections are added to softmax(scores); rope rotates neighbouring columns. ``head_biased``: where other layers have
    biases, the LM head has one."""
    bias, shared = config.flag("use_bias", False), config.whole("moe_num_shared_experts", 2)
    key = "num_experts_per_tok" if config.get("moe_k") is None else "moe_k"
    experts = Experts(
        count,
        chosen_experts(config, count, 6, key),
        width,
        activation(config, "hidden_act", "silu"),
        router,
        shared=Shared(width * shared, biased=bias) if shared else None,
        sparse=sparse.__getitem__,
        dense_biased=bias,
    )
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        head_bias=bias and head_biased,
        paired=True,
        ropes=[read_rope(config, sizes.head_size, sizes.context, theta=500000.0)] * sizes.layers,
        mixer=mixture(sizes, experts),
        tied=True,
    )
    return decoder(config, begin, sizes, style)


def kolibri1(config: Config, begin: Begin) -> Program:
    """Corrections are added to scores, not to their sigmoids. Where some layers have a window, the others have no rope."""
    sizes = read_sizes(config, kv_heads=4, head_size=128, layers=50, heads=48, ffn=1)
    window = config.window(513)
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % 5 else FULL)
    shared, count = config.size("shared_expert_intermediate_size", 512), number_of_experts(config, 384)
    chosen, width = chosen_experts(config, count, 6), config.size("moe_intermediate_size", 512)
    normalised = config.flag("norm_topk_prob", False)
    routing = Routing.SIGMOID_SHARE_BY_SCORE if normalised else Routing.SIGMOID_EACH_BY_SCORE
    router, function = Router(routing, corrections="gate.e_score_correction_bias"), activation(config, "hidden_act", "silu")
    rope = read_rope(config, sizes.head_size, sizes.context)
    style = Style(
        norms=Norms.AROUND,
        second_norm="post_attention_layernorm",
        norms_behind=("post_self_attn_layernorm", "post_mlp_layernorm"),
        head_norms=HeadNorms.EACH,
        windows=windows(config, types, window),
        ropes=[rope if kind == SLIDING or not window else None for kind in types],
        mixer=mixture(sizes, Experts(count, chosen, width, function, router, shared=Shared(shared))),
    )
    return decoder(config, begin, sizes, style)


# What Laguna's gates of attention are multiplied with.
PER_HEAD, PER_ELEMENT = (True, "per-head"), "per-element"
LAGUNA_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


def laguna(config: Config, begin: Begin) -> Program:
    """Layers have numbers of heads of their own; attention's output is multiplied by softplus(gate)."""
    sizes = read_sizes(config, kv_heads=8, head_size=128, layers=40, heads=48, ffn=8192)
    config.only("moe_apply_router_weight_on_input", False)
    count, shared = config.size("num_experts", 256), config.size("shared_expert_intermediate_size", 512)
    chosen, width = chosen_experts(config, count, 8), config.size("moe_intermediate_size", 512)
    cap = config.number("moe_router_logit_softcapping", 0.0)
    scale = config.number("moe_routed_scaling_factor", 1.0)
    router = Router(Routing.SIGMOID_SHARE, corrections="gate.e_score_correction_bias", scale=scale, cap=max(cap, 0.0))
    sparse, function = sparse_layers(config, sizes.layers, 1), activation(config, "hidden_act", "silu")
    experts = Experts(count, chosen, width, function, router, shared=Shared(shared), sparse=sparse.__getitem__)
    return decoder(config, begin, sizes, Style(attention=_laguna_attention(config, sizes), mixer=mixture(sizes, experts)))


def _laguna_attention(config: Config, sizes: Sizes) -> Mixer:
    types = layer_types(config, sizes.layers, lambda layer: FULL)
    each, kinds = windows(config, types, config.window(512)), dict.fromkeys(types, sizes.head_size)
    config.only("rope_scaling", None)
    require_bases(config, kinds)
    bases = dict.fromkeys(LAGUNA_ROPES, 0.0)  # not used: each type's rope states its base
    ropes = read_ropes(config, kinds, sizes.context, bases, usual=LAGUNA_ROPES, partial=1.0)
    bias, gating = config.flag("attention_bias", False), config.get("gating", True)
    if gating not in (*PER_HEAD, PER_ELEMENT):
        raise config.unknown(f'"gating": {gating!r}')
    counts = config.get("num_attention_heads_per_layer") or [sizes.heads] * sizes.layers
    if len(counts) != sizes.layers or not all(type(heads) is int and heads > 0 for heads in counts):
        raise config.unknown(f'"num_attention_heads_per_layer": {counts!r}')
    kv_heads, size = sizes.kv_heads, sizes.head_size

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        names, heads = Linear(f"model.layers.{layer}.self_attn."), counts[layer]
        width = heads * size
        query, key, value = turned_heads(builder, h, names, sizes, heads, ropes[types[layer]], bias=bias)
        a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads, window=each[layer])
        gates = builder.linear(h, [names.weight("g_proj", heads if gating in PER_HEAD else width, h.width)])
        if gating in PER_HEAD:
            gate_heads(builder, a, gates, heads, Activation.SOFTPLUS)
        else:
            a = builder.gate(a, gates, activation=Activation.SOFTPLUS)
        output, biases = [names.weight("o_proj", h.width, width)], names.biases(bias, ("o_proj", h.width))
        return builder.linear(a, output, biases=biases, residual=residual)

    return attention
