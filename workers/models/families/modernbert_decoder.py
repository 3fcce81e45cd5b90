"""ModernBERT's decoder (Ettin): layer norms, behind the embedding too, windows, and a layer of its own before the head."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import LayerNorm, attend, even_heads, projected
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, Linear, activation, layer_types, windows
from outrider.workers.models.rope import read_ropes

# Keys of training, of classifiers, and of the implementation.
UNUSED = """
initializer_cutoff_factor mlp_dropout cls_token_id classifier_pooling deterministic_flash_attn position_embedding_type
repad_logits_with_grad sparse_pred_ignore_index sparse_prediction layer_norm_eps reference_compile
"""


def modernbert_decoder(config: Config, begin: Begin) -> Program:
    hidden, ffn = config.size("hidden_size", 768), config.size("intermediate_size", 1152)
    count = config.size("num_attention_heads", 12)
    heads, layers = even_heads(config, hidden, count, count), config.size("num_hidden_layers", 22)
    vocabulary, context = config.size("vocab_size", 50368), config.size("max_position_embeddings", 8192)
    for key in UNUSED.split():
        config.get(key)
    config.only("causal_mask", True)
    every = config.size("global_attn_every_n_layers", 3)
    types = layer_types(config, layers, lambda layer: SLIDING if layer % every else FULL)
    # "local_attention" counts both sides of a token.
    local = config.whole("local_attention", 128) // 2
    if config.values.get("local_attention", 128) is None:
        raise config.unknown('"local_attention": null')
    config.only("sliding_window", local)
    spans = windows(config, types, local)
    bases = {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}
    config.only("rope_scaling", None)
    ropes = read_ropes(config, heads.size, context, {kind: config.number(*base) for kind, base in bases.items()})
    norm = LayerNorm(hidden, config.number("norm_eps", 1e-5), bias=config.flag("norm_bias", False))
    function, bias = activation(config, "hidden_activation", "gelu"), config.flag("attention_bias", False)
    of_mlp, tied = config.flag("mlp_bias", False), config.flag("tie_word_embeddings", True)

    builder, root = begin(vocabulary, context), Linear("model.")
    embedding = root.weight("embeddings.tok_embeddings", vocabulary, hidden)
    x = norm(builder, builder.embed(embedding), root, "embeddings.norm")
    for layer in range(layers):
        block = Linear(f"model.layers.{layer}.")
        under = Linear(f"{block.prefix}attn.")
        # The first layer has no norm, since its input is the embeddings' norm.
        h = norm(builder, x, block, "attn_norm") if layer else x
        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, bias)
        a = attend(builder, h, projections, heads, rope=ropes[types[layer]], window=spans[layer])
        x = builder.linear(a, [under.weight("Wo", hidden, hidden)], biases=under.biases(bias, ("Wo", hidden)), residual=x)
        x = _gated(builder, norm(builder, x, block, "mlp_norm"), x, Linear(f"{block.prefix}mlp."), ffn, function, of_mlp)
    x, head = norm(builder, x, root, "final_norm"), Linear("lm_head.")
    shift = head.biases(config.flag("classifier_bias", False), ("dense", hidden))
    function = activation(config, "classifier_activation", "gelu")
    x = norm(
        builder,
        builder.linear(x, [head.weight("dense", hidden, hidden)], biases=shift, activation=function),
        head,
        "norm",
    )
    last = Linear("")
    logits = embedding if tied else Tensor("lm_head.weight", (vocabulary, hidden))
    biases = last.biases(config.flag("decoder_bias", True), ("decoder", vocabulary))
    return builder.finish(builder.linear(x, [logits], biases=biases))


def _gated(builder: Builder, h: Slice, residual: Slice, mlp: Linear, ffn: int, function: Activation, bias: bool) -> Slice:
    """Gate and up are one tensor, the one behind the other."""
    halves = [((0, ffn),), ((ffn, 2 * ffn),)]
    gate, up = (mlp.weight("Wi", 2 * ffn, h.width, rows) for rows in halves)
    biases = [mlp.bias("Wi", 2 * ffn, rows) for rows in halves] if bias else []
    m = builder.gated(h, gate, up, function, biases=biases)
    down, shift = mlp.weight("Wo", h.width, ffn), mlp.biases(bias, ("Wo", h.width))
    return builder.linear(m, [down], biases=shift, residual=residual)
