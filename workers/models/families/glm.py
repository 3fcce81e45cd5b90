"""GLM, ERNIE 4.5 and Helium: Llama, with rope that turns neighbouring columns."""

from __future__ import annotations

from dataclasses import replace

from outrider.kernels.program import Program
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Begin
from outrider.workers.models.families.skeleton import Norms, Sizes, Style, decoder, read_sizes
from outrider.workers.models.rope import read_rope


def glm(config: Config, begin: Begin) -> Program:
    sizes = _sizes(config)
    return decoder(config, begin, sizes, _style(config, sizes))


def glm4(config: Config, begin: Begin) -> Program:
    """Norms before and after attention and feed-forward, under their own names."""
    sizes = _sizes(config)
    config.get("num_nextn_predict_layers")  # GLM-OCR's, of multi-token prediction layers (formats/unexpected_tensors.py)
    behind = ("post_self_attn_layernorm", "post_mlp_layernorm")
    style = replace(_style(config, sizes), norms=Norms.AROUND, second_norm="post_attention_layernorm", norms_behind=behind)
    return decoder(config, begin, sizes, style)


def _sizes(config: Config) -> Sizes:
    return read_sizes(config, kv_heads=2, head_size=128, epsilon=1.5625e-07, layers=40)


def _style(config: Config, sizes: Sizes) -> Style:
    partial = config.number("partial_rotary_factor", 0.5)
    rope = read_rope(config, sizes.head_size, sizes.context, partial=partial)
    bias = config.flag("attention_bias", True)
    return Style(qkv_bias=bias, fused_gate=True, paired=True, ropes=[rope] * sizes.layers)


def ernie4_5(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=2, head_size=128, epsilon=1e-5, layers=18, heads=16)
    rope = read_rope(config, sizes.head_size, sizes.context, theta=500000.0)
    bias = config.flag("use_bias", False)
    style = Style(qkv_bias=bias, output_bias=bias, mlp_bias=bias, paired=True, tied=True, ropes=[rope] * sizes.layers)
    return decoder(config, begin, sizes, style)


def helium(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=20, head_size=128, epsilon=1e-8, layers=24, heads=20)
    # Its heads together are as wide as its layers, which its output projection takes for granted.
    config.only("head_dim", sizes.hidden // sizes.heads)
    rope = read_rope(config, sizes.head_size, sizes.context, theta=100000.0)
    style = Style(
        qkv_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        paired=True,
        ropes=[rope] * sizes.layers,
    )
    return decoder(config, begin, sizes, style)
