"""The mixture of experts in a decoder layer: router, experts, and shared expert.

Builders ask for the tensors of single experts, by the names that most checkpoints give them; formats/experts.py finds
experts that are stored in one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Routing, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Linear
from outrider.workers.models.families.skeleton import Mixer, Sizes

DENSE, SPARSE = "dense", "sparse"


@dataclass(frozen=True, slots=True)
class Router:
    """How a token's experts are chosen (Builder.route), and the router's tensors.

    ``name`` and ``corrections`` are tensor names after the mixture's prefix. ``transposed``: so the checkpoint stores the
    matrix. ``corrections`` are added to the scores for the choice only; with ``matrix_of`` they are stored as the first of
    so many rows (0: as a vector). ``cap`` (0: none) is the soft cap of scores.
    """

    routing: Routing
    name: str = "gate"
    corrections: str = ""
    matrix_of: int = 0
    transposed: bool = False
    groups: int = 1
    groups_kept: int = 1
    epsilon: float = 0.0
    scale: float = 1.0
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Shared:
    """A gated feed-forward layer of ``width`` columns for every token: a shared expert, or that of a layer without experts.

    Its tensors are named by the layer's prefix, ``prefix``, and ``names`` (gate, up and down). ``weighed``: its output is
    multiplied by sigmoid(shared_expert_gate). ``biased``: gate, up and down have biases.
    """

    width: int
    prefix: str = "mlp.shared_experts."
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    weighed: bool = False
    biased: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model. ``prefix`` follows the layer's prefix in names. ``biased``: router and experts have biases.

    ``clamp`` is the bound of a clamped activation and ``slope`` its factor; ``beside``: the activation of shared and dense
    layers and its bound, where they differ. ``sparse(layer)``: whether the layer has experts; a layer without has a gated
    feed-forward layer (``dense_biased``: with biases). ``scale`` multiplies what the experts and a shared expert that is
    not ``weighed`` add to the residual, ``dense_scale`` what a gated feed-forward layer adds. ``scales_input``: the weight
    of a token's only expert multiplies the expert's input, not its output.
    """

    count: int
    chosen: int
    ffn: int
    function: Activation
    router: Router
    biased: bool = False
    shared: Shared | None = None
    clamp: float = 0.0
    beside: tuple[Activation, float] | None = None
    slope: float = 1.0
    sparse: Callable[[int], bool] = lambda layer: True
    prefix: str = "mlp."
    dense_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    dense_biased: bool = False
    scale: float = 1.0
    dense_scale: float = 1.0
    scales_input: bool = False


def mixture(sizes: Sizes, experts: Experts, dense: int = 0) -> Mixer:
    """The mixture as the second part of a layer. ``dense``: the width of the gated feed-forward layer in layers without
    experts (0: ``sizes.ffn``)."""

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        block = Linear(f"model.layers.{layer}.")
        if not experts.sparse(layer):
            gated = Shared(dense or sizes.ffn, experts.prefix, experts.dense_names, biased=experts.dense_biased)
            return _beside(builder, h, block, gated, experts, residual, experts.dense_scale)
        mlp = Linear(f"{block.prefix}{experts.prefix}")
        route = route_of(builder, h, mlp, experts.router, experts.count, experts.chosen, experts.biased)
        read = builder.blend(h, route.part(1, 1), vectors=1) if experts.scales_input else h
        products = products_of(builder, read, route, mlp, experts)
        if experts.shared is not None and experts.shared.weighed:
            beside = _beside(builder, h, block, experts.shared, experts, None)
            key = builder.linear(h, [mlp.weight("shared_expert_gate", 1, sizes.hidden)], precision=Format.FP32)
            residual = builder.gate(beside, key, residual=residual)
        elif experts.shared is not None:
            residual = _beside(builder, h, block, experts.shared, experts, residual, experts.scale)
        weighed = not experts.scales_input
        return builder.mix(products, route, sizes.hidden, residual=residual, scale=experts.scale, weighed=weighed)

    return mixer


