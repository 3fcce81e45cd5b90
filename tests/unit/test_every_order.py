"""The real driver in worlds where everything goes wrong. A broken rule names its seed: stress/orders.py replays it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import orders
import pytest
from orders import Violation, World

from outrider.runner.driving import driver
from outrider.runner.driving.replica import Replica
from outrider.runner.driving.written_tokens import WrittenTokens
from outrider.runner.job.journal import Journal
from outrider.workers.messages import Row, Written

SEEDS = 80
MANY_SEEDS = 4000


def lived(seeds: range) -> None:
    broken = []
    for seed in seeds:
        try:
            World(seed).run()
        except Violation as violation:
            broken.append(str(violation))
    assert not broken, f"{len(broken)} of {len(seeds)} worlds break a rule, the first is\n{broken[0]}"


def test_no_order_of_things_loses_doubles_or_blames_a_row() -> None:
    lived(range(SEEDS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_no_order_of_things_of_many_does(part: int) -> None:
    first = SEEDS + part * MANY_SEEDS // 8
    lived(range(first, first + MANY_SEEDS // 8))


def test_a_world_is_the_same_each_time() -> None:
    """Else a seed would be of no use."""
    first, second = World(7), World(7)
    assert (first.run(), first.ray.log) == (second.run(), second.ray.log)


# A harness that cannot fail proves nothing: mistakes in what it watches over are found, each within a few worlds.


def complaint(worlds: int = 120) -> str:
    for seed in range(worlds):
        try:
            World(seed).run()
        except Violation as violation:
            return str(violation).splitlines()[0]
    return "none"


def test_a_journal_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Journal.record
    monkeypatch.setattr(Journal, "record", lambda self, done, failed, totals=None: record(self, done[1:], failed, totals))
    assert re.search("tokens are counted|is not as it was", complaint())


def test_totals_that_are_not_of_the_transaction_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Journal.record
    monkeypatch.setattr(Journal, "record", lambda self, done, failed, totals=None: record(self, done, failed))
    assert "tokens are counted" in complaint()


def test_attempts_that_are_made_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when rows are held against a host that has left."""
    lost = driver.Driver._unseat

    def unseat(self: driver.Driver, replica: Replica) -> None:
        rows = self._schedule._replicas[replica.number].rows
        self._journal.count_attempt(list(rows))
        lost(self, replica)

    monkeypatch.setattr(driver.Driver, "_unseat", unseat)
    assert "blamed" in complaint()


def test_a_driver_that_waits_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "CALM_SECONDS", 300.0)
    monkeypatch.setattr(driver.Driver, "_harvested", lambda self, harvests: ())
    assert "does not come to its end" in complaint()


def test_tokens_that_are_kept_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a harvest that arrives again is believed again."""

    def told(self: WrittenTokens, replica: int, written: Iterable[Written]) -> None:
        for each in written:
            if (answer := self._answers.get(each.key)) is not None:
                answer.tokens.extend(each.tokens)

    monkeypatch.setattr(WrittenTokens, "told", told)
    assert "not as undisturbed" in complaint()


def test_rows_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = []
    begun = WrittenTokens.begun

    def seen(self: WrittenTokens, row: Row, replica: int) -> Row:
        found = begun(self, row, replica)
        resumed.append(len(found.begun))
        return found

    monkeypatch.setattr(WrittenTokens, "begun", seen)
    lived(range(20))
    assert sum(map(bool, resumed)) > 20
