"""Gemma 1 to 3 (text), VaultGemma: scaled embeddings, norms that multiply by 1 + w, soft caps, alternating windows."""

from __future__ import annotations

import numpy as np

from outrider.kernels import packing
from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, activation, layer_types, windows
from outrider.workers.models.families.skeleton import HeadNorms, Norms, Sizes, Style, decoder, read_sizes
from outrider.workers.models.rope import read_ropes


def gemma(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, head_size=256, layers=28)
    config.only("use_bidirectional_attention", False)
    bias = config.flag("attention_bias", False)
    # The first releases said gelu and meant this one.
    legacy = config.get("hidden_act") == "gelu"
    config.get("hidden_activation")
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        plus=1.0,
        tied=True,
        embedding_scale=lambda builder: root(builder, sizes.hidden),
        activation=Activation.GELU_TANH if legacy else activation(config, "hidden_act", "gelu_pytorch_tanh"),
    )
    return decoder(config, begin, sizes, style)


def gemma2(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=4, head_size=256, layers=26)
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % 2 else FULL)
    cap = cap_of(config, "attn_logit_softcapping", 50.0)
    return decoder(config, begin, sizes, _style(config, sizes, types, 30.0, attention_cap=cap))


def vaultgemma(config: Config, begin: Begin) -> Program:
    """Gemma 2 without the norms after attention and feed-forward."""
    sizes = read_sizes(config, kv_heads=4, head_size=256, layers=26, heads=8)
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % 2 else FULL)
    cap = cap_of(config, "attn_logit_softcapping", 50.0)
    norms = {"norms": Norms.BEFORE, "second_norm": "pre_feedforward_layernorm"}
    return decoder(config, begin, sizes, _style(config, sizes, types, 30.0, attention_cap=cap, **norms))


def gemma3(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=4, head_size=256, layers=26)
    pattern = config.size("sliding_window_pattern", 6)
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % pattern else FULL)
    config.only("attn_logit_softcapping", None)
    theta = config.number("rope_theta", 1000000.0)
    local = config.number("rope_local_base_freq", 10000.0)
    ropes = read_ropes(config, sizes.head_size, sizes.context, {FULL: theta, SLIDING: local})
    style = _style(config, sizes, types, None, head_norms=HeadNorms.EACH, ropes=[ropes[kind] for kind in types])
    return decoder(config, begin, sizes, style)


def _style(config: Config, sizes: Sizes, types: list[str], logit_cap: float | None, **more: object) -> Style:
    config.only("use_bidirectional_attention", False)
    config.get("hidden_act")  # older configurations have it beside the one that counts
    bias = config.flag("attention_bias", False)
    common = dict(
        qkv_bias=bias,
        output_bias=bias,
        norms=Norms.AROUND,
        plus=1.0,
        tied=True,
        windows=windows(config, types, config.window(4096)),
        embedding_scale=lambda builder: root(builder, sizes.hidden),
        attention_scale=config.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_cap=cap_of(config, "final_logit_softcapping", logit_cap),
        activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"),
    )
    return Style(**(common | more))


def cap_of(config: Config, key: str, default: float | None) -> float:
    """The soft cap; null stands for none (0)."""
    if config.stated(key, default) is None:
        return 0.0
    return config.positive(key, default or 0.0)


def root(builder: Builder, width: int) -> float:
    """The square root of a width, in the type of the embeddings."""
    return in_type_of_embeddings(builder, float(np.sqrt(np.float64(width))))


def in_type_of_embeddings(builder: Builder, factor: float) -> float:
    """The factor rounded to the type of the embeddings, in which transformers multiplies."""
    value = np.array([factor], np.float32)
    return float(value[0] if builder.precision.fp32 else packing.from_bf16(packing.to_bf16(value))[0])
