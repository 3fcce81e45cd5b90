"""Qwen3-Next and the text models of Qwen3.5: gated delta nets in most layers, gated attention in the others.

Lara 4 Mini has these delta nets, too, and plain attention in the other layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Program, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import Shared, mixture
from outrider.workers.models.families.mixtures import qwen_experts
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, Linear, windows
from outrider.workers.models.families.skeleton import (
    HeadNorms,
    Mixer,
    Sizes,
    Style,
    decoder,
    plain_attention,
    read_sizes,
    rotate,
)
from outrider.workers.models.rope import Rope, read_rope

DELTA_NET = "linear_attention"
# The kinds of Lara's layers, again and again.
OF_LARA = (DELTA_NET, SLIDING, DELTA_NET, FULL, SLIDING)


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """``fused``: one matrix has the rows of q, k, v and z of one key head, then those of the next; ``fused_gates``: another
    has those of b and a likewise. ``joined``: one matrix has all rows of q, then those of k, v, z, b and a.
    ``output_gate``: the function of z by which the output is multiplied."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    taps: int
    fused: bool = False
    fused_gates: bool = False
    joined: bool = False
    output_gate: Activation = Activation.SILU


def qwen3_next(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=2, head_size=256, layers=48)
    config.only("use_sliding_window", False)
    experts = qwen_experts(config, 512, 10, 512, config.size("shared_expert_intermediate_size", 512), normalised=True)
    return decoder(config, begin, sizes, _style(config, sizes, True, mixture(sizes, experts)))


def qwen3_5_text(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=4, head_size=256, layers=32)
    return decoder(config, begin, sizes, _style(config, sizes, False, None))


