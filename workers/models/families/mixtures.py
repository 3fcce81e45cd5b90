"""Mixtures of experts that are chosen by the best scores: Mixtral, Qwen2-MoE, Qwen3-MoE, Mellum 2, Flint, OLMoE, FlexOlmo,
GraniteMoE, Hunyuan and gpt-oss."""

from __future__ import annotations

from dataclasses import replace

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Routing, Slice
from outrider.workers.errors import ModelError
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
from outrider.workers.models.families.granite import by_layer
from outrider.workers.models.families.llama import hunyuan_style
from outrider.workers.models.families.mamba2 import MAMBA, kinds_of, mamba_layer, pass_over, read_mamba
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, Linear, activation, layer_types, windows
from outrider.workers.models.families.skeleton import (
    HeadNorms,
    Mixer,
    Norms,
    Sizes,
    Style,
    decoder,
    plain_attention,
    read_sizes,
)
from outrider.workers.models.rope import Rope, read_rope, read_ropes

AMONG_CHOSEN = Router(Routing.SOFTMAX_CHOSEN)


def _router(config: Config, *, normalised: bool) -> Router:
    """``normalised`` is the default of "norm_topk_prob": whether the weights of a token's experts sum to 1."""
    return Router(Routing.SOFTMAX_CHOSEN if config.flag("norm_topk_prob", normalised) else Routing.SOFTMAX)


def mixtral(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, epsilon=1e-5)
    count, function = number_of_experts(config, 8), activation(config, "hidden_act", "silu")
    experts = Experts(count, chosen_experts(config, count, 2), sizes.ffn, function, AMONG_CHOSEN)
    ropes = [read_rope(config, sizes.head_size, sizes.context, theta=1000000.0)] * sizes.layers
    style = Style(windows=[config.window(None)] * sizes.layers, ropes=ropes, mixer=mixture(sizes, experts))
    return decoder(config, begin, sizes, style)


def qwen_experts(config: Config, count: int, chosen: int, ffn: int, shared: int, *, normalised: bool = False) -> Experts:
    count = number_of_experts(config, count)
    step, dense = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return Experts(
        count,
        chosen_experts(config, count, chosen),
        config.size("moe_intermediate_size", ffn),
        activation(config, "hidden_act", "silu"),
        _router(config, normalised=normalised),
        shared=Shared(shared, "mlp.shared_expert.", weighed=True) if shared else None,
        sparse=lambda layer: layer not in dense and (layer + 1) % step == 0,
    )


def qwen2_moe(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=16, layers=24)
    experts = qwen_experts(config, 60, 4, 1408, config.size("shared_expert_intermediate_size", 5632))
    window = config.window(4096) if config.flag("use_sliding_window", False) else 0
    config.get("sliding_window")
    first = config.number("max_window_layers", 28)
    types = layer_types(config, sizes.layers, lambda n: SLIDING if window and (n + 1) % 2 and n < first else FULL)
    bias = config.flag("qkv_bias", True)
    style = Style(qkv_bias=bias, windows=windows(config, types, window), mixer=mixture(sizes, experts))
    return decoder(config, begin, sizes, style)


def qwen3_moe(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=4, layers=24)
    experts = qwen_experts(config, 128, 8, 768, 0)
    window = config.window(4096) if config.flag("use_sliding_window", False) else 0
    for unused in ("sliding_window", "max_window_layers"):
        config.get(unused)
    bias = config.flag("attention_bias", False)
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        head_norms=HeadNorms.EACH,
        windows=[window] * sizes.layers,
        mixer=mixture(sizes, experts),
    )
    return decoder(config, begin, sizes, style)


def mellum(config: Config, begin: Begin) -> Program:
    """Qwen3-MoE with windows and rope by type of layer."""
    sizes = read_sizes(config, kv_heads=4, head_size=128, layers=28)
    for key, always in (("rope_scaling", None), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        config.only(key, always)
    # Keys of multi-token prediction layers, which are not used.
    for key in ("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"):
        config.get(key)
    types = layer_types(config, sizes.layers, lambda layer: FULL)
    ropes = read_ropes(config, sizes.head_size, sizes.context, {FULL: 500000.0, SLIDING: 10000.0})
    sparse, bias = sparse_layers(config, sizes.layers, 0), config.flag("attention_bias", False)
    experts = replace(qwen_experts(config, 64, 8, 896, 0, normalised=True), sparse=sparse.__getitem__)
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        head_norms=HeadNorms.EACH,
        windows=windows(config, types, config.window(1024)),
        ropes=[ropes[kind] for kind in types],
        mixer=mixture(sizes, experts),
    )
    return decoder(config, begin, sizes, style)


