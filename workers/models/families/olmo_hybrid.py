"""OLMo Hybrid: most layers are gated delta nets, with norms before each part; the others have OLMo 3's attention, with
norms after each part."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Program, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import FULL, Begin, Linear, activation
from outrider.workers.models.families.qwen3_next import DELTA_NET
from outrider.workers.models.families.skeleton import HeadNorms, Norms, Sizes, Style, decoder, plain_attention, read_sizes
from outrider.workers.models.rope import Rope, read_rope

# The epsilon of the norm after a gated delta net; the configuration states that of the other norms.
EPSILON = 1e-5
# Keys of the initialisation before training.
UNUSED = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """``most``: the upper bound of beta. With 2 the eigenvalue 1 - beta of a state's transition may be negative."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    taps: int
    function: Activation
    most: float


def olmo_hybrid(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, heads=30)
    types = _layer_types(config, sizes.layers)
    for key in UNUSED:
        config.get(key)
    kv_heads = config.size("linear_num_key_heads", sizes.heads)
    key_size = config.size("linear_key_head_dim", int(0.75 * sizes.hidden / kv_heads))
    net = DeltaNet(
        heads=config.size("linear_num_value_heads", sizes.heads),
        kv_heads=kv_heads,
        key_size=key_size,
        value_size=config.size("linear_value_head_dim", 2 * key_size),
        taps=config.size("linear_conv_kernel_dim", 4),
        function=activation(config, "hidden_act", "silu"),
        most=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
    )
    bias = config.flag("attention_bias", False)
    ropes = [_rope(config, sizes)] * sizes.layers
    full = plain_attention(config, sizes, Style(qkv_bias=bias, output_bias=bias, head_norms=HeadNorms.ALL, ropes=ropes))

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        if types[layer] == FULL:
            return full(builder, h, layer, residual)
        return _delta_net(builder, h, Linear(f"model.layers.{layer}.linear_attn."), net, residual)

    norms = [Norms.BEHIND if kind == FULL else Norms.BEFORE for kind in types]
    return decoder(config, begin, sizes, Style(norms=norms, attention=attention))


def _layer_types(config: Config, layers: int) -> list[str]:
    types = config.get("layer_types")
    if not types:
        types = [FULL if layer % 4 == 3 else DELTA_NET for layer in range(layers)]
        types[-1] = types[-1] if FULL in types else FULL
    if len(types) != layers or set(types) != {FULL, DELTA_NET}:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    return list(types)


def _rope(config: Config, sizes: Sizes) -> Rope | None:
    """The rope of attention; None where its base is null, as in published configurations."""
    stated, base = config.get("rope_scaling") or config.get("rope_parameters"), config.stated("rope_theta", 10000.0)
    if isinstance(stated, dict) and "rope_theta" in stated:
        base = stated["rope_theta"]
    return None if base is None else read_rope(config, sizes.head_size, sizes.context)


def _delta_net(builder: Builder, h: Slice, names: Linear, net: DeltaNet, residual: Slice | None) -> Slice:
    key_width, value_width = net.kv_heads * net.key_size, net.heads * net.value_size
    widths = {"q": key_width, "k": key_width, "v": value_width}
    projections = [names.weight(f"{name}_proj", width, h.width) for name, width in [*widths.items(), ("g", value_width)]]
    *mixed, gate = builder.linear(h, projections).split(*widths.values(), value_width)
    # A state's decay and beta depend on these projections, so like a router's they are in fp32.
    rates = builder.linear(h, [names.weight(f"{gate}_proj", net.heads, h.width) for gate in "ba"], precision=Format.FP32)
    query, key, value = (
        builder.convolve(
            part, Tensor(f"{names.prefix}{name}_conv1d.weight", (part.width, 1, net.taps)), activation=net.function
        )
        for name, part in zip(widths, mixed, strict=True)
    )
    y = builder.delta(
        query,
        key,
        value,
        rates,
        decay=Tensor(f"{names.prefix}A_log", (net.heads,)),
        shift=Tensor(f"{names.prefix}dt_bias", (net.heads,)),
        heads=net.heads,
        kv_heads=net.kv_heads,
        most=net.most,
    )
    builder.head_norm(y, names.vector("o_norm", net.value_size), heads=net.heads, epsilon=EPSILON)
    y = builder.gate(y, gate, activation=Activation.SILU)
    return builder.linear(y, [names.weight("o_proj", h.width, value_width)], residual=residual)
