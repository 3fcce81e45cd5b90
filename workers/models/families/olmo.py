"""OLMo 2 and 3: norms behind attention and gated layer, queries and keys normalised over all of their heads."""

from __future__ import annotations

from outrider.kernels.program import Program
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, layer_types, windows
from outrider.workers.models.families.skeleton import HeadNorms, Norms, Style, decoder, read_sizes
from outrider.workers.models.rope import read_ropes

THETA = 500000.0


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