def flint(config: Config, begin: Begin) -> Program:
    """Qwen3-MoE with attention sinks, a sigmoid router, a shared expert, and rope only in layers with a window."""
    sizes = read_sizes(config, kv_heads=4, head_size=128, layers=49, heads=32, ffn=6144)
    count, function = number_of_experts(config, 256), activation(config, "hidden_act", "silu")
    dense, step = config.get("mlp_only_layers"), config.size("decoder_sparse_step", 1)
    dense = [0, 1] if dense is None else dense
    shared = config.size("shared_expert_intermediate_size", 1024)
    experts = Experts(
        count,
        chosen_experts(config, count, 6),
        config.size("moe_intermediate_size", 512),
        function,
        Router(Routing.SIGMOID_SHARE if config.flag("norm_topk_prob", True) else Routing.SIGMOID_EACH),
        shared=Shared(shared, "mlp.shared_expert."),
        sparse=lambda layer: layer not in dense and (layer + 1) % step == 0,
    )
    last = sizes.layers - 1
    types = layer_types(config, sizes.layers, lambda n: FULL if n < 2 or n % 4 == 1 or n == last else SLIDING)
    rope, bias = read_rope(config, sizes.head_size, sizes.context), config.flag("attention_bias", False)
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        head_norms=HeadNorms.EACH,
        sinks=True,
        windows=windows(config, types, config.window(513)),
        ropes=[rope if kind == SLIDING else None for kind in types],
        mixer=mixture(sizes, experts),
    )
    return decoder(config, begin, sizes, style)


def olmoe(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, epsilon=1e-5, layers=16)
    mixer, bias = mixture(sizes, _olmo_experts(config, sizes.ffn, 64, 8)), config.flag("attention_bias", False)
    style = Style(qkv_bias=bias, output_bias=bias, head_norms=HeadNorms.ALL, mixer=mixer)
    return decoder(config, begin, sizes, style)


def flex_olmo(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config)
    mixer, bias = mixture(sizes, _olmo_experts(config, sizes.ffn, 7, 5)), config.flag("attention_bias", False)
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        norms=Norms.BEHIND,
        head_norms=HeadNorms.ALL,
        ropes=[read_rope(config, sizes.head_size, sizes.context, theta=500000.0)] * sizes.layers,
        mixer=mixer,
    )
    return decoder(config, begin, sizes, style)


def _olmo_experts(config: Config, ffn: int, count: int, chosen: int) -> Experts:
    count, function = number_of_experts(config, count), activation(config, "hidden_act", "silu")
    return Experts(count, chosen_experts(config, count, chosen), ffn, function, _router(config, normalised=False))


def granitemoe(config: Config, begin: Begin) -> Program:
    return _granite(config, begin, 0)


def granitemoeshared(config: Config, begin: Begin) -> Program:
    return _granite(config, begin, _beside(config))


def granitemoe_swa(config: Config, begin: Begin) -> Program:
    sizes, shared = read_sizes(config), _beside(config)
    return decoder(config, begin, sizes, by_layer(config, sizes, _granite_style(config, sizes, shared)))


def _beside(config: Config) -> int:
    """The width of the shared expert; 0: there is none."""
    return config.whole("shared_intermediate_size", 0)


# checkpoint_program.py and the GGUF reader set this key to false where gate and up of the shared expert, or of the only
# feed-forward layer, are separate tensors; by default they are one (of MiniMax M3 separate).
FUSED = "fused_projections"


