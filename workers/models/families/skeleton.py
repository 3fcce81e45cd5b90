"""The decoder layer of Llama, which most families share: attention and gated feed-forward, each with norms and a
residual."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Norm, Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Begin, Linear, activation, paired_rows
from outrider.workers.models.rope import Rope, read_rope


class Norms(Enum):
    """The positions of a layer's norms."""

    BEFORE = "before attention and the gated layer"
    BEHIND = "behind both, before the residual is added"
    AROUND = "before and behind"


class HeadNorms(Enum):
    """How queries and keys are normalised."""

    NONE = "nothing"
    EACH = "each head by itself"
    TURNED = "each head by itself, behind rope"
    ALL = "all heads together"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model, which these families' configurations state under the same keys."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    epsilon: float


def read_sizes(
    config: Config,
    *,
    kv_heads: int | None = None,
    head_size: int | None = None,
    epsilon: float = 1e-6,
    layers: int = 32,
    ffn: int | None = None,
    heads: int = 32,
) -> Sizes:
    """The sizes in the configuration; the arguments are the family's defaults."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads", heads)
    # Here null is a value: kv_heads = heads, and head_size = hidden / heads.
    kv_heads = None if config.stated("num_key_value_heads", 0) is None else kv_heads
    head_size = None if config.stated("head_dim", 0) is None else head_size
    return Sizes(
        hidden=hidden,
        ffn=config.size("intermediate_size", ffn),
        layers=config.size("num_hidden_layers", layers),
        heads=heads,
        kv_heads=config.size("num_key_value_heads", kv_heads or heads),
        head_size=config.size("head_dim", head_size or hidden // heads),
        vocabulary=config.size("vocab_size"),
        context=config.size("max_position_embeddings"),
        epsilon=config.number("rms_norm_eps", epsilon),
    )


# Adds a part of a layer (attention or feed-forward) to the program: (builder, input, layer number, residual) -> output.
Mixer = Callable[[Builder, Slice, int, Slice | None], Slice]


@dataclass(frozen=True, slots=True)
class Style:
    """Where the families differ. ``windows`` (0: none) and ``ropes`` (None: no rope) have one element for each layer;
    ``norms`` and ``second_norm`` may have, too.

    ``fused``: queries, keys and values are one tensor; ``fused_gate``: so are gate and up. ``paired``: rope rotates
    neighbouring columns. ``first_norm`` names the norm before attention, ``second_norm`` the one before the gated layer
    ("": the usual name), ``norms_behind`` the ones after attention and after the gated layer, ``last_norm`` the one before
    the LM head. ``depth_scaled``: the residual is divided by sqrt(n) after what is added as the n-th summand, the embedding
    being the first (Beam). ``clip`` (0: none) bounds queries, keys and values. ``query_factors`` are (factors, positions):
    a rotated query is multiplied by factors[its position // positions]. ``plus`` is added to every norm's weight.
    ``weightless``: the kind of norms that have no weights; with RMS the norms of heads have none either.
    ``embedding_norm``: a norm follows the embedding. ``tied``: whether the LM head is the embedding by default.
    ``head_rows`` (0: the whole vocabulary): the LM head has only the vocabulary's first ``head_rows`` tokens; no other is
    ever chosen.
    ``attention`` and ``mixer`` replace the usual attention and the gated layer.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False
    fused_gate: bool = False
    paired: bool = False
    norms: Norms | Sequence[Norms] = Norms.BEFORE
    first_norm: str = "input_layernorm"
    second_norm: str | Sequence[str] = ""
    norms_behind: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")
    weightless: Norm | None = None
    embedding_norm: bool = False
    last_norm: str = "norm"
    depth_scaled: bool = False
    head_norms: HeadNorms = HeadNorms.NONE
    head_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    windows: Sequence[int] = ()
    ropes: Sequence[Rope | None] = ()
    plus: float = 0.0
    tied: bool = False
    embedding_scale: Callable[[Builder], float] = lambda builder: 1.0
    attention_scale: float | None = None
    attention_cap: float = 0.0
    clip: float = 0.0
    query_factors: tuple[Sequence[float], int] | None = None
    sinks: bool = False
    residual_scale: float = 1.0
    head_bias: bool = False
    head_rows: int = 0
    left_out: Collection[int] = ()
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    activation: Activation | None = None
    attention: Mixer | None = None
    mixer: Mixer | None = None


def decoder(config: Config, begin: Begin, sizes: Sizes, style: Style) -> Program:
    attention = style.attention or plain_attention(config, sizes, style)
    mixer = style.mixer or _gated(config, sizes, style)
    builder = begin(sizes.vocabulary, sizes.context)
    embedding = Tensor("model.embed_tokens.weight", (sizes.vocabulary, sizes.hidden))
    x = builder.embed(embedding, style.embedding_scale(builder))

    def norm(y: Slice, weight: Tensor, residual: Slice | None = None, summands: int = 1) -> Slice:
        kind = Norm.RMS if style.weightless is None else style.weightless
        gain = weight if style.weightless is None else None
        # The sum is kept undivided: norm(y / sqrt(n)) with epsilon is norm(y) with n epsilon.
        epsilon = sizes.epsilon * (summands if style.depth_scaled else 1)
        return builder.norm(y, gain, kind=kind, epsilon=epsilon, residual=residual)

    each = [style.norms] * sizes.layers if isinstance(style.norms, Norms) else style.norms
    behind_attention, behind_mixer = style.norms_behind
    if style.embedding_norm:
        x = norm(x, Tensor("model.embedding_norm.weight", (sizes.hidden,)))
    for layer in range(sizes.layers):
        summands = 2 * layer + 1
        scaled = style.depth_scaled and layer in builder.states
        builder.layer_input(layer, builder.scale(x, summands**-0.5) if scaled else x)
        if layer in style.left_out:
            continue
        block = Linear(f"model.layers.{layer}.")
        before, behind = each[layer] is not Norms.BEHIND, each[layer] is not Norms.BEFORE
        # Llama's name of the norm before the gated layer, unless the norm after attention has that name.
        said = style.second_norm if isinstance(style.second_norm, str) else style.second_norm[layer]
        second = said or ("pre_feedforward_layernorm" if behind else "post_attention_layernorm")
        vector = [block.vector(name, sizes.hidden, style.plus) for name in (style.first_norm, second)]
        h = norm(x, vector[0], summands=summands) if before else x
        residual = None if behind else x
        a = attention(builder, h, layer, residual)
        x = norm(a, block.vector(behind_attention, sizes.hidden, style.plus), x) if behind else a
        h = norm(x, vector[1], summands=summands + 1) if before else x
        m = mixer(builder, h, layer, None if behind else x)
        x = norm(m, block.vector(behind_mixer, sizes.hidden, style.plus), x) if behind else m
    last = Tensor(f"model.{style.last_norm}.weight", (sizes.hidden,), plus=style.plus)
    x = norm(x, last, summands=2 * sizes.layers + 1)
    tied = config.flag("tie_word_embeddings", style.tied)
    rows = style.head_rows or sizes.vocabulary
    head = embedding if tied else Tensor("lm_head.weight", (rows, sizes.hidden))
    biases = Linear("").biases(style.head_bias, ("lm_head", rows))
    logits = builder.linear(x, [head], biases=biases, scale=style.logit_scale, cap=style.logit_cap)
    return builder.finish(builder.scatter(logits, range(rows)) if style.head_rows else logits)


def plain_attention(config: Config, sizes: Sizes, style: Style) -> Mixer:
    """The usual attention, as ``style`` says."""
    ropes = style.ropes or [read_rope(config, sizes.head_size, sizes.context)] * sizes.layers

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        return _attention(builder, h, layer, ropes[layer], sizes, style, residual)

    return attention


def _attention(
    builder: Builder, h: Slice, layer: int, rope: Rope | None, sizes: Sizes, style: Style, residual: Slice | None
) -> Slice:
    attention = Linear(f"model.layers.{layer}.self_attn.")
    heads, kv_heads, hidden = sizes.heads, sizes.kv_heads, sizes.hidden
    width, kv_width = heads * sizes.head_size, kv_heads * sizes.head_size
    projections = [("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)]
    if style.fused:
        projections = [("qkv_proj", width + 2 * kv_width)]
    matrices = [attention.weight(name, rows, hidden) for name, rows in projections]
    biases = attention.biases(style.qkv_bias, *projections)
    if style.paired and rope is not None:
        matrices, biases = _paired(matrices, sizes, rope), tuple(_paired(biases, sizes, rope))
    bound: dict[str, Any] = {"activation": Activation.CLIP, "cap": style.clip} if style.clip else {}
    qkv = builder.linear(h, matrices, biases=biases, **bound)
    query, key, value = qkv.split(width, kv_width, kv_width)
    for part, name, count in ((query, style.head_norm_names[0], heads), (key, style.head_norm_names[1], kv_heads)):
        if rope is not None and style.head_norms is HeadNorms.TURNED:
            rotate(builder, part, rope, count)
        if style.head_norms is not HeadNorms.NONE:
            each = style.head_norms is not HeadNorms.ALL
            weight = attention.vector(name, sizes.head_size if each else part.width, style.plus)
            gain = None if style.weightless is Norm.RMS else weight
            builder.head_norm(part, gain, heads=count if each else 1, epsilon=sizes.epsilon)
        if rope is not None and style.head_norms is not HeadNorms.TURNED:
            rotate(builder, part, rope, count)
    if style.query_factors is not None:
        builder.scale_by_position(query, *style.query_factors)
    window = style.windows[layer] if style.windows else 0
    sinks = Tensor(f"{attention.prefix}sinks", (heads,)) if style.sinks else None
    a = builder.attention(
        query,
        key,
        value,
        heads=heads,
        kv_heads=kv_heads,
        scale=style.attention_scale,
        window=window,
        cap=style.attention_cap,
        sinks=sinks,
    )
    output = [attention.weight("o_proj", hidden, width)]
    biases = attention.biases(style.output_bias, ("o_proj", hidden))
    return builder.linear(a, output, biases=biases, residual=residual, scale=style.residual_scale)


def _paired(projections: Sequence[Tensor], sizes: Sizes, rope: Rope) -> list[Tensor]:
    """The projections of queries, keys and values (or their biases, or none), with the rows of queries and keys permuted
    for the kernels' rope."""
    counts = (sizes.heads, sizes.kv_heads, 0)
    orders = [paired_rows(count, sizes.head_size, 2 * len(rope.frequencies)) for count in counts]
    return [replace(tensor, rows=order) for tensor, order in zip(projections, orders, strict=False)]


def rotate(builder: Builder, x: Slice, rope: Rope, heads: int) -> None:
    builder.rope(
        x,
        rope.frequencies,
        heads=heads,
        factor=rope.factor,
        long_frequencies=rope.long_frequencies,
        longest=rope.longest,
    )


def turned_heads(
    builder: Builder, h: Slice, names: Linear, sizes: Sizes, heads: int, rope: Rope, *, bias: bool, plus: float = 0.0
) -> tuple[Slice, ...]:
    """Queries of ``heads`` heads, keys and values; queries and keys with a norm for each head, then rope. ``plus`` is added
    to the norms' weights."""
    width, kv_width = heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    projections = [("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)]
    matrices = [names.weight(name, rows, h.width) for name, rows in projections]
    qkv = builder.linear(h, matrices, biases=names.biases(bias, *projections))
    query, key, value = qkv.split(width, kv_width, kv_width)
    for part, name, count in ((query, "q_norm", heads), (key, "k_norm", sizes.kv_heads)):
        builder.head_norm(part, names.vector(name, sizes.head_size, plus), heads=count, epsilon=sizes.epsilon)
        rotate(builder, part, rope, count)
    return query, key, value


def _gated(config: Config, sizes: Sizes, style: Style) -> Mixer:
    function = style.activation if style.activation is not None else activation(config, "hidden_act", "silu")

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        mlp = Linear(f"model.layers.{layer}.mlp.")
        m = gated(builder, h, mlp, sizes.ffn, function, bias=style.mlp_bias, fused=style.fused_gate)
        down = [mlp.weight("down_proj", sizes.hidden, sizes.ffn)]
        biases = mlp.biases(style.mlp_bias, ("down_proj", sizes.hidden))
        return builder.linear(m, down, biases=biases, residual=residual, scale=style.residual_scale)

    return mixer


def gated(
    builder: Builder, h: Slice, mlp: Linear, ffn: int, function: Activation, *, bias: bool = False, fused: bool = False
) -> Slice:
    """``activation(h G^T) * (h U^T)``, with the matrices gate and up. ``fused``: they are one tensor, gate's rows first."""
    if fused:
        shape = (2 * ffn, h.width)
        both = f"{mlp.prefix}gate_up_proj.weight"
        return builder.gated(h, Tensor(both, shape, ((0, ffn),)), Tensor(both, shape, ((ffn, 2 * ffn),)), function)
    gate, up = mlp.weight("gate_proj", ffn, h.width), mlp.weight("up_proj", ffn, h.width)
    return builder.gated(h, gate, up, function, biases=mlp.biases(bias, ("gate_proj", ffn), ("up_proj", ffn)))
