"""Nemotron H (Nano 2, Nemotron 3): each layer is either Mamba 2, attention, an ungated feed-forward layer, or a mixture of
ungated experts."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.corrected_mixtures import deepseek_router
from outrider.workers.models.families.experts import chosen_experts, route_of
from outrider.workers.models.families.layer_norm import Heads, attend, plain, projected
from outrider.workers.models.families.mamba2 import MAMBA, Mamba, check_steps, kinds_of, mamba_layer
from outrider.workers.models.families.parts import FULL, Begin, Linear, activation, rms_norm

MLP, MOE = "mlp", "moe"
# How "hybrid_override_pattern" names the kinds of layers.
LETTERS = {"M": MAMBA, "E": MOE, "*": FULL, "-": MLP}
KINDS = tuple(LETTERS.values())
NAMES = ("up_proj", "down_proj")
# Attention has no rope, even if one is stated; norms use "layer_norm_epsilon". Multi-token prediction layers are not used.
UNUSED = """
rope_theta rope_scaling rope_parameters partial_rotary_factor rms_norm_eps norm_eps expand mamba_expand
moe_shared_expert_overlap num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern
"""

# Keys of mixtures, which models without one state, too.
OF_EXPERTS = """
n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size moe_shared_expert_intermediate_size
moe_latent_size n_group topk_group norm_topk_prob routed_scaling_factor
"""


def nemotron_h(config: Config, begin: Begin) -> Program:
    hidden, epsilon = config.size("hidden_size", 4096), config.number("layer_norm_epsilon", 1e-5)
    vocabulary, context = config.size("vocab_size", 131072), config.size("max_position_embeddings", 4096)
    kinds, mamba = _kinds(config), _mamba(config, epsilon)
    mixture = _Mixture(config, hidden) if MOE in kinds else None
    for key in (*UNUSED.split(), *OF_EXPERTS.split()):
        config.get(key)
    heads = _heads(config)
    function, biased = activation(config, "mlp_hidden_act", "relu2"), config.flag("mlp_bias", False)
    ffn = config.size("intermediate_size", 21504)
    mlp = plain("backbone.layers.{}.mixer.", hidden, ffn, function, NAMES, bias=biased)
    builder, root = begin(vocabulary, context), Linear("backbone.")
    embedding = root.weight("embeddings", vocabulary, hidden)
    x = builder.embed(embedding)
    for layer, kind in enumerate(kinds):
        builder.layer_input(layer, x)
        block = Linear(f"backbone.layers.{layer}.")
        h, mixer = rms_norm(builder, x, block, "norm", epsilon), Linear(f"{block.prefix}mixer.")
        if kind == MAMBA:
            x = mamba_layer(builder, h, mixer, mamba, x)
        elif kind == FULL:
            a = attend(builder, h, projected(mixer, ("q_proj", "k_proj", "v_proj"), heads, hidden, False), heads)
            x = builder.linear(a, [mixer.weight("o_proj", hidden, a.width)], residual=x)
        elif mixture is not None and kind == MOE:
            x = mixture(builder, h, layer, mixer, x)
        else:
            x = mlp(builder, h, layer, x)
    x = rms_norm(builder, x, root, "norm_f", epsilon)
    tied = config.flag("tie_word_embeddings", False)
    return builder.finish(builder.linear(x, [embedding if tied else Tensor("lm_head.weight", (vocabulary, hidden))]))


def _kinds(config: Config) -> list[str]:
    pattern = config.get("hybrid_override_pattern")
    config.get("num_hidden_layers")  # transformers ignores it, and counts the layers
    key = next((key for key in ("layers_block_type", "layer_types") if config.get(key)), "hybrid_override_pattern")
    if key == "hybrid_override_pattern":
        if not isinstance(pattern, str) or not set(pattern) <= set(LETTERS):
            raise config.unknown(f'"hybrid_override_pattern": {pattern!r}')
        return kinds_of(config, key, [LETTERS[letter] for letter in pattern], len(pattern), KINDS)
    return kinds_of(config, key, config.get(key), len(config.get(key)), KINDS)


def _mamba(config: Config, epsilon: float) -> Mamba:
    check_steps(config)
    config.only("mamba_hidden_act", "silu")
    bias = config.flag("use_bias", False)
    config.get("mamba_proj_bias")  # transformers reads "use_bias" instead
    return Mamba(
        heads=config.size("mamba_num_heads", 128),
        head_size=config.size("mamba_head_dim", 64),
        # Where both names are used transformers takes the number of the second.
        groups=config.size("mamba_n_groups", config.size("n_groups", 8)),
        state=config.size("ssm_state_size", 128),
        taps=config.size("mamba_d_conv", config.size("conv_kernel", 4)),
        conv_bias=config.flag("mamba_conv_bias", config.flag("use_conv_bias", True)),
        bias=bias,
        epsilon=epsilon,
    )


def _heads(config: Config) -> Heads:
    config.only("attention_bias", False)
    if window := config.window(None):
        raise config.unknown(f'"sliding_window": {window}')
    count, size = config.size("num_attention_heads", 32), config.size("head_dim", 128)
    config.only("attention_head_dim", size)
    return Heads(count, config.size("num_key_value_heads", 8), size)


class _Mixture:
    """Ungated experts, whose input and output may be a narrower latent vector, and a shared expert of another width."""

    def __init__(self, config: Config, hidden: int) -> None:
        config.only("mlp_bias", False)
        self.count, self.function = config.size("n_routed_experts", 8), activation(config, "mlp_hidden_act", "relu2")
        self.chosen = chosen_experts(config, self.count, 2)
        self.ffn = config.size("moe_intermediate_size", 7688)
        self.latent = 0 if config.get("moe_latent_size") is None else config.size("moe_latent_size")
        self.router = deepseek_router(config)(self.count, self.chosen)
        width = config.size("moe_shared_expert_intermediate_size", 7688)
        shared = "backbone.layers.{}.mixer.shared_experts."
        self.shared = plain(shared, hidden, width, self.function, NAMES, bias=False)

    def __call__(self, builder: Builder, h: Slice, layer: int, mixer: Linear, residual: Slice) -> Slice:
        hidden = h.width
        route = route_of(builder, h, mixer, self.router, self.count, self.chosen)
        read = builder.linear(h, [mixer.weight("fc1_latent_proj", self.latent, hidden)]) if self.latent else h
        each = [Linear(f"{mixer.prefix}experts.{number}.") for number in range(self.count)]
        up, down = ([[one.weight(name, *shape)] for one in each] for name, shape in self._shapes(read.width))
        m = builder.experts(read, route, up, activation=self.function)
        products = builder.experts(m, route, down, behind=True)
        x = self.shared(builder, h, layer, residual)
        if not self.latent:
            return builder.mix(products, route, hidden, residual=x)
        mixed = builder.mix(products, route, self.latent)
        return builder.linear(mixed, [mixer.weight("fc2_latent_proj", hidden, self.latent)], residual=x)

    def _shapes(self, width: int) -> tuple[tuple[str, tuple[int, int]], ...]:
        up, down = NAMES
        return (up, (self.ffn, width)), (down, (width, self.ffn))
