"""EAGLE-3: one layer whose attention reads [embedding of a token, state of the token before], the target's state or its
own."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.kernels.builder import Builder
from outrider.kernels.program import Norm, Program, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.families.skeleton import Sizes, gated, read_sizes, rotate
from outrider.workers.models.heads import HeadConfig
from outrider.workers.models.rope import Rope, read_rope

# The target's own embedding, where the head has none.
TARGETS_EMBEDDING = "model.embed_tokens.weight"
OWN_EMBEDDING = "embed_tokens.weight"


def eagle3(head: HeadConfig, begin: Begin, tokens: Sequence[int] | None, own_embedding: bool) -> Program:
    """``tokens`` are the target's tokens of the rows of the head's ``lm_head``; None: all tokens in their order."""
    config = Config(head.values, head.source, native_alone=True)
    sizes = read_sizes(config)
    config.get("tie_word_embeddings")  # its matrix is its own all the same: the vocabularies differ
    qwen = config.get("model_type") == "qwen3"
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    function = activation(config, "hidden_act", "silu")
    rope = read_rope(config, sizes.head_size, sizes.context)
    # A window is off unless layers ask for it.
    for key in ("sliding_window", "max_window_layers"):
        config.get(key)
    if config.flag("use_sliding_window", False) or set(config.get("layer_types") or []) - {"full_attention"}:
        raise ModelError(f"{head.source}: a head with a sliding window is not supported")
    if sizes.layers != 1:
        raise ModelError(f"{head.source}: a head of {sizes.layers} layers is not supported; EAGLE-3's have one")
    config.check_all_read()
    builder = begin(sizes.vocabulary, sizes.context)
    hidden, epsilon = sizes.hidden, sizes.epsilon

    def norm(x: Slice, name: str, output: Slice | None = None) -> Slice:
        weight = Tensor(f"{name}.weight", (x.width,))
        return builder.norm(x, weight, kind=Norm.RMS, epsilon=epsilon, output=output)

    embedding = OWN_EMBEDDING if own_embedding else TARGETS_EMBEDDING
    embedded = builder.embed(Tensor(embedding, (sizes.vocabulary, hidden)))
    given = builder.hidden_in(head.states * head.target_hidden)
    if head.norm_before_fc:
        given = norm(given, "input_norm")
    if head.fc_norm:
        normed = builder.room(given.width)
        for place in range(head.states):
            part = (place * head.target_hidden, head.target_hidden)
            norm(given.part(*part), f"fc_norm.{place}", normed.part(*part))
        given = normed
    state = builder.load_hidden(builder.linear(given, [Tensor("fc.weight", (hidden, given.width))]))
    both = builder.room(2 * hidden)
    norm(embedded, f"{head.first_layer}input_layernorm", both.part(0, hidden))
    normed = norm(state, f"{head.first_layer}hidden_norm", both.part(hidden, hidden))
    residual = normed if head.norm_before_residual else state
    x = _attention(builder, both, residual, head.first_layer, rope, sizes, bias, qwen)
    h = norm(x, f"{head.first_layer}post_attention_layernorm")
    mlp = Linear(f"{head.first_layer}mlp.")
    m = gated(builder, h, mlp, sizes.ffn, function, bias=mlp_bias)
    down = [mlp.weight("down_proj", hidden, sizes.ffn)]
    x = builder.linear(m, down, biases=mlp.biases(mlp_bias, ("down_proj", hidden)), residual=x)
    last = norm(x, "norm")
    builder.store_hidden(last if head.norm_output else x)
    logits = builder.linear(last, [Tensor("lm_head.weight", (head.draft_vocabulary, hidden))])
    return builder.finish(logits if tokens is None else builder.scatter(logits, tokens))


def _attention(
    builder: Builder, both: Slice, residual: Slice, first_layer: str, rope: Rope, sizes: Sizes, bias: bool, qwen: bool
) -> Slice:
    attention = Linear(f"{first_layer}self_attn.")
    heads, kv_heads = sizes.heads, sizes.kv_heads
    width, kv_width = heads * sizes.head_size, kv_heads * sizes.head_size
    projections = [("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)]
    matrices = [attention.weight(name, rows, both.width) for name, rows in projections]
    qkv = builder.linear(both, matrices, biases=attention.biases(bias, *projections))
    query, key, value = qkv.split(width, kv_width, kv_width)
    for part, name, count in ((query, "q_norm", heads), (key, "k_norm", kv_heads)):
        if qwen:
            weight = attention.vector(name, sizes.head_size)
            builder.head_norm(part, weight, heads=count, epsilon=sizes.epsilon)
        rotate(builder, part, rope, count)
    a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads)
    output = [attention.weight("o_proj", sizes.hidden, width)]
    return builder.linear(a, output, biases=attention.biases(bias, ("o_proj", sizes.hidden)), residual=residual)
