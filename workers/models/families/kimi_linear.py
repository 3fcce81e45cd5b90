"""Kimi Linear: most layers are gated delta nets with a decay for each row of a state, the others latent attention without
rope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Program, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.corrected_mixtures import deepseek_experts, deepseek_router
from outrider.workers.models.families.experts import mixture, sparse_layers
from outrider.workers.models.families.latent import latent_attention, read_latent
from outrider.workers.models.families.parts import FULL, Begin, Linear
from outrider.workers.models.families.qwen3_next import DELTA_NET
from outrider.workers.models.families.skeleton import Style, decoder, read_sizes

# Its makers' keys, and those of other families with the same meaning.
OWN_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# Keys of "linear_attn_config": the sizes of delta nets and, in KINDS, the layers of each kind, counted from 1.
OF_DELTA_NETS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
KINDS = {"full_attn_layers": FULL, "kda_layers": DELTA_NET}
# Keys in published configurations with the only supported values.
ALWAYS = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "hidden_act": "silu",
    "attention_bias": False,
}
# Keys of rope, which attention does not have, of training, and of multi-token prediction layers.
UNUSED = ("rope_theta", "rope_scaling", "rope_parameters", "num_nextn_predict_layers", "aux_loss_alpha", "seq_aux")


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """``flat_rates``: A_log is a plain vector, as in GGUF files. ``low_rank``: the projections of decays and of the output
    gate are products of two narrow matrices. ``bound`` is ``Builder.delta``'s."""

    heads: int
    size: int
    taps: int
    epsilon: float
    flat_rates: bool
    low_rank: bool = True
    bound: float = 0.0


def kimi_linear(config: Config, begin: Begin) -> Program:
    said = Config(_as_others(config), config.source)
    for key in config.values:
        config.get(key)  # said.check_all_read() refuses unknown keys
    for key, always in ALWAYS.items():
        said.only(key, always)
    for key in UNUSED:
        said.get(key)
    sizes = read_sizes(said, head_size=64, epsilon=1e-5, layers=27, ffn=9216)
    said.only("num_key_value_heads", sizes.heads)
    types = _layer_types(said, sizes.layers)
    net = DeltaNet(
        said.size("linear_num_heads", 32),
        said.size("linear_head_dim", 128),
        said.size("linear_conv_kernel_dim", 4),
        sizes.epsilon,
        said.flag("flat_rates", False),
    )
    full = latent_attention(sizes, read_latent(said, sizes, query_rank=None, plain=128, value=128, turns=False))
    sparse = sparse_layers(said, sizes.layers, said.whole("first_k_dense_replace", 1))
    count, shared = said.size("num_experts", said.get("num_local_experts", 256)), said.size("n_shared_experts", 1)
    router = deepseek_router(said, scale=2.446)
    mixer = mixture(sizes, deepseek_experts(said, count, 8, 1024, shared, router, sparse.__getitem__))

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        if types[layer] == FULL:
            return full(builder, h, layer, residual)
        return delta_net(builder, h, Linear(f"model.layers.{layer}.self_attn."), net, residual)

    program = decoder(said, begin, sizes, Style(attention=attention, mixer=mixer))
    said.check_all_read()
    return program


def _as_others(config: Config) -> dict[str, Any]:
    """The configuration under the keys of other families, without "head_dim", which is the size of none of these heads."""
    for own, other in OWN_NAMES.items():
        if own in config.values and other in config.values and config.values[other] != config.values[own]:
            raise config.unknown(f'"{own}": {config.values[own]!r} beside "{other}": {config.values[other]!r}')
    values = {OWN_NAMES.get(key, key): value for key, value in config.values.items() if key != "head_dim"}
    nested = values.pop("linear_attn_config", None) or {}
    if not isinstance(nested, Mapping) or not set(nested) <= {*OF_DELTA_NETS, *KINDS}:
        raise config.unknown(f'"linear_attn_config": {nested!r}')
    values |= {name: nested[key] for key, name in OF_DELTA_NETS.items() if key in nested}
    if not values.get("layer_types") and set(KINDS) <= set(nested):
        kinds = {layer: kind for key, kind in KINDS.items() for layer in nested[key]}
        values["layer_types"] = [kinds[layer] for layer in sorted(kinds)]
    return values


def _layer_types(config: Config, layers: int) -> list[str]:
    types = config.get("layer_types") or [FULL if layer and layer % 4 == 0 else DELTA_NET for layer in range(layers)]
    if len(types) != layers or not set(types) <= {FULL, DELTA_NET} or FULL not in types:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    return list(types)


def delta_net(builder: Builder, h: Slice, names: Linear, net: DeltaNet, residual: Slice | None) -> Slice:
    width, size = net.heads * net.size, net.size
    # ``gate`` is the output gate, or its low-rank vector. A state's decay and beta depend on b_proj and those of f, so like
    # a router's they are in fp32.
    name, rank = ("g_a_proj", size) if net.low_rank else ("g_proj", width)
    matrices = [*(names.weight(f"{part}_proj", width, h.width) for part in "qkv"), names.weight(name, rank, h.width)]
    *mixed, gate = builder.linear(h, matrices).split(width, width, width, rank)
    rates = builder.room(net.heads + width)
    builder.linear(h, [names.weight("b_proj", net.heads, h.width)], precision=Format.FP32, output=rates.part(0, net.heads))
    by_row, forgotten, name = rates.part(net.heads, width), h, "f_proj"
    if net.low_rank:
        forgotten = builder.linear(h, [names.weight("f_a_proj", size, h.width)], precision=Format.FP32)
        name = "f_b_proj"
    builder.linear(forgotten, [names.weight(name, width, forgotten.width)], precision=Format.FP32, output=by_row)
    query, key, value = (
        builder.convolve(part, _taps(names, name, width, net.taps), activation=Activation.SILU)
        for part, name in zip(mixed, "qkv", strict=True)
    )
    y = builder.delta(
        query,
        key,
        value,
        rates,
        decay=Tensor(f"{names.prefix}A_log", (net.heads,), stored=() if net.flat_rates else (1, 1, net.heads, 1)),
        shift=Tensor(f"{names.prefix}dt_bias", (width,)),
        heads=net.heads,
        kv_heads=net.heads,
        bound=net.bound,
    )
    builder.head_norm(y, names.vector("o_norm", size), heads=net.heads, epsilon=net.epsilon)
    if net.low_rank:
        gate = builder.linear(gate, [names.weight("g_b_proj", width, size)])
    y = builder.gate(y, gate, activation=Activation.SIGMOID)
    return builder.linear(y, [names.weight("o_proj", h.width, width)], residual=residual)


def _taps(names: Linear, name: str, width: int, taps: int) -> Tensor:
    return Tensor(f"{names.prefix}{name}_conv1d.weight", (width, 1, taps))
