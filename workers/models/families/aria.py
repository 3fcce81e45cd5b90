"""Aria's language model: Llama with a mixture of experts, each of width ``intermediate_size``, and shared experts."""

from __future__ import annotations

from outrider.kernels.program import Activation, Program, Routing
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import Experts, Router, Shared, chosen_experts, mixture
from outrider.workers.models.families.parts import Begin
from outrider.workers.models.families.skeleton import Style, decoder, read_sizes


def aria(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, ffn=4096)
    # transformers would use another activation only in the shared experts.
    config.only("hidden_act", "silu")
    bias = config.flag("attention_bias", False)
    count, shared = config.size("moe_num_experts", 8), config.size("moe_num_shared_experts", 2)
    experts = Experts(
        count,
        chosen_experts(config, count, 2, "moe_topk"),
        sizes.ffn,
        Activation.SILU,
        Router(Routing.SOFTMAX_CHOSEN, "router"),
        shared=Shared(sizes.ffn * shared, biased=config.flag("mlp_bias", False)),
    )
    style = Style(qkv_bias=bias, output_bias=bias, mixer=mixture(sizes, experts))
    return decoder(config, begin, sizes, style)
