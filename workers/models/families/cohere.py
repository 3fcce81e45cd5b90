"""Command R and its successors, and Compass: attention and the gated feed-forward layer in parallel, after one norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Norm, Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import Heads, LayerNorm, Stack, attend, finish, gated_layer, projected
from outrider.workers.models.families.parts import (
    FULL,
    SLIDING,
    Begin,
    Linear,
    activation,
    layer_types,
    paired_rows,
    windows,
)
from outrider.workers.models.rope import Rope, read_rope


def cohere(config: Config, begin: Begin) -> Program:
    heads, context = _heads(config), config.size("max_position_embeddings", 8192)
    rope = read_rope(config, heads.size, context, theta=500000.0)
    layers = config.size("num_hidden_layers", 40)
    return _decoder(config, begin, heads, [rope] * layers, [0] * layers, config.flag("use_qk_norm", False))


def cohere2(config: Config, begin: Begin) -> Program:
    """Layers without a window have no rope either."""
    heads, context = _heads(config), config.size("max_position_embeddings", 8192)
    config.get("use_parallel_embedding")  # of training on several machines only
    # Of the model's own code, which can do more than has been published.
    for key, value in (
        ("layer_switch", config.size("sliding_window_pattern", 4)),
        ("order_of_interleaved_layers", "local_attn_first"),
        ("position_embedding_type", "rope_gptj"),
        ("rotary_pct", 1.0),
        ("use_embedding_sharing", True),
        ("use_gated_activation", True),
        ("use_parallel_block", True),
    ):
        config.only(key, value)
    rope, pattern = read_rope(config, heads.size, context), config.size("sliding_window_pattern", 4)
    layers = config.size("num_hidden_layers", 40)
    types = layer_types(config, layers, lambda layer: SLIDING if (layer + 1) % pattern else FULL)
    ropes = [rope if kind == SLIDING else None for kind in types]
    return _decoder(config, begin, heads, ropes, windows(config, types, config.window(4096)), False)


# Keys of positions in pictures.
OF_COMPASS = ("mrope_section", "mrope_interleaved")


def cohere_compass(config: Config, begin: Begin) -> Program:
    """Rope rotates halves (not neighbouring columns), and has parameters for each type of layer, which may have none."""
    heads, context = _heads(config), config.size("max_position_embeddings", 8192)
    config.get("pooling")
    for key in ("rope_theta", "rope_scaling", "sliding_window_pattern"):
        config.only(key, None)
    layers = config.size("num_hidden_layers", 40)
    types, stated = layer_types(config, layers, lambda layer: FULL), config.get("rope_parameters") or {}
    found = {kind: _rope_of(config, stated, kind, heads.size, context) for kind in dict.fromkeys(types)}
    spans = windows(config, types, config.window(4096))
    return _decoder(config, begin, heads, [found[kind] for kind in types], spans, False, paired=False, scale=1.0)


def _rope_of(config: Config, stated: Any, kind: str, head_size: int, context: int) -> Rope | None:
    """Of one type of layers; null is no rope."""
    if not isinstance(stated, Mapping) or kind not in stated:
        raise config.unknown(f'layers of the type "{kind}" of which "rope_parameters" says nothing')
    parameters = stated[kind]
    if parameters is None:
        return None
    if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
        raise config.unknown(f'"rope_parameters": "{kind}": {parameters!r}')
    kept = {key: value for key, value in parameters.items() if key not in OF_COMPASS}
    return read_rope(Config({"rope_parameters": kept}, config.source), head_size, context)


def _heads(config: Config) -> Heads:
    count = config.size("num_attention_heads", 64)
    size = config.size("head_dim", config.size("hidden_size", 8192) // count)
    return Heads(count, config.size("num_key_value_heads", count), size)


def _decoder(
    config: Config,
    begin: Begin,
    heads: Heads,
    ropes: Sequence[Rope | None],
    spans: Sequence[int],
    normed: bool,
    paired: bool = True,
    scale: float = 0.0625,
) -> Program:
    """``paired``: rope rotates neighbouring columns. ``scale`` is the default factor of the logits."""
    hidden, ffn = config.size("hidden_size", 8192), config.size("intermediate_size", 22528)
    vocabulary, context = config.size("vocab_size", 256000), config.size("max_position_embeddings", 8192)
    norm = LayerNorm(hidden, config.number("layer_norm_eps", 1e-5), bias=False)
    config.get("model_max_length")  # the tokenizer's: rows are as long as "max_position_embeddings" says
    bias = config.flag("attention_bias", False)
    taken = [paired_rows(count, heads.size, heads.size) for count in (heads.count, heads.kv_count)]

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"model.layers.{layer}.self_attn.")
        order = (*taken, ()) if paired and ropes[layer] else ((), (), ())
        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, bias, order)

        def each(x: Slice, name: str, count: int) -> None:
            _norm_heads(builder, x, f"{under.prefix}{name}_norm.weight", heads.size, norm.epsilon)

        a = attend(builder, h, projections, heads, rope=ropes[layer], norm=each if normed else None, window=spans[layer])
        biases = under.biases(bias, ("o_proj", hidden))
        return builder.linear(a, [under.weight("o_proj", hidden, a.width)], biases=biases, residual=residual)

    builder = begin(vocabulary, context)
    root = Linear("model.")
    embedding = root.weight("embed_tokens", vocabulary, hidden)
    stack = Stack("model.layers.", len(ropes), norm, "input_layernorm", parallel=True)
    mixer = gated_layer("model.layers.{}.mlp.", hidden, ffn, activation(config, "hidden_act", "silu"))
    x = norm(builder, stack(builder, builder.embed(embedding), attention, mixer), root, "norm")
    scale = config.number("logit_scale", scale)
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", True), scale=scale)


def _norm_heads(builder: Builder, x: Slice, name: str, size: int, epsilon: float) -> None:
    """Norms with a weight for each head, all in one tensor of the checkpoint."""
    count = x.width // size
    for head in range(count):
        weight = Tensor(name, (x.width,), paired_rows(1, size, size, head * size), stored=(count, size))
        builder.head_norm(x.part(head * size, size), weight, heads=1, epsilon=epsilon, kind=Norm.LAYER)
