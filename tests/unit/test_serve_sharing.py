"""Several jobs over the same replicas: rows in turn, each in its own journal, one taken away without the others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from driver_fakes import PLAN, REPORT, REQUEST, FakeReplicas, fill, ids, install_fakes

from outrider.kernels.suffixes import Gain, Suffixes
from outrider.runner.driving.replica import Replica
from outrider.runner.hosts.this_machine import LocalHost
from outrider.runner.job.journal import DONE, FAILED, Journal, StoredRow
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.prepare_job import BEHIND_PROMPTS, TEXTS
from outrider.runner.serve.shared_driver import SharedDriver
from outrider.runner.serve.shared_jobs import LAST_JOB, Job, SharedJobs, first_row, job_of
from outrider.runner.serve.shares import SentRows
from outrider.runner.serve.single_rows import SingleRow, SingleRows, StreamedText
from outrider.workers.errors import JobChangedError, JobDamagedError, OldAnswersError, OutriderError
from outrider.workers.messages import Harvest, PartialTokens, Row, RowResult, TargetCounters


class Shared:
    """A driver over fake replicas, and jobs that are opened between two of its ticks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, replicas: int = 1) -> None:
        self.replicas: FakeReplicas = install_fakes(monkeypatch)
        self.folder = folder
        self.answers: list[tuple[str, Any]] = []
        self.broken: list[tuple[str, str]] = []
        self.left: list[str] = []
        self.after: Callable[[], None] = lambda: None
        self.drops_first_space = False
        single = SingleRows(
            "tiny",
            lambda row, sample, tokens: self.answers.append((row.request, tokens)),
            lambda row, record: self.answers.append((row.request, record)),
        )
        self.jobs = SharedJobs("tiny", replicas, lambda plan: "here", single, self._break)
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        hosts = LocalHost(lambda unplaced: [], lambda: None, lambda: None)
        self.driver = SharedDriver(self.jobs, [PLAN] * replicas, 60.0, hosts, 3600.0, self.inbox, self._after)
        self._wanted: list[str] = []

    def job(self, name: str, rows: int, samples: int = 1) -> Path:
        directory = self.folder / name
        directory.mkdir(exist_ok=True)
        with closing(Journal(directory / "job.db")) as journal:
            fill(journal, rows, samples)
        self._wanted.append(name)
        return directory

    def run(self) -> None:
        self.driver.run()

    def open(self, name: str) -> Job:
        return self.jobs.open(name, self.folder / name, lambda digest: {}, lambda: self.drops_first_space)

    def _after(self) -> None:
        if self.jobs.path is not None and self._wanted:
            for name in self._wanted:
                self.open(name)
            self._wanted = []
            self.driver.offer()
        for job in list(self.jobs.jobs.values()):
            if job.whole and not job.broken:
                self.jobs.leave(job)
                self.left.append(job.batch)
        self.after()
        if not self.jobs.jobs and not self._wanted:
            self.driver.drain()

    def _break(self, job: Job, error: OutriderError) -> None:
        self.broken.append((job.batch, str(error)))

        def go() -> None:
            self.driver.withdraw(job)
            del self.jobs.jobs[job.number]

        self.inbox.put(go)


def done(directory: Path, state: int = DONE) -> list[str]:
    with closing(Journal(directory / "job.db", read_only=True)) as journal:
        return ids(journal, state)


def test_two_jobs_take_turns_and_each_row_ends_in_its_own_journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = Shared(monkeypatch, tmp_path)
    first, second = shared.job("first", 40), shared.job("second", 10)
    shared.run()
    assert done(first) == [f"id-{number}" for number in range(40)]
    assert done(second) == [f"id-{number}" for number in range(10)]
    assert shared.left == ["second", "first"], "the small one does not wait for the large one"
    order = [job_of(row) for row in shared.replicas.submitted]
    assert sorted(set(order)) == [1, 2]
    assert abs(order[:16].count(1) - 8) <= 2, "as many of each"
    described = json.loads((second / "job.json").read_text())
    assert described["summary"]["done"] == 10
    assert described["summary"]["tokens"] == 20


def test_a_job_that_comes_later_begins_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = Shared(monkeypatch, tmp_path)
    shared.job("long", 200)

    def come() -> None:
        if len(done(tmp_path / "long")) >= 20 and not (tmp_path / "short").exists():
            shared.job("short", 4)

    shared.after = come
    shared.run()
    assert shared.left == ["short", "long"]
    submitted = shared.replicas.submitted
    arrived = next(index for index, row in enumerate(submitted) if job_of(row) == 2)
    assert arrived < 60, "few rows of the other were ahead of it"


