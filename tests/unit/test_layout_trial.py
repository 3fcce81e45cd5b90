"""The choice between layouts, on a machine that is a table of speeds."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from outrider.workers.target.forecast import Round
from outrider.workers.target.layout_trial import CYCLES, PHASE_ROUNDS, ROUNDS_TO_GIVE_UP, WARM_UP_ROUNDS, LayoutTrial


def play(
    trial: LayoutTrial,
    seconds: Mapping[str, float],
    counts: Mapping[str, int],
    chance: float = 0.8,
    seed: int = 1,
    rows: int = 4,
) -> list[str]:
    """Rounds of some rows until the trial is over; the names in the order in which they were used."""
    dice, used = random.Random(seed), []
    while not trial.over:
        name = trial.current
        used.append(name)
        assert len(used) < 10_000, "the trial does not end"
        held = [0] * rows
        for row in range(rows):
            while held[row] < counts[name] and dice.random() < chance:
                held[row] += 1
        trial.observe(Round((counts[name],) * rows, tuple(held), rows, True), seconds[name] * dice.uniform(0.9, 1.1))
    return used


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_wins_whatever_the_luck(seed: int) -> None:
    # Tokens a round at 0.8: 3.36 for 4 candidates, 1 without any.
    seconds = {"shared": 0.040, "split": 0.033, "plain": 0.020}
    trial = LayoutTrial(list(seconds))
    play(trial, seconds, {"shared": 4, "split": 4, "plain": 0}, seed=seed)
    assert trial.best == trial.current == "split"
    assert trial.rates["plain"] == pytest.approx(4 / 0.020, rel=0.1)
    assert trial.rates["split"] == pytest.approx(4 * 3.36 / 0.033, rel=0.15)


def test_a_draft_is_judged_by_many_rounds_of_one_row() -> None:
    """It writes 2.8 tokens a round, in the time of two plain ones."""
    seconds, counts = {"shared": 0.040, "plain": 0.020}, {"shared": 4, "plain": 0}
    best = []
    for seed in range(100):
        trial = LayoutTrial(list(seconds), plain="plain")
        play(trial, seconds, counts, chance=0.7, seed=seed, rows=1)
        best.append(trial.best)
    assert best.count("shared") >= 98


def test_a_draft_of_one_row_is_not_given_up_after_four_rounds() -> None:
    trial, seconds = LayoutTrial(["plain", "shared"], plain="plain"), {"shared": 0.040, "plain": 0.020}
    used = play(trial, seconds, {"shared": 4, "plain": 0}, chance=0.05, rows=1)
    assert trial.best == "plain"
    assert used.count("shared") == WARM_UP_ROUNDS + 16


@pytest.mark.parametrize("seed", range(10))
def test_an_easy_stretch_of_text_decides_nothing(seed: int) -> None:
    """The draft proposes a lot where the text is easy. One layout meets all of that, and pays more for it."""
    cost = {"shared": (0.020, 0.003), "split": (0.030, 0.004)}
    trial, dice = LayoutTrial(list(cost)), random.Random(seed)
    while not trial.over:
        name = trial.current
        proposed = dice.randint(6, 16) if name == "split" else dice.randint(1, 5)
        held = proposed if name == "split" else dice.randint(0, proposed)
        first, each = cost[name]
        trial.observe(Round((proposed,), (held,), 1, True), (first + each * proposed) * dice.uniform(0.95, 1.05))
    assert trial.best == "shared"


def test_a_draft_that_never_hits_loses_to_none() -> None:
    seconds = {"shared": 0.040, "plain": 0.020}
    trial = LayoutTrial(list(seconds))
    play(trial, seconds, {"shared": 4, "plain": 0}, chance=0.05)
    assert trial.best == "plain"


@pytest.mark.parametrize(("shared", "winner"), [(0.0196, "plain"), (0.0190, "shared")])
def test_a_draft_that_hardly_gains_loses_to_none(shared: float, winner: str) -> None:
    trial = LayoutTrial(["shared", "plain"], plain="plain")
    while not trial.over:
        trial.observe(Round((0,), (0,), 1, True), {"shared": shared, "plain": 0.020}[trial.current])
    assert trial.best == winner


def test_what_is_hopeless_is_tried_once() -> None:
    seconds = {"shared": 0.030, "split": 0.031, "plain": 0.5}
    trial = LayoutTrial(list(seconds))
    used = play(trial, seconds, {"shared": 4, "split": 4, "plain": 0})
    least = WARM_UP_ROUNDS + PHASE_ROUNDS
    assert used.count("plain") == WARM_UP_ROUNDS + ROUNDS_TO_GIVE_UP, "given up in the midst of its first phase"
    assert used.count("shared") >= CYCLES * least


def test_prompts_and_warming_up_do_not_count() -> None:
    trial = LayoutTrial(["shared", "plain"])
    for _ in range(50):
        trial.observe(Round((), (), 4, False), 100.0)
    for _ in range(WARM_UP_ROUNDS):
        trial.observe(Round((4,) * 4, (1,) * 4, 4, True), 100.0)
    assert trial.rates == {}
    trial.observe(Round((4,) * 4, (4,) * 4, 4, True), 0.1)
    assert trial.rates.keys() == {"shared"}
    assert trial.rates["shared"] > 100


def test_reading_prompts_counts_as_far_as_the_job_reads() -> None:
    """The one that decodes faster reads slower; with long prompts and short answers that decides."""

    def play_with(read_each: int) -> str:
        seconds = {"shared": 0.10, "split": 0.08}
        reading = {"shared": 0.001, "split": 0.003}
        trial = LayoutTrial(list(seconds))
        for number in range(10_000):
            if trial.over:
                return trial.best
            read = read_each if number % 3 == 0 else 0
            name = trial.current
            trial.observe(Round((4,) * 4, (1, 1, 1, 0), 4, not read, read), seconds[name] + read * reading[name])
        raise AssertionError("the trial does not end")

    assert play_with(1) == "split"
    assert play_with(200) == "shared"


def test_another_number_of_rows_is_another_trial() -> None:
    trial = LayoutTrial(["shared", "plain"])
    for _ in range(40):
        trial.observe(Round((4,) * 8, (1,) * 8, 8, True), 0.1)
    assert "shared" in trial.rates
    trial.observe(Round((4,) * 8, (1,) * 8, 9, True), 0.1)
    assert "shared" in trial.rates, "one row more or less is the same"
    trial.observe(Round((4,) * 4, (1,) * 4, 4, True), 0.1)
    assert trial.rates == {}
    assert trial.current == "shared"


def test_alone_there_is_nothing_to_choose() -> None:
    trial = LayoutTrial(["shared"])
    assert trial.best == trial.current == "shared"
