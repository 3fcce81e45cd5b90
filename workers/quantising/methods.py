"""The ways to round a layer, and the choice among them by what each does to text that none of them has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.program import Program
from outrider.workers.quantising.forward import Buffers, Forward, Watch
from outrider.workers.quantising.gptq import Feedback
from outrider.workers.quantising.grids import Form, Rounded, fit, joined, nearest
from outrider.workers.quantising.layers import Layer, live_behind, matrix_of
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layer rounded in one way: its matrices as they are stored, and all its tensors as they are computed with."""

    name: str
    rounded: dict[str, Rounded]
    tensors: dict[str, Tensor]
    # What calibration text is behind the layer, where it went through it anyway.
    behind: Buffers | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What calibration text showed of a layer, by matrix operation: ``X^T X`` a token, and some tokens of X."""

    hessians: dict[int, Tensor]
    samples: dict[int, Tensor]


def observe(program: Program, layer: Layer, tensors: Mapping[str, Tensor], buffers: Buffers, length: int) -> Seen:
    """Runs the layer as it is; ``buffers`` are left as they were."""
    seen = Seen({}, {})

    def watch(number: int, x: Tensor) -> Tensor:
        seen.hessians[number] = second_moment(x)
        seen.samples[number] = x[:: max(1, len(x) // SAMPLED_TOKENS)].clone()
        return x

    after(program, layer, tensors, buffers, length, watch)
    return seen


def some_of(buffers: Buffers, length: int) -> Buffers:
    """About ``OBSERVED_TOKENS`` of them, in whole sequences."""
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
) -> Buffers:
    """What later operations need of the buffers behind the layer. Calibration text need not go through it ``exactly``."""
    inner = dict(buffers)
    for part in _written_in_part(program, layer) & inner.keys():
        inner[part] = inner[part].clone()
    Forward(program, tensors, length, exactly).run(layer.start, layer.stop, inner, torch.empty(0), watch)
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
    seen, recipes = Seen({}, {}), recipes or choice.recipes
    if any(mover for mover, _ in recipes):
        seen = observe(program, layer, tensors, some_of(buffers, length), length)
    moved: dict[str, tuple[dict[str, Tensor], dict[int, Tensor]]] = {}
    candidates = []
    for mover, feedback in recipes:
        if mover not in moved:
            moved[mover] = _moved(program, layer, choice.form, mover, tensors, stored, seen)
        changed, importance = moved[mover]
        if feedback:
            candidates.append(_fed_back(program, layer, choice, mover, changed, buffers, length))
        else:
            candidates.append(_nearest(program, layer, choice.form, mover, changed, importance))
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
    """The layer's tensors with factors moved as ``mover`` does, and by operation what its inputs' channels then weigh."""
    changed, hessians = dict(tensors), dict(seen.hessians)
    for feeder in layer.feeders if mover else ():
        names = list({source.name: None for reader in feeder.readers for source in matrix_of(program, reader).sources})
        matrices, first = [changed[name] for name in names], feeder.readers[0]
        if mover == AWQ:
            factors = activation_aware(feeder, matrices, hessians[first], form)
        else:
            factors = smoothing(feeder, matrices, seen.samples[first], form)
        if factors is not None:
            factors = apply(feeder, names, factors, changed, stored)
            for reader in feeder.readers:
                hessians[reader] = hessians[reader] / torch.outer(factors, factors)
    return changed, {number: hessian.diagonal() for number, hessian in hessians.items()}


def _nearest(
    program: Program,
    layer: Layer,
    form: Form,
    mover: str,
    tensors: Mapping[str, Tensor],
    importance: Mapping[int, Tensor],
) -> Candidate:
    rounded = {
        source.name: _by_itself(tensors[source.name], form, importance.get(number))
        for number in layer.linears
        for source in matrix_of(program, number).sources
    }
    return Candidate(mover or RTN, rounded, {**tensors, **{name: each.matrix() for name, each in rounded.items()}})


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
    changed, rounded = dict(tensors), {}

    def watch(number: int, x: Tensor) -> Tensor:
        x = rounded_activations(x) if choice.activations else x
        hessian = second_moment(x)
        feedback = Feedback(hessian)
        for name in {source.name: None for source in matrix_of(program, number).sources}:
            rounded[name] = feedback.rounded(changed[name], choice.form)
            changed[name] = rounded[name].matrix()
        return x

    behind = after(program, layer, changed, buffers, length, watch)
    return Candidate(f"{mover}+{GPTQ}" if mover else GPTQ, rounded, changed, behind)


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
