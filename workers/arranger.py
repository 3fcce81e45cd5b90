"""How a target and its draft share their cores: tried on the first rows of a job, then kept, and looked at again later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.workers.costs import CostCurve
from outrider.workers.layout_memory import Remembered, recall, remember
from outrider.workers.messages import Arrangement, LayoutRecord
from outrider.workers.trial import Round, Trial
from outrider.workers.verify import Verifier

# After so many rounds the arrangements are tried again: rows and neighbours change. The pauses double while nothing does.
FIRST_PAUSE = 1024
ROUNDS_BETWEEN_TRIALS = 4096
# Over so many rounds a draft must have been worth its while, or they are tried again at once. The pauses double.
ROUNDS_TO_DOUBT = 128


class Draft(Protocol):
    """The draft's side of an arrangement."""

    @property
    def ready(self) -> bool:
        """Whether there is a draft to try anything with."""

    def settle(self, arrangement: Arrangement) -> None:
        """Move the draft there, now or as soon as it comes up."""


class Arranger:
    """Belongs to the verifying thread. ``move_target`` takes the target to other cores, ``measure`` its costs there."""

    def __init__(
        self,
        verifier: Verifier,
        draft: Draft,
        arrangements: Sequence[Arrangement],
        move_target: Callable[[Sequence[int]], None],
        measure: Callable[[], CostCurve],
        memory_key: str = "",
    ) -> None:
        self.record: LayoutRecord | None = None
        self._verifier = verifier
        self._draft = draft
        self._arrangements = {each.name: each for each in arrangements}
        self._move_target = move_target
        self._measure = measure
        self._memory_key = memory_key
        self._draft_tokens = verifier.draft_tokens
        first = arrangements[0]
        # The curve that the verifier came with was measured where the target was started.
        self._curves = {first.target_cores: verifier.verify_seconds}
        self._rounds = 0
        self._pause = min(FIRST_PAUSE, ROUNDS_BETWEEN_TRIALS)
        self._trial: Trial | None = None
        self._holding = False
        # A number of candidates that the user fixed is not put to the vote.
        self._tried = [each.name for each in arrangements if not each.plain or self._draft_tokens is None]
        self._plain = next((each for each in arrangements if each.plain and each.name in self._tried), None)
        self._doubt_after = ROUNDS_TO_DOUBT
        self._begin_watch()
        self._current = self._chosen = first
        known = recall(memory_key, self._tried) if memory_key and len(self._tried) > 1 else None
        self._take(self._arrangements[known.took] if known else first)
        if known is not None:
            self._settle(known, "measured earlier")
        elif len(self._tried) > 1:
            self._begin_trial()

    def hold(self, name: str | None) -> None:
        """Use this arrangement, whatever is known of others; None goes back to the one chosen or being tried."""
        if name is None:
            wanted = self._chosen if self._trial is None else self._arrangements[self._trial.current]
        else:
            wanted = self._arrangements.get(name, self._current)
        self._holding = name is not None
        if wanted is not self._current:
            self._take(wanted)

    def after_round(self, seconds: float) -> None:
        """To be called after each round, with the time since the end of the one before."""
        done = self._verifier.last_round
        if done is None or self._holding or len(self._tried) == 1:
            return
        self._rounds += 1
        if self._trial is None:
            doubtful = self._loses_to_plain(done, seconds)
            if self._rounds >= self._pause or doubtful:
                self._rounds = 0
                self._take(self._arrangements[self._begin_trial().current])
            return
        if not self._draft.ready:
            return
        self._trial.observe(done, seconds)
        chosen = self._arrangements[self._trial.current]
        if chosen is not self._current:
            self._take(chosen)
        if self._trial.over:
            found = Remembered(chosen.name, {name: round(rate, 3) for name, rate in self._trial.rates.items()})
            self._trial, self._rounds = None, 0
            longer = 2 * self._pause if chosen is self._chosen else FIRST_PAUSE
            self._pause = min(longer, ROUNDS_BETWEEN_TRIALS)
            self._begin_watch()
            self._settle(found, "measured on this job's rows")
            if self._memory_key:
                remember(self._memory_key, self._tried, found)

    def _begin_trial(self) -> Trial:
        self._trial = Trial(self._tried, None if self._plain is None else self._plain.name)
        return self._trial

    def _begin_watch(self) -> None:
        self._watched, self._spent, self._spent_plainly = 0, 0.0, 0.0

    def _loses_to_plain(self, done: Round, seconds: float) -> bool:
        """Whether the rounds since the choice took longer than the same tokens would have without a draft.

        A choice may have been made in a disturbed minute, or on rows that took the draft's candidates when those now under
        way do not; on cores of its own such a draft costs the target its share of them.
        """
        if self._plain is None or self._chosen.plain or not done.steady:
            return False
        self._watched += 1
        self._spent += seconds
        committed = done.accepted + len(done.proposed)
        self._spent_plainly += committed / done.live * self._curves[self._plain.target_cores](done.live)
        if self._watched < self._doubt_after:
            return False
        loses = self._spent > self._spent_plainly
        self._doubt_after = min(2 * self._doubt_after, ROUNDS_BETWEEN_TRIALS) if loses else ROUNDS_TO_DOUBT
        self._begin_watch()
        return loses

    def _take(self, arrangement: Arrangement) -> None:
        self._verifier.arrange(arrangement.overlap, 0 if arrangement.plain else self._draft_tokens)
        with self._verifier.tally.arranging():
            if arrangement.target_cores and arrangement.target_cores != self._current.target_cores:
                self._move_target(arrangement.target_cores)
            self._current = arrangement
            self._draft.settle(arrangement)
            curve = self._curves.get(arrangement.target_cores)
            if curve is None:
                curve = self._curves[arrangement.target_cores] = self._measure()
            self._verifier.verify_seconds = curve

    def _settle(self, found: Remembered, how: str) -> None:
        took = self._chosen = self._arrangements[found.took]
        others = sorted((name for name in found.rates if name != found.took), key=found.rates.__getitem__, reverse=True)
        against = ", ".join(f"{name} {found.rates[name]:,.0f}" for name in others)
        rate = found.rates.get(found.took)
        sentence = f"layout {describe(took)}" + (f": {rate:,.0f} tokens/s" if rate is not None else "")
        sentence += f" against {against}" if against else ""
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
        plain = next((each for each in self._arrangements.values() if each.plain and each.name in rates), None)
        if plain is None:
            return ""
        curve = self._curves[plain.target_cores]
        seconds = 1.0 / rates[plain.name] - curve(rows) / rows + curve(2 * rows) / (2 * rows)
        if seconds <= 0.0:
            return ""
        return f"; without a draft and with --batch {2 * rows} it would be about {1.0 / seconds:,.0f}"


def describe(arrangement: Arrangement) -> str:
    where = ""
    if arrangement.target_cores and arrangement.draft_cores and not arrangement.plain:
        same = arrangement.target_cores == arrangement.draft_cores
        where = " on shared cores" if same else f" with {len(arrangement.draft_cores)} core(s) for the draft"
    return f'"{arrangement.name}"{where}'
