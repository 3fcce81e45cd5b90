"""How fast a job is, and when it will be through: by the last minutes, in words."""

from __future__ import annotations

from pathlib import Path

import driver_fakes
import pytest
from driver_fakes import REQUEST

from outrider.runner.driving.partial_results import PartialResults
from outrider.runner.job.journal import Journal, KeptTokens, StoredRow
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.report import statistics
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.latencies import Latencies
from outrider.runner.report.pace import Pace, Rates, left_words, speed_words, spoken_duration
from outrider.runner.report.status import status_of
from outrider.runner.report.words import accepted_words
from outrider.workers.messages import Harvest, PartialTokens, RowResult, TargetCounters


def test_speed_is_that_of_the_last_minutes() -> None:
    pace = Pace()
    for second in range(2001):
        # Slow for half an hour, then ten times as fast.
        ended = second if second <= 1500 else 1500 + 10 * (second - 1500)
        pace.add(float(second), ended, 100 * ended, 7 * ended)
    rates = pace.rates()
    assert rates is not None
    assert 295 <= rates.seconds <= 310
    assert (rates.rows, rates.tokens, rates.prompt_tokens) == pytest.approx((10, 1000, 70))
    assert rates.left(600) == pytest.approx(60)
    assert len(pace.record()) < 100, "it stays small, however often it is asked"


def test_a_job_that_has_just_begun_says_nothing_of_its_end() -> None:
    pace = Pace()
    assert pace.rates() is None
    pace.add(0.0, 0, 0, 0)
    assert pace.rates() is None
    pace.add(2.0, 2, 20, 4)
    rates = pace.rates()
    assert rates is not None and rates.left(100) is None
    assert left_words(rates, 100) == left_words(None, 100) == "time left not known yet"
    assert speed_words(None) == "no speed known yet"


def test_rows_that_had_ended_before_are_no_speed() -> None:
    """Bad rows of the input, and those of earlier runs."""
    pace = Pace()
    pace.add(0.0, 5000, 0, 0)
    pace.add(10.0, 5010, 0, 0)
    rates = pace.rates()
    assert rates is not None and rates.rows == 1.0


def test_it_goes_on_where_it_was_kept() -> None:
    pace = Pace()
    for second in range(60):
        pace.add(float(second), second, second, second)
    again = Pace(pace.record())
    assert again.rates() == pace.rates()
    again.add(70.0, 70, 70, 70)
    rates = again.rates()
    assert rates is not None and rates.rows == pytest.approx(1.0)


def test_rows_that_are_done_again_have_not_slowed_the_job_down() -> None:
    """As those that `outrider retry` puts back: what the job has kept counts them as ended."""
    pace = Pace([[900.0, 1500, 1500, 7500], [1200.0, 2000, 2000, 10_000]])
    before = pace.rates()
    pace.resume(1600, 2000)
    assert pace.rates() == before
    pace.add(1210.0, 1610, 2010, 10_050)
    rates = pace.rates()
    assert rates is not None and (rates.ended, rates.rows) == (510, pytest.approx(510 / 310))
    assert rates.left(390) == pytest.approx(390 * 310 / 510)
    kept = pace.record()
    for ended in (1610, 1700):  # the journal may know of more rows than was kept of the speed
        pace.resume(ended, 2010)
    assert pace.record() == kept
    Pace().resume(5, 5)


def test_tokens_that_were_counted_otherwise_are_no_speed() -> None:
    """Earlier versions kept those of rows that had ended, which were fewer than the targets had written, or more."""
    for written in (1500, 9000):
        pace = Pace([[900.0, 15, 1500, 7500], [1200.0, 20, 2000, 10_000]])
        pace.resume(20, written)
        pace.add(1210.0, 20, written + 400, 10_000)
        rates = pace.rates()
        assert rates is not None and rates.tokens == pytest.approx(900 / 310)


