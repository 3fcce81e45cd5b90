"""How a target and its draft share their cores: found out on the first rows of a job, kept, and looked at again later.

A job begins with the first layout. Of plain decoding enough is known by then: a pass was measured. Others have to be
faster at their very best, by the passes that the target takes on its cores there, before a round of the job is spent on
them; and looking at them may cost no more than a small share of what is left of the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from outrider.workers.engines.costs import BUDGET_SECONDS, CostCurve
from outrider.workers.messages import Layout, LayoutRecord
from outrider.workers.speculation import MOST_CANDIDATES, DraftCost, LayoutKind
from outrider.workers.target.forecast import ForecastCheck, Round
from outrider.workers.target.layout_memory import RememberedLayout, recall, remember
from outrider.workers.target.layout_trial import WARM_UP_ROUNDS, LayoutTrial, best_of, rounds_to_give_up
from outrider.workers.target.verifier import Verifier

# After so many rounds the layouts are looked at again: rows and neighbours change. While nothing does, pauses double.
FIRST_PAUSE = 1024
ROUNDS_BETWEEN_TRIALS = 4096
# What finding out may cost of the rest of the job.
MOST_SHARE = 0.02
# What is not this much faster at its very best is not tried.
WORTH_TRYING = 1.02
# Between these shares of a measured rate the rate of plain decoding, by its passes alone, is too near to go by.
NEAR = (0.87, 1.15)
# Over so many rounds a draft must have been worth its while, or they are looked at again at once; after as many a draft
# that was left out is tried again. The pauses double.
ROUNDS_TO_DOUBT = 64
# After so many rounds other cores that were remembered are held against the first ones.
ROUNDS_FROM_MEMORY = 16
# Passes are measured at work over up to so many tokens a row, and this many at least; more candidates are hardly asked for,
# and are believed to cost what the last ones did. For no more than this share of the job.
MOST_FED_A_ROW, LEAST_FED, AT_WORK_SHARE = 4, 16, 0.015
# A glimpse of other cores: passes over so many tokens.
QUICK_PASSES_OF_ONE_ROW, QUICK_PASSES = (1, 8), (1, 8, 32)


class Draft(Protocol):
    """The draft's side of a layout."""

    @property
    def ready(self) -> bool:
        """Whether there is a draft to try anything with."""

    @property
    def transport(self) -> str | None:
        """Which transport reaches it."""

    def set_layout(self, layout: Layout) -> None:
        """Move the draft there, now or as soon as it comes up."""

    def draft_cost(self, rows: int, layout: str | None = None) -> DraftCost | None:
        """What candidates for that many rows cost in this layout, or in the current one."""

    def costs(self) -> dict[str, Any]:
        """What it has cost in each layout."""


