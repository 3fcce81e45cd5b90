"""How a target tries layouts while it works: nothing but speed may change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import END, FakeEngine, Fixed, Nonsense, decode, plain

from outrider.workers.engines.costs import CostCurve
from outrider.workers.messages import Layout, Row, RowResult, Sampling
from outrider.workers.speculation import DraftCost, LayoutKind
from outrider.workers.target import layout_memory
from outrider.workers.target import layout_tuner as tuner
from outrider.workers.target.layout_memory import RememberedLayout, recall, remember
from outrider.workers.target.layout_tuner import LayoutTuner
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier

LAYOUTS = (
    Layout("shared", LayoutKind.SEQUENTIAL, (0, 1), (0, 1)),
    Layout("split", LayoutKind.OVERLAPPED, (1,), (0,)),
    Layout("plain", LayoutKind.SEQUENTIAL, (0, 1), (0, 1), plain=True),
)
# Seconds of a round, as a clock would show them, and of the target's pass in it on all cores and on fewer.
SECONDS = {"shared": 0.05, "split": 0.02, "plain": 0.2}
PASS, PASS_ON_FEWER = 0.2, 0.018


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    # Time is made up here, so what the fakes really take must not be learned.
    monkeypatch.setattr(tuner, "CostCurve", Fixed)
    # Half the rounds between trials, so that half the rows show as many of them.
    monkeypatch.setattr(tuner, "FIRST_PAUSE", tuner.FIRST_PAUSE // 2)
    monkeypatch.setattr(tuner, "ROUNDS_BETWEEN_TRIALS", tuner.ROUNDS_BETWEEN_TRIALS // 2)
    return tmp_path


class Draft:
    transport = "none"

    def __init__(self) -> None:
        self.ready = True
        self.layouts: list[str] = []
        self.step = 1.0

    def set_layout(self, layout: Layout) -> None:
        self.layouts.append(layout.name)

    def draft_cost(self, rows: int, layout: str | None = None) -> DraftCost | None:
        return DraftCost(self.step)

    def costs(self) -> dict[str, Any]:
        return {}


class Bench:
    """A verifier with its tuner, and what the tuner did to the target."""

    def __init__(
        self,
        memory_key: str = "",
        layouts: Sequence[Layout] = LAYOUTS,
        draft_tokens: int | None = None,
        pass_seconds: float = PASS,
        pass_on_fewer: float = PASS_ON_FEWER,
        job_rows: int = 0,
        batch: int = 4,
    ) -> None:
        self.pass_seconds, self.pass_on_fewer = pass_seconds, pass_on_fewer
        self.slower = 1.0
        self.verifier = Verifier(
            engine=FakeEngine(),
            new_writer=lambda row: TextWriter(decode, row.stop, (END,)),
            proposer=Nonsense(3),
            batch=batch,
            draft_tokens=draft_tokens,
            verify_seconds=Fixed({count: (1 + count / 640) * pass_seconds for count in (1, 4, 8, 64)}),
            end_tokens=(END,),
        )
        self.draft = Draft()
        self.moves: list[tuple[int, ...]] = []
        self.measured: list[tuple[int, ...]] = []
        self.measured_at_work: list[tuple[int, ...]] = []
        self.tuner = LayoutTuner(
            self.verifier,
            self.draft,
            layouts,
            lambda cores: self.moves.append(tuple(cores)),
            self._measure,
            memory_key,
            job_rows,
        )

    def _measure(self, only: Sequence[int]) -> CostCurve:
        elsewhere = self.moves and self.moves[-1] != LAYOUTS[0].target_cores
        seconds = self.pass_on_fewer if elsewhere else self.pass_seconds
        (self.measured if elsewhere else self.measured_at_work).append(tuple(only))
        return Fixed({count: (1 + count / 640) * seconds for count in only or (1, 64)})

    def work(self, rows: Sequence[Row]) -> dict[int, RowResult]:
        self.verifier.add(rows)
        ended: dict[int, RowResult] = {}
        while not self.verifier.idle:
            for one in self.verifier.round():
                assert isinstance(one, RowResult)
                ended[one.key] = one
            done = self.verifier.last_round
            if done is not None:
                self.verifier.last_round = replace(
                    done, verifying=self.slower * self.verifier.policy.verify_seconds(done.fed)
                )
            self.tuner.after_round(SECONDS[self.draft.layouts[-1]])
        return ended


def rows(count: int) -> list[Row]:
    return [Row(key, (key % END, 3, 1), 60, Sampling(temperature=key % 2, seed=key)) for key in range(count)]


@pytest.mark.slow
def test_without_another_layout_turns_are_held_against_plain_decoding_alone() -> None:
    """As with a parallel draft, which never drafts ahead."""
    bench, job = Bench(layouts=[each for each in LAYOUTS if each.kind is LayoutKind.SEQUENTIAL]), rows(300)
    ended = bench.work(job)
    assert {key: one.tokens for key, one in ended.items()} == {row.key: plain(row, 96).tokens for row in job}
    assert bench.tuner.record is not None
    assert bench.tuner.record.rates.keys() == {"shared", "plain"}
    assert bench.moves == [], "on the same cores"


def test_texts_stay_the_same_while_layouts_change_and_the_fastest_is_kept() -> None:
    bench, job = Bench(), rows(400)
    ended = bench.work(job)
    assert {key: one.tokens for key, one in ended.items()} == {row.key: plain(row, 96).tokens for row in job}
    assert set(bench.draft.layouts) == {"shared", "split"}
    record = bench.tuner.record
    assert record is not None
    assert record.took == bench.draft.layouts[-1] == "split"
    assert record.rates.keys() == {"shared", "split", "plain"}
    assert record.rates["split"] > record.rates["shared"]
    assert 'layout "split" with 1 core(s) for the draft: ' in record.sentence
    assert "--batch 8 it would be about" in record.sentence
    assert bench.moves[:2] == [(1,), (0, 1)], "a glimpse"
    assert bench.measured == [tuner.QUICK_PASSES, ()], "each set of cores is measured once, and glimpsed at before"


def test_passes_are_measured_again_once_the_draft_is_there() -> None:
    bench = Bench(layouts=LAYOUTS[:1], pass_seconds=2.0)
    bench.draft.ready = False
    bench.work(rows(4))
    assert not bench.measured_at_work, "whatever starts with the job is still at work"
    assert bench.verifier.policy.verify_seconds.points[4] == pytest.approx(2.0, rel=0.01)
    bench.draft.ready, bench.pass_seconds = True, 0.5
    bench.work(rows(4))
    assert bench.measured_at_work == [(4, 8, 16) * 2], "what rounds of four rows may feed"
    for points in (bench.tuner.costs()["verify_at_start"], bench.verifier.policy.verify_seconds.points):
        assert points == {count: pytest.approx(0.5 * (1 + count / 640), rel=0.01) for count in (1, 4, 8, 16, 64)}


@pytest.mark.slow
def test_rows_under_way_say_what_is_measured_and_not_the_batch_nor_what_was_measured_before() -> None:
    alone = Bench(layouts=LAYOUTS[:1])
    alone.work([Row(0, (1, 2), 90, Sampling())])
    assert alone.measured_at_work == [(1, 2, 4, 8, 16) * 2]
    many = Bench(layouts=LAYOUTS[:1], batch=40)
    many.work(rows(400))
    assert many.measured_at_work == [(40, 80, 160) * 2], "the curve had nothing beyond 64"
    assert many.verifier.policy.verify_seconds.points.keys() == {1, 4, 8, 40, 80, 160}


@pytest.mark.parametrize(("job_rows", "measured"), [(1, []), (6, [(1, 2, 4, 8, 16, 16)]), (20, [(1, 2, 4, 8, 16) * 2])])
def test_a_short_job_waits_less_for_measurements_or_not_at_all(job_rows: int, measured: list[tuple[int, ...]]) -> None:
    bench = Bench(layouts=LAYOUTS[:1], job_rows=job_rows)
    bench.work([Row(0, (1, 2), 90, Sampling())])
    assert bench.measured_at_work == measured


def test_what_cannot_be_faster_is_not_tried() -> None:
    bench = Bench(pass_on_fewer=10.0)
    bench.work(rows(300))
    assert set(bench.draft.layouts) <= {"shared", "plain"}
    assert bench.measured == [tuner.QUICK_PASSES]
    assert bench.tuner.record is not None
    assert "not tried: split" in bench.tuner.record.sentence


def test_a_short_job_does_not_look_at_other_cores() -> None:
    bench = Bench(job_rows=8)
    bench.work(rows(8))
    assert bench.measured == []
    assert bench.moves == []
    assert bench.draft.layouts[0] == "shared"


@pytest.mark.slow
@pytest.mark.parametrize(("pass_seconds", "took"), [(0.001, "plain"), (1.0, "shared")])
def test_plain_decoding_is_known_without_being_tried(pass_seconds: float, took: str) -> None:
    bench = Bench(pass_seconds=pass_seconds, pass_on_fewer=10.0)
    bench.work(rows(300))
    assert bench.tuner.record is not None
    assert bench.tuner.record.took == took
    # When it is looked at again after a pause, the same follows.
    in_turn = ["shared", "plain"] if took == "plain" else ["shared"]
    assert bench.draft.layouts[: len(in_turn)] == in_turn
    assert set(bench.draft.layouts) == set(in_turn)


def test_a_draft_that_was_left_out_is_soon_tried_again() -> None:
    """Passes were disturbed while it was tried, or its rows were hard: nothing of that is seen in plain rounds."""
    bench = Bench(pass_seconds=0.001, pass_on_fewer=10.0)
    bench.work(rows(200))
    assert bench.verifier.counters.rounds < tuner.FIRST_PAUSE
    assert bench.draft.layouts == ["shared", "plain", "shared", "plain", "shared"], "after 64 rounds, and after 128"


def test_without_a_draft_nothing_is_tried_yet() -> None:
    bench = Bench()
    bench.draft.ready = False
    bench.work(rows(20))
    assert bench.tuner.record is None
    assert bench.draft.layouts == ["shared"]


@pytest.mark.slow
def test_a_number_of_candidates_that_was_fixed_is_not_put_to_the_vote() -> None:
    bench = Bench(draft_tokens=3)
    bench.work(rows(300))
    assert set(bench.draft.layouts) == {"shared", "split"}
    assert bench.verifier.counters.proposed > 0


def test_a_layout_can_be_fixed() -> None:
    bench = Bench()
    bench.tuner.fix("plain")
    bench.work(rows(20))
    assert bench.verifier.counters.proposed == 0
    bench.tuner.fix(None)
    assert bench.draft.layouts == ["shared", "plain", "shared"]
    bench.work(rows(300))
    bench.tuner.fix("nothing of the kind")
    bench.tuner.fix(None)
    assert bench.draft.layouts[-1] == "split"


def test_one_layout_is_taken_as_it_is() -> None:
    bench = Bench(layouts=LAYOUTS[:1])
    bench.work(rows(20))
    assert (bench.moves, bench.tuner.record) == ([], None)


@pytest.mark.slow
def test_what_was_found_is_remembered_and_looked_at_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "ROUNDS_BETWEEN_TRIALS", 50)
    Bench("pair").work(rows(600))
    again = Bench("pair")
    assert again.draft.layouts[-1] == "split"
    assert again.tuner.record is not None
    assert "measured earlier" in again.tuner.record.sentence
    assert Bench("another pair").draft.layouts == ["shared"]
    again.work(rows(300))
    assert set(again.draft.layouts) == {"shared", "split"}


@pytest.mark.parametrize(("then", "taken"), [(0.78, False), (0.82, True), (1.0, True), (1.2, True), (1.3, False)])
def test_a_memory_of_a_slower_or_a_faster_machine_is_not_taken_over(then: float, taken: bool) -> None:
    """Passes take this many times as long today; a layout that a disturbed trial chose is tried again."""
    names = [each.name for each in LAYOUTS if not each.plain]
    bench = Bench()
    remember("pair", names, RememberedLayout("split", {"split": 2.0}, bench.verifier.policy.verify_seconds(4) / then))
    again = Bench("pair")
    assert again.draft.layouts == ["split" if taken else "shared"]
    assert (again.tuner.record is not None) == taken


@pytest.mark.slow
def test_a_choice_is_remembered_with_what_passes_took_while_it_was_made() -> None:
    disturbed = Bench("pair", pass_on_fewer=10.0)
    disturbed.slower = 1.5
    disturbed.work(rows(300))
    known = recall("pair", [each.name for each in LAYOUTS if not each.plain])
    assert known is not None
    assert known.pass_seconds == pytest.approx(1.5 * PASS, rel=0.02)
    assert Bench("pair").draft.layouts == ["shared"], "passes take less now"


@pytest.mark.slow
def test_other_cores_that_were_remembered_are_held_against_the_first_ones_once_and_soon() -> None:
    names = [each.name for each in LAYOUTS if not each.plain]
    remember("pair", names, RememberedLayout("split", {"split": 100.0, "shared": 1.0}, PASS))
    bench = Bench("pair", pass_on_fewer=10.0)
    bench.work(rows(300))
    assert bench.verifier.counters.rounds > 2 * tuner.ROUNDS_FROM_MEMORY
    assert bench.draft.layouts[:2] == ["split", "shared"]
    assert "split" not in bench.draft.layouts[1:], "it cannot be faster, by the passes on its cores"
    known = recall("pair", names)
    assert known is not None and known.took == "shared"


def test_a_short_job_stays_with_what_was_remembered() -> None:
    names = [each.name for each in LAYOUTS if not each.plain]
    remembered = RememberedLayout("split", {"split": 100.0, "shared": 1.0}, PASS)
    remember("pair", names, remembered)
    bench = Bench("pair", job_rows=30)
    bench.work(rows(30))
    assert bench.verifier.counters.rounds > tuner.ROUNDS_FROM_MEMORY
    assert set(bench.draft.layouts) == {"split"}
    assert recall("pair", names) == remembered


@pytest.mark.slow
@pytest.mark.parametrize("plain_pass", [1.0, 0.001])
def test_a_choice_that_turns_out_slower_than_plain_decoding_is_made_again(
    plain_pass: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "ROUNDS_TO_DOUBT", 16)
    names = [each.name for each in LAYOUTS if not each.plain]
    remember("pair", names, RememberedLayout("split", {"split": 2.0, "plain": 1.0}, plain_pass))
    bench = Bench("pair", pass_seconds=plain_pass)
    bench.work(rows(300))
    assert bench.verifier.counters.rounds > 32
    assert ("plain" in bench.draft.layouts) == (plain_pass < SECONDS["split"])


def test_a_memory_that_is_damaged_old_or_of_other_layouts_is_none(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["shared", "split"]
    remember("key", names, RememberedLayout("split", {"split": 2.0, "shared": 1.0}, 0.02))
    assert recall("key", names) == RememberedLayout("split", {"split": 2.0, "shared": 1.0}, 0.02)
    assert recall("key", [*names, "plain"]) is None
    assert recall("other", names) is None
    (file,) = (own_cache / "layouts").glob("*.json")
    now = layout_memory.time.time()
    monkeypatch.setattr(layout_memory.time, "time", lambda: now + layout_memory.LONGEST_SECONDS + 60)
    assert recall("key", names) is None
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_CACHE", str(own_cache))
    for content in (
        "",
        "[]",
        "{}",
        json.dumps({"took": "left", "rates": {}, "pass_seconds": 0.02, "names": names}),
        json.dumps({"took": "split", "rates": {}, "names": names}),
        '{"took": "split", "rates": 3}',
    ):
        file.write_text(content)
        assert recall("key", names) is None


@pytest.mark.parametrize(("step", "last"), [(0.0001, "shared"), pytest.param(1.0, "split", marks=pytest.mark.slow)])
def test_a_layout_that_the_first_would_have_beaten_is_left(step: float, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "ROUNDS_TO_DOUBT", 16)
    names = [each.name for each in LAYOUTS if not each.plain]
    remember("pair", names, RememberedLayout("split", {"split": 2.0}, 0.015))
    bench = Bench("pair", pass_seconds=0.015, draft_tokens=3)
    bench.draft.step = step
    bench.work(rows(300))
    assert bench.draft.layouts[-1] == last
    known = recall("pair", names)
    assert known is not None and known.took == last


@pytest.mark.slow
def test_cores_given_up_in_a_disturbed_second_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The opening saw passes take fifty times as long, so that plain decoding looked slow; it is not."""
    monkeypatch.setattr(tuner, "ROUNDS_TO_DOUBT", 16)
    names = [each.name for each in LAYOUTS if not each.plain]
    remember("pair", names, RememberedLayout("split", {"split": 28.0, "shared": 19.0, "plain": 18.0}, 0.001))
    bench = Bench("pair", pass_seconds=0.001)
    bench.draft.step = 0.0
    bench.tuner._verifying, bench.tuner._verifying_at_start = 0.05, 0.001
    bench.work(rows(300))
    assert bench.draft.layouts[0] == "split"
    assert bench.draft.layouts[1] == "shared"
