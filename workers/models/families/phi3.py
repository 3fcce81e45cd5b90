"""Phi 3 and Phi 4: fused projections, rope on a part of each head, other frequencies for long rows."""

from __future__ import annotations

from outrider.kernels.program import Program
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Begin
from outrider.workers.models.families.skeleton import Style, decoder, read_sizes
from outrider.workers.models.rope import read_rope


def phi3(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, epsilon=1e-5)
    # Of the model's own code, which can do more than has been published.
    for key in ("full_attn_mod", "interpolate_factor"):
        config.only(key, 1)
    original = config.size("original_max_position_embeddings", 4096)
    partial = config.number("partial_rotary_factor", 1.0)
    rope = read_rope(config, sizes.head_size, sizes.context, partial=partial, long_from=original)
    style = Style(fused=True, fused_gate=True, windows=[config.window(None)] * sizes.layers, ropes=[rope] * sizes.layers)
    return decoder(config, begin, sizes, style)
