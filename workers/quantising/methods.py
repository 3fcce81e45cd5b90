"""The ways to round a layer, and the choice among them by what each does to text that none of them has seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.kernels.program import Program
from outrider.workers.quantising.forward import Buffers, Forward, Watch
from outrider.workers.quantising.gptq import Feedback
from outrider.workers.quantising.grids import Form, Rounded, fit, joined, nearest
from outrider.workers.quantising.layers import Feeder, Layer, live_behind, named
from outrider.workers.quantising.products import second_moment
from outrider.workers.quantising.rows import by_rows
from outrider.workers.quantising.scales import activation_aware, apply, rounded_activations, smoothing

RTN, AWQ, GPTQ, SMOOTHQUANT, AUTO = "rtn", "awq", "gptq", "smoothquant", "auto"
# What each method does, as (who moves factors, whether errors are fed back); ``auto`` tries all of its bits' own.
RECIPES: dict[str, tuple[tuple[str, bool], ...]] = {
    RTN: (("", False),),
    AWQ: ((AWQ, False),),
    GPTQ: (("", True),),
    SMOOTHQUANT: ((SMOOTHQUANT, False),),
}
ALL_OF_4 = (("", True), (AWQ, True), (AWQ, False))
ALL_OF_8 = (("", False), (SMOOTHQUANT, False), (SMOOTHQUANT, True))
# A layer of so many weights takes minutes for each of these; then not all are tried on every layer.
LARGE_LAYER, ALL_OF_FIRST, ALL_EVERY = 100_000_000, 2, 8
# So many tokens, of sequences from all of the text, are enough to find factors by.
OBSERVED_TOKENS = 4096
# Tokens of each matrix's input that factors for int8 activations are compared by.
SAMPLED_TOKENS = 512
# An expert that fewer tokens of the calibration text are sent to goes by so many of all of the layer's, too.
LEAST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """How layers are to be rounded; ``activations``: those that the matrices read are int8 too, one scale a token."""

    method: str
    form: Form
    activations: bool

    @property
    def recipes(self) -> tuple[tuple[str, bool], ...]:
        if self.method == AUTO:
            return ALL_OF_8 if self.activations else ALL_OF_4
        return RECIPES[self.method]

    def recipes_for(self, weights: int, before: list[str]) -> tuple[tuple[str, bool], ...]:
        """Those of a layer of so many weights behind layers that took ``before``.

        Where trying all takes minutes and ``gptq`` was the best one layer earlier, it is tried alone, but for the first
        layers and one in ``ALL_EVERY``.
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
        """What the matrices of the rounded model do to their inputs."""
        return (lambda number, x: rounded_activations(x)) if self.activations else None


class Replaced(Mapping[str, Tensor]):
    """Tensors of which some are what their rounded form stands for: expanded as they are asked for, so that not all of a
    layer's are in memory as numbers at once. ``rounded`` may grow."""

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
class Candidate:
    """A layer rounded in one way: its matrices as they are stored, and all its tensors as they are computed with."""

    name: str
    rounded: dict[str, Rounded]
    tensors: Mapping[str, Tensor]
    # Experts that few tokens were sent to.
    few: int = 0
    # What calibration text is behind the layer, where it went through it anyway.
    behind: Buffers | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What calibration text showed of a layer, by matrix: ``X^T X`` a token, and some tokens of X; of experts, which are
    many, what their inputs' channels weigh, and the factors that were found while there was more."""

    hessians: dict[int, Tensor]
    samples: dict[int, Tensor]
    importance: dict[int, Tensor]
    factors: dict[int, Tensor | None]
    few: int = 0


NOTHING = Seen({}, {}, {}, {})