def qwen3_5_moe_text(config: Config, begin: Begin) -> Program:
    shared = config.size("shared_expert_intermediate_size", 512)
    # Every layer is a mixture, so the width of a gated layer is not stated.
    sizes = read_sizes(config, kv_heads=2, head_size=256, layers=40, ffn=shared)
    for key, always in (("norm_topk_prob", True), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        config.only(key, always)
    experts = qwen_experts(config, 256, 8, 512, shared, normalised=True)
    return decoder(config, begin, sizes, _style(config, sizes, False, mixture(sizes, experts)))


def lara_mini(config: Config, begin: Begin) -> Program:
    """Attention without gates, and without rope in layers without a window; a shared expert that is not weighed."""
    shared = config.size("shared_expert_intermediate_size", 512)
    sizes = read_sizes(config, kv_heads=4, head_size=128, layers=34, ffn=shared)  # every layer is a mixture
    for key, always in (("hidden_act", "silu"), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        config.only(key, always)
    net = replace(read_net(config, heads=16, kv_heads=8), joined=True)
    experts = replace(
        qwen_experts(config, 128, 4, 512, shared, normalised=True),
        shared=Shared(shared, "mlp.shared_expert."),
    )
    usual = [OF_LARA[layer % len(OF_LARA)] for layer in range(sizes.layers)]
    types = _layer_types(config, sizes.layers, usual, {FULL, SLIDING, DELTA_NET})
    rope, bias = read_rope(config, sizes.head_size, sizes.context), config.flag("attention_bias", False)
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        head_norms=HeadNorms.EACH,
        windows=windows(config, types, config.window(512)),
        ropes=[rope if kind == SLIDING else None for kind in types],
        mixer=mixture(sizes, experts),
        tied=True,
    )
    plain = plain_attention(config, sizes, style)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        if types[layer] == DELTA_NET:
            return gated_delta_net(builder, h, Linear(f"model.layers.{layer}.linear_attn."), net, sizes.epsilon, residual)
        return plain(builder, h, layer, residual)

    return decoder(config, begin, sizes, replace(style, attention=attention))


def read_net(config: Config, *, heads: int = 32, kv_heads: int = 16) -> DeltaNet:
    return DeltaNet(
        heads=config.size("linear_num_value_heads", heads),
        kv_heads=config.size("linear_num_key_heads", kv_heads),
        key_size=config.size("linear_key_head_dim", 128),
        value_size=config.size("linear_value_head_dim", 128),
        taps=config.size("linear_conv_kernel_dim", 4),
    )


def _style(config: Config, sizes: Sizes, fused: bool, mixer: Mixer | None) -> Style:
    # In GGUF files q, k, v and z are separate; b and a are fused there, too.
    net = replace(read_net(config), fused=fused and config.flag("fused_projections", True), fused_gates=fused)
    # Keys in published configurations of Qwen3.5: some with the only supported values, one of multi-token prediction.
    for key, always in (("hidden_act", "silu"), ("attn_output_gate", True), ("output_gate_type", "swish")):
        config.only(key, always)
    config.only("mamba_ssm_dtype", "float32")
    config.get("mtp_num_hidden_layers")
    interval = config.size("full_attention_interval", 4)
    usual = [DELTA_NET if (layer + 1) % interval else FULL for layer in range(sizes.layers)]
    types, bias = _layer_types(config, sizes.layers, usual, {FULL, DELTA_NET}), config.flag("attention_bias", False)
    partial = config.number("partial_rotary_factor", 0.25)
    rope = read_rope(config, sizes.head_size, sizes.context, partial=partial)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        block = f"model.layers.{layer}."
        if types[layer] == DELTA_NET:
            return gated_delta_net(builder, h, Linear(f"{block}linear_attn."), net, sizes.epsilon, residual)
        return gated_attention(builder, h, Linear(f"{block}self_attn."), sizes, rope, bias, residual)

    return Style(plus=1.0, attention=attention, mixer=mixer)


def _layer_types(config: Config, layers: int, usual: list[str], kinds: Collection[str]) -> list[str]:
    types = config.get("layer_types") or usual
    if len(types) != layers or not set(types) <= set(kinds):
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    return list(types)


def _rows(heads: int, parts: Sequence[int], part: int) -> tuple[tuple[int, int], ...]:
    """The rows of one part in a matrix that has the rows of all parts of one head, then those of the next head. ``parts``
    are their sizes."""
    before, width = sum(parts[:part]), sum(parts)
    return tuple((head * width + before, head * width + before + parts[part]) for head in range(heads))


def gated_delta_net(
    builder: Builder, h: Slice, names: Linear, net: DeltaNet, epsilon: float, residual: Slice | None
) -> Slice:
    hidden, group = h.width, net.heads // net.kv_heads
    key_width, value_width = net.kv_heads * net.key_size, net.heads * net.value_size
    mixed_width = 2 * key_width + value_width
    if net.joined:
        shape = (mixed_width + value_width + 2 * net.heads, hidden)
        matrices = [Tensor(f"{names.prefix}in_proj.weight", shape, ((0, mixed_width + value_width),))]
    elif net.fused:
        parts = (net.key_size, net.key_size, group * net.value_size, group * net.value_size)
        shape = (net.kv_heads * sum(parts), hidden)
        name = f"{names.prefix}in_proj_qkvz.weight"
        matrices = [Tensor(name, shape, _rows(net.kv_heads, parts, part)) for part in range(len(parts))]
    else:
        matrices = [names.weight("in_proj_qkv", mixed_width, hidden), names.weight("in_proj_z", value_width, hidden)]
    if net.joined:
        gates = [Tensor(f"{names.prefix}in_proj.weight", shape, ((mixed_width + value_width, shape[0]),))]
    elif net.fused_gates:
        name = f"{names.prefix}in_proj_ba.weight"
        gates = [Tensor(name, (2 * net.heads, hidden), _rows(net.kv_heads, (group, group), part)) for part in range(2)]
    else:
        gates = [names.weight(f"in_proj_{gate}", net.heads, hidden) for gate in "ba"]
    mixed, z = builder.linear(h, matrices).split(mixed_width, value_width)
    # A state's decay and beta depend on these projections, so like a router's they are in fp32.
    rates = builder.linear(h, gates, precision=Format.FP32)
    taps = Tensor(f"{names.prefix}conv1d.weight", (mixed_width, 1, net.taps))
    query, key, value = builder.convolve(mixed, taps, activation=Activation.SILU).split(key_width, key_width, value_width)
    y = builder.delta(
        query,
        key,
        value,
        rates,
        decay=Tensor(f"{names.prefix}A_log", (net.heads,)),
        shift=Tensor(f"{names.prefix}dt_bias", (net.heads,)),
        heads=net.heads,
        kv_heads=net.kv_heads,
    )
    builder.head_norm(y, names.vector("norm", net.value_size), heads=net.heads, epsilon=epsilon)
    y = builder.gate(y, z, activation=net.output_gate)
    return builder.linear(y, [names.weight("out_proj", hidden, value_width)], residual=residual)


def gated_attention(
    builder: Builder, h: Slice, names: Linear, sizes: Sizes, rope: Rope, bias: bool, residual: Slice | None
) -> Slice:
    heads, kv_heads, size = sizes.heads, sizes.kv_heads, sizes.head_size
    width, kv_width = heads * size, kv_heads * size
    # q_proj has the rows of each head's query, then those of its gate.
    query_rows, gate_rows = (_rows(heads, (size, size), part) for part in range(2))
    projections = [("q_proj", 2 * width, query_rows), ("k_proj", kv_width, ()), ("v_proj", kv_width, ())]
    projections.append(("q_proj", 2 * width, gate_rows))
    matrices = [Tensor(f"{names.prefix}{name}.weight", (rows, h.width), part) for name, rows, part in projections]
    biases = [Tensor(f"{names.prefix}{name}.bias", (rows,), part) for name, rows, part in projections]
    both = builder.linear(h, matrices, biases=biases if bias else ())
    query, key, value, gate = both.split(width, kv_width, kv_width, width)
    for part, name, count in ((query, "q_norm", heads), (key, "k_norm", kv_heads)):
        builder.head_norm(part, names.vector(name, size, plus=1.0), heads=count, epsilon=sizes.epsilon)
        rotate(builder, part, rope, count)
    a = builder.gate(builder.attention(query, key, value, heads=heads, kv_heads=kv_heads), gate)
    return builder.linear(
        a,
        [names.weight("o_proj", h.width, width)],
        biases=names.biases(bias, ("o_proj", h.width)),
        residual=residual,
    )
