"""MiniMax M3: norms that multiply by 1 + w, experts as MiniMax-M2's beside a shared one, with a clamped activation."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.kernels.program import Activation, Program, Routing
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.corrected_mixtures import MINIMAX_UNUSED
from outrider.workers.models.families.experts import (
    DENSE,
    SPARSE,
    Experts,
    Router,
    Shared,
    chosen_experts,
    mixture,
    number_of_experts,
    sparse_layers,
)
from outrider.workers.models.families.mixtures import FUSED
from outrider.workers.models.families.parts import FULL, Begin
from outrider.workers.models.families.skeleton import HeadNorms, Sizes, Style, decoder, read_sizes
from outrider.workers.models.rope import read_rope

# Keys with the only supported values. transformers reads none of them.
ALWAYS = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "n_shared_experts": 1,
}
# Layers in which a token sees the blocks of tokens that an indexer chooses.
BLOCKS = "minimax_m3_sparse"


def minimax_m3(config: Config, begin: Begin) -> Program:
    """For rows of so few blocks that an indexer would choose all of them, so it is left out."""
    sizes = read_sizes(config, kv_heads=4, head_size=128, layers=60, heads=64, ffn=3072)
    for key, always in ALWAYS.items():
        config.only(key, always)
    # "hidden_act": the activation is the clamped one, whatever it says.
    for key in ("hidden_act", *MINIMAX_UNUSED):
        config.get(key)
    _check_blocks(config, sizes)
    rope = read_rope(config, sizes.head_size, sizes.context, theta=5000000.0, partial=1.0)
    config.only("rotary_dim", 2 * len(rope.frequencies))
    frequency = config.get("moe_layer_freq")
    if frequency is not None and not config.get("mlp_layer_types"):
        kinds = [SPARSE if each else DENSE for each in frequency]
        sparse = sparse_layers(Config({"mlp_layer_types": kinds}, config.source), sizes.layers, 0)
    else:
        sparse = sparse_layers(config, sizes.layers, 0)
    count = number_of_experts(config, 128)
    # transformers writes gate and up of layers without experts, and of the shared expert, as one tensor; its makers as two.
    names = (
        ("gate_up_proj", "gate_up_proj", "down_proj")
        if config.flag(FUSED, False)
        else ("gate_proj", "up_proj", "down_proj")
    )
    experts = Experts(
        count,
        chosen_experts(config, count, 4),
        sizes.ffn,
        Activation.CLAMPED_SWIGLU,
        Router(
            Routing.SIGMOID_SHARE,
            corrections="gate.e_score_correction_bias",
            scale=config.number("routed_scaling_factor", 2.0),
        ),
        shared=Shared(config.size("shared_intermediate_size", 3072), names=names),
        dense_names=names,
        clamp=config.positive("swiglu_limit", 7.0),
        slope=config.positive("swiglu_alpha", 1.702),
        sparse=sparse.__getitem__,
    )
    style = Style(
        head_norms=HeadNorms.EACH,
        plus=1.0,
        ropes=[rope] * sizes.layers,
        mixer=mixture(sizes, experts, config.size("dense_intermediate_size", 12288)),
    )
    return decoder(config, begin, sizes, style)


def _check_blocks(config: Config, sizes: Sizes) -> None:
    stated = config.get("sparse_attention_config", {})
    if not isinstance(stated, Mapping):
        raise config.unknown(f'"sparse_attention_config": {stated!r}')
    chosen = Config(dict(stated), config.source)
    for unused in ("index_n_heads", "index_head_dim", "index_local_blocks"):
        config.get(unused)
    count = chosen.size("sparse_topk_blocks", config.size("index_topk_blocks", 16))
    size = chosen.size("sparse_block_size", config.size("index_block_size", 128))
    frequency = chosen.get("sparse_attention_freq") or [0] * sizes.layers
    types = config.get("layer_types") or [BLOCKS if each else FULL for each in frequency]
    if len(types) != sizes.layers or not set(types) <= {BLOCKS, FULL}:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    if BLOCKS in types and sizes.context > count * size:
        raise config.unknown(
            f"rows of up to {sizes.context} tokens where a token sees {count} blocks of {size}; it runs rows of up to "
            f'{count * size}: write "max_position_embeddings": {count * size} for those',
            hf="does",
        )