def observe(
    program: Program, layer: Layer, form: Form, mover: str, tensors: Mapping[str, Tensor], buffers: Buffers, length: int
) -> Seen:
    """Runs the layer as it is; ``buffers`` are left as they were. Factors are those that ``mover`` moves."""
    seen = Seen({}, {}, {}, {})
    inside = {feeder.readers[0]: feeder for feeder in layer.feeders if feeder.readers[0] in layer.experts}

    def watch(number: int, x: Tensor) -> Tensor:
        sample = x[:: max(1, len(x) // SAMPLED_TOKENS)].clone()
        if number not in layer.experts:
            seen.hessians[number], seen.samples[number] = second_moment(x), sample
            return x
        seen.importance[number] = x.square().mean(0)
        if number in inside:
            matrices = [tensors[source.name] for source in program.weights[number].sources]
            hessian = second_moment(x) if mover == AWQ else None
            seen.factors[number] = _factors(inside[number], matrices, hessian, sample, form)
        return x

    few = set[int]()
    after(program, layer, tensors, buffers, length, watch, few=few)
    return replace(seen, few=len(few))


def _factors(
    feeder: Feeder, matrices: Sequence[Tensor], hessian: Tensor | None, sample: Tensor, form: Form
) -> Tensor | None:
    """AWQ's where there is a Hessian, else SmoothQuant's."""
    if hessian is not None:
        return activation_aware(feeder, matrices, hessian, form)
    return smoothing(feeder, matrices, sample, form)


def some_of(layer: Layer, buffers: Buffers, length: int) -> Buffers:
    """About ``OBSERVED_TOKENS`` of them, in whole sequences; all of them where they are shared out among experts."""
    if layer.experts:
        return buffers
    found = {}
    for number, part in buffers.items():
        step = max(1, len(part) // OBSERVED_TOKENS)
        found[number] = part.view(-1, length, part.shape[1])[::step].reshape(-1, part.shape[1])
    return found


def after(
    program: Program,
    layer: Layer,
    tensors: Mapping[str, Tensor],
    buffers: Buffers,
    length: int,
    watch: Watch | None = None,
    exactly: bool = False,
    few: set[int] | None = None,
) -> Buffers:
    """What later operations need of the buffers behind the layer. Calibration text need not go through it ``exactly``.

    With ``few``, to which experts that few tokens are sent to are added, these are given others beside.
    """
    inner = dict(buffers)
    for part in _written_in_part(program, layer) & inner.keys():
        inner[part] = inner[part].clone()
    forward = Forward(program, tensors, length, exactly, 0 if few is None else LEAST_TOKENS)
    forward.run(layer.start, layer.stop, inner, torch.empty(0), watch)
    if few is not None:
        few |= forward.few
    return {number: inner[number] for number in live_behind(program, layer.stop)}


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
) -> list[Candidate]:
    """A candidate for each of the ``recipes``, or of the method's; ``buffers``: calibration text in front of the layer."""
    seen, recipes = NOTHING, recipes or choice.recipes
    # The recipes of one width of weights have one mover between them.
    if mover := next((mover for mover, _ in recipes if mover), ""):
        seen = observe(program, layer, choice.form, mover, tensors, some_of(layer, buffers, length), length)
    moved: dict[str, tuple[dict[str, Tensor], dict[int, Tensor]]] = {}
    candidates = []
    for mover, feedback in recipes:
        if mover not in moved:
            moved[mover] = _moved(program, layer, choice.form, mover, tensors, stored, seen)
        changed, importance = moved[mover]
        if feedback:
            candidates.append(_fed_back(program, layer, choice, mover, changed, buffers, length))
        else:
            candidates.append(_nearest(program, layer, choice.form, mover, changed, importance, seen.few))
    return candidates


def _moved(
    program: Program,
    layer: Layer,
    form: Form,
    mover: str,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, torch.dtype],
    seen: Seen,
) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """The layer's tensors with factors moved as ``mover`` does, and by matrix what its inputs' channels then weigh."""
    changed, importance = dict(tensors), dict(seen.importance)
    hessians = dict(seen.hessians)
    for feeder in layer.feeders if mover else ():
        names, first = [source.name for source in named(program, feeder.readers)], feeder.readers[0]
        if first in layer.experts:
            factors = seen.factors[first]
        else:
            hessian = hessians[first] if mover == AWQ else None
            factors = _factors(feeder, [changed[name] for name in names], hessian, seen.samples[first], form)
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
) -> Candidate:
    rounded = {
        source.name: _by_itself(tensors[source.name], form, importance.get(number))
        for number in layer.rounded
        for source in program.weights[number].sources
    }
    return Candidate(mover or RTN, rounded, Replaced(tensors, rounded), few)


def _by_itself(matrix: Tensor, form: Form, importance: Tensor | None) -> Rounded:
    return joined(by_rows(len(matrix), lambda rows: nearest(matrix[rows], fit(matrix[rows], form, importance), form)))


def _fed_back(
    program: Program,
    layer: Layer,
    choice: Choice,
    mover: str,
    tensors: Mapping[str, Tensor],
    buffers: Buffers,
    length: int,
) -> Candidate:
    """Each matrix is rounded when the text comes to it, by inputs that went through those that are rounded already."""
    rounded, few = dict[str, Rounded](), set[int]()

    def watch(number: int, x: Tensor) -> Tensor:
        x = rounded_activations(x) if choice.activations else x
        feedback = Feedback(second_moment(x))
        for source in named(program, [number]):
            rounded[source.name] = feedback.rounded(tensors[source.name], choice.form)
        return x

    changed = Replaced(tensors, rounded)
    behind = after(program, layer, changed, buffers, length, watch, few=few)
    return Candidate(f"{mover}+{GPTQ}" if mover else GPTQ, rounded, changed, len(few), behind)


def best_of(
    program: Program,
    layer: Layer,
    choice: Choice,
    candidates: list[Candidate],
    tensors: Mapping[str, Tensor],
    held_out: Buffers,
    length: int,
) -> tuple[Candidate, float, Buffers]:
    """The one whose outputs of the layer lie nearest to the exact ones, how near (the error's share of them), and they."""
    exact = after(program, layer, tensors, held_out, length, exactly=True)
    scale = sum(float(part.square().sum()) for part in exact.values())

    outputs = [after(program, layer, each.tensors, held_out, length, choice.watch(), exactly=True) for each in candidates]
    losses = [
        sum(float((found[number] - exact[number]).square().sum()) for number in exact) / (scale or 1.0) for found in outputs
    ]
    best = min(range(len(losses)), key=losses.__getitem__)
    return candidates[best], losses[best], outputs[best]
