"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and gpt-oss.

Experts are asked for one by one, by the names that most checkpoints give them; formats/experts.py finds those that lie
together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Program, Slice
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, Linear, activation, layer_types, windows
from outrider.workers.models.families.skeleton import HeadNorms, Mixer, Sizes, Style, decoder, gated, read_sizes
from outrider.workers.models.rope import read_rope


@dataclass(frozen=True, slots=True)
class Experts:
    """``shared``: how wide the layer is that every token goes through beside its experts; 0: there is none.

    ``clamp`` is the bound of a clamped activation and ``slope`` its factor. ``sparse``: which layers have experts.
    """

    count: int
    chosen: int
    ffn: int
    function: Activation
    among_chosen: bool
    router: str = "gate"
    biased: bool = False
    shared: int = 0
    clamp: float = 0.0
    slope: float = 1.0
    sparse: Callable[[int], bool] = lambda layer: True


def mixture(sizes: Sizes, experts: Experts) -> Mixer:
    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        mlp = Linear(f"model.layers.{layer}.mlp.")
        if not experts.sparse(layer):
            m = gated(builder, h, mlp, sizes.ffn, experts.function)
            return builder.linear(m, [mlp.weight("down_proj", sizes.hidden, sizes.ffn)], residual=residual)
        router = [mlp.weight(experts.router, experts.count, sizes.hidden)]
        shifts = mlp.biases(experts.biased, (experts.router, experts.count))
        scores = builder.linear(h, router, biases=shifts, precision=Format.FP32)
        route = builder.route(scores, experts.chosen, among_chosen=experts.among_chosen)
        each = [Linear(f"{mlp.prefix}experts.{number}.") for number in range(experts.count)]
        ffn, hidden = experts.ffn, sizes.hidden
        m = builder.experts(
            h,
            route,
            [[one.weight("gate_proj", ffn, hidden), one.weight("up_proj", ffn, hidden)] for one in each],
            biases=[one.biases(True, ("gate_proj", ffn), ("up_proj", ffn)) for one in each] if experts.biased else (),
            gated=True,
            activation=experts.function,
            scale=experts.slope,
            cap=experts.clamp,
        )
        products = builder.experts(
            m,
            route,
            [[one.weight("down_proj", hidden, ffn)] for one in each],
            biases=[[one.bias("down_proj", hidden)] for one in each] if experts.biased else (),
            behind=True,
        )
        if experts.shared:
            shared = Linear(f"{mlp.prefix}shared_expert.")
            m = gated(builder, h, shared, experts.shared, experts.function)
            beside = builder.linear(m, [shared.weight("down_proj", hidden, experts.shared)])
            key = builder.linear(h, [mlp.weight("shared_expert_gate", 1, hidden)], precision=Format.FP32)
            residual = builder.gate(beside, key, residual=residual)
        return builder.mix(products, route, hidden, residual=residual)

    return mixer


def _count(config: Config, usual: int) -> int:
    """Under either of the names that transformers reads and writes."""
    return config.size("num_experts", config.size("num_local_experts", usual))


def _chosen(config: Config, count: int, usual: int) -> int:
    chosen = config.size("num_experts_per_tok", usual)
    if chosen > count:
        raise ModelError(f'{config.source}: "num_experts_per_tok" is {chosen}, there are {count} experts')
    return chosen


def mixtral(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, epsilon=1e-5)
    count, function = _count(config, 8), activation(config, "hidden_act", "silu")
    experts = Experts(count, _chosen(config, count, 2), sizes.ffn, function, among_chosen=True)
    ropes = [read_rope(config, sizes.head_size, sizes.context, theta=1000000.0)] * sizes.layers
    style = Style(windows=[config.window(None)] * sizes.layers, ropes=ropes, mixer=mixture(sizes, experts))
    return decoder(config, begin, sizes, style)


def qwen_experts(config: Config, count: int, chosen: int, ffn: int, shared: int, *, normalised: bool = False) -> Experts:
    count = _count(config, count)
    step, dense = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return Experts(
        count,
        _chosen(config, count, chosen),
        config.size("moe_intermediate_size", ffn),
        activation(config, "hidden_act", "silu"),
        among_chosen=config.flag("norm_topk_prob", normalised),
        shared=shared,
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


def olmoe(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, epsilon=1e-5, layers=16)
    count, function = _count(config, 64), activation(config, "hidden_act", "silu")
    normalised, bias = config.flag("norm_topk_prob", False), config.flag("attention_bias", False)
    experts = Experts(count, _chosen(config, count, 8), sizes.ffn, function, among_chosen=normalised)
    mixer = mixture(sizes, experts)
    style = Style(qkv_bias=bias, output_bias=bias, head_norms=HeadNorms.ALL, mixer=mixer)
    return decoder(config, begin, sizes, style)


def gpt_oss(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, head_size=64, epsilon=1e-5, layers=36)
    count = _count(config, 128)
    config.only("hidden_act", "silu")
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        raise ModelError(f'{config.source} has no "rope_parameters"')
    for unused in ("initial_context_length", "experts_per_token"):
        config.get(unused)  # what other keys say as well
    experts = Experts(
        count,
        _chosen(config, count, 4),
        sizes.ffn,
        Activation.CLAMPED_SWIGLU,
        among_chosen=True,
        router="router",
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
