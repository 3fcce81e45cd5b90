"""Ling 3: most layers are Kimi Linear's delta nets whose decays have a bound, the others DeepSeek's latent attention with a
gate for each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.corrected_mixtures import deepseek_experts, deepseek_router
from outrider.workers.models.families.experts import mixture, sparse_layers
from outrider.workers.models.families.kimi_linear import OWN_NAMES, DeltaNet, delta_net
from outrider.workers.models.families.latent import latent_attention, read_latent
from outrider.workers.models.families.parts import FULL, Begin, Linear
from outrider.workers.models.families.qwen3_next import DELTA_NET
from outrider.workers.models.families.skeleton import Style, decoder, read_sizes

# Keys in published configurations with the only supported values.
ALWAYS: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "use_mla_nope": False,
    "use_qkv_bias": False,
    "use_bias": False,
    "no_kda_lora": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "moe_router_enable_expert_bias": True,
    "routing_group_score_top_k": 2,
    "topk_method": "noaux_tc",
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
}
PART = "partial_rotary_factor"
# Keys that say the same as others, or are about training or multi-token prediction layers.
UNUSED = """
use_qk_norm router_dtype rotary_dim mtp_use_kda mtp_loss_scaling_factor num_nextn_predict_layers
num_mtp_layers layer_group_size group_norm_size embedding_dropout
"""


def bailing_hybrid(config: Config, begin: Begin) -> Program:
    values = {OWN_NAMES.get(key, key): value for key, value in config.values.items()}
    for own, other in OWN_NAMES.items():
        if own in config.values and other in config.values and config.values[other] != config.values[own]:
            raise config.unknown(f'"{own}": {config.values[own]!r} beside "{other}": {config.values[other]!r}')
    size = config.size("linear_head_dim", config.size("head_dim", 128))
    # The part of a head that is rotated is stated by the sizes of latent attention; transformers passes this key over.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) == "default"
    unread = ("head_dim", PART) if plain else ("head_dim",)
    said = Config({key: value for key, value in values.items() if key not in unread}, config.source)
    for key in config.values:
        config.get(key)  # said.check_all_read() refuses unknown keys
    for key, always in ALWAYS.items():
        said.only(key, always)
    for key in UNUSED.split():
        said.get(key)
    sizes = read_sizes(said, head_size=64, layers=42, ffn=6144)
    said.only("num_key_value_heads", sizes.heads)
    sizes = replace(sizes, kv_heads=sizes.heads)
    types = _layer_types(said, sizes.layers, config.size("layer_group_size", 6))
    said.get("linear_head_dim")
    net = DeltaNet(
        said.size("linear_num_heads", sizes.heads),
        size,
        said.size("linear_conv_kernel_dim", said.size("short_conv_kernel_size", 4)),
        sizes.epsilon,
        flat_rates=True,
        low_rank=False,
        bound=_bound(said),
    )
    passed_over = (PART,) if plain else ()
    latent = read_latent(said, sizes, query_rank=None, plain=128, value=128, theta=6000000.0, passed_over=passed_over)
    full = latent_attention(sizes, replace(latent, head_gates=True))
    sparse = sparse_layers(said, sizes.layers, said.whole("first_k_dense_replace", 2))
    count, shared = said.size("num_experts", said.get("num_local_experts", 512)), said.size("n_shared_experts", 1)
    router = deepseek_router(said, scale=2.5, groups=(8, 4))
    experts = deepseek_experts(said, count, 8, 768, shared, router, sparse.__getitem__)
    said.only("moe_shared_expert_intermediate_size", experts.ffn * shared)

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        if types[layer] == FULL:
            return full(builder, h, layer, residual)
        return delta_net(builder, h, Linear(f"model.layers.{layer}.self_attn."), net, residual)

    program = decoder(said, begin, sizes, Style(attention=attention, mixer=mixture(sizes, experts)))
    said.check_all_read()
    return program


def _layer_types(config: Config, layers: int, every: int) -> list[str]:
    types = config.get("layer_types") or [DELTA_NET if (layer + 1) % every else FULL for layer in range(layers)]
    if len(types) != layers or not set(types) <= {FULL, DELTA_NET} or FULL not in types:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    return list(types)


def _bound(config: Config) -> float:
    """Decays are at least exp(-bound); 0: they have none."""
    bounded, least = config.flag("kda_safe_gate", True), config.number("kda_lower_bound", -5.0)
    if bounded and not least < 0.0:
        raise config.unknown(f'"kda_lower_bound": {least!r}')
    return -least if bounded else 0.0