def test_a_retried_job_is_as_fast_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes = driver_fakes.install_fakes(monkeypatch)
    journal = Journal(tmp_path / "job.db")
    driver_fakes.fill(journal, 40)
    fakes.refused = set(range(20))
    driver_fakes.driver(journal).run()
    account, totals = journal.meta(statistics.KEY), journal.meta("totals")
    journal.set_meta(statistics.KEY, {**account, "pace": [[900.0, 20, 20, 100], [1200.0, 40, 40, 200]]})
    journal.record([], [], {**totals, "seconds": 1200.0})
    assert journal.put_back_failed() == 20
    fakes.refused = set()
    again = driver_fakes.driver(journal)
    again.run()
    assert journal.counts().done == 40
    rates = status_of(journal).rates
    assert rates is not None and rates.ended == 40, "20 of the last minutes, and the 20 that were put back"
    journal.close()


def test_it_says_what_it_rests_on() -> None:
    rates = Rates(300.0, 1230, 4.1, 512.3, 2048.0)
    assert speed_words(rates) == "4.1 rows/s, 512 tok/s, prompts 2,048 tok/s"
    assert left_words(rates, 8856) == "about 36 min left (by the 1,230 rows of the last 5 min)"
    assert speed_words(Rates(300.0, 6, 0.02, 1.0, 2.0)).startswith("0.02 rows/s")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0 s"), (59.4, "59 s"), (61, "1 min 1 s"), (300, "5 min"), (599, "9 min 59 s"), (600, "10 min"),
        (3599, "60 min"), (3600, "1 h"), (5400, "1 h 30 min"), (86400, "24 h"), (200000, "2 d 7 h"), (172800, "2 d"),
    ],
)  # fmt: skip
def test_durations_are_said_as_people_do(seconds: float, words: str) -> None:
    assert spoken_duration(seconds) == words


def test_moments_that_a_killed_run_has_not_come_to_are_dropped() -> None:
    """Earlier versions kept the pace of rows under way, and not the seconds that it was at."""
    pace = Pace([[0.5, 0, 0, 10], [40.5, 0, 0, 10], [45.5, 0, 0, 10]])
    pace.add(10.0, 2, 380, 10)
    assert pace.record() == [[0.5, 0, 0, 10], [10.0, 2, 380, 10]]
    pace.add(10.5, 2, 400, 10)
    rates = pace.rates()
    assert rates is not None and rates.tokens == pytest.approx(40)


@pytest.mark.parametrize("kept", [[[1, 2]], [["x", 1, 2, 3]], 5, [None]])
def test_what_is_damaged_is_noticed(kept: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        Pace(kept)  # type: ignore[arg-type]


def test_what_is_read_twice_is_counted() -> None:
    def row(number: int) -> StoredRow:
        return StoredRow(number, f"id-{number}", number + 1, "completion", {**REQUEST}, (1, 2, 3))

    def told(replica: int, number: int, start: int, *tokens: int) -> None:
        written = PartialTokens(number * MOST_SAMPLES, start, tokens)
        results.take(Harvest((), TargetCounters(), written=(written,)), replica)

    counters = JobCounters()
    results = PartialResults("m", counters, Latencies(None))
    results.add([row(0), row(1)], [], replica=0)
    told(0, 0, 0, 7)
    results.add([row(0)], [], replica=1)
    told(1, 0, 1, 8)
    assert counters.read_again == 0, "a copy of a late row, for which nobody died or stopped"
    results.partial_tokens.replica_gone(0)
    results.add([row(0), row(1)], [], replica=0)
    assert counters.read_again == 0, "sent is not read"
    told(0, 0, 1, 8)
    told(0, 0, 2, 9)
    told(0, 1, 0, 7)
    assert counters.read_again == 4, "the other one waited when the target died, and is read for the first time"
    results.add([row(2)], [KeptTokens(2, 0, 0, (7, 8))], replica=1)
    ended = RowResult(2 * MOST_SAMPLES, (7, 8, 9), "text", "stop", 1, 0, 0, 0.1)
    results.take(Harvest((ended,), TargetCounters()), 1)
    assert counters.read_again == 9, "a resumed row is read with what was written of it"
    assert not results._to_read_again


def test_a_job_without_candidates_says_nothing_of_them() -> None:
    assert accepted_words({"proposed": 0, "accepted": 0}) == accepted_words({}) == ""
    assert accepted_words({"proposed": 3, "accepted": 2}) == ", 67% accepted"
