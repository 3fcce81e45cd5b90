"""LFM2: short convolutions between two gates in most layers, attention in the others."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Norm, Program, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import FULL, Begin, Linear
from outrider.workers.models.families.skeleton import rotate
from outrider.workers.models.rope import Rope, read_rope

CONVOLUTION = "conv"
# Of the first releases: how the weights were initialised before training, and what other keys say as well.
UNUSED = (
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
    *("block_norm_eps", "num_heads", "full_attn_idxs"),
)


def lfm2(config: Config, begin: Begin) -> Program:
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers", 32)
    heads, kv_heads = config.size("num_attention_heads", 32), config.size("num_key_value_heads", 8)
    vocabulary, context = config.size("vocab_size"), config.size("max_position_embeddings", 128000)
    epsilon, taps, bias = config.number("norm_eps", 1e-5), config.size("conv_L_cache", 3), config.flag("conv_bias", False)
    head_size, ffn = config.size("head_dim", hidden // heads), _inner(config)
    rope = read_rope(config, head_size, context, theta=1000000.0)
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        config.only(key, hidden)
    for key in ("block_use_swiglu", "use_pos_enc"):
        config.only(key, True)
    types = _layer_types(config, layers)
    for key in UNUSED:
        config.get(key)
    builder = begin(vocabulary, context)

    def norm(x: Slice, name: str) -> Slice:
        return builder.norm(x, Tensor(f"model.{name}.weight", (hidden,)), kind=Norm.RMS, epsilon=epsilon)

    embedding = Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    x = builder.embed(embedding)
    for layer, kind in enumerate(types):
        builder.layer_input(layer, x)
        block = Linear(f"model.layers.{layer}.")
        h = norm(x, f"layers.{layer}.operator_norm")
        if kind == CONVOLUTION:
            x = _convolution(builder, h, x, Linear(f"{block.prefix}conv."), taps, bias)
        else:
            attention = Linear(f"{block.prefix}self_attn.")
            x = _attention(builder, h, x, attention, heads, kv_heads, head_size, rope, epsilon)
        h = norm(x, f"layers.{layer}.ffn_norm")
        mlp = Linear(f"{block.prefix}feed_forward.")
        m = builder.gated(h, mlp.weight("w1", ffn, hidden), mlp.weight("w3", ffn, hidden), Activation.SILU)
        x = builder.linear(m, [mlp.weight("w2", hidden, ffn)], residual=x)
    x = norm(x, "embedding_norm")
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    head = embedding if tied else Tensor("lm_head.weight", (vocabulary, hidden))
    return builder.finish(builder.linear(x, [head]))


def _convolution(builder: Builder, h: Slice, x: Slice, conv: Linear, taps: int, bias: bool) -> Slice:
    width = h.width
    both = builder.linear(h, [conv.weight("in_proj", 3 * width, width)], biases=conv.biases(bias, ("in_proj", 3 * width)))
    before, behind, middle = both.split(width, width, width)
    kernel, shift = Tensor(f"{conv.prefix}conv.weight", (width, 1, taps)), conv.bias("conv", width) if bias else None
    c = builder.convolve(middle, kernel, before=before, behind=behind, bias=shift)
    output = [conv.weight("out_proj", width, width)]
    return builder.linear(c, output, biases=conv.biases(bias, ("out_proj", width)), residual=x)


def _attention(
    builder: Builder,
    h: Slice,
    x: Slice,
    attention: Linear,
    heads: int,
    kv_heads: int,
    head_size: int,
    rope: Rope,
    epsilon: float,
) -> Slice:
    width, kv_width = heads * head_size, kv_heads * head_size
    projections = [("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)]
    qkv = builder.linear(h, [attention.weight(name, rows, h.width) for name, rows in projections])
    query, key, value = qkv.split(width, kv_width, kv_width)
    for part, name, count in ((query, "q_layernorm", heads), (key, "k_layernorm", kv_heads)):
        builder.head_norm(part, attention.vector(name, head_size), heads=count, epsilon=epsilon)
        rotate(builder, part, rope, count)
    a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads)
    return builder.linear(a, [attention.weight("out_proj", h.width, width)], residual=x)


def _layer_types(config: Config, layers: int) -> list[str]:
    with_attention = config.get("full_attn_idxs")
    chosen = range(layers) if with_attention is None else with_attention
    types = config.get("layer_types") or [FULL if layer in chosen else CONVOLUTION for layer in range(layers)]
    if len(types) != layers or not set(types) <= {FULL, CONVOLUTION}:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    return list(types)


def _inner(config: Config) -> int:
    """How wide the gated layers are; the configuration may state another size, from which that follows."""
    size = config.size("block_ff_dim", config.size("intermediate_size", 12288))
    multiplier, multiple = config.number("block_ffn_dim_multiplier", 1.0), config.size("block_multiple_of", 256)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if config.stated("block_ffn_dim_multiplier", 1.0) is None:
        return size
    return -(-int(multiplier * size) // multiple) * multiple