def granitemoehybrid(config: Config, begin: Begin) -> Program:
    """Granite 4: Mamba 2 in most layers or in none; a shared expert, and routed experts unless their number is 0."""
    sizes, key = read_sizes(config), "layer_types"
    kinds = kinds_of(config, key, config.get(key) or [MAMBA] * sizes.layers, sizes.layers, (MAMBA, FULL))
    config.only("normalization_function", "rmsnorm")
    rope = config.get("position_embedding_type", "nope")
    if rope not in ("rope", "nope"):
        raise config.unknown(f'"position_embedding_type": {rope!r}')
    ropes: list[Rope | None] = [None] * sizes.layers
    if rope == "rope":
        ropes = [read_rope(config, sizes.head_size, sizes.context)] * sizes.layers
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"):
        config.get(key)
    style = replace(_granite_style(config, sizes, config.size("shared_intermediate_size", 1024)), ropes=ropes)
    if MAMBA not in kinds:
        pass_over(config)
        return decoder(config, begin, sizes, style)
    mamba = read_mamba(config, config.size("mamba_expand", 2) * sizes.hidden, sizes.epsilon)
    attention = plain_attention(config, sizes, style)

    def mixed(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        if kinds[layer] == FULL:
            return attention(builder, h, layer, residual)
        return mamba_layer(builder, h, Linear(f"model.layers.{layer}.mamba."), mamba, residual, style.residual_scale)

    return decoder(config, begin, sizes, replace(style, attention=mixed))


def _granite(config: Config, begin: Begin, shared: int) -> Program:
    sizes = read_sizes(config)
    return decoder(config, begin, sizes, _granite_style(config, sizes, shared))


def _granite_style(config: Config, sizes: Sizes, shared: int) -> Style:
    scale = config.number("residual_multiplier", 1.0)
    bias, embedding = config.flag("attention_bias", False), config.number("embedding_multiplier", 1.0)
    if config.stated("attention_multiplier", 1.0) is None:  # for null transformers uses another value than its default
        raise config.unknown('"attention_multiplier": null', hf="does")
    return Style(
        qkv_bias=bias,
        output_bias=bias,
        embedding_scale=lambda builder: embedding,
        attention_scale=config.positive("attention_multiplier", 1.0),
        residual_scale=scale,
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
        mixer=_granite_experts(config, sizes, shared, scale),
    )


def _granite_experts(config: Config, sizes: Sizes, shared: int, scale: float) -> Mixer:
    function, names = activation(config, "hidden_act", "silu"), ("input_linear", "input_linear", "output_linear")
    fused = config.flag(FUSED, True)
    if not fused:  # in GGUF files, and MLX's of models without experts
        names = ("gate_proj", "up_proj", "down_proj")
    if shared and config.get("num_local_experts") == 0:
        config.get("num_experts_per_tok")
        # Where gate and up are separate, the only feed-forward layer has the usual name.
        prefix = "shared_mlp." if fused else "mlp."
        layer = Experts(0, 0, 0, function, AMONG_CHOSEN, sparse=lambda layer: False, prefix=prefix)
        return mixture(replace(sizes, ffn=shared), replace(layer, dense_names=names, dense_scale=scale))
    count = number_of_experts(config, 8)
    experts = Experts(
        count,
        chosen_experts(config, count, 2),
        sizes.ffn,
        function,
        Router(Routing.SOFTMAX_CHOSEN, "router"),
        shared=Shared(shared, "shared_mlp.", names) if shared else None,
        prefix="block_sparse_moe.",
        scale=scale,
    )
    return mixture(sizes, experts)


def hunyuan_moe(config: Config, begin: Begin) -> Program:
    """Hunyuan with routed experts and a shared expert, all of the same width."""
    sizes = read_sizes(config, epsilon=1e-5)
    count, key = number_of_experts(config, 1), "num_experts_per_tok" if config.get("moe_topk") is None else "moe_topk"
    chosen = config.get(key)
    if isinstance(chosen, list):  # one for each layer
        if len(chosen) != sizes.layers or len(set(chosen)) != 1:
            raise config.unknown(f'"{key}": {chosen!r}', hf="does")
        chosen = chosen[0]
    experts = Experts(
        count,
        chosen_experts(Config({key: chosen}, config.source), count, 1, key),
        sizes.ffn,
        activation(config, "hidden_act", "silu"),
        Router(Routing.SOFTMAX_CHOSEN, "gate.wg"),
        shared=Shared(sizes.ffn, "mlp.shared_mlp."),
    )
    return decoder(config, begin, sizes, replace(hunyuan_style(config, sizes), mixer=mixture(sizes, experts)))


def gpt_oss(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, head_size=64, epsilon=1e-5, layers=36)
    count = number_of_experts(config, 128)
    config.only("hidden_act", "silu")
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        raise ModelError(f'{config.source} has no "rope_parameters"')
    for unused in ("initial_context_length", "experts_per_token"):
        config.get(unused)  # other keys state the same
    experts = Experts(
        count,
        chosen_experts(config, count, 4),
        sizes.ffn,
        Activation.CLAMPED_SWIGLU,
        Router(Routing.SOFTMAX_CHOSEN, "router"),
        biased=True,
        clamp=config.positive("swiglu_limit", 7.0),
        slope=config.positive("swiglu_alpha", 1.702),
    )
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % 2 else FULL)
    bias = config.flag("attention_bias", True)
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        windows=windows(config, types, config.window(128)),
        ropes=[read_rope(config, sizes.head_size, sizes.context, theta=150000.0)] * sizes.layers,
        mixer=mixture(sizes, experts),
    )
    return decoder(config, begin, sizes, style)
