"""The draft model's loop: it answers a target's requests, and may run ahead of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from outrider.workers.draft.confidence import Confidence, Doubt, SecondBest
from outrider.workers.engines.costs import Recent
from outrider.workers.engines.engine import Engine, Feed, Run
from outrider.workers.engines.prefixes import Prefixes
from outrider.workers.messages import Advance, Ask, Candidates, Sampling

# Prompts enter the draft's cache in passes over so many tokens in all: what lies between its small matrices then stays in
# the processor's caches.
PREFILL_TOKENS = 256
# A step that feeds a row more than this reads a text, which says nothing of what a candidate costs.
MOST_FED = 2
# A step that feeds more than this is mostly reading.
MUCH_FED = 32
# Running ahead beyond candidates that are this unlikely to hold is not worth the power.
LEAST_REACH = 0.05


@dataclass(slots=True)
class DraftRow:
    """``committed`` is what the target has decided, ``guessed`` how the draft goes on from there.

    ``leads`` say how clear each guess was, ``chances`` what that made of it when it was guessed (``doubt`` is how far to
    trust leads in this row), and ``reach`` is the chance that all of them hold. ``runners_up`` are what would have been
    guessed second (-1: not known). The engine's cache holds the first ``cached`` tokens of the two in a row. The last guess
    has not been fed, so it is never among them.
    """

    committed: list[int] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    runners_up: list[int] = field(default_factory=list)
    reach: float = 1.0
    doubt: Doubt = field(default_factory=Doubt)
    cached: int = 0
    limit: int = 0
    end_tokens: Collection[int] = ()

    def uncached(self) -> list[int]:
        beyond = self.cached - len(self.committed)
        return self.guessed[beyond:] if beyond >= 0 else self.committed[self.cached :] + self.guessed


class Drafter:
    """Answers a target's requests. Whatever it says is a hint, so it may forget anything at any time."""

    def __init__(self, engine: Engine, end_tokens: Collection[int], prefix_tokens: int = 0) -> None:
        self.engine = engine
        self._prefixes = Prefixes(engine, prefix_tokens)
        self.end_tokens = frozenset(end_tokens)
        self.confidence = Confidence()
        self.second_best = SecondBest()
        self._steps = Recent()
        self._reading = Recent()
        self._passing = 0.0
        self._rows: dict[int, DraftRow] = {}
        self._asked: list[int] = []

    def propose(self, ask: Ask) -> Candidates:
        started, self._passing = time.perf_counter(), 0.0
        for key in ask.closed:
            self._close(key)
        self._asked = [advance.key for advance in ask.rows if self._advance(advance)]
        forgotten = tuple(advance.key for advance in ask.rows if advance.key not in self._rows)
        rows = {key: self._rows[key] for key in self._asked}
        self._go_on({key: self._wanted(row, row.limit, ask.keep) for key, row in rows.items()}, ask.keep, ask.a_step)
        tokens = {key: self._worth_sending(self._rows[key], ask) for key in self._asked}
        runners_up = {}
        for key, guesses in tokens.items():
            if found := self._runners_up(self._rows[key], len(guesses), ask.runner_up_chances):
                runners_up[key] = found
        seconds = time.perf_counter() - started
        prices = (self._steps(len(self._asked)), self._reading(1), max(0.0, seconds - self._passing))
        return Candidates(ask.round, tokens, forgotten, seconds, *prices, runners_up)

    def run_ahead(self) -> bool:
        """One step further for the rows of the last request, as if the target were going to accept everything.

        A second set of candidates and the target's own token between the two sets are as far as it pays to go. False
        where there is nothing to do.
        """
        rows = {key: self._rows[key] for key in self._asked}
        return self._go_on({key: min(1, self._wanted(row, 2 * row.limit + 1, LEAST_REACH)) for key, row in rows.items()})

    def _advance(self, advance: Advance) -> bool:
        """Take in what the target has committed. False where this row's history here is not the target's."""
        if advance.start == 0 and advance.sampling is not None:
            self._open(advance, advance.sampling)
            return True
        row = self._rows.get(advance.key)
        if row is None or len(row.committed) != advance.start:
            self._close(advance.key)
            return False
        held = _common_prefix(row.guessed, advance.tokens)
        for index, (guess, token) in enumerate(zip(row.guessed[: held + 1], advance.tokens, strict=False)):
            lead = row.leads[index]
            row.doubt.learn(self.confidence.chance(lead), guess == token)
            self.confidence.learn(lead, guess == token)
            if guess != token and row.runners_up[index] >= 0:
                self.second_best.learn(row.runners_up[index] == token)
        # What was guessed beyond the committed tokens stays good as long as all of them were guessed right.
        keep_from = held if held == len(advance.tokens) else len(row.guessed)
        del row.guessed[:keep_from], row.leads[:keep_from], row.chances[:keep_from], row.runners_up[:keep_from]
        row.reach = prod(row.chances)
        row.committed.extend(advance.tokens)
        keep = min(row.cached, advance.start + held, len(row.committed) - 1) if not row.guessed else row.cached
        if keep < row.cached:
            row.cached = keep
            self.engine.truncate(advance.key, keep)
        row.limit = self._room(row, advance.limit)
        return True

    def _open(self, advance: Advance, sampling: Sampling) -> None:
        """Begin a row anew, with as much of its prompt as another row has read."""
        self._close(advance.key)
        prompt = advance.tokens[: advance.prompt_length]
        shared = self._prefixes.open(advance.key, prompt, sampling)
        if shared is None:
            # A row opened just before it has the same beginning: what that one is to read anyway, it reads now.
            self._read_on()
            shared = self._prefixes.open(advance.key, prompt, sampling, wait=False) or 0
        ends = self.end_tokens if sampling.end_tokens is None else sampling.end_tokens
        row = self._rows[advance.key] = DraftRow(list(advance.tokens), cached=shared, end_tokens=ends)
        row.limit = self._room(row, advance.limit)

    def _read_on(self) -> None:
        """Bring all but the last token of every text into the cache."""
        self._read([key for key, row in self._rows.items() if row.limit], 0)

    def _read(self, keys: Iterable[int], most_left: int) -> None:
        """Bring these rows' texts into the cache, in their order, until no more than so many tokens of all are left.

        The last token of each stays out: the engine is to choose what comes after it.
        """
        unread = {key: self._rows[key].uncached()[:-1] for key in keys}
        while sum(map(len, unread.values())) > most_left:
            feeds, room = [], PREFILL_TOKENS
            for key, tokens in unread.items():
                if piece := tokens[:room]:
                    feeds.append(Feed(key, piece, 0))
                    room -= len(piece)
                    del tokens[: len(piece)]
            self._feed(feeds)
            for feed in feeds:
                self._rows[feed.row].cached += len(feed.tokens)

    def _room(self, row: DraftRow, limit: int) -> int:
        if any(token >= self.engine.vocabulary for token in row.uncached()):
            return 0  # the target's vocabulary is the larger one, and this row uses it
        return max(0, min(limit, self.engine.context - len(row.committed)))

    def _wanted(self, row: DraftRow, count: int, least_reach: float) -> int:
        """How many more guesses there should be, so that there are ``count`` of them; none where they are of no use."""
        if row.limit == 0 or row.reach < least_reach or (row.guessed and row.guessed[-1] in row.end_tokens):
            return 0
        return max(0, min(count, self.engine.context - len(row.committed)) - len(row.guessed))

    def _worth_sending(self, row: DraftRow, ask: Ask) -> tuple[int, ...]:
        reach = 1.0
        for count, chance in enumerate(row.chances[: row.limit]):
            reach *= chance
            if chance < ask.confidence or reach < ask.keep:
                return tuple(row.guessed[:count])
        return tuple(row.guessed[: row.limit])

    def _runners_up(self, row: DraftRow, sent: int, chances: Sequence[float]) -> tuple[tuple[int, int], ...]:
        """Those that are likely enough to come in place of one of the guesses sent, likeliest first."""
        if not chances:
            return ()
        possible, reach = [], self.second_best.share
        for place, (chance, token) in enumerate(zip(row.chances[:sent], row.runners_up, strict=False)):
            if token >= 0:
                possible.append((reach * (1.0 - chance), place, token))
            reach *= chance
        possible.sort(reverse=True)
        likely = zip(possible, chances, strict=False)
        return tuple((place, token) for (chance, place, token), least in likely if chance > least)

    def _go_on(self, wanted: Mapping[int, int], least_reach: float = 0.0, least_sum: float = 0.0) -> bool:
        """So many more guesses for each of these rows, all together; fewer where they become too unlikely."""
        wanted = {key: count for key, count in wanted.items() if count}
        if not wanted:
            return False
        self._read(wanted, PREFILL_TOKENS)
        rows = {key: self._rows[key] for key in wanted}
        runs = [
            Run(key, row.uncached(), wanted[key], row.end_tokens, row.reach, row.doubt.factor) for key, row in rows.items()
        ]
        try:
            ran = self.engine.run(runs, self.confidence.trust(least_reach, least_sum))
        except Exception:
            # Some passes may have been made, and a row's account must not lag behind its cache.
            for run in runs:
                self.engine.truncate(run.row, self._rows[run.row].cached)
            raise
        for run, chosen in zip(runs, ran.chosen, strict=True):
            row = self._rows[run.row]
            # The last choice has not been fed.
            row.cached += len(run.tokens) + len(chosen.tokens) - 1
            row.guessed.extend(chosen.tokens)
            row.leads.extend(chosen.margins)
            row.runners_up.extend(chosen.runners_up or [-1] * len(chosen.tokens))
            # As the engine has reckoned with them.
            chances = [self.confidence.chance(lead, run.doubt) for lead in chosen.margins]
            row.chances.extend(chances)
            row.reach *= prod(chances)
        self._observe([len(run.tokens) for run in runs], ran.steps[0][1])
        for going_on, seconds in ran.steps[1:]:
            self._observe([1] * going_on, seconds)
        return True

    def _feed(self, feeds: Sequence[Feed]) -> None:
        """Read, and choose nothing."""
        started = time.perf_counter()
        self.engine.feed(feeds)
        seconds = time.perf_counter() - started
        self._passing += seconds
        self._observe_reading(sum(len(feed.tokens) for feed in feeds), seconds)

    def _observe(self, fed: Sequence[int], seconds: float) -> None:
        """Learn what a pass costs that fed so many tokens to each of its rows, and chose one for each."""
        self._passing += seconds
        if max(fed) <= MOST_FED:
            self._steps.observe(len(fed), seconds)
        else:
            self._observe_reading(sum(fed), seconds)

    def _observe_reading(self, tokens: int, seconds: float) -> None:
        if tokens > MUCH_FED:
            self._reading.observe(1, seconds / tokens)

    def _close(self, key: int) -> None:
        if self._rows.pop(key, None) is not None:
            self._prefixes.close(key)
            self._asked = [other for other in self._asked if other != key]


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    shorter = min(len(left), len(right))
    return next((index for index in range(shorter) if left[index] != right[index]), shorter)
