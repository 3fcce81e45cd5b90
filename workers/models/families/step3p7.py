"""Step 3.7: norms that multiply by 1 + w, a gate for each head, more heads in layers with a window; in some layers experts
and gated layers have bounds that follow the activation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Routing, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import (
    DENSE,
    SPARSE,
    Experts,
    Router,
    Shared,
    chosen_experts,
    mixture,
    sparse_layers,
)
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, Linear, gate_heads, layer_types, windows
from outrider.workers.models.families.skeleton import Mixer, Sizes, Style, decoder, read_sizes, turned_heads
from outrider.workers.models.rope import read_ropes

THETA = 10000.0
# Other names of keys, which transformers reads as well.
OTHERS = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
# Keys of layers that guess further tokens (formats/unexpected_tensors.py), and one that transformers replaces.
UNUSED = ("mtp_layer_types", "mtp_mlp_layer_types", "num_nextn_predict_layers", "hidden_act")
# Lists with an element for each layer, behind which published configurations have those of layers for further tokens.
LISTS = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta", "partial_rotary_factors")
# Whether attention has a gate for each head.
PER_HEAD: tuple[Any, ...] = (True, "per-head")
FIRST_SPARSE = 3


def step3p7(config: Config, begin: Begin) -> Program:
    said = _as_transformers_reads(config)
    for key in config.values:
        config.get(key)  # said.check_all_read() refuses unknown keys
    sizes = read_sizes(said, kv_heads=8, head_size=128, epsilon=1e-5, layers=45, heads=64, ffn=11264)
    for unused in UNUSED:
        said.get(unused)
    said.only("use_bidirectional_attention", False)
    style = Style(plus=1.0, attention=_attention(said, sizes), mixer=_mixer(said, sizes))
    program = decoder(said, begin, sizes, style)
    said.check_all_read()
    return program


def _as_transformers_reads(config: Config) -> Config:
    """The configuration with one name for each key, lists of one element for each layer, and rope by type of layer."""
    values = dict(config.values)
    for other, name in OTHERS.items():
        stated = values.pop(other, None)
        if stated is not None and values.setdefault(name, stated) != stated:
            raise config.unknown(f'"{other}": {stated!r} beside "{name}": {values[name]!r}')
    layers, more = config.size("num_hidden_layers", 45), Config(values, config.source).whole("num_nextn_predict_layers", 0)
    for key in LISTS:
        if isinstance(each := values.get(key), list):
            each = each[:layers] if len(each) == layers + more else each
            if len(each) != layers:
                raise config.unknown(f'"{key}" with {len(each)} elements for {layers} layers')
            values[key] = each
    if values.get("mlp_layer_types") is None:
        values["mlp_layer_types"] = _listed(config, values.get("moe_layers_enum"), layers)
    types = values.get("layer_types") or [FULL] * layers
    values |= _ropes(config, values, types)
    if values.get("num_sliding_attention_heads") is None:
        values["num_sliding_attention_heads"] = _heads_with_window(config, values.get("attention_other_setting"))
    for key in ("moe_layers_enum", "attention_other_setting", "rope_theta", "rope_scaling", "partial_rotary_factors"):
        values.pop(key, None)
    return Config(values, config.source)


def _listed(config: Config, stated: Any, layers: int) -> list[str]:
    """The kinds of layers, where "moe_layers_enum" lists those that have experts: in a string, or one by one."""
    try:
        items = stated.split(",") if isinstance(stated, str) else stated
        sparse = range(FIRST_SPARSE, layers) if items is None else {int(item) for item in items if str(item).strip()}
    except (TypeError, ValueError):
        raise config.unknown(f'"moe_layers_enum": {stated!r}') from None
    return [SPARSE if layer in sparse else DENSE for layer in range(layers)]


def _heads_with_window(config: Config, stated: Any) -> int:
    """The heads of layers with a window. transformers takes their number alone from this object, so the rest has to say
    what it takes for granted."""
    setting = {} if stated is None else stated
    if not isinstance(setting, Mapping):
        raise config.unknown(f'"attention_other_setting": {stated!r}')
    size, kv_heads = config.get("head_dim", 128), config.get("num_attention_groups", config.get("num_key_value_heads", 8))
    known = {"attention_type": SLIDING, "num_attention_groups": kv_heads, "num_key_value_heads": kv_heads}
    known |= {"head_dim": size, "true_head_dim": size}
    for key, value in setting.items():
        if key != "num_attention_heads" and (key not in known or known[key] != value):
            raise config.unknown(f'"attention_other_setting" with "{key}": {value!r}')
    return Config(setting, config.source).size("num_attention_heads", config.size("num_attention_heads", 64))


def _ropes(config: Config, values: Mapping[str, Any], types: Sequence[str]) -> dict[str, Any]:
    """Rope by type of layer. Where it is not so stated, the first layer of a type says it, and "rope_scaling" is that of
    layers without a window."""
    stated = values.get("rope_parameters") or {}
    kinds = dict.fromkeys(types)
    if isinstance(stated, dict) and all(isinstance(stated.get(kind), dict) for kind in kinds):
        return {"rope_parameters": {kind: stated[kind] for kind in kinds}}
    if stated:
        raise config.unknown(f'"rope_parameters": {stated!r}')
    thetas, parts = values.get("rope_theta", THETA), values.get("partial_rotary_factors")
    ropes: dict[str, Any] = {}
    for kind in kinds:
        first = types.index(kind)
        ropes[kind] = {"rope_type": "default", "rope_theta": thetas[first] if isinstance(thetas, list) else thetas}
        if parts:
            ropes[kind]["partial_rotary_factor"] = parts[first]
    # transformers rotates all layers of a type alike.
    for layer, kind in enumerate(types):
        for name, each in (("rope_theta", thetas), ("partial_rotary_factors", parts)):
            if isinstance(each, list) and each[layer] != each[types.index(kind)]:
                raise config.unknown(f'"{name}": {each!r} with layers of one type that differ')
    if FULL in ropes and (scaling := values.get("rope_scaling")):
        ropes[FULL] |= scaling
    return {"rope_parameters": ropes}


def _attention(config: Config, sizes: Sizes) -> Mixer:
    types = layer_types(config, sizes.layers, lambda layer: FULL)
    each = windows(config, types, config.window(None))
    ropes = read_ropes(
        config, dict.fromkeys(types, sizes.head_size), sizes.context, {FULL: THETA, SLIDING: THETA}, partial=1.0
    )
    within = config.size("num_sliding_attention_heads", sizes.heads)
    counts = [within if kind == SLIDING else sizes.heads for kind in types]
    of_layers = {str(layer): {"num_attention_heads": within} for layer, kind in enumerate(types) if kind == SLIDING}
    if config.get("per_layer_config", of_layers) != of_layers:
        raise config.unknown(f'"per_layer_config": {config.get("per_layer_config")!r}')
    if config.get("gating", True) not in PER_HEAD:
        raise config.unknown(f'"gating": {config.get("gating")!r}')
    bias, kv_heads, size = config.flag("attention_bias", False), sizes.kv_heads, sizes.head_size
    scale = config.positive("query_pre_attn_scalar", size) ** -0.5

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        names, heads = Linear(f"model.layers.{layer}.self_attn."), counts[layer]
        width = heads * size
        query, key, value = turned_heads(builder, h, names, sizes, heads, ropes[types[layer]], bias=bias, plus=1.0)
        a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads, window=each[layer], scale=scale)
        gate_heads(builder, a, builder.linear(h, [names.weight("g_proj", heads, h.width)]), heads)
        output, biases = [names.weight("o_proj", h.width, width)], names.biases(bias, ("o_proj", h.width))
        return builder.linear(a, output, biases=biases, residual=residual)

    return attention


def _mixer(config: Config, sizes: Sizes) -> Mixer:
    sparse, count = sparse_layers(config, sizes.layers, FIRST_SPARSE), config.size("n_routed_experts", 288)
    chosen, width = chosen_experts(config, count, 8), config.size("moe_intermediate_size", 1280)
    scale, bias = config.number("moe_router_scaling_factor", 1.0), config.flag("mlp_bias", False)
    router = Router(Routing.SIGMOID_SHARE, corrections="gate.e_score_correction_bias", scale=scale)
    shared = Shared(config.size("share_expert_dim", 1280), biased=bias)
    bounds, beside = (_bounds(config, key, sizes.layers) for key in ("swiglu_limits", "swiglu_limits_shared"))
    mixers = [
        mixture(
            sizes,
            Experts(
                count,
                chosen,
                width,
                _bounded(bounds[layer]),
                router,
                shared=shared,
                clamp=bounds[layer],
                beside=(_bounded(beside[layer]), beside[layer]),
                sparse=sparse.__getitem__,
                dense_biased=bias,
            ),
        )
        for layer in range(sizes.layers)
    ]

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        return mixers[layer](builder, h, layer, residual)

    return mixer


def _bounded(bound: float) -> Activation:
    return Activation.BOUNDED_SILU if bound else Activation.SILU


def _bounds(config: Config, key: str, layers: int) -> list[float]:
    """The bound of each layer; 0, which null stands for too, is none."""
    stated = config.get(key) or [0.0] * layers
    found = [0.0 if each is None else each for each in stated]
    if not all(type(each) in (int, float) and math.isfinite(each) and each >= 0 for each in found):
        raise config.unknown(f'"{key}": {stated!r}')
    return [float(each) for each in found]
