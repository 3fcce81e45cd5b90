"""The real driver on jobs in which everything goes wrong. A broken rule names its seed: stress/orders.py replays it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import orders
import pytest
from orders import FailingJob, Violation

from outrider.runner.driving import driver
from outrider.runner.driving.job_record import JobRecord
from outrider.runner.driving.partial_tokens import PartialTokenStore
from outrider.runner.driving.replica import Replica
from outrider.runner.job.journal import Journal
from outrider.workers.messages import PartialTokens, Row

SEEDS = 20
# More: stress/orders.py.
MANY_SEEDS = 800


def lived(seeds: range) -> None:
    broken = []
    for seed in seeds:
        try:
            FailingJob(seed).run()
        except Violation as violation:
            broken.append(str(violation))
    assert not broken, f"{len(broken)} of {len(seeds)} jobs break a rule, the first is\n{broken[0]}"


def test_no_order_of_things_loses_doubles_or_blames_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = []
    resume = PartialTokenStore.resumed

    def seen(self: PartialTokenStore, row: Row, replica: int) -> Row:
        found = resume(self, row, replica)
        resumed.append(len(found.resumed))
        return found

    monkeypatch.setattr(PartialTokenStore, "resumed", seen)
    lived(range(SEEDS))
    assert sum(map(bool, resumed)) > 20, "rows go on where they were"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_no_order_of_things_of_many_does(part: int) -> None:
    first = SEEDS + part * MANY_SEEDS // 8
    lived(range(first, first + MANY_SEEDS // 8))


def test_a_job_is_the_same_each_time() -> None:
    """Else a seed would be of no use."""
    first, second = FailingJob(7), FailingJob(7)
    assert (first.run(), first.ray.log) == (second.run(), second.ray.log)


# A harness that cannot fail proves nothing: mistakes in what it watches over are found, each within a few jobs.


def complaint(jobs: int = 120) -> str:
    for seed in range(jobs):
        try:
            FailingJob(seed).run()
        except Violation as violation:
            return str(violation).splitlines()[0]
    return "none"


def test_a_journal_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Journal.record
    monkeypatch.setattr(Journal, "record", lambda self, done, failed, *kept: record(self, done[1:], failed, *kept))
    assert re.search("tokens are counted|is not as it was", complaint())


def test_totals_that_are_not_of_the_transaction_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Journal.record
    monkeypatch.setattr(Journal, "record", lambda self, done, failed, *kept: record(self, done, failed))
    assert "tokens are counted" in complaint()


@pytest.mark.slow
def test_attempts_that_are_made_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when rows are held against a host that has left."""
    release = driver.Driver._release

    def blame(self: driver.Driver, replica: Replica) -> None:
        rows = self._schedule._replicas[replica.number].rows
        self._rows.count_attempt(list(rows))
        release(self, replica)

    monkeypatch.setattr(driver.Driver, "_release", blame)
    assert "blamed" in complaint()


def test_a_driver_that_waits_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "CALM_SECONDS", 300.0)
    monkeypatch.setattr(JobRecord, "take", lambda self, harvests: ())
    assert "does not come to its end" in complaint()


@pytest.mark.slow
def test_tokens_that_are_kept_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a harvest that arrives again is believed again."""

    def told(self: PartialTokenStore, replica: int, written: Iterable[PartialTokens]) -> None:
        for each in written:
            if (answer := self._partials.get(each.key)) is not None:
                answer.tokens.extend(each.tokens)

    monkeypatch.setattr(PartialTokenStore, "add_reported", told)
    assert "not as undisturbed" in complaint()