def test_what_the_target_counts_is_shared_out_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = Shared(monkeypatch, tmp_path)
    directories = [shared.job("first", 30), shared.job("second", 10)]
    shared.run()
    summaries = [json.loads((each / "job.json").read_text())["summary"] for each in directories]
    assert abs(sum(each["rounds"] for each in summaries) - 40) <= 2
    assert abs(summaries[0]["rounds"] - 30) <= 2


def test_a_server_may_have_had_any_number_of_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernels, which find candidates in texts, keep keys of rows in 63 bits."""
    shared = Shared(monkeypatch, tmp_path)
    directories = [shared.job(f"job-{number}", 3, samples=2) for number in range(4)]
    shared.jobs._last = LAST_JOB - 2
    shared.run()
    assert [done(each) for each in directories] == [["id-0", "id-1", "id-2"]] * 4
    assert {job_of(row) for row in shared.replicas.submitted} == {LAST_JOB - 1, LAST_JOB, 1, 2}
    last = first_row(LAST_JOB + 1) * MOST_SAMPLES - 1
    suffixes = Suffixes(1000)
    suffixes.advance([Gain(last, [1, 2, 1, 2, 1], 0, 4)], 0.0)
    suffixes.end(last, [2])
    with pytest.raises(OverflowError):
        suffixes.advance([Gain(last + 1, [1], 0, 4)], 0.0)


def test_the_number_of_an_open_job_is_given_to_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = Shared(monkeypatch, tmp_path)
    shared.jobs.path = {"engine": "fake"}
    for name in ("first", "second", "third"):
        shared.job(name, 1)
    assert shared.open("first").number == 1
    shared.jobs._last = LAST_JOB - 1
    assert [shared.open(name).number for name in ("second", "third")] == [LAST_JOB, 2]
    shared.jobs.save_all()


def key_of(job: Job, row: int) -> int:
    return (first_row(job.number) + row) * MOST_SAMPLES


def written_and_ended(shared: Shared) -> tuple[Job, Job, TargetCounters]:
    """One target, 25 s: the first job's 50 short rows end between harvests, the second's one row takes all of it.

    Both gain 20 tokens in each harvest. Candidates are proposed for the long row alone.
    """
    short, long = shared.open("short"), shared.open("long")
    shared.jobs.rows_to_send([first_row(short.number) + number for number in range(50)], 0)
    shared.jobs.rows_to_send([first_row(long.number)], 0)
    counters = TargetCounters(prompt_tokens=2 * 51)
    for number in range(50):
        counters.seconds += 0.5
        counters.rounds += 20
        counters.row_rounds += 40
        counters.tokens += 40
        counters.proposed += 60
        counters.accepted += 10
        ended = [RowResult(key_of(short, number), (7,) * 20, "text", "length", 20, 0, 0, 0.5)]
        told = [PartialTokens(key_of(long, 0), 20 * number, (7,) * 20)] if number < 49 else []
        if number == 49:
            ended.append(RowResult(key_of(long, 0), (7,) * 1000, "text", "length", 1000, 3000, 500, 25.0))
        harvest = Harvest(tuple(ended), replace(counters), written=tuple(told))
        shared.jobs.take([(Replica(0, PLAN), harvest)])
    return short, long, counters


def summary_of(shared: Shared, job: Job) -> dict[str, Any]:
    shared.jobs.leave(job)
    found: dict[str, Any] = json.loads((job.directory / "job.json").read_text())["summary"]
    return found


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shared:
    """One replica is up, and what it tells is up to the test."""
    shared = Shared(monkeypatch, tmp_path)
    shared.job("short", 50)
    shared.job("long", 1)
    shared.jobs.path = {"engine": "fake"}
    shared.jobs.target_is_up(Replica(0, PLAN), REPORT)
    return shared


def test_a_row_that_ends_counts_with_all_its_tokens(up: Shared) -> None:
    for job in written_and_ended(up)[:2]:
        summary = summary_of(up, job)
        [replica] = summary["replicas"]
        assert (summary["tokens"], replica["tokens"], replica["seconds"], summary["rounds"]) == (1000, 1000, 12.5, 500)
        assert summary["tokens_per_round"] == 1.0


def test_candidates_and_prompts_are_those_of_a_jobs_own_rows(up: Shared) -> None:
    short, long = (summary_of(up, job) for job in written_and_ended(up)[:2])
    own = ("proposed", "accepted", "acceptance", "prompt_tokens")
    assert [short[name] for name in own] == [0, 0, 0.0, 100]
    assert [long[name] for name in own] == [3000, 500, 0.1667, 2]


def test_the_time_before_a_job_comes_is_not_its_own(up: Shared) -> None:
    *ended, counters = written_and_ended(up)
    for job in ended:
        up.jobs.leave(job)
    for _ in range(60):
        counters.seconds += 60.0
        counters.idle_seconds += 60.0
        up.jobs.take([(Replica(0, PLAN), Harvest((), replace(counters)))])
    up.job("next", 4)
    job = up.open("next")
    up.jobs.rows_to_send([first_row(job.number) + number for number in range(4)], 0)
    for number in range(4):
        counters.seconds += 0.5
        counters.tokens += 20
        result = RowResult(key_of(job, number), (7,) * 20, "text", "length", 20, 0, 0, 0.5)
        up.jobs.take([(Replica(0, PLAN), Harvest((result,), replace(counters)))])
    summary = summary_of(up, job)
    assert (summary["time"]["idle"], summary["replicas"][0]["seconds"]) == (0.0, 2.0)
    assert summary["replicas"][0]["tokens_per_second"] == 40.0


def test_what_a_killed_process_proposed_for_a_row_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The row goes on in the next one, whose target knows nothing of those candidates."""
    tokens = (7,) * 100
    for life in range(2):
        shared = Shared(monkeypatch, tmp_path)
        if not life:
            shared.job("long", 1)
        shared.jobs.path = {"engine": "fake"}
        shared.jobs.target_is_up(Replica(0, PLAN), REPORT)
        job = shared.open("long")
        [row] = shared.jobs.rows_to_send([first_row(job.number)], 0)
        assert len(row.resumed) == 60 * life
        if life:
            result = RowResult(row.key, tokens, "text", "length", 40, 30, 6, 1.0)
            counters = TargetCounters(seconds=1.0, tokens=40, proposed=30, accepted=6)
            shared.jobs.take([(Replica(0, PLAN), Harvest((result,), counters))])
            break
        for proposed in (20, 50):
            written = (PartialTokens(row.key, proposed - 20, tokens[:30], (), proposed, proposed // 10),)
            counters = TargetCounters(seconds=1.0, tokens=30, proposed=proposed, accepted=proposed // 10)
            shared.jobs.take([(Replica(0, PLAN), Harvest((), counters, written=written))])
        shared.jobs.save_if_due()
        job.hold.close()  # without a word of its end
    summary = summary_of(shared, job)
    assert (summary["proposed"], summary["accepted"], summary["tokens"]) == (80, 11, 100)


def test_a_resumed_row_has_gained_what_its_replica_wrote() -> None:
    sent = SentRows()
    sent.add(0, [Row(5, (1, 2, 3), 100, resumed=(7,) * 60)])
    weight, own = sent.gained(0, (), [PartialTokens(5, 60, (7,) * 10)])
    assert (weight, own) == (10, Counter(tokens=10, prompt_tokens=3, resumed_tokens=60))
    weight, own = sent.gained(0, (), [PartialTokens(5, 70, (7,) * 2, (), 20, 4)])
    assert (weight, own) == (2, Counter(tokens=2, proposed=20, accepted=4))
    result = RowResult(5, (7,) * 75, "text", "stop", 9, 30, 6, 1.0)
    weight, own = sent.gained(0, [result], ())
    assert (weight, own) == (3, Counter(tokens=3, proposed=10, accepted=2))
    weight, own = sent.gained(0, [replace(result, proposed=0, accepted=0)], ())
    assert (weight, own["tokens"]) == (1, 0), "it was taken back, and had ended on the way"


def test_what_a_replica_had_is_forgotten_with_it() -> None:
    sent = SentRows()
    sent.add(0, [Row(5, (1,), 9)])
    sent.add(1, [Row(5, (1,), 9), Row(6, (1,), 9)])
    sent.stopped(0)
    assert list(sent._sent) == [(1, 5), (1, 6)]
    sent.forget([6])
    assert list(sent._sent) == [(1, 5)]


def test_a_job_that_is_withdrawn_leaves_its_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = Shared(monkeypatch, tmp_path)
    shared.job("cancelled", 50, samples=3)
    other = shared.job("other", 20)

    def cancel() -> None:
        found = [job for job in shared.jobs.jobs.values() if job.batch == "cancelled"]
        if found and found[0].record.counters.done >= 3:
            shared.driver.withdraw(found[0])
            shared.jobs.leave(found[0])

    shared.after = cancel
    shared.run()
    assert 3 <= len(done(tmp_path / "cancelled")) < 50
    assert len(done(other)) == 20
    keys = shared.replicas.cancelled
    assert keys, "what was under way is let go"
    by_row = {key // MOST_SAMPLES for key in keys}
    assert len(keys) == 3 * len(by_row), "all samples of a row"
    assert {job_of(row) for row in by_row} == {1}


def test_a_job_whose_journal_breaks_is_not_the_end_of_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = Shared(monkeypatch, tmp_path)
    shared.job("broken", 50)
    other = shared.job("other", 20)

    def damage() -> None:
        for job in shared.jobs.jobs.values():
            if job.batch == "broken" and job.record.counters.done >= 4:
                job.journal.close()

    shared.after = damage
    shared.run()
    assert [name for name, _ in shared.broken] == ["broken"]
    assert len(done(other)) == 20
    assert 4 <= len(done(tmp_path / "broken")) < 50


def test_a_failing_row_is_its_own_jobs_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = Shared(monkeypatch, tmp_path, replicas=2)
    first, second = shared.job("first", 10), shared.job("second", 10)
    shared.replicas.refused = {first_row(1) + 3}
    shared.replicas.poison = {first_row(2) + 5}
    shared.run()
    assert done(first, FAILED) == ["id-3"]
    assert done(second, FAILED) == ["id-5"]
    assert len(done(first)) == len(done(second)) == 9


def test_a_job_of_another_numeric_path_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = Shared(monkeypatch, tmp_path)
    directory = shared.job("old", 3)
    with closing(Journal(directory / "job.db")) as journal:
        journal.set_meta("numeric_path", {"engine": "another"})
    shared.jobs.path = {"engine": "fake"}
    with pytest.raises(JobChangedError, match=r"old waits: .*engine: another then, fake now"):
        shared.open("old")
    assert not shared.jobs.jobs
    with closing(Journal(directory / "job.db")) as journal:
        journal.set_meta("numeric_path", {"engine": "fake"})
    assert shared.open("old").batch == "old", "it was let go of"


def test_a_job_whose_answers_would_begin_otherwise_now_is_not_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An older outrider began it, and did not say so."""
    shared = Shared(monkeypatch, tmp_path)
    directory = shared.job("old", 3)
    shared.jobs.path = {"engine": "fake"}
    shared.drops_first_space = True
    with closing(Journal(directory / "job.db")) as journal:
        journal.record([(0, '{"custom_id": "id-0"}')], [])
    with pytest.raises(OldAnswersError, match=r"^the batch was begun by an older outrider, .*make another batch"):
        shared.open("old")
    assert not shared.jobs.jobs and done(directory) == ["id-0"], "nothing that is done is lost"
    shared.drops_first_space = False
    shared.jobs.leave(shared.open("old"))
    new = shared.job("new", 3)
    shared.drops_first_space = True
    shared.jobs.leave(shared.open("new"))
    with closing(Journal(new / "job.db")) as journal:
        journal.record([(0, '{"custom_id": "id-0"}')], [])
    assert shared.open("new").batch == "new", "its first row was done by this version"


def test_a_job_of_a_version_that_makes_texts_otherwise_is_not_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A later version's: any mark was taken for this version's own."""
    shared = Shared(monkeypatch, tmp_path)
    directory = shared.job("later", 3)
    shared.jobs.path = {"engine": "fake"}
    with closing(Journal(directory / "job.db")) as journal:
        journal.set_meta(TEXTS, BEHIND_PROMPTS + 1)
    with pytest.raises(JobChangedError, match="has answers of another outrider, which makes texts of tokens otherwise"):
        shared.open("later")
    assert not shared.jobs.jobs
    with closing(Journal(directory / "job.db")) as journal:
        journal.set_meta(TEXTS, BEHIND_PROMPTS)
    shared.jobs.leave(shared.open("later"))


@pytest.mark.parametrize("how", ["folder", "journal", "content"])
def test_a_journal_that_is_not_there_is_not_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str) -> None:
    """Its folder may be mounted again at the next start."""
    shared = Shared(monkeypatch, tmp_path)
    directory = shared.job("away", 3)
    shared.jobs.path = {"engine": "fake"}
    if how == "content":
        (directory / "job.db").write_bytes(b"")
    else:
        (directory if how == "folder" else directory / "job.db").rename(tmp_path / "aside")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(JobDamagedError, match=r"away/job.db is not there, or empty"):
        shared.open("away")
    assert not shared.jobs.jobs
    assert sorted(tmp_path.rglob("*")) == before


# Single requests


def stored(number: int, **request: Any) -> StoredRow:
    return StoredRow(number, "single", 1, "completion", {**REQUEST, **request}, (1, 2))


def test_single_requests_come_before_rows_that_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = Shared(monkeypatch, tmp_path)
    shared.job("batch", 100)
    asked: list[int] = []

    def ask() -> None:
        if not asked and shared.replicas.submitted:
            asked.append(len(shared.replicas.submitted))
            shared.jobs.single.add(SingleRow("request-1", stored(0), streamed=False))
            shared.driver.offer()

    shared.after = ask
    shared.run()
    [(request, record)] = shared.answers
    assert request == "request-1"
    assert record["response"]["body"]["choices"][0]["text"] == "text 0"
    place = [job_of(row) for row in shared.replicas.submitted].index(0)
    assert place - asked[0] <= 20
    assert len(done(tmp_path / "batch")) == 100


def test_a_single_request_that_is_taken_back_is_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = Shared(monkeypatch, tmp_path)
    shared.job("batch", 10)
    shared.replicas.hangs_on = {(0, 0)}
    seen: list[int] = []

    def ask() -> None:
        seen.append(0)
        if len(seen) == 1:
            shared.jobs.single.add(SingleRow("request-1", stored(0, n=2), streamed=True))
            shared.driver.offer()
        if len(seen) > 5 and 0 in shared.replicas.submitted:
            shared.driver.withdraw_single("request-1")

    shared.after = ask
    shared.run()
    assert shared.replicas.cancelled[:2] == [0, 1]
    assert shared.answers == []
    assert not shared.jobs.single.streaming


def test_tokens_are_told_once_each_whoever_tells_them() -> None:
    told: list[tuple[int, ...]] = []
    rows = SingleRows("tiny", lambda row, sample, tokens: told.append(tokens), lambda row, record: told.append(()))
    rows.add(SingleRow("request-1", stored(7), streamed=True))
    assert rows.pending(5) == [(7, 0)]
    [row] = rows.rows_to_send([7], 0)
    replica = Replica(0, PLAN)

    def harvest(start: int, *tokens: int) -> Harvest:
        return Harvest((), TargetCounters(), written=(PartialTokens(row.key, start, tokens),))

    rows.take(replica, harvest(0, 1, 2))
    rows.take(replica, harvest(0, 1, 2))
    rows.take(replica, harvest(1, 2, 3))
    rows.take(replica, harvest(5, 9))
    assert told == [(1, 2), (1, 2, 3)]
    result = RowResult(row.key, (1, 2, 3), "text", "stop", 1, 0, 0, 0.1)
    assert rows.take(replica, Harvest((result,), TargetCounters()))[0].rows == (7,)
    assert told[-1] == ()


def test_an_answer_that_cannot_be_written_down_speaks_of_no_line() -> None:
    told: list[str] = []
    rows = SingleRows("tiny", lambda *_: None, lambda row, record: told.append(record["error"]["message"]))
    rows.add(SingleRow("request-1", stored(7), streamed=False))
    rows.pending(5)
    [row] = rows.rows_to_send([7], 0)
    result = RowResult(row.key, (1,), "\ud800", "stop", 1, 0, 0, 0.1)
    rows.take(Replica(0, PLAN), Harvest((result,), TargetCounters()))
    assert told[0].startswith('the row "single" could not be written down: ')


TEXT = "One sentence. Another END of it"


@pytest.mark.parametrize(
    ("stop", "whole"), [([], TEXT), (["END"], "One sentence. Another "), ([" of it", "xyz"], TEXT[:-6])]
)
def test_what_is_streamed_is_the_text_that_a_batch_would_have(stop: list[str], whole: str) -> None:
    stream = StreamedText(stored(0, stop=stop))
    pieces = [stream.grown(TEXT[:length]).content for length in range(1, len(TEXT) + 1)]
    assert whole.startswith("".join(pieces))
    rest = stream.rest(None, whole)
    assert rest is not None
    assert "".join([*pieces, rest.content]) == whole


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = StreamedText(stored(0))
    assert [stream.grown(text).content for text in ("a", "a\ufffd", "aé", "aé b")] == ["a", "", "é", " b"]


def test_thoughts_are_streamed_apart() -> None:
    stream = StreamedText(stored(0, reasoning=["<think>", "</think>", False]))
    text = "<think>\nfirst\nthen</think>\n\nThe answer"
    grown = [stream.grown(text[:length]) for length in range(1, len(text) + 1)]
    rest = stream.rest("first\nthen", "The answer")
    assert rest is not None
    assert "".join(each.reasoning or "" for each in (*grown, rest)) == "first\nthen"
    assert "".join(each.content for each in (*grown, rest)) == "The answer"


def test_a_text_that_was_told_otherwise_is_not_passed_over() -> None:
    stream = StreamedText(stored(0))
    stream.grown("one")
    assert stream.rest(None, "two") is None
