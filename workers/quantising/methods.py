"""The methods of quantising a layer, and the choice among them by the error on held-out text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.kernels.program import Program
from outrider.workers.quantising.forward import Buffers, Forward, Watch
from outrider.workers.quantising.gptq import Feedback
from outrider.workers.quantising.grids import Form, Rounded, fit, joined, nearest
from outrider.workers.quantising.layers import Feeder, Layer, live_buffers, named
from outrider.workers.quantising.products import second_moment
from outrider.workers.quantising.rows import by_rows
from outrider.workers.quantising.scales import activation_aware, apply, rounded_activations, smoothing

RTN, AWQ, GPTQ, SMOOTHQUANT, AUTO = "rtn", "awq", "gptq", "smoothquant", "auto"
# Each method as recipes: (who moves factors between channels: AWQ, SmoothQuant or nobody; whether errors are fed back).
# ``auto`` tries all recipes for its number of bits.
RECIPES: dict[str, tuple[tuple[str, bool], ...]] = {
    RTN: (("", False),),
    AWQ: ((AWQ, False),),
    GPTQ: (("", True),),
    SMOOTHQUANT: ((SMOOTHQUANT, False),),
}
ALL_OF_4 = (("", True), (AWQ, True), (AWQ, False))
ALL_OF_8 = (("", False), (SMOOTHQUANT, False), (SMOOTHQUANT, True))
# A layer of this many weights takes minutes for each recipe; then all are tried only on the first layers and on one in
# ALL_EVERY (``Choice.recipes_for``).
LARGE_LAYER, ALL_OF_FIRST, ALL_EVERY = 100_000_000, 2, 8
# The tokens of calibration text for finding factors, in whole sequences spread over it.
OBSERVED_TOKENS = 4096
# The tokens of each matrix's input by which factors for int8 activations (SmoothQuant) are compared.
SAMPLED_TOKENS = 512
# An expert with fewer tokens is calibrated with this many additional tokens of the layer (``Forward``).
LEAST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """How layers are quantised; ``activations``: the inputs of matrices are int8 too, with one scale for each token."""

    method: str
    form: Form
    activations: bool

    @property
    def recipes(self) -> tuple[tuple[str, bool], ...]:
        if self.method == AUTO:
            return ALL_OF_8 if self.activations else ALL_OF_4
        return RECIPES[self.method]

    def recipes_for(self, weights: int, before: list[str]) -> tuple[tuple[str, bool], ...]:
        """The recipes to try on a layer of this many weights, after layers that took the methods ``before``.

        For a large layer only GPTQ, if that was the best one layer earlier; but all of them for the first layers and for
        one in ``ALL_EVERY``.
        """
        index = len(before)
        all_again = index < ALL_OF_FIRST or index % ALL_EVERY == 0 or before[-1] != GPTQ
        if self.recipes != ALL_OF_4 or weights < LARGE_LAYER or all_again:
            return self.recipes
        return RECIPES[GPTQ]

    @property
    def calibrated(self) -> bool:
        return self.method != RTN

    def watch(self) -> Watch | None:
        """Rounds the inputs of matrices as the quantised model will."""
        return (lambda number, x: rounded_activations(x)) if self.activations else None


class DequantisedTensors(Mapping[str, Tensor]):
    """The layer's tensors, with those in ``rounded`` dequantised when they are read, so that not all of a layer's are in
    memory as floats at once. ``rounded`` may grow."""

    def __init__(self, tensors: Mapping[str, Tensor], rounded: Mapping[str, Rounded]) -> None:
        self._tensors = tensors
        self._rounded = rounded

    def __getitem__(self, name: str) -> Tensor:
        return self._rounded[name].matrix() if name in self._rounded else self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True, slots=True)
class RoundedLayer:
    """A layer quantised by one recipe: its matrices as stored (``rounded``), and all its tensors for computing."""

    name: str
    rounded: dict[str, Rounded]
    tensors: Mapping[str, Tensor]
    # How many experts got too few tokens.
    few: int = 0
    # The activations of calibration text after the layer, if they were computed.
    activations: Buffers | None = None


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Statistics of a layer's inputs X over calibration text, by matrix: ``X^T X / tokens`` and a sample of X. For experts,
    which are many, only the mean square of each channel, and the factors, which are found while X is in memory."""

    hessians: dict[int, Tensor]
    samples: dict[int, Tensor]
    importance: dict[int, Tensor]
    factors: dict[int, Tensor | None]
    few: int = 0


