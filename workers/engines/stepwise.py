"""Rows that go on by themselves, one step after the other: for engines that cannot take several steps in one call."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider.workers.engines.engine import Chosen, Engine, Feed, Ran, Run, Trust


def run_in_steps(engine: Engine, runs: Sequence[Run], trust: Trust) -> Ran:
    """What ``Engine.run`` is to do, by ``Engine.feed``."""
    choices: dict[int, Chosen] = {run.row: Chosen([], []) for run in runs}
    reach = {run.row: run.reach for run in runs}
    going: list[tuple[Run, Sequence[int]]] = [(run, run.tokens) for run in runs]
    steps = []
    while going:
        started = time.perf_counter()
        answers = engine.feed([Feed(run.row, tokens, 1) for run, tokens in going])
        steps.append((len(going), time.perf_counter() - started))
        still_going: list[tuple[Run, Sequence[int]]] = []
        worth = 0.0
        for (run, _), answer in zip(going, answers, strict=True):
            choice, lead, chosen = answer.tokens[0], answer.margins[0], choices[run.row]
            chosen.tokens.append(choice)
            chosen.margins.append(lead)
            reach[run.row] *= trust.chance(lead, run.doubt)
            hopeful = reach[run.row] >= trust.least_reach and choice not in run.ends
            if hopeful and len(chosen.tokens) < run.most:
                still_going.append((run, [choice]))
                worth += reach[run.row] - trust.least_reach
        going = still_going if worth >= trust.least_sum else []
    return Ran([choices[run.row] for run in runs], steps)