def route_of(
    builder: Builder, h: Slice, mlp: Linear, router: Router, count: int, chosen: int, biased: bool = False
) -> Slice:
    """Routes each token to ``chosen`` of ``count`` experts (Builder.route). ``biased``: the router has biases."""
    shifts = mlp.biases(biased, (router.name, count))
    weight = mlp.weight(router.name, count, h.width)
    weight = replace(weight, stored=(h.width, count)) if router.transposed else weight
    scores = builder.linear(h, [weight], biases=shifts, precision=Format.FP32, cap=router.cap)
    corrections = Tensor(f"{mlp.prefix}{router.corrections}", (count,))
    if router.matrix_of:
        stored = (router.matrix_of, count)
        corrections = replace(corrections, shape=(math.prod(stored),), rows=((0, count),), stored=stored)
    return builder.route(
        scores,
        chosen,
        router.routing,
        corrections=corrections if router.corrections else None,
        groups=router.groups,
        groups_kept=router.groups_kept,
        epsilon=router.epsilon,
        scale=router.scale,
    )


def products_of(builder: Builder, h: Slice, route: Slice, mlp: Linear, experts: Experts) -> Slice:
    each = [Linear(f"{mlp.prefix}experts.{number}.") for number in range(experts.count)]
    ffn, hidden = experts.ffn, h.width
    m = builder.experts(
        h,
        route,
        [[one.weight("gate_proj", ffn, hidden), one.weight("up_proj", ffn, hidden)] for one in each],
        biases=[one.biases(True, ("gate_proj", ffn), ("up_proj", ffn)) for one in each] if experts.biased else (),
        gated=True,
        activation=experts.function,
        scale=experts.slope,
        cap=experts.clamp,
    )
    return builder.experts(
        m,
        route,
        [[one.weight("down_proj", hidden, ffn)] for one in each],
        biases=[[one.bias("down_proj", hidden)] for one in each] if experts.biased else (),
        behind=True,
    )


def _beside(
    builder: Builder,
    h: Slice,
    block: Linear,
    shared: Shared,
    experts: Experts,
    residual: Slice | None,
    scale: float = 1.0,
) -> Slice:
    layer, (gate, up, down) = Linear(f"{block.prefix}{shared.prefix}"), shared.names
    if gate == up:  # one tensor: the rows of gate, then those of up
        shape = (2 * shared.width, h.width)
        first, second = (Tensor(f"{layer.prefix}{gate}.weight", shape, (rows,)) for rows in _halves(shared.width))
    else:
        first, second = (layer.weight(name, shared.width, h.width) for name in (gate, up))
    biases = layer.biases(shared.biased, (gate, shared.width), (up, shared.width))
    function, clamp = experts.beside or (experts.function, experts.clamp)
    m = builder.gated(h, first, second, function, biases=biases, scale=experts.slope, cap=clamp)
    biases = layer.biases(shared.biased, (down, h.width))
    matrix = layer.weight(down, h.width, shared.width)
    return builder.linear(m, [matrix], biases=biases, residual=residual, scale=scale)


def _halves(width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (0, width), (width, 2 * width)


def sparse_layers(config: Config, layers: int, dense: int) -> list[bool]:
    """Whether each layer has experts; by default all layers but the first ``dense`` have."""
    kinds = config.get("mlp_layer_types") or [DENSE if layer < dense else SPARSE for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {DENSE, SPARSE}:
        raise ModelError(f'{config.source}: the native engine cannot follow "mlp_layer_types": {kinds!r}')
    return [kind == SPARSE for kind in kinds]


def number_of_experts(config: Config, usual: int) -> int:
    """The number of experts, under either of the keys that transformers reads and writes."""
    return config.size("num_experts", config.size("num_local_experts", usual))


def chosen_experts(config: Config, count: int, usual: int | None, key: str = "num_experts_per_tok") -> int:
    chosen = config.size(key, usual)
    if chosen > count:
        raise ModelError(f'{config.source}: "{key}" is {chosen}, there are {count} experts')
    return chosen


def groups_of(config: Config, count: int, chosen: int, usual: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """The number of groups of experts, and the number of groups from which a token's experts are chosen."""
    groups, kept = config.size("n_group", usual[0]), config.size("topk_group", usual[1])
    # transformers sums the best two scores of every group, even of a single group, so each needs two experts.
    if count % groups or count // groups < 2 or kept > groups or chosen > kept * (count // groups):
        raise ModelError(
            f'{config.source}: {chosen} of {count} experts cannot be chosen with "n_group": {groups}, "topk_group": {kept}'
        )
    return groups, kept
