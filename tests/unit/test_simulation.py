"""The real schedule on jobs with deaths, stragglers and replicas that hang."""

from __future__ import annotations

import pytest
from simulation import Scenario, Simulation


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_job_on_fifty_replicas_loses_nothing_and_ends_in_time(seed: int) -> None:
    """That no row is lost, doubled, sent after its end, or in a suspect's company, the simulation itself asserts."""
    scenario = Scenario(seed=seed)
    outcome = Simulation(scenario).run()
    assert outcome.failed - outcome.innocent == scenario.poison
    assert outcome.innocent == 0
    assert outcome.deaths > 3 * scenario.poison
    assert outcome.excess < 0.05, "the tail is too long"
    assert outcome.copies < 0.01 * scenario.rows
    # What may be under way and in store, what waits to be fetched ahead, and a few suspects.
    assert outcome.most_held < scenario.replicas * scenario.capacity * 3
    # 6 to 15 on a quiet machine; the promise is 50.
    assert outcome.scheduler_microseconds_a_row < 50


def test_a_hung_replica_holds_nothing_up() -> None:
    """Half of all lives hang sooner or later; nobody dies but of poison, so only late rows given twice can end the job."""
    outcome = Simulation(Scenario(replicas=20, rows=4000, hangs=0.5, stragglers=0.0, mean_life=300.0, poison=0)).run()
    assert outcome.failed == outcome.innocent
    assert outcome.copies > 0


@pytest.mark.parametrize("rows", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_job(rows: int) -> None:
    small, large = (Simulation(Scenario(replicas=10, rows=each, poison=0)).run() for each in (rows, 10 * rows))
    assert large.most_held <= 1.1 * small.most_held
