"""Mamba, Falcon Mamba and Mamba 2: a norm and a Mamba layer, again and again, without attention."""

from __future__ import annotations

from collections.abc import Callable

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice, Tensor
from outrider.workers.models.configuration import LONGEST_ROW, Config
from outrider.workers.models.families.mamba1 import Keys, NormsOfParts, mamba_layer, read_mamba
from outrider.workers.models.families.mamba2 import Mamba as Mamba2
from outrider.workers.models.families.mamba2 import check_steps
from outrider.workers.models.families.mamba2 import mamba_layer as mamba2_layer
from outrider.workers.models.families.parts import Begin, Linear, activation, rms_norm

# Keys of implementation or training, which change no logit.
UNUSED = """
residual_in_fp32 use_mambapy use_falcon_mambapy use_associative_scan time_step_scale time_step_min
time_step_max time_step_init_scheme time_step_floor fused_add_norm pad_vocab_size_multiple
"""
# Adds a layer to the program: (builder, input, names of its tensors, residual) -> output.
Layer = Callable[[Builder, Slice, Linear, Slice], Slice]


def mamba(config: Config, begin: Begin) -> Program:
    return _mamba1(config, begin, NormsOfParts.NONE, 0.0)


def falcon_mamba(config: Config, begin: Begin) -> Program:
    return _mamba1(config, begin, NormsOfParts.WEIGHTLESS, config.number("mixer_rms_eps", 1e-6))


def _mamba1(config: Config, begin: Begin, norms: NormsOfParts, epsilon: float) -> Program:
    hidden, function = config.size("hidden_size", 768), activation(config, "hidden_act", "silu")
    # Falcon Mamba 7B says "expand": 16, and means the width that it states as well.
    inner = config.size("intermediate_size", config.size("expand", 2) * hidden)
    config.only("d_inner", inner)
    sizes = read_mamba(config, Keys(), hidden, inner, norms=norms, epsilon=epsilon, function=function)

    def layer(builder: Builder, h: Slice, names: Linear, residual: Slice) -> Slice:
        return mamba_layer(builder, h, names, sizes, residual)

    return _decoder(config, begin, hidden, 32, layer, vocabulary=50280, tied=True)


def mamba2(config: Config, begin: Begin) -> Program:
    hidden, epsilon = config.size("hidden_size", 4096), config.number("layer_norm_epsilon", 1e-5)
    check_steps(config)
    # transformers ignores where the norm stands, and always multiplies by the gate before it.
    config.get("norm_before_gate")
    sizes = Mamba2(
        heads=config.size("num_heads", 128),
        head_size=config.size("head_dim", 64),
        groups=config.size("n_groups", 8),
        state=config.size("state_size", 128),
        taps=config.size("conv_kernel", 4),
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
        epsilon=epsilon,
        function=activation(config, "hidden_act", "silu"),
    )
    inner = config.size("expand", 2) * hidden
    if sizes.inner != inner:
        raise config.unknown(f'"num_heads": {sizes.heads} of "head_dim": {sizes.head_size} for {inner} columns')
    for key in ("intermediate_size", "d_inner"):
        config.only(key, inner)

    def layer(builder: Builder, h: Slice, names: Linear, residual: Slice) -> Slice:
        return mamba2_layer(builder, h, names, sizes, residual)

    return _decoder(config, begin, hidden, 64, layer, vocabulary=32768, tied=False)


def _decoder(
    config: Config, begin: Begin, hidden: int, layers: int, layer: Layer, *, vocabulary: int, tied: bool
) -> Program:
    """``layers``, ``vocabulary`` and ``tied`` are the family's defaults."""
    for key in UNUSED.split():
        config.get(key)
    # transformers divides trained weights, too, when it loads them.
    config.only("rescale_prenorm_residual", False)
    layers, vocabulary = config.size("num_hidden_layers", layers), config.size("vocab_size", vocabulary)
    # The names of the authors' own code, which checkpoints converted from it state as well.
    for key, value in (("d_model", hidden), ("n_layer", layers), ("rms_norm", True)):
        config.only(key, value)
    epsilon = config.number("layer_norm_epsilon", 1e-5)
    # Nothing depends on how long a row is.
    builder, root = begin(vocabulary, config.context(LONGEST_ROW)), Linear("backbone.")
    embedding = root.weight("embeddings", vocabulary, hidden)
    x = builder.embed(embedding)
    for number in range(layers):
        builder.layer_input(number, x)
        block = Linear(f"{root.prefix}layers.{number}.")
        h = rms_norm(builder, x, block, "norm", epsilon)
        x = layer(builder, h, Linear(f"{block.prefix}mixer."), x)
    x = rms_norm(builder, x, root, "norm_f", epsilon)
    head = embedding if config.flag("tie_word_embeddings", tied) else Tensor("lm_head.weight", (vocabulary, hidden))
    return builder.finish(builder.linear(x, [head]))
