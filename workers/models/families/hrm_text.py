"""HRM-Text: two stacks of layers that run repeatedly: H_cycles times, L_cycles runs of the fast stack, then one of the slow
stack."""

from __future__ import annotations

from collections.abc import Callable

from outrider.kernels.builder import Builder
from outrider.kernels.program import Norm, Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.families.skeleton import Sizes, gated, read_sizes, rotate
from outrider.workers.models.rope import read_rope

# Adds one run of a stack to the program: (builder, input, the stack's prefix) -> output. Each run has KV caches of its own.
Turn = Callable[[Builder, Slice, str], Slice]


def hrm_text(config: Config, begin: Begin) -> Program:
    """Attention is causal; transformers attends in both directions within a prompt only for callers who ask for it."""
    sizes = read_sizes(config, head_size=128, layers=16)
    for key, always in (("num_key_value_heads", sizes.heads), ("attention_bias", False), ("mlp_bias", False)):
        config.only(key, always)
    for unused in ("L_bp_cycles", "prefix_lm"):  # of training; of attention in both directions within a prompt
        config.get(unused)
    slow, fast = config.size("H_cycles", 2), config.size("L_cycles", 3)
    layers = sizes.layers
    if config.get("num_layers_per_stack") is not None:
        layers = config.size("num_layers_per_stack")
        config.only("num_hidden_layers", layers * slow * (fast + 1))
    if config.get("embedding_scale") is None:
        scale = 1.0 / config.positive("initializer_range", 0.02)
    else:
        scale = config.number("embedding_scale", 1.0)
    turn = _turn(config, sizes, layers)
    builder, hidden = begin(sizes.vocabulary, sizes.context), sizes.hidden
    embedding = Tensor("model.embed_tokens.weight", (sizes.vocabulary, hidden))
    high = builder.embed(embedding, scale)
    low: Slice | None = None
    for _ in range(slow):
        for _ in range(fast):
            start = Tensor("model.z_L_init", (hidden,))
            both = builder.shift(high, start) if low is None else builder.scale(low, 1.0, residual=high)
            low = turn(builder, both, "model.L_module.")
        assert low is not None
        high = turn(builder, builder.scale(low, 1.0, residual=high), "model.H_module.")
    tied = config.flag("tie_word_embeddings", False)
    head = embedding if tied else Tensor("lm_head.weight", (sizes.vocabulary, hidden))
    return builder.finish(builder.linear(high, [head]))


def _turn(config: Config, sizes: Sizes, layers: int) -> Turn:
    rope, function = read_rope(config, sizes.head_size, sizes.context), activation(config, "hidden_act", "silu")
    heads, width, ffn = sizes.heads, sizes.heads * sizes.head_size, sizes.ffn

    def norm(builder: Builder, x: Slice) -> Slice:
        return builder.norm(x, None, kind=Norm.RMS, epsilon=sizes.epsilon)

    def turn(builder: Builder, x: Slice, stack: str) -> Slice:
        for layer in range(layers):
            block = f"{stack}layers.{layer}."
            names, mlp, h = Linear(f"{block}attn."), Linear(f"{block}mlp."), norm(builder, x)
            fused = names.weight("gqkv_proj", 4 * width, h.width)
            gate, query, key, value = builder.linear(h, [fused]).split(width, width, width, width)
            for part in (query, key):
                rotate(builder, part, rope, heads)
            a = builder.attention(query, key, value, heads=heads, kv_heads=heads)
            x = builder.linear(builder.gate(a, gate), [names.weight("o_proj", x.width, width)], residual=x)
            m = gated(builder, norm(builder, x), mlp, ffn, function, fused=True)
            x = builder.linear(m, [mlp.weight("down_proj", x.width, ffn)], residual=x)
        return norm(builder, x)

    return turn