class LayoutTuner:
    """Belongs to the verifying thread. ``move_target`` takes the target to other cores, ``measure`` its costs there.

    ``measure`` is told which numbers of tokens to measure if it is to be quick. ``job_rows`` says how many rows are to
    come in all, as far as that is known.
    """

    def __init__(
        self,
        verifier: Verifier,
        draft: Draft,
        layouts: Sequence[Layout],
        move_target: Callable[[Sequence[int]], None],
        measure: Callable[[Sequence[int]], CostCurve],
        memory_key: str = "",
        job_rows: int = 0,
    ) -> None:
        self.record: LayoutRecord | None = None
        self._verifier = verifier
        self._draft = draft
        self._layouts = {each.name: each for each in layouts}
        self._move_target = move_target
        self._measure = measure
        self._memory_key = memory_key
        self._job_rows = job_rows
        self._draft_tokens = verifier.policy.draft_tokens
        self._first = first = layouts[0]
        # The curve that the verifier came with was measured where the target was started.
        self._curves = {first.target_cores: verifier.policy.verify_seconds}
        self._at_start = verifier.policy.verify_seconds.as_now()
        self._measured_at_work = False
        self._quick_curves: dict[tuple[int, ...], CostCurve] = {}
        self._forecast_check = ForecastCheck()
        self._verifying = self._verifying_at_start = 0.0
        self._doubt_after = ROUNDS_TO_DOUBT
        self._pause = min(FIRST_PAUSE, ROUNDS_BETWEEN_TRIALS)
        self._begin_comparison()
        self._rounds = 0
        self._trial: LayoutTrial | None = None
        self._only_first = False
        self._is_fixed = False
        self._plain = next((each for each in layouts if each.plain), None)
        self._tried = [each.name for each in layouts if not each.plain]
        self._current = self._chosen = first
        self._only_one = len(layouts) == 1
        known = recall(memory_key, self._tried) if memory_key and not self._only_one else None
        if known is not None and not known.holds_at(self._plain_pass):
            known = None
        self._switch_to(self._layouts[known.took] if known else first)
        if known is not None:
            self._record_choice(known, "measured earlier")
            if known.took != first.name:
                # The trial that found it may have been disturbed, and nothing is known of the first one's draft now.
                self._pause = ROUNDS_FROM_MEMORY
        elif not self._only_one:
            self._begin_trial()

    def fix(self, name: str | None) -> None:
        """Use this layout, whatever is known of others; None goes back to the one chosen or being tried."""
        if name is None:
            wanted = self._chosen if self._trial is None else self._layouts[self._trial.current]
        else:
            wanted = self._layouts.get(name, self._current)
        self._is_fixed = name is not None
        if wanted is not self._current:
            self._switch_to(wanted)

    def costs(self) -> dict[str, Any]:
        """Passes as first measured with everything up and as they are now; what rounds took against their forecast."""
        curve = self._curves[self._first.target_cores]
        return {
            "verify_at_start": self._at_start.points,
            "verify": curve.points,
            "draft": self._draft.costs(),
            "transport": self._draft.transport,
            **curve.record(),
            "rounds": self._forecast_check.record(),
        }

    def after_round(self, seconds: float) -> None:
        """To be called after each round, with the time since the end of the one before."""
        done = self._verifier.last_round
        if done is None:
            return
        self._forecast_check.observe(self._current, done, seconds)
        # On cores of its own the draft drafts ahead meanwhile, and would be at work beside what is measured.
        if not self._measured_at_work and self._draft.ready and self._current.kind is LayoutKind.SEQUENTIAL:
            self._measure_at_work(done.live)
        if self._is_fixed or self._only_one:
            return
        self._rounds += 1
        if done.steady and self._current.target_cores == self._first.target_cores:
            self._verifying += done.verifying
            self._verifying_at_start += self._at_start(done.fed)
        if self._trial is None:
            self._compare(done, seconds)
            if self._rounds >= self._pause and self._trial_tokens(done.live) <= MOST_SHARE * self._work_left:
                self._begin_trial()
                self._switch_to(self._first)
            return
        if not self._draft.ready:
            return
        self._trial.observe(done, seconds)
        if self._trial.over:
            others = self._worth_trying(self._trial) if self._only_first else []
            self._only_first = False
            if not others:
                self._end_trial(self._trial)
                return
            self._trial = LayoutTrial([self._first.name, *others], self._plain_name)
        wanted = self._layouts[self._trial.current]
        if wanted is not self._current:
            self._switch_to(wanted)

    def _measure_at_work(self, rows: int) -> None:
        """Passes as they are once everything is up: the first measurement had the draft being loaded on the same cores, and
        of the points that no round visits it is all that is known.

        Left out where it would take too much of the job.
        """
        self._measured_at_work = True
        curve, most = self._curves[self._current.target_cores], max(LEAST_FED, MOST_FED_A_ROW * rows)
        sizes = [rows << doubled for doubled in range(most.bit_length()) if rows << doubled <= most]
        # Twice: a pass that was disturbed makes candidates look dear, which are then never asked for. Where time is short
        # only the last: each of the others is bounded by those over more, and all beyond is judged by that one.
        most_seconds = AT_WORK_SHARE * self._work_left * curve(rows) / rows
        tries = (sizes * 2, [*sizes, sizes[-1]])
        sizes = next((each for each in tries if sum(map(curve, each)) <= most_seconds), [])
        if not sizes:
            return
        # What was asked for is waited for first.
        self._verifier.set_layout(self._current.kind, self._verifier.policy.draft_tokens)
        with self._verifier.statistics.changing_layout():
            fresh = curve.measured_anew(self._measure(sizes).points)
        self._curves[self._current.target_cores] = self._verifier.policy.verify_seconds = fresh
        if self._current.target_cores == self._first.target_cores:
            self._at_start = fresh.as_now()
            self._verifying = self._verifying_at_start = 0.0

    def _begin_trial(self) -> None:
        """Begin with the first layout alone."""
        self._rounds = 0
        self._trial, self._only_first = LayoutTrial([self._first.name], cycles=1), True
        self._verifying = self._verifying_at_start = 0.0

    def _end_trial(self, trial: LayoutTrial) -> None:
        rates = trial.rates
        if self._plain is not None and self._plain.name not in rates:
            rates[self._plain.name] = self._plain_rate(trial.rows, trial.reading)
        # A number of candidates that the user fixed is not put to the vote.
        allowed = {name: rate for name, rate in rates.items() if name in self._tried or self._draft_tokens is None}
        took = best_of(allowed, self._plain_name) or self._first.name
        self._begin_comparison()
        self._trial, self._rounds = None, 0
        again = self.record is not None and self.record.took == took
        self._chosen = self._layouts[took]
        # Plain rounds say nothing of a draft that was left out.
        first = ROUNDS_TO_DOUBT if self._chosen.plain else FIRST_PAUSE
        self._pause = min(max(first, 2 * self._pause) if again else first, ROUNDS_BETWEEN_TRIALS)
        if self._chosen is not self._current:
            self._switch_to(self._chosen)
        found = RememberedLayout(took, {name: round(rate, 3) for name, rate in rates.items()}, self._plain_pass)
        self._record_choice(found, "measured on this job's rows")
        # That a draft does not pay holds for this text only, and is found out anew for nothing.
        if self._memory_key and not self._chosen.plain:
            remember(self._memory_key, self._tried, found)

    @property
    def _plain_pass(self) -> float:
        """Seconds of a pass of a full batch without candidates, as passes have lately been."""
        return self._at_start(self._verifier.batch) * self._slowdown

    @property
    def _plain_name(self) -> str | None:
        return None if self._plain is None else self._plain.name

    def _plain_rate(self, rows: int, reading: float) -> float:
        """Tokens a second without a draft: what its passes took at the start, as much slower as passes have become."""
        return 1.0 / (self._at_start(rows) * self._slowdown / rows + reading)

    @property
    def _slowdown(self) -> float:
        """How much longer passes on the first layout's cores have lately taken than at the start."""
        return self._verifying / self._verifying_at_start if self._verifying_at_start else 1.0

    def _worth_trying(self, trial: LayoutTrial) -> list[str]:
        """The others that might be faster than the first, if they can be looked at and tried for little."""
        rate, rows = trial.decoding[self._first.name], trial.rows
        left = self._work_left / rate
        worth = []
        for name in self._tried[1:]:
            other = self._layouts[name]
            measuring = 0.0 if other.target_cores in self._curves else BUDGET_SECONDS
            if self._trial_tokens(rows) / rate + measuring > MOST_SHARE * left:
                continue
            curve = self._quick_curve(other.target_cores, MOST_SHARE * left)
            if curve is not None and self._best_possible_rate(trial, curve) > WORTH_TRYING * rate:
                worth.append(name)
        if self._plain is not None and self._draft_tokens is None:
            low, high = NEAR
            if low * rate < self._plain_rate(rows, 0.0) < high * rate and left > 0:
                worth.append(self._plain.name)
        return worth

    @property
    def _work_left(self) -> float:
        """Tokens that are still to be written, as far as it is known."""
        return self._verifier.work_left(self._job_rows)

    def _trial_tokens(self, rows: int) -> float:
        """What it costs to try something that turns out hopeless, as if it got half as much done."""
        return (WARM_UP_ROUNDS + rounds_to_give_up(rows)) * rows / 2

    def _quick_curve(self, cores: tuple[int, ...], most_seconds: float) -> CostCurve | None:
        """Roughly what passes take on these cores; None where it would take too long to see."""
        known = self._curves.get(cores) or self._quick_curves.get(cores)
        if known is not None:
            return known
        counts = QUICK_PASSES if self._verifier.batch > 1 else QUICK_PASSES_OF_ONE_ROW
        fewer = max(1.0, len(self._first.target_cores) / max(1, len(cores)))
        if sum(map(self._at_start, counts)) * fewer > most_seconds:
            return None
        with self._verifier.statistics.changing_layout():
            self._move_target(cores)
            self._quick_curves[cores] = self._measure(counts).sharing_like(self._at_start)
            self._move_target(self._current.target_cores)
        return self._quick_curves[cores]

    def _best_possible_rate(self, trial: LayoutTrial, curve: CostCurve) -> float:
        """Tokens a second if the draft and the way to it cost nothing."""
        counts = range(MOST_CANDIDATES + 1) if self._draft_tokens is None else (self._draft_tokens,)
        return max(trial.rows * trial.expected_tokens(count) / curve(trial.rows * (count + 1)) for count in counts)

    def _begin_comparison(self) -> None:
        self._compared_rounds = 0
        self._spent_seconds = self._plain_seconds = self._first_layout_seconds = 0.0

    def _compare(self, done: Round, seconds: float) -> None:
        """See whether the rounds since the choice took longer than the same tokens would have with the first layout,
        or without a draft.

        A choice may have been made in a disturbed minute, or on rows that took the draft's candidates when those now under
        way do not; on cores of its own such a draft costs the target its share of them.
        """
        if self._plain is None or self._chosen.plain or not done.steady:
            return
        self._compared_rounds += 1
        self._spent_seconds += seconds
        # As passes were at the start: what they have become is known of the first cores only as long as they are used, and
        # may be of a disturbed second. A doubt that is mistaken costs a few rounds, and the next one comes later.
        self._plain_seconds += done.gained / done.live * self._at_start(done.live)
        draft_cost = self._draft.draft_cost(len(done.proposed), self._first.name) or DraftCost(0.0)
        most = max(done.proposed, default=0)
        # A layout that was remembered has no measured draft of the first one beside it: that one is tried instead.
        drafting = draft_cost.hop + (draft_cost.seconds(most) or math.inf) if most else 0.0
        self._first_layout_seconds += self._at_start(done.fed) + drafting
        if self._compared_rounds < self._doubt_after:
            return
        moved = self._chosen.target_cores != self._first.target_cores
        loses_to_first = moved and self._spent_seconds > self._first_layout_seconds
        loses_to_plain = self._draft_tokens is None and self._spent_seconds > self._plain_seconds
        doubtful = loses_to_first or loses_to_plain
        self._doubt_after = min(2 * self._doubt_after, ROUNDS_BETWEEN_TRIALS) if doubtful else ROUNDS_TO_DOUBT
        if doubtful:
            self._revert(first_is_better=loses_to_first and self._first_layout_seconds <= self._plain_seconds)
        self._begin_comparison()

    def _revert(self, first_is_better: bool) -> None:
        """The choice was wrong: back to the first layout, to stay there if it is better, else to find out anew."""
        was, rates = self._chosen, self.record.rates if self.record is not None else {}
        self._switch_to(self._first)
        if not first_is_better:
            self._begin_trial()
            return
        self._rounds, self._pause = 0, min(FIRST_PAUSE, ROUNDS_BETWEEN_TRIALS)
        found = RememberedLayout(self._first.name, rates, self._plain_pass)
        self._record_choice(found, f"{was.name} was slower in the long run")
        if self._memory_key:
            remember(self._memory_key, self._tried, found)

    def _switch_to(self, layout: Layout) -> None:
        self._verifier.set_layout(layout.kind, 0 if layout.plain else self._draft_tokens)
        with self._verifier.statistics.changing_layout():
            if layout.target_cores and layout.target_cores != self._current.target_cores:
                self._move_target(layout.target_cores)
            self._current = layout
            self._draft.set_layout(layout)
            curve = self._curves.get(layout.target_cores)
            if curve is None:
                curve = self._curves[layout.target_cores] = self._measure(()).sharing_like(self._at_start)
            self._verifier.policy.verify_seconds = curve

    def _record_choice(self, found: RememberedLayout, how: str) -> None:
        took = self._chosen = self._layouts[found.took]
        others = sorted((name for name in found.rates if name != found.took), key=found.rates.__getitem__, reverse=True)
        against = ", ".join(f"{name} {found.rates[name]:,.0f}" for name in others)
        rate = found.rates.get(found.took)
        sentence = f"layout {describe(took)}" + (f": {rate:,.0f} tokens/s" if rate is not None else "")
        sentence += f" against {against}" if against else ""
        untried = [name for name in self._tried if name not in found.rates]
        how += f"; not tried: {', '.join(untried)}" if untried else ""
        self.record = LayoutRecord(
            found.took,
            found.rates,
            f"{sentence} ({how}{self._more_rows(found.rates)})",
            took.target_cores,
            took.draft_cores,
        )

    def _more_rows(self, rates: dict[str, float]) -> str:
        """What the honest rival would do: no draft, and twice as many rows at once. Prompts cost as much as they did."""
        rows = self._verifier.batch
        if self._plain is None or self._plain.name not in rates:
            return ""
        curve = self._curves[self._first.target_cores]
        seconds = 1.0 / rates[self._plain.name] - curve(rows) / rows + curve(2 * rows) / (2 * rows)
        if seconds <= 0.0:
            return ""
        return f"; without a draft and with --batch {2 * rows} it would be about {1.0 / seconds:,.0f}"


def describe(layout: Layout) -> str:
    on_its_own = layout.draft_cores and layout.draft_cores != layout.target_cores
    return f'"{layout.name}"' + (f" with {len(layout.draft_cores)} core(s) for the draft" if on_its_own else "")