NO_STATISTICS = LayerStatistics({}, {}, {}, {})


def observe(
    program: Program, layer: Layer, form: Form, mover: str, tensors: Mapping[str, Tensor], buffers: Buffers, length: int
) -> LayerStatistics:
    """Run the unrounded layer and collect statistics; ``buffers`` stay unchanged. ``mover``: whose factors to find."""
    statistics = LayerStatistics({}, {}, {}, {})
    inside = {feeder.readers[0]: feeder for feeder in layer.feeders if feeder.readers[0] in layer.experts}

    def watch(number: int, x: Tensor) -> Tensor:
        sample = x[:: max(1, len(x) // SAMPLED_TOKENS)].clone()
        if number not in layer.experts:
            statistics.hessians[number], statistics.samples[number] = second_moment(x), sample
            return x
        statistics.importance[number] = x.square().mean(0)
        if number in inside:
            matrices = [tensors[source.name] for source in program.weights[number].sources]
            hessian = second_moment(x) if mover == AWQ else None
            statistics.factors[number] = _factors(inside[number], matrices, hessian, sample, form)
        return x

    few = set[int]()
    run_layer(program, layer, tensors, buffers, length, watch, few=few)
    return replace(statistics, few=len(few))


def _factors(
    feeder: Feeder, matrices: Sequence[Tensor], hessian: Tensor | None, sample: Tensor, form: Form
) -> Tensor | None:
    """AWQ's factors if a Hessian is given, else SmoothQuant's."""
    if hessian is not None:
        return activation_aware(feeder, matrices, hessian, form)
    return smoothing(feeder, matrices, sample, form)


def some_of(layer: Layer, buffers: Buffers, length: int) -> Buffers:
    """About ``OBSERVED_TOKENS`` tokens, in whole sequences; all tokens for layers with experts, each of which gets a
    part."""
    if layer.experts:
        return buffers
    found = {}
    for number, part in buffers.items():
        step = max(1, len(part) // OBSERVED_TOKENS)
        found[number] = part.view(-1, length, part.shape[1])[::step].reshape(-1, part.shape[1])
    return found


def run_layer(
    program: Program,
    layer: Layer,
    tensors: Mapping[str, Tensor],
    buffers: Buffers,
    length: int,
    watch: Watch | None = None,
    exactly: bool = False,
    few: set[int] | None = None,
) -> Buffers:
    """Run a layer; the buffers that later operations need. Without ``exactly`` products may round their factors to bf16.

    With ``few``, experts with too few tokens are given additional ones, and added to this set.
    """
    inner = dict(buffers)
    for part in _written_in_part(program, layer) & inner.keys():
        inner[part] = inner[part].clone()
    forward = Forward(program, tensors, length, exactly, 0 if few is None else LEAST_TOKENS)
    forward.run(layer.start, layer.stop, inner, torch.empty(0), watch)
    if few is not None:
        few |= forward.few
    return {number: inner[number] for number in live_buffers(program, layer.stop)}


def _written_in_part(program: Program, layer: Layer) -> set[int]:
    outputs = [op.output if op.output.buffer >= 0 else op.input for op in program.ops[layer.start : layer.stop]]
    return {output.buffer for output in outputs if output.width < program.buffers[output.buffer]}


def rounded_in_all_ways(
    program: Program,
    layer: Layer,
    choice: Choice,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, torch.dtype],
    buffers: Buffers,
    length: int,
    recipes: Sequence[tuple[str, bool]] = (),
) -> list[RoundedLayer]:
    """The layer quantised by each of the ``recipes`` (by default the method's); ``buffers``: its inputs for calibration."""
    statistics, recipes = NO_STATISTICS, recipes or choice.recipes
    # The recipes for one number of bits have at most one mover.
    if mover := next((mover for mover, _ in recipes if mover), ""):
        statistics = observe(program, layer, choice.form, mover, tensors, some_of(layer, buffers, length), length)
    moved: dict[str, tuple[dict[str, Tensor], dict[int, Tensor]]] = {}
    candidates = []
    for mover, feedback in recipes:
        if mover not in moved:
            moved[mover] = _with_factors_moved(program, layer, choice.form, mover, tensors, stored, statistics)
        changed, importance = moved[mover]
        if feedback:
            candidates.append(_fed_back(program, layer, choice, mover, changed, buffers, length))
        else:
            candidates.append(_nearest(program, layer, choice.form, mover, changed, importance, statistics.few))
    return candidates


def _with_factors_moved(
    program: Program,
    layer: Layer,
    form: Form,
    mover: str,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, torch.dtype],
    statistics: LayerStatistics,
) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """The layer's tensors after moving factors, and by matrix the importance of its input channels after that."""
    changed, importance = dict(tensors), dict(statistics.importance)
    hessians = dict(statistics.hessians)
    for feeder in layer.feeders if mover else ():
        names, first = [source.name for source in named(program, feeder.readers)], feeder.readers[0]
        if first in layer.experts:
            factors = statistics.factors[first]
        else:
            hessian = hessians[first] if mover == AWQ else None
            factors = _factors(feeder, [changed[name] for name in names], hessian, statistics.samples[first], form)
        if factors is not None:
            factors = apply(feeder, names, factors, changed, stored)
            for reader in feeder.readers:
                if reader in layer.experts:
                    importance[reader] = importance[reader] / factors.square()
                else:
                    hessians[reader] = hessians[reader] / torch.outer(factors, factors)
    return changed, importance | {number: hessian.diagonal() for number, hessian in hessians.items()}


def _nearest(
    program: Program,
    layer: Layer,
    form: Form,
    mover: str,
    tensors: Mapping[str, Tensor],
    importance: Mapping[int, Tensor],
    few: int,
) -> RoundedLayer:
    rounded = {
        source.name: _round_to_nearest(tensors[source.name], form, importance.get(number))
        for number in layer.rounded
        for source in program.weights[number].sources
    }
    return RoundedLayer(mover or RTN, rounded, DequantisedTensors(tensors, rounded), few)


def _round_to_nearest(matrix: Tensor, form: Form, importance: Tensor | None) -> Rounded:
    return joined(by_rows(len(matrix), lambda rows: nearest(matrix[rows], fit(matrix[rows], form, importance), form)))


def _fed_back(
    program: Program,
    layer: Layer,
    choice: Choice,
    mover: str,
    tensors: Mapping[str, Tensor],
    buffers: Buffers,
    length: int,
) -> RoundedLayer:
    """Run calibration text through the layer and quantise each matrix when it is reached, so that its inputs include the
    errors of the matrices before it."""
    rounded, few = dict[str, Rounded](), set[int]()

    def watch(number: int, x: Tensor) -> Tensor:
        x = rounded_activations(x) if choice.activations else x
        feedback = Feedback(second_moment(x))
        for source in named(program, [number]):
            rounded[source.name] = feedback.rounded(tensors[source.name], choice.form)
        return x

    changed = DequantisedTensors(tensors, rounded)
    activations = run_layer(program, layer, changed, buffers, length, watch, few=few)
    return RoundedLayer(f"{mover}+{GPTQ}" if mover else GPTQ, rounded, changed, len(few), activations)


def best_of(
    program: Program,
    layer: Layer,
    choice: Choice,
    candidates: list[RoundedLayer],
    tensors: Mapping[str, Tensor],
    held_out: Buffers,
    length: int,
) -> tuple[RoundedLayer, float, Buffers]:
    """The candidate with the smallest relative squared error of the layer's outputs on held-out text; that error, and these
    outputs."""
    exact = run_layer(program, layer, tensors, held_out, length, exactly=True)
    scale = sum(float(part.square().sum()) for part in exact.values())

    outputs = [
        run_layer(program, layer, each.tensors, held_out, length, choice.watch(), exactly=True) for each in candidates
    ]
    losses = [
        sum(float((found[number] - exact[number]).square().sum()) for number in exact) / (scale or 1.0) for found in outputs
    ]
    best = min(range(len(losses)), key=losses.__getitem__)
    return candidates[best], losses[best], outputs[best]
