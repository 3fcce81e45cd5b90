"""Pairs of a target and a head on its hidden states, in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from built import CURVE, END, InProcess, Numbers
from eagle3 import STATES

from outrider.workers.build import Draft, Target, build_target
from outrider.workers.messages import ModelSpec, ReplicaSpec, Row, Sampling
from outrider.workers.models.opening import OpenModel, open_model


def opened_target(path: Path, precision: str, states: tuple[int, ...] = STATES) -> OpenModel:
    model = open_model(ModelSpec(str(path), "native", precision, threads=1, states=states))
    return replace(model, end_tokens=(END,))


def opened_draft(path: Path, target: Path, precision: str = "bf16") -> OpenModel:
    return replace(open_model(ModelSpec(str(path), "native", precision, threads=1, target=str(target))), end_tokens=(END,))


def pair(
    target: OpenModel,
    batch: int,
    count: int | None,
    draft: Draft | None,
    prefix_tokens: int = 0,
    read: tuple[int, ...] = STATES,
) -> Target:
    """A target that returns the hidden states ``read``, unless there is no draft to read them."""
    states = read if draft is not None else ()
    spec = ModelSpec("", "native", "", prefix_tokens=prefix_tokens, states=states)
    built = build_target(spec, ReplicaSpec(batch, count, draft is not None), target, Numbers(), CURVE)
    if draft is not None:
        built.link.attach(InProcess(draft.drafter))
    return built


def some_rows(count: int, seed: int = 7) -> list[Row]:
    random = np.random.default_rng(seed)
    heads = [tuple(random.integers(1, 203, size=size).tolist()) for size in (20, 40)]
    rows = []
    for key in range(count):
        tail = tuple(random.integers(1, 203, size=int(random.integers(1, 14))).tolist())
        sampling = Sampling(temperature=(0.0, 0.0, 0.9)[key % 3], seed=key, repetition_penalty=1.0 + 0.2 * (key % 4 == 1))
        rows.append(
            Row(key, (*(heads[0], heads[1], (), ())[key % 4], *tail), 24, sampling, logprobs=2 if key % 5 == 0 else None)
        )
    return rows
