"""Gemma 4 (text): heads by type of layer, keys that serve as values, too, late layers that attend to the keys and values of
earlier ones, an embedding for each layer, and experts beside the gated layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Norm, Program, Routing, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import Experts, Router, chosen_experts, products_of
from outrider.workers.models.families.gemma import cap_of, root
from outrider.workers.models.families.gemma_layers import SharedAttention, first_that_shares, inputs_of_layers
from outrider.workers.models.families.layer_norm import Heads
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, Linear, activation, layer_types, rms_norm, windows
from outrider.workers.models.families.skeleton import Sizes, gated, read_sizes
from outrider.workers.models.rope import Rope, read_ropes, require_bases

ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")


def gemma4(config: Config, begin: Begin) -> Program:
    stated = config.stated("hidden_size_per_layer_input", 256)
    by_layer = 0 if stated is None else config.whole("hidden_size_per_layer_input", 256)
    table = config.size("vocab_size_per_layer_input", 262144)
    sizes = _sizes(config)
    if by_layer and (by_layer == 1 or table < sizes.vocabulary):
        raise config.unknown(
            f'"hidden_size_per_layer_input": {by_layer} with "vocab_size_per_layer_input": {table} '
            f"and {sizes.vocabulary} tokens"
        )
    return _decoder(config, begin, sizes, 512, by_layer, table, _experts(config))


def gemma4_unified(config: Config, begin: Begin) -> Program:
    """Gemma 4 without an embedding for each layer, and without experts."""
    config.only("hidden_size_per_layer_input", 0)
    config.only("enable_moe_block", False)
    config.get("vocab_size_per_layer_input")
    return _decoder(config, begin, _sizes(config), 1024, 0, 0, None)


def _sizes(config: Config) -> Sizes:
    return read_sizes(config, kv_heads=4, head_size=256, layers=30, heads=8)


def _experts(config: Config) -> Experts | None:
    if not config.flag("enable_moe_block", False):
        for key in OF_EXPERTS:
            config.get(key)
        return None
    count = config.size("num_experts")
    chosen = chosen_experts(config, count, None, "top_k_experts")
    # transformers normalises the chosen experts' elements of a softmax over all, which is a softmax over the chosen ones.
    router = Router(Routing.SOFTMAX_CHOSEN)
    return Experts(count, chosen, config.size("moe_intermediate_size"), _function(config), router, prefix="")


def _function(config: Config) -> Activation:
    return activation(config, "hidden_activation", "gelu_pytorch_tanh")


def _decoder(
    config: Config, begin: Begin, sizes: Sizes, window: int, by_layer: int, table: int, experts: Experts | None
) -> Program:
    if (seen := config.get("use_bidirectional_attention")) not in (None, False, "vision"):  # only of pictures
        raise config.unknown(f'"use_bidirectional_attention": {seen!r}')
    hidden, epsilon = sizes.hidden, sizes.epsilon
    attention = _attention(config, sizes, window)
    mixer = _Mixer(config, sizes, attention, experts)
    cap, tied = cap_of(config, "final_logit_softcapping", None), config.flag("tie_word_embeddings", True)
    builder = begin(sizes.vocabulary, sizes.context)
    embedding = Tensor("model.embed_tokens.weight", (sizes.vocabulary, hidden))
    x = builder.embed(embedding, root(builder, hidden))
    inputs = inputs_of_layers(builder, x, sizes, by_layer, table) if by_layer else None
    for layer in range(sizes.layers):
        builder.layer_input(layer, x)
        block = Linear(f"model.layers.{layer}.")
        a = attention(builder, rms_norm(builder, x, block, "input_layernorm", epsilon), layer)
        x = rms_norm(builder, a, block, "post_attention_layernorm", epsilon, x)
        x = mixer(builder, x, layer)
        if inputs is not None:
            key = builder.linear(x, [block.weight("per_layer_input_gate", by_layer, hidden)])
            y = builder.gate(inputs.part(layer * by_layer, by_layer), key, activation=mixer.function)
            y = builder.linear(y, [block.weight("per_layer_projection", hidden, by_layer)])
            x = rms_norm(builder, y, block, "post_per_layer_input_norm", epsilon, x)
        x = builder.scale(x, Tensor(f"{block.prefix}layer_scalar", (1,)))
    x = rms_norm(builder, x, Linear("model."), "norm", epsilon)
    head = embedding if tied else Tensor("lm_head.weight", (sizes.vocabulary, hidden))
    return builder.finish(builder.linear(x, [head], cap=cap))


class _Mixer:
    """The gated layer and, in models that have them, the experts beside it, which read the same residual."""

    def __init__(self, config: Config, sizes: Sizes, attention: SharedAttention, experts: Experts | None) -> None:
        self.function = _function(config)
        double = config.flag("use_double_wide_mlp", False)
        self._wider = 2 if double else 1
        self._attention = attention
        self._sizes, self._experts = sizes, experts

    def __call__(self, builder: Builder, x: Slice, layer: int) -> Slice:
        block, epsilon = Linear(f"model.layers.{layer}."), self._sizes.epsilon
        ffn = self._sizes.ffn * (1 if self._attention.stores(layer) else self._wider)
        mlp = Linear(f"{block.prefix}mlp.")
        h = rms_norm(builder, x, block, "pre_feedforward_layernorm", epsilon)
        m = gated(builder, h, mlp, ffn, self.function)
        m = builder.linear(m, [mlp.weight("down_proj", x.width, ffn)])
        if self._experts is not None:
            beside = rms_norm(builder, m, block, "post_feedforward_layernorm_1", epsilon)
            mixed = self._mixed(builder, x, block, self._experts)
            m = rms_norm(builder, mixed, block, "post_feedforward_layernorm_2", epsilon, beside)
        return rms_norm(builder, m, block, "post_feedforward_layernorm", epsilon, x)

    def _mixed(self, builder: Builder, x: Slice, block: Linear, experts: Experts) -> Slice:
        router, epsilon = Linear(f"{block.prefix}router."), self._sizes.epsilon
        gain = Tensor(f"{router.prefix}scale", (x.width,))
        h = builder.norm(x, gain, kind=Norm.RMS, epsilon=epsilon)
        weight = [router.weight("proj", experts.count, x.width)]
        scores = builder.linear(h, weight, precision=Format.FP32, scale=x.width**-0.5)
        factors = Tensor(f"{router.prefix}per_expert_scale", (experts.count,))
        route = builder.route(scores, experts.chosen, experts.router.routing, factors=factors)
        h = rms_norm(builder, x, block, "pre_feedforward_layernorm_2", epsilon)
        return builder.mix(products_of(builder, h, route, block, experts), route, x.width)


def _attention(config: Config, sizes: Sizes, window: int) -> SharedAttention:
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % 6 else FULL)
    types[-1] = FULL  # transformers makes it so, whatever the configuration states
    of_keys = (FULL,) if config.flag("attention_k_eq_v", False) else ()
    shared = first_that_shares(config, types, 0)
    heads = _heads(config, sizes, types, bool(of_keys))
    ropes = _ropes(config, sizes, {kind: heads[kind].size for kind in types})
    return SharedAttention(
        sizes,
        types,
        [heads[kind] for kind in types],
        windows(config, types, config.window(window)),
        [ropes[kind] for kind in types],
        shared,
        of_keys,
        config.flag("attention_bias", False),
    )


def _heads(config: Config, sizes: Sizes, types: Sequence[str], of_keys: bool) -> dict[str, Heads]:
    """The heads of each type of layer. Published configurations state those of full attention apart; transformers saves
    those of each layer ("per_layer_config")."""
    usual = Heads(sizes.heads, sizes.kv_heads, sizes.head_size)
    size, kv_count = config.stated("global_head_dim", 512), config.get("num_global_key_value_heads")
    stated = config.get("per_layer_config")
    if stated is None:
        if size is None:
            raise config.unknown('"global_head_dim": None')
        kv_count = config.size("num_global_key_value_heads", sizes.kv_heads) if of_keys and kv_count else sizes.kv_heads
        return {SLIDING: usual, FULL: Heads(sizes.heads, kv_count, config.size("global_head_dim", 512))}
    if not isinstance(stated, dict) or not all(str(place).isdecimal() for place in stated):
        raise ModelError(f'{config.source}: "per_layer_config" must be an object of layers by their number, got {stated!r}')
    found: dict[str, Heads] = {}
    places = {int(place): values for place, values in stated.items()}
    for layer, kind in enumerate(types):
        heads = _heads_of(config, places.pop(layer, {}), usual)
        if found.setdefault(kind, heads) != heads:
            raise config.unknown(f'"per_layer_config" in which layers of the type "{kind}" differ')
    if places:
        raise ModelError(f'{config.source}: "per_layer_config" is of a layer {min(places)}, there are {sizes.layers}')
    return found


def _heads_of(config: Config, stated: object, usual: Heads) -> Heads:
    if not isinstance(stated, dict) or not set(stated) <= {"head_dim", "num_key_value_heads"}:
        raise config.unknown(f'"per_layer_config" with {stated!r}')
    one = Config(stated, f'{config.source}, "per_layer_config"')
    return Heads(usual.count, one.size("num_key_value_heads", usual.kv_count), one.size("head_dim", usual.size))


def _ropes(config: Config, sizes: Sizes, head_sizes: Mapping[str, int]) -> dict[str, Rope]:
    config.only("rope_scaling", None)
    require_bases(config, head_sizes)
    thetas = {SLIDING: 0.0, FULL: 0.0}  # not used: each type's rope states its base
    return read_ropes(config, head_sizes, sizes.context, thetas, usual=ROPES, proportional=True)
