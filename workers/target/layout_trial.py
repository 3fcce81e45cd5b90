"""Which layout is the fastest: tried on the job's own rows, whose texts do not depend on it. Pure.

Each layout is given a few rounds in turn, twice over, since a machine's speed drifts. Which of them meets an easy stretch
of text, with many candidates and a high acceptance, is luck. So for each layout with a draft a line is fitted,

    seconds of a round = rows * a + candidates * b,

and layouts are compared by what the rounds of all of them together would have taken by their lines. Tokens are expected by
the acceptance seen in all rounds. The cost of reading prompts is added, in proportion to the prompts that this job reads.
Plain decoding wins unless a layout is clearly faster: where they tie, the draft is of no use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.workers.speculation import Survival
from outrider.workers.target.forecast import Round

CYCLES = 2
# The least length of a phase, after warm-up rounds, in which caches are filled and the draft reads new tokens.
PHASE_SECONDS = 0.25
PHASE_ROUNDS = 8
WARM_UP_ROUNDS = 3
# A layout is given up, even within its phase, when its rate is below this share of the best one.
HOPELESS = 0.8
ROUNDS_TO_GIVE_UP = 4
# A layout with a draft is judged when rounds * rows reaches this. Eight rounds of one row are luck: five of eight such
# trials left out a draft that makes the job half as fast again.
PHASE_ROW_ROUNDS, ROW_ROUNDS_TO_GIVE_UP = 32, 16
# The least gain by a draft; two measurements of the same layout differ by as much.
CLEARLY = 1.03
# The least variance of the number of candidates a row for which a line can be fitted.
LEAST_SPREAD = 0.1
# A trial starts over when the number of rows changes by more than this share.
ROWS_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class _Pass:
    rows: int
    candidates: int
    seconds: float


@dataclass(slots=True)
class _Score:
    """``seconds`` and candidates (``proposed``) of ``rounds`` without prompts; ``reading``: seconds added by ``read``
    prompt tokens."""

    seconds: float = 0.0
    rounds: int = 0
    proposed: Counter[int] = field(default_factory=Counter)
    passes: list[_Pass] = field(default_factory=list)
    reading: float = 0.0
    read: int = 0

    def fit(self) -> tuple[float, float] | None:
        """(a, b): seconds of a row without candidates, and of each candidate; None where the number of candidates hardly
        varied."""
        rows = sum(each.rows for each in self.passes)
        mean = sum(each.candidates for each in self.passes) / rows
        usual = sum(each.seconds for each in self.passes) / rows
        spread = sum(each.rows * (each.candidates / each.rows - mean) ** 2 for each in self.passes)
        if spread < LEAST_SPREAD * rows:
            return None
        together = sum((each.candidates / each.rows - mean) * (each.seconds - each.rows * usual) for each in self.passes)
        slope = min(max(0.0, together / spread), usual / mean)
        return usual - slope * mean, slope


def rounds_to_give_up(rows: int) -> int:
    """After how many rounds a layout with a draft may be given up, with this many rows."""
    return max(ROUNDS_TO_GIVE_UP, math.ceil(ROW_ROUNDS_TO_GIVE_UP / rows))


def best_of(rates: Mapping[str, float], plain: str | None) -> str | None:
    """The fastest; ``plain``, unless another is clearly faster."""
    fastest = max(rates, key=rates.__getitem__, default=None)
    if fastest is not None and plain is not None and rates[fastest] < CLEARLY * rates.get(plain, 0.0):
        return plain
    return fastest


class LayoutTrial:
    def __init__(self, names: Sequence[str], plain: str | None = None, cycles: int = CYCLES) -> None:
        """``plain`` is the name of the layout without a draft."""
        self._names = list(names)
        self._plain = plain
        self._cycles = cycles
        self._rows: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._scores = {name: _Score() for name in self._names}
        self._survival = Survival()
        self._read = self._committed = 0
        self._phases = [name for _ in range(self._cycles) for name in self._names]
        self._phase = 0
        self._begin_phase()

    def _begin_phase(self) -> None:
        self._rounds = 0
        self._seconds = 0.0

    @property
    def over(self) -> bool:
        return self._phase == len(self._phases)

    @property
    def current(self) -> str:
        """The layout to use now: the one being tried, and the best once the trial is over."""
        return self.best if self.over else self._phases[self._phase]

    @property
    def best(self) -> str:
        return best_of(self.rates, self._plain) or self._names[0]

    @property
    def rates(self) -> dict[str, float]:
        """Expected tokens a second of the layouts tried so far, prompts included."""
        scores = self._with_rounds
        # A layout in which no prompt was read gets the mean cost of the others.
        all_read = sum(score.read for score in scores.values())
        usual = sum(score.reading for score in scores.values()) / all_read if all_read else 0.0
        decoding = self.decoding
        rates = {}
        for name, score in scores.items():
            reading = score.reading / score.read if score.read else usual
            rates[name] = 1.0 / (1.0 / decoding[name] + reading * self._read_per_token)
        return rates

    @property
    def decoding(self) -> dict[str, float]:
        """Expected tokens a second in rounds without prompts."""
        scores = self._with_rounds
        expected = {
            name: sum(count * self.expected_tokens(each) for each, count in score.proposed.items())
            for name, score in scores.items()
        }
        rates = {name: expected[name] / score.seconds for name, score in scores.items()}
        drafting = {name: score for name, score in scores.items() if any(score.proposed)}
        fits = {name: score.fit() for name, score in drafting.items()}
        rows = sum(each.rows for score in drafting.values() for each in score.passes)
        candidates = sum(each.candidates for score in drafting.values() for each in score.passes)
        tokens = sum(expected[name] for name in drafting)
        for name, fit in fits.items():
            if fit is not None and None not in fits.values():
                rates[name] = tokens / (fit[0] * rows + fit[1] * candidates)
        return rates

    def expected_tokens(self, candidates: int) -> float:
        """The expected tokens of a row in a round with this many candidates, by the acceptance in all rounds of this
        trial."""
        return self._survival.expected_tokens(candidates)

    @property
    def rows(self) -> int:
        """How many rows there were at once."""
        return self._rows or 1

    @property
    def reading(self) -> float:
        """Seconds of reading prompts for each token written."""
        read = sum(score.read for score in self._scores.values())
        return sum(score.reading for score in self._scores.values()) / read * self._read_per_token if read else 0.0

    @property
    def _with_rounds(self) -> dict[str, _Score]:
        return {name: score for name, score in self._scores.items() if score.seconds > 0.0}

    @property
    def _read_per_token(self) -> float:
        return self._read / self._committed if self._committed else 0.0

    def observe(self, round: Round, seconds: float) -> None:
        """A round of the current layout, and the time since the end of the one before."""
        if self.over:
            return
        if self._rows is None or abs(round.live - self._rows) > ROWS_TOLERANCE * self._rows:
            self._rows = round.live
            self._begin()
        self._read += round.read
        self._committed += round.gained
        score = self._scores[self.current]
        if round.read and score.rounds:
            score.read += round.read
            score.reading += max(0.0, seconds - score.seconds / score.rounds)
        if not round.steady:
            return
        self._rounds += 1
        if self._rounds <= WARM_UP_ROUNDS:
            return
        self._seconds += seconds
        score.seconds += seconds
        score.rounds += 1
        score.proposed.update(round.proposed)
        score.passes.append(_Pass(len(round.proposed), sum(round.proposed), seconds))
        for proposed, accepted in zip(round.proposed, round.accepted, strict=True):
            self._survival.observe(proposed, accepted)
        self._survival.observe_runners_up(sum(map(bool, round.proposed)), round.runners_up_accepted)
        counted = self._rounds - WARM_UP_ROUNDS
        if counted >= self._rounds_to_give_up and self._is_hopeless(self.current):
            self._phases[self._phase + 1 :] = [name for name in self._phases[self._phase + 1 :] if name != self.current]
        elif counted < self._phase_rounds or self._seconds < PHASE_SECONDS:
            return
        self._phase += 1
        self._begin_phase()
        if self._phase == len(self._names):
            self._phases[self._phase :] = [name for name in self._phases[self._phase :] if not self._is_hopeless(name)]

    @property
    def _phase_rounds(self) -> int:
        # Plain decoding gains one token a row, whatever the text, so few rounds are enough.
        return PHASE_ROUNDS if self.current == self._plain else max(PHASE_ROUNDS, math.ceil(PHASE_ROW_ROUNDS / self.rows))

    @property
    def _rounds_to_give_up(self) -> int:
        return ROUNDS_TO_GIVE_UP if self.current == self._plain else rounds_to_give_up(self.rows)

    def _is_hopeless(self, name: str) -> bool:
        rates = self.rates
        return rates[name] < HOPELESS * max(rates.values())
