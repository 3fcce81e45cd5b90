"""Hy4: hyper-connections, latent attention with sinks and a gate for each column, experts as DeepSeek V3's, clamped."""

from __future__ import annotations

from dataclasses import replace

from outrider.kernels.program import Program
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.corrected_mixtures import listed_experts
from outrider.workers.models.families.experts import mixture
from outrider.workers.models.families.hyper_connections import Connections, connected_decoder, read_streams
from outrider.workers.models.families.latent import check_experts, check_rows, latent_attention, read_latent
from outrider.workers.models.families.parts import Begin
from outrider.workers.models.families.skeleton import read_sizes

# transformers sets these from other keys, whatever they say.
FOLLOWING = ("head_dim", "num_key_value_heads")
# Keys of what chooses the tokens that are seen, and of training.
UNUSED = ("index_head_dim", "index_n_heads", "indexer_types", "learnable_sink_init")


def hy_v4(config: Config, begin: Begin) -> Program:
    """For rows of up to "index_topk" tokens: the indexer would choose all earlier tokens, so it is left out."""
    return _hy_v4(config, begin, layers=34, heads=32, ffn=(6912, 768), query_rank=1536, larger=False)


def hy_v4_vl(config: Config, begin: Begin) -> Program:
    """The language model of the larger one, which sees: rope turns neighbouring columns, and the norms of latent vectors
    have the epsilon of the others."""
    return _hy_v4(config, begin, layers=78, heads=64, ffn=(18432, 2048), query_rank=2048, larger=True)


def _hy_v4(
    config: Config, begin: Begin, *, layers: int, heads: int, ffn: tuple[int, int], query_rank: int, larger: bool
) -> Program:
    """The sizes are defaults; ``ffn``: the widths of the gated layer and of an expert."""
    said = Config({key: value for key, value in config.values.items() if key not in FOLLOWING}, config.source)
    for key in config.values:
        config.get(key)  # said.check_all_read() refuses unknown keys
    sizes = read_sizes(said, head_size=64, epsilon=1e-5, layers=layers, heads=heads, ffn=ffn[0])
    check_rows(said, sizes)
    said.only("layer_types", ["indexed_attention"] * sizes.layers)
    check_experts(said, "sigmoid")
    for unused in UNUSED:
        said.get(unused)
    said.only("hidden_act", "silu")  # experts have it whatever it says
    experts = listed_experts(said, sizes.layers, dense=1, count=256, chosen=8, width=ffn[1], scale=2.827)
    experts = replace(experts, clamp=said.positive("swiglu_limit", 10.0), beside=(experts.function, 0.0))
    latent = read_latent(said, sizes, query_rank=query_rank, plain=192, value=256, halves=True)
    said.only("rope_interleave", larger)
    if not latent.query_rank:
        raise said.unknown('"q_lora_rank": null')
    latent = replace(latent, paired=larger, column_gates=True, sinks=True)
    latent = replace(latent, epsilon=sizes.epsilon) if larger else latent
    count, epsilon = read_streams(said)
    connections = Connections(
        count,
        epsilon,
        norm_epsilon=sizes.epsilon,
        most=said.number("hc_magnitude", 2.0),
        least=epsilon,
        head=True,
    )
    mixer = mixture(sizes, experts)
    program = connected_decoder(said, begin, sizes, connections, latent_attention(sizes, latent), mixer)
    said.check_all_read()
    return program
