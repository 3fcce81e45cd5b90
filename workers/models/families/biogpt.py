"""BioGPT: OPT with scaled embeddings and a head of another name."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import LayerNorm, Stack, attend, even_heads, finish, plain, projected
from outrider.workers.models.families.parts import Begin, Linear, activation


def biogpt(config: Config, begin: Begin) -> Program:
    hidden, ffn = config.size("hidden_size", 1024), config.size("intermediate_size", 4096)
    count = config.size("num_attention_heads", 16)
    heads = even_heads(config, hidden, count, count)
    vocabulary, context = config.size("vocab_size", 42384), config.size("max_position_embeddings", 1024)
    # transformers ignores it: its norms have torch's default epsilon.
    config.get("layer_norm_eps")
    norm, function = LayerNorm(hidden, 1e-5), activation(config, "hidden_act", "gelu")
    scale = hidden**0.5 if config.flag("scale_embedding", True) else 1.0

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"biogpt.layers.{layer}.self_attn.")
        a = attend(builder, h, projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, True), heads)
        output, shift = under.weight("out_proj", hidden, hidden), under.biases(True, ("out_proj", hidden))
        return builder.linear(a, [output], biases=shift, residual=residual)

    builder, root = begin(vocabulary, context), Linear("biogpt.")
    embedding = root.weight("embed_tokens", vocabulary, hidden)
    # The first two rows of the position table are for padding, as in OPT.
    x = builder.positions(builder.embed(embedding, scale), root.weight("embed_positions", context + 2, hidden), offset=2)
    stack = Stack("biogpt.layers.", config.size("num_hidden_layers", 24), norm, "self_attn_layer_norm", "final_layer_norm")
    x = stack(builder, x, attention, plain("biogpt.layers.{}.", hidden, ffn, function, ("fc1", "fc2")))
    return finish(builder, norm(builder, x, root, "layer_norm"), embedding, config.flag("tie_word_embeddings", True))
