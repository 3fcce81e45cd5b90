"""Beam: a residual that is divided as it grows, attention with gates, and queries that grow with their position in layers
without rope."""

from __future__ import annotations

import numpy as np

from outrider.kernels import arithmetic
from outrider.kernels.program import Program
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.corrected_mixtures import deepseek_experts, deepseek_router, gated_attention
from outrider.workers.models.families.experts import mixture, sparse_layers
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, layer_types, windows
from outrider.workers.models.families.skeleton import Norms, Sizes, Style, decoder, read_sizes
from outrider.workers.models.rope import Rope, read_ropes, require_bases

# Queries of layers without rope are multiplied by (1 + (position + 1) / LENGTH) ** POWER.
LENGTH, POWER = 2048, 0.1
# What transformers takes where a configuration has no rope.
USUAL = {SLIDING: {"rope_type": "default", "rope_theta": 10000.0}, FULL: None}


def beam(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, head_size=128, layers=52, heads=48, ffn=20480)
    last = sizes.layers - 1
    types = layer_types(config, sizes.layers, lambda n: SLIDING if (n + 1) % 6 and n < last else FULL)
    ropes, sparse = _ropes(config, sizes, set(types)), sparse_layers(config, sizes.layers, 3)
    each, bias = windows(config, types, config.window(512)), config.flag("attention_bias", False)
    router = deepseek_router(config, scale=2.5, groups=(8, 4))
    experts = deepseek_experts(config, config.size("num_experts", 256), 8, 2560, 0, router, sparse.__getitem__)
    # Here null is a value: no cap.
    capped = config.stated("final_logit_softcapping", 30.0) is not None
    of_layers = [ropes[kind] for kind in types]
    style = Style(
        norms=Norms.AROUND,
        depth_scaled=True,
        logit_cap=config.positive("final_logit_softcapping", 30.0) if capped else 0.0,
        attention=gated_attention(sizes, of_layers, each, bias, True, _query_factors(sizes.context)),
        mixer=mixture(sizes, experts),
    )
    return decoder(config, begin, sizes, style)


def _ropes(config: Config, sizes: Sizes, kinds: set[str]) -> dict[str, Rope | None]:
    """Rope by type of layer; null is a value: layers of this type have none."""
    config.only("rope_scaling", None)
    stated = config.get("rope_parameters", USUAL)
    if not isinstance(stated, dict) or not kinds <= set(stated):
        raise config.unknown(f'"rope_parameters": {stated!r}')
    turning = {kind: stated[kind] for kind in sorted(kinds) if stated[kind] is not None}
    said = Config({"rope_parameters": turning}, config.source)
    require_bases(said, turning)
    found = read_ropes(said, dict.fromkeys(turning, sizes.head_size), sizes.context, dict.fromkeys(turning, 0.0))
    return {kind: found.get(kind) for kind in kinds}


def _query_factors(context: int) -> tuple[float, ...]:
    passed = 1.0 + np.arange(1, context + 1, dtype=np.float64) / LENGTH
    return tuple(float(factor) for factor in arithmetic.exp(POWER * arithmetic.log(passed)).astype(np.float32))
