"""LFM2 and its mixture: short convolutions between two gates in most layers, attention in the others."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Norm, Program, Routing, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import Experts, Router, chosen_experts, mixture, number_of_experts
from outrider.workers.models.families.parts import FULL, Begin, Linear
from outrider.workers.models.families.skeleton import Mixer, Sizes, rotate
from outrider.workers.models.rope import Rope, read_rope

CONVOLUTION = "conv"
# Keys of the first releases: of the initialisation before training, and ones that repeat other keys.
UNUSED = (
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
    *("block_norm_eps", "num_heads", "full_attn_idxs"),
)


def lfm2(config: Config, begin: Begin) -> Program:
    sizes = _sizes(config, _inner(config))
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        config.only(key, sizes.hidden)
    for key in ("block_use_swiglu", "use_pos_enc"):
        config.only(key, True)
    types = _layer_types(config, sizes.layers)
    for key in UNUSED:
        config.get(key)

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        mlp, ffn = Linear(f"model.layers.{layer}.feed_forward."), sizes.ffn
        m = builder.gated(h, mlp.weight("w1", ffn, h.width), mlp.weight("w3", ffn, h.width), Activation.SILU)
        return builder.linear(m, [mlp.weight("w2", h.width, ffn)], residual=residual)

    return _decoder(config, begin, sizes, types, mixer)


def lfm2_moe(config: Config, begin: Begin) -> Program:
    sizes = _sizes(config, config.size("intermediate_size", 7168))
    if not config.get("layer_types"):
        raise ModelError(f'{config.source} has no "layer_types"')
    count, first = number_of_experts(config, 32), config.whole("num_dense_layers", 2)
    router = Router(
        Routing.SIGMOID_SHARE if config.flag("norm_topk_prob", True) else Routing.SIGMOID_EACH,
        corrections="expert_bias" if config.flag("use_expert_bias", True) else "",
        epsilon=1e-6,
        scale=config.number("routed_scaling_factor", 1.0),
    )
    experts = Experts(
        count,
        chosen_experts(config, count, 4),
        config.size("moe_intermediate_size", 1792),
        Activation.SILU,
        router,
        sparse=lambda layer: layer >= first,
        prefix="feed_forward.",
        dense_names=("w1", "w3", "w2"),
    )
    return _decoder(config, begin, sizes, _layer_types(config, sizes.layers), mixture(sizes, experts))


def _sizes(config: Config, ffn: int) -> Sizes:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads", 32)
    return Sizes(
        hidden=hidden,
        ffn=ffn,
        layers=config.size("num_hidden_layers", 32),
        heads=heads,
        kv_heads=config.size("num_key_value_heads", 8),
        head_size=config.size("head_dim", hidden // heads),
        vocabulary=config.size("vocab_size"),
        context=config.size("max_position_embeddings", 128000),
        epsilon=config.number("norm_eps", 1e-5),
    )


def _decoder(config: Config, begin: Begin, sizes: Sizes, types: list[str], mixer: Mixer) -> Program:
    hidden, vocabulary, epsilon = sizes.hidden, sizes.vocabulary, sizes.epsilon
    taps, bias = config.size("conv_L_cache", 3), config.flag("conv_bias", False)
    rope = read_rope(config, sizes.head_size, sizes.context, theta=1000000.0)
    builder = begin(vocabulary, sizes.context)

    def norm(x: Slice, name: str) -> Slice:
        return builder.norm(x, Tensor(f"model.{name}.weight", (hidden,)), kind=Norm.RMS, epsilon=epsilon)

    embedding = Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    x = builder.embed(embedding)
    for layer, kind in enumerate(types):
        builder.layer_input(layer, x)
        block = Linear(f"model.layers.{layer}.")
        h = norm(x, f"layers.{layer}.operator_norm")
        if kind == CONVOLUTION:
            x = convolution(builder, h, x, Linear(f"{block.prefix}conv."), taps, bias)
        else:
            x = _attention(builder, h, x, Linear(f"{block.prefix}self_attn."), sizes, rope)
        x = mixer(builder, norm(x, f"layers.{layer}.ffn_norm"), layer, x)
    x = norm(x, "embedding_norm")
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    head = embedding if tied else Tensor("lm_head.weight", (vocabulary, hidden))
    return builder.finish(builder.linear(x, [head]))


def convolution(builder: Builder, h: Slice, x: Slice | None, conv: Linear, taps: int, bias: bool) -> Slice:
    width = h.width
    both = builder.linear(h, [conv.weight("in_proj", 3 * width, width)], biases=conv.biases(bias, ("in_proj", 3 * width)))
    before, behind, middle = both.split(width, width, width)
    kernel, shift = Tensor(f"{conv.prefix}conv.weight", (width, 1, taps)), conv.bias("conv", width) if bias else None
    c = builder.convolve(middle, kernel, before=before, behind=behind, bias=shift)
    output = [conv.weight("out_proj", width, width)]
    return builder.linear(c, output, biases=conv.biases(bias, ("out_proj", width)), residual=x)


def _attention(builder: Builder, h: Slice, x: Slice, attention: Linear, sizes: Sizes, rope: Rope) -> Slice:
    heads, kv_heads, head_size, epsilon = sizes.heads, sizes.kv_heads, sizes.head_size, sizes.epsilon
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
    """The width of the gated layers. With "block_auto_adjust_ff_dim" it is 2/3 of the stated size, times a multiplier and
    rounded up to a multiple unless that is null."""
    size = config.size("block_ff_dim", config.size("intermediate_size", 12288))
    multiplier, multiple = config.number("block_ffn_dim_multiplier", 1.0), config.size("block_multiple_of", 256)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if config.stated("block_ffn_dim_multiplier", 1.0) is None:
        return size
    return -(-int(multiplier * size) // multiple) * multiple
