"""EXAONE 4: norms behind attention and gated layer, norms of heads; among layers with a window the others have no rope."""

from __future__ import annotations

from outrider.kernels.program import Program
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, layer_types, windows
from outrider.workers.models.families.skeleton import HeadNorms, Norms, Style, decoder, read_sizes
from outrider.workers.models.rope import read_rope


def exaone4(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=32, epsilon=1e-5)
    window = config.window(4096)
    # A pattern in letters ("LLLG") stands beside the types that it stands for: transformers reads no letters either.
    every = 1
    if not config.get("layer_types") and window:
        every = config.size("sliding_window_pattern", 4)
    config.get("sliding_window_pattern")
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % every else FULL)
    rope = read_rope(config, sizes.head_size, sizes.context)
    style = Style(
        norms=Norms.BEHIND,
        head_norms=HeadNorms.EACH,
        windows=windows(config, types, window),
        ropes=[rope if kind == SLIDING or not window else None for kind in types],
    )
    return decoder(config, begin, sizes, style)
