"""Gemma 3n (text): several streams of hidden states, of which each layer computes one and corrects the others by it
(AltUp), a low-rank projection beside attention (LAuReL), sparse gates, and what it shares with Gemma 4 (gemma_layers.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Program, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.gemma import cap_of, in_type_of_embeddings, root
from outrider.workers.models.families.gemma_layers import SharedAttention, first_that_shares, inputs_of_layers
from outrider.workers.models.families.layer_norm import Heads
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, Linear, activation, layer_types, rms_norm, windows
from outrider.workers.models.families.skeleton import Sizes, gated
from outrider.workers.models.rope import read_ropes

# The least mean square by which a stream is rescaled to the norm of the first one.
LEAST_SQUARE = 1e-5
# Keys of training, and a scale of scores that is not used.
UNUSED = ("altup_lr_multiplier", "altup_coef_clip", "query_pre_attn_scalar")


def gemma3n(config: Config, begin: Begin) -> Program:
    for key in UNUSED:
        config.get(key)
    sizes = _sizes(config)
    hidden, epsilon = sizes.hidden, sizes.epsilon
    by_layer = config.size("hidden_size_per_layer_input", 256)
    if by_layer == 1:
        raise config.unknown(f'"hidden_size_per_layer_input": {by_layer}')
    table = config.size("vocab_size_per_layer_input", 262144)
    rank = config.size("laurel_rank", 64)
    streams = _streams(config, hidden, epsilon)
    config.only("altup_correct_scale", True)
    attention, mixer = _attention(config, sizes), _mixer(config, sizes)
    cap, tied = cap_of(config, "final_logit_softcapping", 30.0), config.flag("tie_word_embeddings", True)
    builder = begin(sizes.vocabulary, sizes.context)
    embedding = Tensor("model.embed_tokens.weight", (sizes.vocabulary, hidden))
    embedded = builder.embed(embedding, root(builder, hidden))
    inputs = inputs_of_layers(builder, embedded, sizes, by_layer, table)
    x = streams.begin(builder, embedded)
    for layer in range(sizes.layers):
        block = Linear(f"model.layers.{layer}.")
        x = streams.predict(builder, x, block)
        one = streams.active(x)
        h = rms_norm(builder, one, block, "input_layernorm", epsilon)
        narrow = _narrow(builder, h, block, rank, epsilon)
        a = rms_norm(builder, attention(builder, h, layer), block, "post_attention_layernorm", epsilon, one)
        a = builder.scale(builder.scale(a, 1.0, residual=narrow), 2.0**-0.5)
        h = rms_norm(builder, a, block, "pre_feedforward_layernorm", epsilon)
        a = rms_norm(builder, mixer(builder, h, layer), block, "post_feedforward_layernorm", epsilon, a)
        x = streams.correct(builder, x, a, block)
        scaled = builder.scale_columns(streams.active(x), Tensor(f"{block.prefix}altup.correct_output_scale", (hidden,)))
        gate = builder.linear(scaled, [block.weight("per_layer_input_gate", by_layer, hidden)])
        y = builder.gate(inputs.part(layer * by_layer, by_layer), gate, activation=mixer.function)
        y = builder.linear(y, [block.weight("per_layer_projection", hidden, by_layer)])
        y = rms_norm(builder, y, block, "post_per_layer_input_norm", epsilon)
        for stream in streams.each(x)[1:]:
            builder.scale(y, 1.0, residual=stream, output=stream)
    x = rms_norm(builder, streams.end(builder, x), Linear("model."), "norm", epsilon)
    head = embedding if tied else Tensor("lm_head.weight", (sizes.vocabulary, hidden))
    return builder.finish(builder.linear(x, [head], cap=cap))


def _sizes(config: Config) -> Sizes:
    return Sizes(
        hidden=config.size("hidden_size"),
        ffn=0,  # each layer has one of its own
        layers=config.size("num_hidden_layers", 35),
        heads=config.size("num_attention_heads", 8),
        kv_heads=config.size("num_key_value_heads", 2),
        head_size=config.size("head_dim", 256),
        vocabulary=config.size("vocab_size"),
        context=config.size("max_position_embeddings"),
        epsilon=config.number("rms_norm_eps", 1e-6),
    )


def _narrow(builder: Builder, h: Slice, block: Linear, rank: int, epsilon: float) -> Slice:
    """LAuReL: ``h + norm(h L^T R^T)``, with the matrices linear_left and linear_right of low rank."""
    under = Linear(f"{block.prefix}laurel.")
    y = builder.linear(h, [under.weight("linear_left", rank, h.width)])
    y = builder.linear(y, [under.weight("linear_right", h.width, rank)])
    return rms_norm(builder, y, under, "post_laurel_norm", epsilon, h)


def _streams(config: Config, hidden: int, epsilon: float) -> _Streams:
    count, place = config.size("altup_num_inputs", 4), config.whole("altup_active_idx", 0)
    if place >= count:
        raise ModelError(f'{config.source}: "altup_active_idx" is {place}, there are {count} streams')
    return _Streams(count, place, hidden, epsilon)


@dataclass(frozen=True, slots=True)
class _Streams:
    """AltUp: ``count`` concatenated streams of ``hidden`` columns; layers compute only the stream ``place`` (the active
    one)."""

    count: int
    place: int
    hidden: int
    epsilon: float

    def each(self, x: Slice) -> tuple[Slice, ...]:
        return x.split(*[self.hidden] * self.count)

    def active(self, x: Slice) -> Slice:
        return x.part(self.place * self.hidden, self.hidden)

    def begin(self, builder: Builder, embedded: Slice) -> Slice:
        """The first stream is the embedding; the others are projections of it, rescaled to its norm."""
        x = builder.room(self.count * self.hidden)
        builder.scale(embedded, 1.0, output=x.part(0, self.hidden))
        if matrices := self._matrices("altup_projections"):
            others = x.part(self.hidden, x.width - self.hidden)
            builder.match_rms(builder.linear(embedded, matrices), embedded, epsilon=LEAST_SQUARE, output=others)
        return x

    def end(self, builder: Builder, x: Slice) -> Slice:
        """The mean of the first stream and of projections of the others, rescaled to its norm."""
        first, *others = self.each(x)
        total = first
        for stream, matrix in zip(others, self._matrices("altup_unembed_projections"), strict=True):
            turned = builder.linear(stream, [matrix])
            total = builder.match_rms(turned, first, epsilon=LEAST_SQUARE, residual=total)
        return builder.scale(total, 1.0 / self.count)

    def predict(self, builder: Builder, x: Slice, block: Linear) -> Slice:
        """Prediction: each stream plus a weighted sum of all."""
        under, squared = Linear(f"{block.prefix}altup."), self.count**2
        weight = [under.weight("prediction_coefs", squared, self.count)]
        seen = self._seen(builder, self.active(x), under)
        coefficients = builder.linear(seen, weight, precision=Format.FP32)
        return builder.blend(x, coefficients, vectors=self.count, residual=x)

    def correct(self, builder: Builder, predicted: Slice, computed: Slice, block: Linear) -> Slice:
        """Correction: each stream plus a multiple of (computed - predicted) of the active one."""
        under = Linear(f"{block.prefix}altup.")
        weight = [under.weight("correction_coefs", self.count, self.count)]
        coefficients = builder.linear(self._seen(builder, computed, under), weight, shift=1.0, precision=Format.FP32)
        missed = builder.scale(self.active(predicted), -1.0, residual=computed)
        return builder.blend(missed, coefficients, vectors=1, residual=predicted)

    def _seen(self, builder: Builder, x: Slice, under: Linear) -> Slice:
        """The router's output, tanh(…), one number for each stream, from which coefficients are computed."""
        h = builder.scale(rms_norm(builder, x, under, "router_norm", self.epsilon), 1.0 / self.hidden)
        weight = [under.weight("modality_router", self.count, self.hidden)]
        return builder.linear(h, weight, precision=Format.FP32, cap=1.0)

    def _matrices(self, name: str) -> list[Tensor]:
        model = Linear("model.")
        return [model.weight(f"{name}.{stream}", self.hidden, self.hidden) for stream in range(self.count - 1)]


