"""How a token's experts are chosen and weighed, against a plain definition: corrections, groups, ties, no numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_models import Packed, assert_same_bits, pack_program
from numpy.typing import NDArray

from outrider.kernels import library
from outrider.kernels.builder import Builder
from outrider.kernels.library import KernelError
from outrider.kernels.native import NativeFeed
from outrider.kernels.program import MOST_ROUTED, Format, Kind, Program, Routing, Tensor

INSTRUCTION_SETS = library.available_instruction_sets()
Scores = NDArray[np.float32]
WAYS: dict[str, dict[str, Any]] = {
    "softmax": dict(routing=Routing.SOFTMAX),
    "softmax over the chosen": dict(routing=Routing.SOFTMAX_CHOSEN, scale=1.5),
    "sigmoids": dict(routing=Routing.SIGMOID_EACH, scale=2.5),
    "corrected": dict(routing=Routing.SIGMOID_EACH, corrected=True),
    "shares": dict(routing=Routing.SIGMOID_SHARE, epsilon=0.25),
    "groups": dict(routing=Routing.SIGMOID_SHARE, corrected=True, groups=4, groups_kept=2, epsilon=1e-20, scale=2.5),
    "groups by sigmoids": dict(routing=Routing.SIGMOID_EACH, groups=12, groups_kept=5),
    "corrected softmax": dict(routing=Routing.SOFTMAX_SHARE, corrected=True, epsilon=1e-12),
    "no less than a half": dict(routing=Routing.SOFTMAX_SHARE, epsilon=0.5),
    "softmax of groups": dict(routing=Routing.SOFTMAX_GROUPS, groups=4, groups_kept=2, scale=16.0),
    "corrected scores": dict(routing=Routing.SIGMOID_EACH_BY_SCORE, corrected=True),
    "shares by corrected scores": dict(routing=Routing.SIGMOID_SHARE_BY_SCORE, corrected=True, epsilon=0.25),
    "sparse mixer": dict(routing=Routing.SPARSE_MIXER, epsilon=0.3),
    "a factor for each": dict(routing=Routing.SOFTMAX_CHOSEN, factored=True, scale=1.5),
}


def routed(scores: Scores, chosen: int, corrections: Scores, way: dict[str, Any]) -> Packed:
    """A program whose logits are numbers and weights of the experts of a token: its scores are its embedding."""
    settings = dict(way)
    table = Tensor("corrections", corrections.shape) if settings.pop("corrected", False) else None
    factors = Tensor("factors", corrections.shape) if settings.pop("factored", False) else None
    count = len(scores)
    builder = Builder(count, 8, Format.FP32)
    x = builder.embed(Tensor("scores", scores.shape))
    route = builder.route(x, chosen, settings.pop("routing"), corrections=table, factors=factors, **settings)
    program = builder.finish(builder.linear(route, [Tensor("head", (count, 2 * chosen))]))
    contents = {"scores": scores, "corrections": corrections[None], "head": np.eye(count, 2 * chosen, dtype=np.float32)}
    contents["factors"] = contents["corrections"] + np.float32(2)
    return Packed(program, pack_program(program, [contents[weight.sources[0].name] for weight in program.weights]))


def found(model: Packed, count: int, chosen: int) -> Scores:
    with model.model() as engine:
        feeds = [NativeFeed(engine.open(), [token], choose=1, logits=1) for token in range(count)]
        return np.concatenate([answer.logits for answer in engine.forward(feeds)])[:, : 2 * chosen]


def defined(scores: Scores, chosen: int, corrections: Scores, way: dict[str, Any]) -> NDArray[np.float64]:
    """Token by token and expert by expert; of equals the first."""
    rows = []
    for row in scores.astype(np.float64):
        best, weights = (_mixed if way["routing"] is Routing.SPARSE_MIXER else _chosen)(row, chosen, corrections, way)
        rows.append([*best, *(weight * way.get("scale", 1.0) for weight in weights)])
    return np.array(rows)


def _chosen(row: Any, chosen: int, corrections: Scores, way: dict[str, Any]) -> tuple[list[int], list[float]]:
    routing = way["routing"]
    of_sigmoids = routing.name.startswith("SIGMOID")
    chances = 1 / (1 + np.exp(-row)) if of_sigmoids else np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    values = row
    if way.get("corrected") or "groups" in way:
        # As fp32 has them, and so which of them are equal.
        values = (row if routing.name.endswith("BY_SCORE") else chances).astype(np.float32) + (
            corrections if way.get("corrected") else np.float32(0)
        )
    allowed = list(range(len(row)))
    if "groups" in way:
        size = len(row) // way["groups"]
        counted = 1 if routing is Routing.SOFTMAX_GROUPS else 2
        sums = [sum(sorted(values[first : first + size])[-counted:]) for first in range(0, len(row), size)]
        kept = sorted(range(way["groups"]), key=lambda group: -sums[group])[: way["groups_kept"]]
        allowed = [expert for expert in allowed if expert // size in kept]
    best = sorted(allowed, key=lambda expert: -values[expert])[:chosen]
    weights = chances[best]
    if routing is Routing.SOFTMAX_CHOSEN:
        weights = weights / weights.sum()
    if routing.name.startswith("SIGMOID_SHARE"):
        weights = weights / (weights.sum() + way["epsilon"])
    if routing is Routing.SOFTMAX_SHARE:
        weights = weights / max(weights.sum(), way["epsilon"])
    if "factored" in way:
        weights = weights * (corrections[best] + 2)
    return best, list(weights)


def _mixed(row: Any, chosen: int, corrections: Scores, way: dict[str, Any]) -> tuple[list[int], list[float]]:
    best: list[int] = []
    weights = []
    for _ in range(chosen):
        left = [expert for expert in range(len(row)) if expert not in best]
        top = max(left, key=lambda expert: (row[expert], -expert))
        near = [each for each in left if row[top] - row[each] <= way["epsilon"] * max(abs(row[each]), row[top])]
        weights.append(1 / sum(np.exp(row[each] - row[top]) for each in near))
        best.append(top)
    return best, weights


def examples(experts: int, chosen: int) -> tuple[Scores, Scores]:
    """Whole halves tie often, and sums with corrections of whole halves do."""
    random = np.random.default_rng(experts)
    plain = random.normal(0, 2, (20, experts))
    ties = random.integers(-3, 4, (20, experts)) / 2
    extreme = random.choice([-100.0, -30.0, 0.0, 30.0, 60.0], (6, experts))
    scores = np.concatenate([plain, ties, extreme]).astype(np.float32)
    return scores, (random.integers(-1, 2, experts) / 2).astype(np.float32)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("experts", [24, 132])
@pytest.mark.parametrize("name", WAYS)
def test_experts_are_those_of_the_definition(name: str, experts: int, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    way, chosen = WAYS[name], 2 if name == "sparse mixer" else 5
    scores, corrections = examples(experts, chosen)
    wanted = defined(scores, chosen, corrections, way)
    result = found(routed(scores, chosen, corrections, way), len(scores), chosen)
    np.testing.assert_array_equal(result[:, :chosen], wanted[:, :chosen])
    np.testing.assert_allclose(result[:, chosen:], wanted[:, chosen:], rtol=2e-6, atol=1e-24)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", WAYS)
def test_every_instruction_set_gives_the_same_bits(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, chosen = WAYS[name], 2 if name == "sparse mixer" else 5
    scores, corrections = examples(36, chosen)
    model = routed(scores, chosen, corrections, way)
    monkeypatch.setenv("OUTRIDER_ISA", "generic")
    wanted = found(model, len(scores), chosen)
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    assert_same_bits(found(model, len(scores), chosen), wanted)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", WAYS)
def test_a_score_that_is_no_number_is_seen(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even that of an expert which is not chosen, wherever it stands."""
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    way, chosen = WAYS[name], 2
    scores, corrections = examples(24, chosen)
    scores = scores[:3]
    scores[1, 0], scores[2, 23] = np.nan, np.nan
    scores[2, 1] = 5.0
    settings = dict(way) | ({"groups_kept": 2} if "groups" in way else {})
    with routed(scores, chosen, corrections, settings).model() as engine:
        assert np.isfinite(engine.forward([NativeFeed(engine.open(), [0], logits=1)])[0].logits).all()
        for token in (1, 2):
            if way["routing"] is Routing.SOFTMAX_CHOSEN and token == 2:
                continue  # whose weights know of no other expert
            with pytest.raises(KernelError, match="not a finite number"):
                engine.forward([NativeFeed(engine.open(), [token])])


