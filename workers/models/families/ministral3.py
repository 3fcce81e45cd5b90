"""Ministral 3: Mistral whose queries are scaled by how far the row is beyond the length it was first trained with."""

from __future__ import annotations

import numpy as np

from outrider.kernels import arithmetic
from outrider.kernels.program import Program
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Begin
from outrider.workers.models.families.skeleton import Style, decoder, read_sizes
from outrider.workers.models.rope import read_rope

BETA, ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
# (factors, positions) of ``Style``.
QueryFactors = tuple[tuple[float, ...], int]
# What transformers takes where a configuration has no rope.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral3(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, head_size=128, epsilon=1e-5, layers=34)
    rope = read_rope(config, sizes.head_size, sizes.context, usual=ROPE, passed_over=(BETA, "max_position_embeddings"))
    style = Style(
        windows=[config.window(None)] * sizes.layers,
        ropes=[rope] * sizes.layers,
        query_factors=query_factors(config, sizes.context),
    )
    return decoder(config, begin, sizes, style)


def query_factors(config: Config, context: int) -> QueryFactors | None:
    """1 + beta * log(1 + k) from the position k * original on; None: no row grows so long."""
    stated = config.get("rope_scaling") or config.get("rope_parameters") or ROPE
    parameters = Config(stated, f'{config.source}: "rope_parameters"')
    for key in (BETA, ORIGINAL):
        if stated.get(key) is None:
            raise ModelError(f'{config.source}: "rope_parameters" has no "{key}"')
    beta, original = parameters.number(BETA, 0.0), parameters.size(ORIGINAL)
    if context <= original:
        return None
    passed = np.arange(-(-context // original), dtype=np.float64)
    factors = (1.0 + beta * arithmetic.log(1.0 + passed)).astype(np.float32)
    return tuple(float(factor) for factor in factors), original
