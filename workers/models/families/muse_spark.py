"""Muse Spark: Muse Glimmer's attention with a norm of each head's output, a residual that trained gates weaken where they
let something be added, experts in a narrower space, each of whose products has a norm."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Norm, Program, Routing, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import (
    Experts,
    Router,
    chosen_experts,
    number_of_experts,
    products_of,
    sparse_layers,
)
from outrider.workers.models.families.muse import muse_attention, ropes_of_layers
from outrider.workers.models.families.parts import (
    FULL,
    SLIDING,
    Begin,
    Linear,
    activation,
    layer_types,
    rms_norm,
    windows,
)
from outrider.workers.models.families.skeleton import gated, read_sizes

ROPE = {"rope_type": "default", "rope_theta": 500000.0}
SMALLEST_SUM = 1e-15


def muse_spark(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=16, head_size=64, epsilon=1e-5, layers=62, heads=128, ffn=16384)
    behind, bias = config.number("post_norm_eps", 1e-8), config.flag("attention_bias", False)
    # Every fourth layer, counted from the last, attends to all tokens, and has no rope.
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (sizes.layers - 1 - layer) % 4 else FULL)
    each, ropes = windows(config, types, config.window(2048)), ropes_of_layers(config, sizes, ROPE)
    function, sparse = activation(config, "hidden_act", "silu"), sparse_layers(config, sizes.layers, 0)
    scale = config.positive("qk_scale_factor", 5.4730064863875) * sizes.head_size**-0.5
    cap = config.positive("final_logit_softcapping", 20.0)
    factor = config.positive("output_multiplier", 0.1767766952966369)
    cooled = 1.0 / config.positive("residual_gate_temperature", 0.3)
    count, narrow = number_of_experts(config, 256), config.size("moe_hidden_size", 4096)
    chosen, width = chosen_experts(config, count, 8), config.size("moe_intermediate_size", 4096)
    router = Router(Routing.SIGMOID_SHARE, epsilon=SMALLEST_SUM, scale=config.number("routed_scaling_factor", 1.0))
    experts = Experts(count, chosen, width, function, router)
    tied = config.flag("tie_word_embeddings", False)

    def norm(y: Slice, under: Linear | None, name: str, epsilon: float) -> Slice:
        """Without ``under`` the norm has no weights."""
        weight = under.vector(name, y.width, 1.0) if under else None
        return builder.norm(y, weight, kind=Norm.RMS, epsilon=epsilon)

    def mixture(h: Slice, mlp: Linear) -> Slice:
        gate = mlp.weight("gate", count, sizes.hidden)
        scores = builder.linear(h, [gate], precision=Format.FP32, scale=factor)
        corrections = Tensor(f"{mlp.prefix}gate.e_score_correction_bias", (count,))
        route = builder.route(
            scores, chosen, router.routing, corrections=corrections, epsilon=router.epsilon, scale=router.scale
        )
        low = builder.linear(h, [mlp.weight("pre_expert_proj", narrow, sizes.hidden)])
        low = norm(low, mlp, "pre_expert_norm", sizes.epsilon)
        gain = mlp.vector("experts.post_expert_norm", narrow, 1.0)
        mixed = builder.mix(products_of(builder, low, route, mlp, experts), route, narrow, gain=gain, epsilon=behind)
        return builder.linear(mixed, [mlp.weight("post_expert_proj", sizes.hidden, narrow)])

    def dense(h: Slice, mlp: Linear) -> Slice:
        m = gated(builder, h, mlp, sizes.ffn, function)
        return builder.linear(m, [mlp.weight("down_proj", sizes.hidden, sizes.ffn)])

    builder, root = begin(sizes.vocabulary, sizes.context), Linear("model.")
    embedding = root.weight("embed_tokens", sizes.vocabulary, sizes.hidden)
    x = norm(builder.embed(embedding), None, "", sizes.epsilon)
    for layer in range(sizes.layers):
        builder.layer_input(layer, x)
        block = Linear(f"model.layers.{layer}.")
        h = norm(x, block, "input_layernorm", sizes.epsilon)
        names = Linear(f"{block.prefix}self_attn.")
        a = muse_attention(builder, h, names, sizes, ropes[layer], each[layer], scale, bias, normed=True)
        x = _added(builder, x, norm(a, None, "", behind), block, "post_attention_residual_gate", cooled)
        h = norm(x, block, "pre_feedforward_layernorm", sizes.epsilon)
        m = (mixture if sparse[layer] else dense)(h, Linear(f"{block.prefix}mlp."))
        m = builder.scale_columns(m, block.vector("post_feedforward_layernorm", sizes.hidden, 1.0))
        x = _added(builder, x, norm(m, None, "", behind), block, "post_feedforward_residual_gate", cooled)
    x = rms_norm(builder, x, root, "norm", sizes.epsilon)
    head = embedding if tied else Linear("").weight("lm_head", sizes.vocabulary, sizes.hidden)
    # cap * tanh(factor * y / cap)
    return builder.finish(builder.linear(x, [head], scale=factor, cap=cap / factor))


def _added(builder: Builder, x: Slice, made: Slice, block: Linear, name: str, cooled: float) -> Slice:
    """sigmoid(g) * ``made`` + RETAINED(g) * ``x``, with g = the trained gates * ``cooled``."""
    gates = builder.spread(made, Tensor(f"{block.prefix}{name}.gate", (x.width,)))
    gates = builder.scale(gates, cooled)
    made = builder.gate(made, gates, activation=Activation.SIGMOID)
    return builder.gate(x, gates, activation=Activation.RETAINED, residual=made)
