"""GPT-Neo: learned positions, scores that are not scaled, windows in some layers."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import (
    LayerNorm,
    Stack,
    attend,
    even_heads,
    finish,
    plain,
    projected,
)
from outrider.workers.models.families.parts import Begin, Linear, activation

LOCAL, GLOBAL = "local", "global"


def gpt_neo(config: Config, begin: Begin) -> Program:
    hidden = config.size("hidden_size", 2048)
    ffn = config.size("intermediate_size", 4 * hidden)
    vocabulary, context = config.size("vocab_size", 50257), config.size("max_position_embeddings", 2048)
    count, layers = config.size("num_heads", 16), config.size("num_layers", 24)
    heads = even_heads(config, hidden, count, count)
    norm = LayerNorm(hidden, config.number("layer_norm_epsilon", 1e-5))
    function = activation(config, "activation_function", "gelu_new")
    window = config.size("window_size", 256)
    windows = [window if kind == LOCAL else 0 for kind in _types(config, layers)]

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"transformer.h.{layer}.attn.attention.")
        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, False)
        a = attend(builder, h, projections, heads, window=windows[layer], scale=1.0)
        biases = under.biases(True, ("out_proj", hidden))
        return builder.linear(a, [under.weight("out_proj", hidden, hidden)], biases=biases, residual=residual)

    builder = begin(vocabulary, context)
    root = Linear("transformer.")
    embedding = root.weight("wte", vocabulary, hidden)
    x = builder.positions(builder.embed(embedding), root.weight("wpe", context, hidden))
    stack = Stack("transformer.h.", layers, norm, "ln_1", "ln_2")
    mixer = plain("transformer.h.{}.mlp.", hidden, ffn, function, ("c_fc", "c_proj"))
    x = norm(builder, stack(builder, x, attention, mixer), root, "ln_f")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", True))


def _types(config: Config, layers: int) -> list[str]:
    """The type of each layer, from "attention_types" ("attention_layers" follows from it)."""
    stated = config.get("attention_types", [[[GLOBAL, LOCAL], 12]])
    try:
        types = [kind for kinds, times in stated for _ in range(times) for kind in kinds]
    except (TypeError, ValueError):
        types = []
    if len(types) != layers or not set(types) <= {GLOBAL, LOCAL}:
        raise config.unknown(f'"attention_types": {stated!r} of {layers} layers')
    config.only("attention_layers", types)
    return types
