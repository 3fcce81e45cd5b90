"""The draft model's loop: it answers a target's requests, and may draft ahead of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, prod
from operator import mul

import numpy as np
from numpy.typing import NDArray

from outrider.workers.constraints.matching import EVERYTHING, LEAST_OPEN_SECONDS, Matching
from outrider.workers.draft.confidence import Confidence, MissFactor, RunnerUpShare
from outrider.workers.draft.constraints import Constraints
from outrider.workers.draft.parallel import OnePass
from outrider.workers.draft.window import SMALLEST, WHOLE, Prices, WindowChoice
from outrider.workers.engines.costs import Recent
from outrider.workers.engines.engine import Chosen, DecodeFeed, DecodeResult, Engine, Feed
from outrider.workers.engines.prefix_cache import PrefixCache
from outrider.workers.messages import Advance, DraftReply, DraftRequest, Sampling

# A pass of prefill has this many tokens in all, so that the activations of a small model stay in the processor's caches.
PREFILL_TOKENS = 256
# Passes that feed at most this many tokens a row are measured as steps; larger ones are prefill.
MOST_FED = 2
# Passes over more than this many tokens are measured as prefill.
MUCH_FED = 32
# A parallel draft's guess is accepted less often the more masks come before it: chances are counted for each of this many
# positions, the last of which stands for all later ones.
DEPTHS = 6
# The decay of ``ChoicesPerPass`` for each pass.
CHOICES_DECAY = 0.98
# No drafting ahead after candidates with a smaller reach.
LEAST_REACH = 0.05


@dataclass(slots=True)
class DraftRow:
    """``committed`` are the target's tokens, ``guessed`` the draft's own tokens after them.

    For each guess there is its margin, its chance by that margin, and its runner-up (-1: not known); ``reach`` is the
    product of the chances. ``miss_factor`` is the row's miss rate over the predicted one. The engine's cache holds the
    first ``cached`` tokens of ``committed`` + ``guessed``, never the last guess, which has not been fed.

    With a ``window`` the tokens before ``begin`` are skipped, and the text's first token is fed in the place of the token
    at ``begin``, since models use it as an attention sink. ``rounds`` counts the rounds in which the row had guesses.
    """

    committed: list[int] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    runners_up: list[int] = field(default_factory=list)
    reach: float = 1.0
    miss_factor: MissFactor = field(default_factory=MissFactor)
    cached: int = 0
    window: int = WHOLE
    begin: int = 0
    rounds: int = 0
    limit: int = 0
    end_tokens: Collection[int] = ()
    # The state of the row's grammar, guesses included; None without a grammar.
    matching: Matching | None = None
    prompt_length: int = 0
    # Seconds of the row's last mask; 0 where the next may differ.
    mask_seconds: float = 0.0

    def uncached(self) -> list[int]:
        beyond = self.cached - len(self.committed)
        if beyond >= 0:
            return self.guessed[beyond:]
        tokens = self.committed[self.cached :] + self.guessed
        if self.begin >= self.cached:
            tokens[self.begin - self.cached] = self.committed[0]
        return tokens


class ChoicesPerPass:
    """The mean number of choices of a row in a pass: more than 1 where the engine verifies tokens from earlier text in
    it."""

    def __init__(self) -> None:
        self._choices = self._passes = 1.0

    @property
    def usual(self) -> float:
        return max(1.0, self._choices / self._passes)

    def observe(self, choices: int, passes: int) -> None:
        decay = CHOICES_DECAY**passes
        self._choices, self._passes = self._choices * decay + choices, self._passes * decay + passes


class Drafter:
    """Answers a target's requests. Its answers are hints, so it may forget any row at any time."""

    def __init__(
        self,
        engine: Engine,
        end_tokens: Collection[int],
        prefix_tokens: int = 0,
        constraints: Constraints | None = None,
        one_pass: OnePass | None = None,
    ) -> None:
        """``one_pass``: the model is a parallel draft, which makes all candidates in one pass."""
        self.engine = engine
        self._learner = engine.learner
        self._skipper = engine.skipper
        self._windows = WindowChoice()
        self._one_pass = one_pass
        self._constraints = constraints
        self._prefix_cache = PrefixCache(engine, prefix_tokens)
        self.end_tokens = frozenset(end_tokens)
        self.confidence = Confidence()
        # For a parallel draft by the position of a guess, else one for all.
        self._confidences = [self.confidence, *(Confidence() for _ in range(0 if one_pass is None else DEPTHS - 1))]
        self.runner_up_share = RunnerUpShare()
        self._steps = Recent()
        self._reading = Recent()
        self._choices = ChoicesPerPass()
        self._pass_seconds = 0.0
        # Since the last reply.
        self._passes = self._skipped = self._corrected_right = self._corrected_wrong = 0
        self._rows: dict[int, DraftRow] = {}
        self._asked: list[int] = []

    def read_whole_texts(self) -> None:
        """Never skip the beginning of a text."""
        self._skipper = None

    def propose(self, request: DraftRequest) -> DraftReply:
        started, self._pass_seconds = time.perf_counter(), 0.0
        for key in request.closed:
            self._close(key)
        if self._skipper is not None and (request.closed or not self._windows.best):
            context = self.engine.context_share * (self._steps(1) or 0.0)
            self._windows.price(Prices(request.rate, self._reading(1) or 0.0, context))
        self._asked = [advance.key for advance in request.rows if self._advance(advance)]
        forgotten = tuple(advance.key for advance in request.rows if advance.key not in self._rows)
        rows = {key: self._rows[key] for key in self._asked}
        self._draft(
            {key: self._wanted(row, row.limit, request.least_reach) for key, row in rows.items()},
            request.least_reach,
            request.least_sum,
        )
        tokens = {key: self._worth_sending(self._rows[key], request) for key in self._asked}
        runners_up = {}
        for key, guesses in tokens.items():
            if found := self._runners_up(self._rows[key], len(guesses), request.runner_up_chances):
                runners_up[key] = found
        seconds = time.perf_counter() - started
        step = self._steps(len(self._asked))
        candidate = None if step is None else step / self._choices.usual
        draft_costs = (candidate, self._reading(1), max(0.0, seconds - self._pass_seconds))
        reaches = {key: tuple(accumulate(self._rows[key].chances[: len(sent)], mul)) for key, sent in tokens.items()}
        one_pass = () if self._one_pass is None else self._one_pass.seconds(len(self._asked))
        counted = self._passes, self._skipped, self._corrected_right, self._corrected_wrong
        self._passes = self._skipped = self._corrected_right = self._corrected_wrong = 0
        made = runners_up, reaches, one_pass
        return DraftReply(request.round, tokens, forgotten, seconds, *draft_costs, *made, self._windows.best, *counted)

    def draft_ahead(self) -> bool:
        """One more step for the rows of the last request, as if the target accepted all candidates.

        At most 2 * limit + 1 guesses: the next candidates, and the target's own token between the two sets. False where
        there is nothing to do.
        """
        if self._one_pass is not None:
            return False  # a parallel draft has no overlapped layouts: all of its candidates are rarely accepted
        rows = {key: self._rows[key] for key in self._asked}
        return self._draft({key: min(1, self._wanted(row, 2 * row.limit + 1, LEAST_REACH)) for key, row in rows.items()})

    def _advance(self, advance: Advance) -> bool:
        """Open a row, or append what the target has committed. False where the draft's tokens of the row are not the
        target's."""
        if advance.start == 0 and advance.sampling is not None:
            self._open(advance, advance.sampling)
            return True
        row = self._rows.get(advance.key)
        if row is None or len(row.committed) != advance.start:
            self._close(advance.key)
            return False
        self._commit(row, advance)
        return True

    def _commit(self, row: DraftRow, advance: Advance) -> None:
        """Append what the target has committed to a known row, and drop guesses that were wrong."""
        accepted = self._learn(row, advance)
        # Guesses beyond the committed tokens are kept if all of these were guessed right. A parallel draft guesses better
        # in a new pass.
        keep_from = accepted if accepted == len(advance.tokens) and self._one_pass is None else len(row.guessed)
        del row.guessed[:keep_from], row.margins[:keep_from], row.chances[:keep_from], row.runners_up[:keep_from]
        row.reach = prod(row.chances)
        row.committed.extend(advance.tokens)
        self._update_matching(row)
        keep = min(row.cached, advance.start + accepted, len(row.committed) - 1) if not row.guessed else row.cached
        if keep < row.cached:
            row.cached = keep
            self.engine.truncate(advance.key, keep)
        row.limit = self._limit(row, advance.limit)
        self._skip(row, advance.key)

    def _confidence_at(self, index: int) -> Confidence:
        return self._confidences[min(index, len(self._confidences) - 1)]

    def _learn(self, row: DraftRow, advance: Advance) -> int:
        """Learn from the row's guesses; returns how many were accepted."""
        accepted = _common_prefix(row.guessed, advance.tokens)
        if row.guessed:
            row.rounds += 1
            self._windows.observe(row.window, accepted, len(row.guessed) / self._choices.usual)
        self._correct(row, advance, accepted)
        for index, (guess, token) in enumerate(zip(row.guessed[: accepted + 1], advance.tokens, strict=False)):
            margin = row.margins[index]
            if margin == inf:  # forced by the grammar
                continue
            confidence = self._confidence_at(index)
            row.miss_factor.learn(confidence.chance(margin), guess == token)
            confidence.learn(margin, guess == token)
            if guess != token and row.runners_up[index] >= 0:
                self.runner_up_share.learn(row.runners_up[index] == token)
        return accepted

    def _correct(self, row: DraftRow, advance: Advance, accepted: int) -> None:
        """Have the engine learn from the accepted guesses and the first wrong one. Nothing is known of later ones."""
        decided = advance.tokens[: min(accepted + 1, len(row.guessed))]
        if self._learner is None or not decided or max(decided) >= self.engine.vocabulary:
            return
        better, worse = self._learner.learn(advance.key, len(row.committed), decided)
        self._corrected_right += better
        self._corrected_wrong += worse

    def _open(self, advance: Advance, sampling: Sampling) -> None:
        """Open a row, with the longest prefix of its prompt that another row has read."""
        self._close(advance.key)
        prompt = advance.tokens[: advance.prompt_length]
        shared = self._prefix_cache.open(advance.key, prompt, sampling)
        if shared is None:
            # A row opened before in the same request has the same beginning: it reads it now, and this one forks it.
            self._read_all()
            shared = self._prefix_cache.open(advance.key, prompt, sampling, wait=False) or 0
        ends = self.end_tokens if sampling.end_tokens is None else sampling.end_tokens
        row = self._rows[advance.key] = DraftRow(list(advance.tokens), cached=shared, end_tokens=ends)
        row.prompt_length = advance.prompt_length
        if sampling.grammar and self._constraints is not None:
            row.matching = self._constraints.matching(sampling.grammar, sorted(ends))
            self._update_matching(row)
        row.limit = self._limit(row, advance.limit)
        self._skip(row, advance.key)

    def _skip(self, row: DraftRow, key: int) -> None:
        """Skip the part of a row's new text that is not worth its prefill."""
        unread = len(row.committed) - row.cached
        if self._skipper is None or not row.limit or unread <= SMALLEST + 1 or row.guessed:
            return
        # Tokens shared with other rows count as read: they are read once for all of them.
        to_read = len(row.committed) - max(row.cached, self._prefix_cache.common(key))
        window = self._windows.choose(row.cached - row.begin, unread, to_read)
        skipped = unread - window - 1
        if window == WHOLE or skipped < 1:
            return
        self._prefix_cache.withdraw(key)
        self._skipper.skip(key, row.uncached()[:skipped])
        self._skipped += skipped
        row.cached += skipped
        row.window, row.begin = window, row.cached

    def _update_matching(self, row: DraftRow) -> None:
        """Take a row's grammar to the end of its tokens. It is dropped where they do not fit it: the target decides
        anyway."""
        if row.matching is None:
            return
        written = row.committed[row.prompt_length :] + row.guessed
        row.matching.truncate(_common_prefix(row.matching.tokens, written))
        if not all(map(row.matching.take, written[len(row.matching) :])):
            row.matching = None

    def _read_all(self) -> None:
        """Feed all rows but their last tokens."""
        self._read([key for key, row in self._rows.items() if row.limit], 0)

    def _read(self, keys: Iterable[int], most_left: int) -> None:
        """Feed these rows' tokens, in their order, until at most ``most_left`` tokens of all rows are left.

        The last token of each row is never fed here, since the first choice is made after it.
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

    def _limit(self, row: DraftRow, limit: int) -> int:
        if any(token >= self.engine.vocabulary for token in row.uncached()):
            return 0  # the target's vocabulary is the larger one, and this row uses it
        return max(0, min(limit, self.engine.context - len(row.committed)))

    def _wanted(self, row: DraftRow, count: int, least_reach: float) -> int:
        """How many guesses are missing to ``count``; 0 where further ones are of no use."""
        if row.limit == 0 or row.reach < least_reach or (row.guessed and row.guessed[-1] in row.end_tokens):
            return 0
        return max(0, min(count - len(row.guessed), self._context_left(row)))

    def _context_left(self, row: DraftRow) -> int:
        """How many more guesses the row's context has room for."""
        return self.engine.context - len(row.committed) - len(row.guessed)

    def _worth_sending(self, row: DraftRow, request: DraftRequest) -> tuple[int, ...]:
        reach = 1.0
        for count, chance in enumerate(row.chances[: row.limit]):
            reach *= chance
            if chance < request.confidence or reach < request.least_reach:
                return tuple(row.guessed[:count])
        return tuple(row.guessed[: row.limit])

    def _runners_up(self, row: DraftRow, sent: int, chances: Sequence[float]) -> tuple[tuple[int, int], ...]:
        """(position, token) of runners-up whose chances exceed the thresholds, likeliest first. Their chance is
        (reach of the guesses before) * (1 - chance of the guess) * (share of runners-up among misses)."""
        if not chances:
            return ()
        possible, reach = [], self.runner_up_share.share
        for position, (chance, token) in enumerate(zip(row.chances[:sent], row.runners_up, strict=False)):
            if token >= 0:
                possible.append((reach * (1.0 - chance), position, token))
            reach *= chance
        possible.sort(reverse=True)
        likely = zip(possible, chances, strict=False)
        return tuple((position, token) for (chance, position, token), least in likely if chance > least)

    def _draft(self, wanted: Mapping[int, int], least_reach: float = 0.0, least_sum: float = 0.0) -> bool:
        """Make ``wanted`` further guesses for each row, all rows together; fewer where they become too unlikely. False
        where nothing is wanted."""
        wanted = {key: count for key, count in wanted.items() if count}
        if not wanted:
            return False
        self._read(wanted, PREFILL_TOKENS)
        rows = {key: self._rows[key] for key in wanted}
        for row in rows.values():
            self._append_forced(row)
        feeds = [
            self._decode_feed(key, row, wanted[key])
            for key, row in rows.items()
            if self._context_left(row) > 0 and (not row.guessed or row.guessed[-1] not in row.end_tokens)
        ]
        if not feeds:
            return True
        result = self._decode(feeds, least_reach, least_sum)
        for feed, chosen in zip(feeds, result.chosen, strict=True):
            self._append_chosen(feed, chosen)
        self._observe_steps(feeds, result)
        return True

    def _decode_feed(self, key: int, row: DraftRow, most: int) -> DecodeFeed:
        guide = None if row.matching is None else _Guide(row, row.matching)
        most = min(most, self._context_left(row))
        return DecodeFeed(key, row.uncached(), most, row.end_tokens, row.reach, row.miss_factor.factor, guide)

    def _decode(self, feeds: Sequence[DecodeFeed], least_reach: float, least_sum: float) -> DecodeResult:
        try:
            if self._one_pass is None:
                return self.engine.decode(feeds, self.confidence.stop_rule(least_reach, least_sum))
            return self._one_pass.decode(self.engine, feeds)
        except Exception:
            # Some passes may have been made: truncate the cache to the row's ``cached``.
            for feed in feeds:
                self.engine.truncate(feed.row, self._rows[feed.row].cached)
            raise

    def _append_chosen(self, feed: DecodeFeed, chosen: Chosen) -> None:
        """Append the choices of one call of the engine to the row's guesses."""
        row = self._rows[feed.row]
        # The last choice has not been fed, nor the forced tokens after it.
        row.cached = self.engine.length(feed.row)
        first = len(row.guessed)
        row.guessed.extend(chosen.tokens)
        row.margins.extend(chosen.margins)
        row.runners_up.extend(chosen.runners_up or [-1] * len(chosen.tokens))
        if row.cached == len(row.committed) + len(row.guessed):
            # The last step made no choice, so its token is fed once more for the next one.
            row.cached -= 1
            self.engine.truncate(feed.row, row.cached)
        # The same chances as in the engine's stop rule.
        chances = [
            self._confidence_at(index).chance(margin, feed.miss_factor)
            for index, margin in enumerate(chosen.margins, start=first)
        ]
        row.chances.extend(chances)
        row.reach *= prod(chances)

    def _observe_steps(self, feeds: Sequence[DecodeFeed], result: DecodeResult) -> None:
        """Learn the costs of one call's steps, and how many choices a pass made."""
        self._passes += len(result.steps)
        choices = sum(margin != inf for chosen in result.chosen for margin in chosen.margins)
        self._choices.observe(choices, sum(rows for rows, _ in result.steps))
        self._observe([len(feed.tokens) for feed in feeds], result.steps[0][1])
        for rows, seconds in result.steps[1:]:
            self._observe([1] * rows, seconds)

    def _append_forced(self, row: DraftRow) -> None:
        """Append the tokens that the grammar forces, without a pass."""
        if row.matching is None:
            return
        while row.matching.forced and self._context_left(row) > 0:
            token = row.matching.forced[0]
            row.matching.take(token)
            row.guessed.append(token)
            row.margins.append(inf)
            row.chances.append(1.0)
            row.runners_up.append(-1)

    def _feed(self, feeds: Sequence[Feed]) -> None:
        """A pass of prefill, without choices."""
        started = time.perf_counter()
        self.engine.feed(feeds)
        seconds = time.perf_counter() - started
        self._pass_seconds += seconds
        self._passes += 1
        self._observe_reading(sum(len(feed.tokens) for feed in feeds), seconds)

    def _observe(self, fed: Sequence[int], seconds: float) -> None:
        """Learn the cost of a pass that fed ``fed[i]`` tokens to row i, and made a choice for each row."""
        self._pass_seconds += seconds
        if self._one_pass is None and max(fed) <= MOST_FED:
            self._steps.observe(len(fed), seconds)
        else:
            self._observe_reading(sum(fed), seconds)

    def _observe_reading(self, tokens: int, seconds: float) -> None:
        if tokens > MUCH_FED:
            self._reading.observe(1, seconds / tokens)

    def _close(self, key: int) -> None:
        row = self._rows.pop(key, None)
        if row is not None:
            if row.rounds:
                self._windows.ended(row.rounds)
            self._prefix_cache.close(key)
            self._asked = [other for other in self._asked if other != key]


class _Guide:
    """A row's grammar during one call of ``Engine.decode``.

    Expensive masks are left open, as on the target (`workers/target/constraints.py`). A guess that the grammar then refuses
    is dropped, and the next one has its mask.
    """

    def __init__(self, row: DraftRow, matching: Matching) -> None:
        self._row = row
        self._matching = matching

    def fill(self, mask: NDArray[np.uint32]) -> None:
        if self._row.mask_seconds >= LEAST_OPEN_SECONDS and not self._matching.forced:
            mask[:] = EVERYTHING
            return
        began = time.thread_time()
        self._matching.fill(mask)
        self._row.mask_seconds = time.thread_time() - began

    def follow(self, token: int) -> list[int] | None:
        matching = self._matching
        if not matching.take(token):
            matching.recover()
            self._row.mask_seconds = 0.0
            return None
        start = len(matching)
        while matching.forced:
            matching.take(matching.forced[0])
        return list(matching.tokens[start:])


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    shorter = min(len(left), len(right))
    return next((index for index in range(shorter) if left[index] != right[index]), shorter)
