"""LongCat-Flash: layers of two attentions and two gated layers, and experts beside the second half, some of which give back
what they are given."""

from __future__ import annotations

from dataclasses import replace

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Routing, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import Experts, Router, products_of, route_of
from outrider.workers.models.families.latent import latent_attention, read_latent
from outrider.workers.models.families.parts import Begin, Linear, activation, rms_norm
from outrider.workers.models.families.skeleton import Sizes, gated

# Keys in published configurations that transformers does not read, with the only supported values.
ALWAYS = {
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "zero_expert_type": "identity",
    "router_bias": False,
    "rope_interleave": True,
    "norm_topk_prob": False,
}
# The two halves of a layer.
HALVES = (0, 1)


def longcat_flash(config: Config, begin: Begin) -> Program:
    sizes = _sizes(config)
    for key, always in ALWAYS.items():
        config.only(key, always)
    for unused in ("num_nextn_predict_layers", "mtp_num_layers"):
        config.get(unused)
    latent = read_latent(config, sizes, query_rank=1536, plain=128, value=128, theta=10000000.0)
    if not latent.query_rank:
        raise config.unknown('"q_lora_rank": null')
    # Queries are multiplied by sqrt(hidden / their rank), and so are the latent vectors of keys and values.
    grown = (sizes.hidden / latent.query_rank) ** 0.5
    latent = replace(latent, scale=latent.scale * grown, latent_scale=(sizes.hidden / latent.rank) ** 0.5)
    attentions = [latent_attention(sizes, replace(latent, prefix=f"self_attn.{half}.")) for half in HALVES]
    experts, idle = _experts(config)
    builder = begin(sizes.vocabulary, sizes.context)
    embedding = Tensor("model.embed_tokens.weight", (sizes.vocabulary, sizes.hidden))
    x = builder.embed(embedding)
    for layer in range(sizes.layers):
        block, beside = Linear(f"model.layers.{layer}."), None
        for half in HALVES:
            h = rms_norm(builder, x, block, f"input_layernorm.{half}", sizes.epsilon)
            x = attentions[half](builder, h, layer, x)
            h = rms_norm(builder, x, block, f"post_attention_layernorm.{half}", sizes.epsilon)
            if beside is None:
                beside = _mixture(builder, h, Linear(f"{block.prefix}mlp."), experts, idle)
            mlp = Linear(f"{block.prefix}mlps.{half}.")
            m = gated(builder, h, mlp, sizes.ffn, experts.function)
            x = builder.linear(m, [mlp.weight("down_proj", sizes.hidden, sizes.ffn)], residual=x)
        assert beside is not None
        x = builder.scale(x, 1.0, residual=beside)
    x = rms_norm(builder, x, Linear("model."), "norm", sizes.epsilon)
    tied = config.flag("tie_word_embeddings", False)
    head = embedding if tied else Tensor("lm_head.weight", (sizes.vocabulary, sizes.hidden))
    return builder.finish(builder.linear(x, [head]))


def _sizes(config: Config) -> Sizes:
    layers, heads = config.size("num_layers", 28), config.size("num_attention_heads", 64)
    config.only("num_hidden_layers", 2 * layers)
    config.only("num_key_value_heads", heads)
    return Sizes(
        hidden=config.size("hidden_size", 6144),
        ffn=config.either("ffn_hidden_size", "intermediate_size", 12288),
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_size=config.size("head_dim", 64),
        vocabulary=config.size("vocab_size", 131072),
        context=config.size("max_position_embeddings", 131072),
        epsilon=config.number("rms_norm_eps", 1e-5),
    )


def _experts(config: Config) -> tuple[Experts, int]:
    """The experts that compute something, and how many more the router chooses among."""
    count = config.either("n_routed_experts", "num_local_experts", 512)
    # Here null is a value: none.
    idle = 0 if config.stated("zero_expert_num", 256) is None else config.whole("zero_expert_num", 256)
    chosen = config.either("moe_topk", "num_experts_per_tok", 12)
    if chosen > count:
        raise config.unknown(f'"moe_topk": {chosen} with {count} experts that compute something')
    width = config.either("expert_ffn_hidden_size", "moe_intermediate_size", 2048)
    # Shares of a softmax over all experts, which are chosen with corrections and among all groups.
    router = Router(
        Routing.SOFTMAX_GROUPS,
        name="router.classifier",
        corrections="router.e_score_correction_bias",
        scale=config.number("routed_scaling_factor", 6.0),
    )
    return Experts(count, chosen, width, activation(config, "hidden_act", "silu"), router), idle


def _mixture(builder: Builder, h: Slice, mlp: Linear, experts: Experts, idle: int) -> Slice:
    route = route_of(builder, h, mlp, experts.router, experts.count + idle, experts.chosen)
    products = products_of(builder, h, route, mlp, experts)
    return builder.mix(products, route, h.width, idle=h if idle else None, experts=experts.count)
