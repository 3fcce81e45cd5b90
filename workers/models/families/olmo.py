"""OLMo: the first has layer norms without weights; 2 and 3 have norms behind attention and gated layer.

Their queries and keys are normalised over all heads together.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.kernels.program import Norm, Program
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, layer_types, windows
from outrider.workers.models.families.skeleton import HeadNorms, Norms, Style, decoder, read_sizes
from outrider.workers.models.rope import read_ropes

THETA = 500000.0


def olmo(config: Config, begin: Begin) -> Program:
    clip = config.positive("clip_qkv", 0.0) if config.get("clip_qkv") is not None else 0.0
    # Its layer norms have a fixed epsilon, whatever the configuration says.
    sizes = replace(read_sizes(config), epsilon=1e-5)
    bias = config.flag("attention_bias", False)
    return decoder(config, begin, sizes, Style(qkv_bias=bias, output_bias=bias, weightless=Norm.LAYER, clip=clip))


def olmo2(config: Config, begin: Begin) -> Program:
    bias = config.flag("attention_bias", False)
    style = Style(qkv_bias=bias, output_bias=bias, norms=Norms.BEHIND, head_norms=HeadNorms.ALL)
    return decoder(config, begin, read_sizes(config, epsilon=1e-5), style)


def olmo3(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, epsilon=1e-5)
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % 4 else FULL)
    # transformers gives a base that stands by itself to the layers without a window only.
    ropes = read_ropes(config, sizes.head_size, sizes.context, {FULL: config.number("rope_theta", THETA), SLIDING: THETA})
    bias = config.flag("attention_bias", False)
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        norms=Norms.BEHIND,
        head_norms=HeadNorms.ALL,
        windows=windows(config, types, config.window(4096)),
        ropes=[ropes[kind] for kind in types],
    )
    return decoder(config, begin, sizes, style)
