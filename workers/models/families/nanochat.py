"""nanochat: norms without weights, behind the embedding and behind rope too, and layers that are not gated."""

from __future__ import annotations

from dataclasses import replace

from outrider.kernels.program import Norm, Program
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import plain
from outrider.workers.models.families.parts import Begin, activation
from outrider.workers.models.families.skeleton import HeadNorms, Style, decoder, read_sizes
from outrider.workers.models.rope import read_rope


def nanochat(config: Config, begin: Begin) -> Program:
    sizes, bias = read_sizes(config, layers=12, heads=6), config.flag("attention_bias", False)
    rope = read_rope(config, sizes.head_size, sizes.context)
    # Its rope rotates in the opposite direction.
    backwards = replace(rope, frequencies=tuple(-frequency for frequency in rope.frequencies))
    capped = config.stated("final_logit_softcapping", 15.0) is not None
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        head_norms=HeadNorms.TURNED,
        weightless=Norm.RMS,
        embedding_norm=True,
        ropes=[backwards] * sizes.layers,
        logit_cap=config.positive("final_logit_softcapping", 15.0) if capped else 0.0,
        mixer=plain(
            "model.layers.{}.mlp.",
            sizes.hidden,
            sizes.ffn,
            activation(config, "hidden_act", "relu2"),
            ("fc1", "fc2"),
            bias=False,
        ),
    )
    return decoder(config, begin, sizes, style)
