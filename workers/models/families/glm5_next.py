"""GLM-5.3-Flash: hyper-connections whose streams are mixed, Kimi Linear's delta nets, latent attention without rope in
every fourth layer, experts as DeepSeek V3's, clamped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.corrected_mixtures import listed_experts
from outrider.workers.models.families.experts import mixture
from outrider.workers.models.families.hyper_connections import Connections, connected_decoder, read_streams
from outrider.workers.models.families.kimi_linear import DeltaNet, delta_net
from outrider.workers.models.families.latent import check_experts, check_rows, latent_attention, read_latent
from outrider.workers.models.families.parts import FULL, Begin, Linear
from outrider.workers.models.families.qwen3_next import DELTA_NET
from outrider.workers.models.families.skeleton import read_sizes

INDEXED = "indexed_attention"
# Keys of what chooses the tokens that are seen, and of rope, which attention does not have.
UNUSED = (
    *("index_head_dim", "index_n_heads", "index_kpool", "indexer_types"),
    *("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)
# Keys of "linear_attn_config", and those of the same meaning beside it.
OF_DELTA_NETS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
LOWEST = -5.0


def glm5_next(config: Config, begin: Begin) -> Program:
    """For rows of up to "index_topk" tokens: the indexer would choose all earlier tokens, so it is left out."""
    said = Config(_flat(config), config.source)
    for key in config.values:
        config.get(key)  # said.check_all_read() refuses unknown keys
    sizes = read_sizes(said, epsilon=1e-5, layers=45, heads=64, ffn=12288)
    said.only("num_key_value_heads", sizes.heads)
    check_rows(said, sizes)
    check_experts(said, "sigmoid")
    # Without it a token would not see those of the last pool, itself among them.
    for key, always in (("hidden_act", "silu"), ("index_kpool_always_select_tail", True), ("topk_method", "noaux_tc")):
        said.only(key, always)
    for unused in UNUSED:
        said.get(unused)
    types = _layer_types(said, sizes.layers)
    net = DeltaNet(
        said.size("linear_num_heads", 64),
        said.size("linear_head_dim", 128),
        said.size("linear_conv_kernel_dim", 4),
        sizes.epsilon,
        flat_rates=True,
        bound=_bound(said),
    )
    latent = read_latent(said, sizes, query_rank=1536, plain=256, value=256, turned=0, turns=False)
    if not latent.query_rank:
        raise said.unknown('"q_lora_rank": null')
    full = latent_attention(sizes, replace(latent, epsilon=sizes.epsilon))
    experts = listed_experts(said, sizes.layers, dense=3, count=288, chosen=8, width=2048, scale=2.5)
    mixer = mixture(sizes, replace(experts, clamp=said.positive("swiglu_limit", 10.0)))
    streams, epsilon = read_streams(said)
    rounds = said.size("hc_sinkhorn_iters", 20)
    connections = Connections(streams, epsilon, sizes.epsilon, most=2.0, least=0.0, rounds=rounds, mixed=True)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        if types[layer] == INDEXED:
            return full(builder, h, layer, residual)
        return delta_net(builder, h, Linear(f"model.layers.{layer}.self_attn."), net, residual)

    program = connected_decoder(said, begin, sizes, connections, attention, mixer)
    said.check_all_read()
    return program


def _flat(config: Config) -> dict[str, Any]:
    """The configuration with the keys of "linear_attn_config" beside it, and without "head_dim", which transformers sets to
    the columns with rope, of which there are none."""
    values = {key: value for key, value in config.values.items() if key != "head_dim"}
    nested = values.pop("linear_attn_config", None)
    if nested is None:
        return values
    if not isinstance(nested, Mapping) or not set(nested) <= {*OF_DELTA_NETS, "safe_gate"}:
        raise config.unknown(f'"linear_attn_config": {nested!r}')
    values |= {name: nested[key] for key, name in OF_DELTA_NETS.items() if key in nested}
    if nested.get("safe_gate", True) and values.get("linear_lower_bound", LOWEST) is None:
        values["linear_lower_bound"] = LOWEST
    return values


def _layer_types(config: Config, layers: int) -> list[str]:
    stated = config.get("layer_types") or [DELTA_NET if layer % 4 != 3 else INDEXED for layer in range(layers)]
    types = [INDEXED if kind == FULL else kind for kind in stated]
    if len(types) != layers or not set(types) <= {INDEXED, DELTA_NET} or INDEXED not in types:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {stated!r}')
    return types


def _bound(config: Config) -> float:
    """Decays are at least exp(-bound); 0: they have none. Here null is a value."""
    if config.stated("linear_lower_bound", LOWEST) is None:
        return 0.0
    least = config.number("linear_lower_bound", LOWEST)
    if not least < 0.0:
        raise config.unknown(f'"linear_lower_bound": {least!r}')
    return -least