@dataclass(frozen=True, slots=True)
class _Mixer:
    """The gated feed-forward layer. ``widths`` and ``sparsities`` by layer: that share of the gates is set to 0, by a
    threshold that assumes a normal distribution (0: none)."""

    function: Activation
    widths: list[int]
    sparsities: list[float]

    def __call__(self, builder: Builder, h: Slice, layer: int) -> Slice:
        mlp, width = Linear(f"model.layers.{layer}.mlp."), self.widths[layer]
        down = [mlp.weight("down_proj", h.width, width)]
        if not self.sparsities[layer] > 0.0:
            return builder.linear(gated(builder, h, mlp, width, self.function), down)
        matrices = [mlp.weight(name, width, h.width) for name in ("gate_proj", "up_proj")]
        gate, up = builder.linear(h, matrices).split(width, width)
        deviations = NormalDist().inv_cdf(float(np.float32(self.sparsities[layer])))
        builder.gaussian_top_k(gate, in_type_of_embeddings(builder, deviations))
        return builder.linear(builder.gate(up, gate, activation=self.function), down)


def _mixer(config: Config, sizes: Sizes) -> _Mixer:
    function = activation(config, "hidden_activation", "gelu_pytorch_tanh")
    layers = sizes.layers
    stated = config.get("intermediate_size", 16384)
    widths = list(stated) if isinstance(stated, list) else [config.size("intermediate_size", 16384)] * layers
    if len(widths) != layers or not all(type(width) is int and width > 0 for width in widths):
        raise ModelError(
            f'{config.source}: "intermediate_size" must be {layers} positive whole numbers, or one, got {stated!r}'
        )
    usual = [0.95] * (10 if layers > 10 else 0)
    stated = config.get("activation_sparsity_pattern", usual + [0.0] * (layers - len(usual)))
    if not isinstance(stated, list) or len(stated) != layers or not all(_is_share(each) for each in stated):
        raise ModelError(
            f'{config.source}: "activation_sparsity_pattern" must be {layers} numbers of less than 1, got {stated!r}'
        )
    return _Mixer(function, widths, [float(each) for each in stated])


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and float(np.float32(value)) < 1.0


def _attention(config: Config, sizes: Sizes) -> SharedAttention:
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if (layer + 1) % 5 else FULL)
    theta, local = config.number("rope_theta", 1000000.0), config.number("rope_local_base_freq", 10000.0)
    ropes = read_ropes(config, sizes.head_size, sizes.context, {FULL: theta, SLIDING: local})
    return SharedAttention(
        sizes,
        types,
        [Heads(sizes.heads, sizes.kv_heads, sizes.head_size)] * sizes.layers,
        windows(config, types, config.window(512)),
        [ropes[kind] for kind in types],
        first_that_shares(config, types, 15),
        (),
        config.flag("attention_bias", False),
    )
