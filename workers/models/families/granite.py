"""Granite and its relatives: Llama, with multipliers of embeddings, scores, what is added to residuals, and logits."""

from __future__ import annotations

from dataclasses import replace

from outrider.kernels.program import Program
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, layer_types, windows
from outrider.workers.models.families.skeleton import Norms, Sizes, Style, decoder, read_sizes
from outrider.workers.models.rope import Rope, read_rope


def granite(config: Config, begin: Begin) -> Program:
    return decoder(config, begin, read_sizes(config), _style(config))


def granite_swa(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=4, epsilon=1e-5, layers=24, heads=20)
    return decoder(config, begin, sizes, by_layer(config, sizes, replace(_style(config), tied=True)))


def by_layer(config: Config, sizes: Sizes, style: Style) -> Style:
    """``style`` with windows, attention sinks, and a base of rope for each layer."""
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if layer % 4 else FULL)
    rope = read_rope(config, sizes.head_size, sizes.context)
    thetas = config.get("layer_rope_theta")
    ropes: list[Rope | None] = [rope] * sizes.layers
    if thetas is not None:
        if not isinstance(thetas, list) or len(thetas) != sizes.layers:
            raise ModelError(f'{config.source}: the native engine cannot follow "layer_rope_theta": {thetas!r}')
        # 0 is no rope.
        found = {
            theta: read_rope(config, sizes.head_size, sizes.context, base=theta) if theta else None for theta in set(thetas)
        }
        ropes = [found[theta] for theta in thetas]
    return replace(style, sinks=True, windows=windows(config, types, config.window(128)), ropes=ropes)


def hyperclovax(config: Config, begin: Begin) -> Program:
    """Has norms after attention and gated layer, too, unless "use_post_norm" is false; "logits_scaling" multiplies logits,
    where Granite's divides them."""
    sizes = read_sizes(config)
    style = replace(
        _style(config, sizes.head_size**-0.5),
        logit_scale=config.number("logits_scaling", 1.0),
    )
    if config.flag("use_post_norm", True):
        # The decoder adds the output of a norm to the residual without a factor.
        config.only("residual_multiplier", 1.0)
        behind = ("post_norm1", "post_norm2")
        style = replace(style, norms=Norms.AROUND, second_norm="post_attention_layernorm", norms_behind=behind)
    return decoder(config, begin, sizes, style)


def _style(config: Config, attention_scale: float = 1.0) -> Style:
    bias = config.flag("attention_bias", False)
    embedding = config.number("embedding_multiplier", 1.0)
    return Style(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        embedding_scale=lambda builder: embedding,
        attention_scale=config.positive("attention_multiplier", attention_scale),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )
