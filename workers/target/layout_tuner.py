"""Chooses the layout, how a target and its draft share their cores, by measurements on a job's own rows; repeated later.

A job begins with the first layout. The rate of plain decoding is computed from measured passes. Another layout is tried on
rounds of the job only if it would be faster with a draft that costs nothing, by the passes that the target takes on its
cores there; and measuring may cost no more than a small share of what is left of the job.
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

# Rounds until layouts are compared again, since rows and neighbours change. While the outcome stays, the pause doubles.
FIRST_PAUSE = 1024
ROUNDS_BETWEEN_TRIALS = 4096
# The share of the rest of the job that measuring may cost.
MOST_SHARE = 0.02
# A layout is tried only if its best possible rate exceeds that of the first layout by this factor.
WORTH_TRYING = 1.02
# Between these ratios to the measured rate of the first layout, the computed rate of plain decoding decides nothing, and it
# is tried on rounds as well.
NEAR = (0.87, 1.15)
# After this many rounds the chosen layout is compared with plain decoding and with the first layout; after as many a draft
# that was left out is tried again. The pauses double.
ROUNDS_TO_DOUBT = 64
# After this many rounds a remembered layout on other cores is compared with the first layout.
ROUNDS_FROM_MEMORY = 16
# During the job passes are measured over up to MOST_FED_A_ROW tokens a row, and over LEAST_FED at least, for at most this
# share of the job. Larger passes are rare, and are extrapolated.
MOST_FED_A_ROW, LEAST_FED, AT_WORK_SHARE = 4, 16, 0.015
# Numbers of tokens in the passes of a quick measurement on other cores.
QUICK_PASSES_OF_ONE_ROW, QUICK_PASSES = (1, 8), (1, 8, 32)


class Draft(Protocol):
    """The draft's side of a layout."""

    @property
    def ready(self) -> bool:
        """Whether there is a draft."""

    @property
    def transport(self) -> str | None:
        """The name of the transport to the draft."""

    def set_layout(self, layout: Layout) -> None:
        """Move the draft to this layout, now or as soon as it comes up."""

    def draft_cost(self, rows: int, layout: str | None = None) -> DraftCost | None:
        """The cost of candidates for that many rows in this layout, or in the current one."""

    def costs(self) -> dict[str, Any]:
        """For job.json: the draft's costs in each layout."""


class LayoutTuner:
    """Used by the verifying thread only. ``move_target`` moves the target to other cores, ``measure`` measures its passes.

    ``measure`` takes the numbers of tokens to measure, or none for a full measurement. ``job_rows`` is how many rows the
    job has in all (0: unknown).
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
        self._at_start = verifier.policy.verify_seconds.snapshot()
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
                # The trial that chose it may have been disturbed, and the first layout's draft has not been measured now.
                self._pause = ROUNDS_FROM_MEMORY
        elif not self._only_one:
            self._begin_trial()

    def fix(self, name: str | None) -> None:
        """Use this layout; None goes back to the one that was chosen or is being tried."""
        if name is None:
            wanted = self._chosen if self._trial is None else self._layouts[self._trial.current]
        else:
            wanted = self._layouts.get(name, self._current)
        self._is_fixed = name is not None
        if wanted is not self._current:
            self._switch_to(wanted)

    def costs(self) -> dict[str, Any]:
        """For job.json: pass times at the start and now, the draft's costs, and the seconds of rounds against their
        forecast."""
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
        # In an overlapped layout the draft would draft ahead during the measurement.
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
        """Measure passes again once the draft is up: during the first measurement it was being loaded on the same cores,
        and points that no round visits would keep these values.

        Skipped where it would take too much of the job.
        """
        self._measured_at_work = True
        curve, most = self._curves[self._current.target_cores], max(LEAST_FED, MOST_FED_A_ROW * rows)
        sizes = [rows << doubled for doubled in range(most.bit_length()) if rows << doubled <= most]
        # Each size twice, since after a disturbed measurement candidates look too expensive and are never asked for. Where
        # time is short only the largest: smaller sizes are bounded by it, and larger ones extrapolated from it.
        most_seconds = AT_WORK_SHARE * self._work_left * curve(rows) / rows
        tries = (sizes * 2, [*sizes, sizes[-1]])
        sizes = next((each for each in tries if sum(map(curve, each)) <= most_seconds), [])
        if not sizes:
            return
        # This waits for the candidates that were asked for, so that the draft is idle.
        self._verifier.set_layout(self._current.kind, self._verifier.policy.draft_tokens)
        with self._verifier.statistics.changing_layout():
            fresh = curve.measured_anew(self._measure(sizes).points)
        self._curves[self._current.target_cores] = self._verifier.policy.verify_seconds = fresh
        if self._current.target_cores == self._first.target_cores:
            self._at_start = fresh.snapshot()
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
        # With a number of candidates that the user fixed, plain decoding is not an option.
        allowed = {name: rate for name, rate in rates.items() if name in self._tried or self._draft_tokens is None}
        took = best_of(allowed, self._plain_name) or self._first.name
        self._begin_comparison()
        self._trial, self._rounds = None, 0
        again = self.record is not None and self.record.took == took
        self._chosen = self._layouts[took]
        # In plain rounds nothing is learned about the draft, so it is tried again sooner.
        first = ROUNDS_TO_DOUBT if self._chosen.plain else FIRST_PAUSE
        self._pause = min(max(first, 2 * self._pause) if again else first, ROUNDS_BETWEEN_TRIALS)
        if self._chosen is not self._current:
            self._switch_to(self._chosen)
        found = RememberedLayout(took, {name: round(rate, 3) for name, rate in rates.items()}, self._plain_pass)
        self._record_choice(found, "measured on this job's rows")
        # Plain is not remembered: that a draft does not pay holds for these texts only, and is computed anew for nothing.
        if self._memory_key and not self._chosen.plain:
            remember(self._memory_key, self._tried, found)

    @property
    def _plain_pass(self) -> float:
        """Seconds of a plain pass of a full batch, at the current pace."""
        return self._at_start(self._verifier.batch) * self._slowdown

    @property
    def _plain_name(self) -> str | None:
        return None if self._plain is None else self._plain.name

    def _plain_rate(self, rows: int, reading: float) -> float:
        """Tokens a second of plain decoding: pass times at the start * slowdown since then, and reading prompts."""
        return 1.0 / (self._at_start(rows) * self._slowdown / rows + reading)

    @property
    def _slowdown(self) -> float:
        """Recent pass times on the first layout's cores / those at the start."""
        return self._verifying / self._verifying_at_start if self._verifying_at_start else 1.0

    def _worth_trying(self, trial: LayoutTrial) -> list[str]:
        """The layouts that may be faster than the first one, if measuring and trying them costs little."""
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
        """The most tokens that are still to be written."""
        return self._verifier.work_left(self._job_rows)

    def _trial_tokens(self, rows: int) -> float:
        """The tokens lost by trying a layout that is given up, if it is half as fast."""
        return (WARM_UP_ROUNDS + rounds_to_give_up(rows)) * rows / 2

    def _quick_curve(self, cores: tuple[int, ...], most_seconds: float) -> CostCurve | None:
        """A rough measurement of passes on these cores; None where it would take longer than ``most_seconds``."""
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
        """Tokens a second with a draft that costs nothing: max over k of rows * expected_tokens(k) / pass_seconds(rows * (k
        + 1))."""
        counts = range(MOST_CANDIDATES + 1) if self._draft_tokens is None else (self._draft_tokens,)
        return max(trial.rows * trial.expected_tokens(count) / curve(trial.rows * (count + 1)) for count in counts)

    def _begin_comparison(self) -> None:
        self._compared_rounds = 0
        self._spent_seconds = self._plain_seconds = self._first_layout_seconds = 0.0

    def _compare(self, done: Round, seconds: float) -> None:
        """Compare the rounds since the choice with what the same tokens would have taken in the first layout and without a
        draft.

        The choice may have been made in a disturbed minute, or on rows with a higher acceptance than the current ones.
        """
        if self._plain is None or self._chosen.plain or not done.steady:
            return
        self._compared_rounds += 1
        self._spent_seconds += seconds
        # By pass times at the start: current ones of the first layout's cores are not known while others are used. A
        # mistaken doubt costs a few rounds, and the next comparison comes later.
        self._plain_seconds += done.gained / done.live * self._at_start(done.live)
        draft_cost = self._draft.draft_cost(len(done.proposed), self._first.name) or DraftCost(0.0)
        most = max(done.proposed, default=0)
        # With a remembered layout the first layout's draft may be unmeasured: then only plain decoding is compared with.
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
        """Go back to the first layout: keep it if it is better than the choice, else begin a new trial."""
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
        """The rate of plain decoding with twice the batch, for the sentence; reading prompts costs the same."""
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