def test_what_cannot_be_chosen_is_refused() -> None:
    builder = Builder(8, 8, Format.FP32)
    x = builder.embed(Tensor("scores", (8, 24)))
    with pytest.raises(ValueError, match="7 of 24 experts cannot be chosen from 2 of 8 groups"):
        builder.route(x, 7, Routing.SIGMOID_EACH, groups=8, groups_kept=2)
    with pytest.raises(ValueError, match="2 of 24 experts cannot be chosen from 2 of 24 groups"):
        builder.route(x, 2, Routing.SIGMOID_EACH, groups=24, groups_kept=2)
    with pytest.raises(ValueError, match="1030 experts are more than 1024"):
        builder.route(builder.embed(Tensor("many", (8, MOST_ROUTED + 6))), 2, Routing.SIGMOID_EACH)


def changed(program: Program, **fields: Any) -> Program:
    ops = tuple(replace(op, **fields) if op.kind is Kind.ROUTE else op for op in program.ops)
    return replace(program, ops=ops)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (dict(integer=max(Routing) + 1), "a token's experts are weighed in another way"),
        (dict(integer=Routing.SPARSE_MIXER), "a sparse mixer takes two experts, without corrections or groups"),
        (dict(weight=0), "corrections are an fp32 vector, one for each expert"),
        (dict(bias=0), "factors of experts are an fp32 vector, one for each expert"),
        (dict(window=7), "experts are chosen from some groups of two or more, which have enough of them"),
        (dict(head_size=5), "experts are chosen from some groups of two or more, which have enough of them"),
    ],
)
def test_programs_that_make_no_sense_are_refused(fields: dict[str, Any], sentence: str) -> None:
    scores, corrections = examples(24, 3)
    model = routed(scores, 3, corrections, WAYS["groups"])
    with pytest.raises(KernelError, match=sentence):
        Packed(changed(model.program, **fields), model.memory).model()
