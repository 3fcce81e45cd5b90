"""The target's loop: it owns the committed tokens of its rows, and leads the rounds of propose and verify."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from outrider.workers import speculation
from outrider.workers.engines.costs import CostCurve
from outrider.workers.engines.engine import Chosen, Engine, Feed
from outrider.workers.engines.prefixes import Prefixes
from outrider.workers.messages import Row, RowFailure, RowResult, Written
from outrider.workers.speculation import Overlap, Price, Request
from outrider.workers.target.layout_trial import Foreseen, Round
from outrider.workers.target.statistics import Tally
from outrider.workers.target.text import TextWriter

PREFILL_TOKENS = 512
# Two scores closer than this may change places when float kernels sum in another order.
NEAR_TIE = 1e-4


@dataclass(slots=True)
class LiveRow:
    """A row in the batch. ``tokens`` are the prompt and everything committed; the cache may lag behind them.

    Of what was committed, the driver knows the first ``told`` tokens.
    """

    row: Row
    tokens: list[int]
    writer: TextWriter
    started: float
    cached: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    prefill_seconds: float = 0.0
    prefill_rounds: int = 0
    acceptance: speculation.Acceptance = field(default_factory=speculation.Acceptance)
    logprobs: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    told: int = 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def remaining(self) -> int:
        return len(self.row.prompt) + self.row.max_tokens - len(self.tokens)


class Guess(NamedTuple):
    """What is proposed for a row. ``runners_up`` are (place, token): what may come in place of the candidate there."""

    tokens: Sequence[int] = ()
    runners_up: Sequence[tuple[int, int]] = ()


NOTHING = Guess()
# Waits for what is proposed for each row that was asked for.
Answer = Callable[[], Sequence[Guess]]


class Proposer(Protocol):
    def ask(self, rows: Sequence[LiveRow], request: Request) -> Answer:
        """Begin to propose, at most as many candidates a row as the request has counts; fewer or none is always allowed.

        The rows stay as they are until the answer is taken, which happens once. Others may be asked for before that.
        """

    def forget(self, key: int) -> None:
        """The row has ended."""

    def price(self, rows: int) -> Price | None:
        """What candidates for that many rows cost; None while nothing can be proposed."""

    def unread(self, live: LiveRow) -> int:
        """How many of the row's tokens the one who proposes would have to read first."""


@dataclass(slots=True)
class Group:
    """Rows that go through rounds together. Two groups take turns: one is verified while the draft works for the other."""

    rows: list[LiveRow] = field(default_factory=list)
    asked: list[LiveRow] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    answer: Answer | None = None
    foreseen: Foreseen | None = None


class Verifier:
    def __init__(
        self,
        engine: Engine,
        new_writer: Callable[[Row], TextWriter],
        proposer: Proposer,
        batch: int,
        draft_tokens: int | None,
        verify_seconds: CostCurve,
        end_tokens: Collection[int],
        prefix_tokens: int = 0,
        tally: Tally | None = None,
        runners_up: bool = True,
    ) -> None:
        self.engine = engine
        self.proposer = proposer
        self.batch = batch
        self.draft_tokens = draft_tokens
        self.verify_seconds = verify_seconds
        self.tally = tally or Tally()
        self.progress = self.tally.progress
        self.last_round: Round | None = None
        self._runners_up = runners_up and engine.branches
        self._overlap = Overlap.TURNS
        self._prefixes = Prefixes(engine, prefix_tokens)
        self._new_writer = new_writer
        self._end_tokens = frozenset(end_tokens)
        self._probing = speculation.Probing()
        self._waiting: deque[Row] = deque()
        self._groups = deque([Group()])
        # What a new row is believed to accept.
        self._acceptance = speculation.Acceptance(memory=speculation.LONG_MEMORY)
        self._finds = speculation.Finds()
        self._added = 0

    def arrange(self, overlap: Overlap, draft_tokens: int | None) -> None:
        """Work in another way from the next round on. What has been asked for is let go."""
        for group in self._groups:
            self._candidates(group)
        rows = [live for group in self._groups for live in group.rows]
        self._overlap, self.draft_tokens = overlap, draft_tokens
        count = 2 if overlap is Overlap.GROUPS else 1
        self._groups = deque(Group(rows[start::count]) for start in range(count))

    @property
    def idle(self) -> bool:
        return not self._waiting and not any(group.rows for group in self._groups)

    @property
    def in_store(self) -> int:
        """Rows that have not begun."""
        return len(self._waiting)

    def work_left(self, job_rows: int) -> float:
        """How many tokens are still to be written at most, if ``job_rows`` come in all; infinitely many if that is 0."""
        if not job_rows:
            return math.inf
        live = [live for group in self._groups for live in group.rows]
        here = [each.row.max_tokens for each in live] + [row.max_tokens - len(row.begun) for row in self._waiting]
        to_come = max(0, job_rows - self._added) * sum(here) / max(1, len(here))
        waiting = sum(row.max_tokens - len(row.begun) for row in self._waiting)
        return sum(each.remaining for each in live) + waiting + to_come

    def add(self, rows: Iterable[Row]) -> None:
        before = len(self._waiting)
        self._waiting.extend(rows)
        self._added += len(self._waiting) - before

    def cancel(self, keys: Collection[int]) -> None:
        """Drop rows that somebody else has written; what is not here any more is no matter."""
        self._waiting = deque(row for row in self._waiting if row.key not in keys)
        for group in self._groups:
            gone = [live for live in group.rows if live.row.key in keys]
            if gone and group.answer is not None:
                group.answer()  # rows stay as they are until it is taken
                group.answer = None
            for live in gone:
                group.rows.remove(live)
                self._close(live)

    def round(self) -> list[RowResult | RowFailure]:
        """One pass of the target over a group. Rows that end in it leave at once, and waiting ones take their places."""
        ended: list[RowResult | RowFailure] = list(self._admit())
        self.last_round = None
        group = self._next_group()
        if not group.rows:
            return ended
        foreseen = group.foreseen if len(group.asked) == len(group.rows) else None
        live_rows = sum(len(each.rows) for each in self._groups)
        assisted = all(live.row.assisted for live in group.rows)
        candidates = self._candidates(group)
        feeds = [self._feed(live, guess) for live, guess in zip(group.rows, candidates, strict=True)]
        fed = sum(len(feed.tokens) + len(feed.branches) for feed in feeds)
        read = sum(len(feed.tokens) - 1 for live, feed in zip(group.rows, feeds, strict=True) if not live.prefill_rounds)
        started = time.perf_counter()
        answers = self.engine.feed(feeds)
        verified = time.perf_counter()
        self.tally.verified(started, verified, len(feeds), fed)
        tokens, held, found_before = self.progress.tokens, [], self.progress.runners_up_held
        for live, guess, answer in zip(list(group.rows), candidates, answers, strict=True):
            held.append(speculation.accepted(guess.tokens, answer.tokens))
            reason = self._commit(live, guess, answer)
            if reason is not None:
                group.rows.remove(live)
                ended.append(self._finish(live, reason))
        found = self.progress.runners_up_held - found_before
        tried = sum(len(guess.runners_up) for guess in candidates)
        self._finds.observe(sum(bool(guess.tokens) for guess in candidates), tried, found)
        self.tally.settled(verified, len(feeds), self.progress.tokens - tokens)
        # Asked for now and taken at the group's next round: until then the draft works beside whatever the target does.
        self._ask(group)
        self.verify_seconds.observe(fed, verified - started)
        self.last_round = Round(
            proposed=tuple(len(guess.tokens) for guess in candidates),
            held=tuple(held),
            live=live_rows,
            steady=assisted and read == 0,
            read=read,
            fed=fed,
            verifying=verified - started,
            foreseen=foreseen,
            found=found,
        )
        self.progress.plain_rounds += not any(guess.tokens for guess in candidates)
        return ended

    def _next_group(self) -> Group:
        """The groups in turn; one without rows only where no group has any."""
        for _ in range(len(self._groups)):
            self._groups.rotate(-1)
            if self._groups[-1].rows:
                break
        return self._groups[-1]

    def _admit(self) -> Iterable[RowResult | RowFailure]:
        later: list[Row] = []
        while self._waiting and sum(len(group.rows) for group in self._groups) < self.batch:
            row = self._waiting.popleft()
            problem = self._problem(row.prompt)
            if problem is not None:
                yield RowFailure(row.key, problem)
                continue
            row = self._usable(row)
            shared = self._prefixes.open(row.key, row.prompt, row.sampling, written=row.begun)
            if shared is None:
                later.append(row)
                continue
            live, reason = self._begin(row, shared)
            self.progress.prompt_tokens += len(row.prompt)
            self.progress.prompt_tokens_reused += min(shared, len(row.prompt))
            self.progress.resumed_tokens += len(row.begun)
            if reason is None:
                min(self._groups, key=lambda group: len(group.rows)).rows.append(live)
            else:
                yield self._finish(live, reason)
        self._waiting.extendleft(reversed(later))

    def _usable(self, row: Row) -> Row:
        """The row; from its start where what is said to be written of it cannot be."""
        known = all(0 <= token < self.engine.vocabulary for token in row.begun)
        told = len(row.begun_logprobs) == (0 if row.logprobs is None else len(row.begun))
        return row if known and told else replace(row, begun=(), begun_logprobs=())

    def _begin(self, row: Row, cached: int) -> tuple[LiveRow, str | None]:
        """A row for the batch, as far as it was written before, and why it has ended already if that is so."""
        live = LiveRow(row, list(row.prompt), self._new_writer(row), time.perf_counter(), cached=cached)
        live.acceptance = speculation.Acceptance(self._acceptance.chance)
        reason = None
        for token in row.begun:
            live.tokens.append(token)
            live.told += 1
            reason = self._ends(live, token)
            if reason is not None:
                break
        live.logprobs = list(row.begun_logprobs[: live.told])
        return live, reason

    def written(self) -> list[Written]:
        """What the rows under way have gained since this was asked last."""
        gained = []
        for group in self._groups:
            for live in group.rows:
                first, told = len(live.row.prompt) + live.told, live.told
                if len(live.tokens) > first:
                    logprobs = tuple(map(tuple, live.logprobs[told:]))
                    gained.append(Written(live.row.key, told, tuple(live.tokens[first:]), logprobs))
                    live.told = len(live.tokens) - len(live.row.prompt)
        return gained

    def _problem(self, prompt: Sequence[int]) -> str | None:
        if not prompt:
            return "the prompt has no tokens"
        if len(prompt) >= self.engine.context:
            return f"the prompt has {len(prompt)} tokens, the model holds {self.engine.context}"
        strange = next((token for token in prompt if not 0 <= token < self.engine.vocabulary), None)
        return None if strange is None else f"token {strange} is not one of the model's {self.engine.vocabulary}"

    def _ask(self, group: Group) -> None:
        """Have candidates made for the rows that are past their prompt."""
        group.asked = [live for live in group.rows if live.prefill_rounds and live.row.assisted]
        # As it is before asking, which may end a draft.
        price = self.proposer.price(len(group.asked)) if group.asked else None
        request = self._request(group.asked, price)
        # The last token of a row is always the target's own, so a candidate for it would be wasted.
        group.counts = [
            max(0, min(count, live.remaining - 1, self.engine.context - len(live.tokens)))
            for live, count in zip(group.asked, request.counts, strict=True)
        ]
        unread = sum(self.proposer.unread(live) for live, count in zip(group.asked, group.counts, strict=True) if count)
        group.foreseen = self._foresee(group, price or Price(0.0), unread)
        group.answer = None
        if any(group.counts):
            started = time.perf_counter()
            chances = self._runner_up_chances(group)
            group.answer = self.proposer.ask(group.asked, replace(request, counts=group.counts, runner_up_chances=chances))
            self.tally.waited("ask", started, len(group.asked), sum(group.counts))
        # What the draft need not wait for.
        self.tally.asked(group.counts)

    def _runner_up_chances(self, group: Group) -> tuple[float, ...]:
        """The chances from which on a first runner-up of each row, a second and so on are worth their place in the pass."""
        if not self._runners_up or group.foreseen is None:
            return ()
        rows, fed = len(group.asked), sum(live.pending for live in group.asked) + sum(group.counts)
        verify = [self.verify_seconds(fed + extra * rows) for extra in range(speculation.MOST_RUNNERS_UP + 1)]
        return speculation.runner_up_chances(group.foreseen.tokens / group.foreseen.seconds, rows, verify)

    def _candidates(self, group: Group) -> list[Guess]:
        """What was proposed for each row of the group; nothing for those that were not asked for."""
        if group.answer is None:
            return [NOTHING] * len(group.rows)
        started = time.perf_counter()
        guesses, group.answer = group.answer(), None
        self.tally.waited("waiting for draft", started, len(guesses), sum(len(guess.tokens) for guess in guesses))
        by_key = {
            live.row.key: self._sane(guess, count, live.cached)
            for live, guess, count in zip(group.asked, guesses, group.counts, strict=True)
        }
        return [by_key.get(live.row.key, NOTHING) for live in group.rows]

    def _sane(self, guess: Guess, count: int, cached: int) -> Guess:
        """A proposal up to its first id that the model does not have: whatever ids a draft sends, they are only a hint."""
        tokens, vocabulary = guess.tokens[:count], self.engine.vocabulary
        for index, token in enumerate(tokens):
            if not 0 <= token < vocabulary:
                tokens = tokens[:index]
                break
        if not guess.runners_up or not self._runners_up or cached > speculation.LONGEST_WITH_RUNNERS_UP:
            return Guess(tokens)
        some = guess.runners_up[: speculation.MOST_RUNNERS_UP]
        return Guess(tokens, [each for each in some if 0 <= each[0] < len(tokens) and 0 <= each[1] < vocabulary])

    def _request(self, rows: Sequence[LiveRow], price: Price | None) -> Request:
        if price is None:
            return Request([0] * len(rows))
        if self.draft_tokens is not None:
            return Request([self.draft_tokens] * len(rows))
        chances = [live.acceptance.chance for live in rows]
        request = speculation.best_request(chances, self.verify_seconds, price, self._overlap)
        # A text that the draft has to read first has to pay for that in what is left of the row.
        counts = [
            count if count and price.read * self.proposer.unread(live) <= request.gain * live.remaining else 0
            for live, count in zip(rows, request.counts, strict=True)
        ]
        if not any(counts):
            return self._probe(rows, price)
        self._probing.asked()
        return replace(request, counts=counts)

    def _probe(self, rows: Sequence[LiveRow], price: Price) -> Request:
        """Nothing, or now and then one candidate for the row of which the draft knows the most."""
        unread = [self.proposer.unread(live) for live in rows]
        least = min(range(len(rows)), key=unread.__getitem__)
        plain, verified = self.verify_seconds(len(rows)), self.verify_seconds(len(rows) + 1)
        cost = price.hop + price.step + price.read * unread[least] + max(0.0, verified - plain)
        due = self._probing.due(cost / plain)
        return Request([int(due and index == least) for index in range(len(rows))])

    def _foresee(self, group: Group, price: Price, unread: int) -> Foreseen | None:
        """What the group's next round should take and bring, by what is known of costs and chances.

        ``unread`` are the tokens that whoever proposes has to read first.
        """
        rows, counts = group.asked, group.counts
        if not rows:
            return None
        chances = [live.acceptance.chance for live in rows]
        hit = math.prod(chance**count for chance, count in zip(chances, counts, strict=True))
        with_some = sum(map(bool, counts))
        fed = sum(live.pending for live in rows) + sum(counts) + round(with_some * self._finds.tried)
        return Foreseen(
            speculation.round_seconds(self._overlap, self.verify_seconds(fed), price, max(counts), hit)
            + price.read * unread,
            sum(map(speculation.expected_tokens, chances, counts)) + with_some * self._finds.found,
        )

    def _feed(self, live: LiveRow, guess: Guess) -> Feed:
        new = live.tokens[live.cached :]
        if len(new) > PREFILL_TOKENS:
            return Feed(live.row.key, new[:PREFILL_TOKENS], 0)
        branches = [(len(new) + place, token) for place, token in guess.runners_up]
        return Feed(live.row.key, [*new, *guess.tokens], len(guess.tokens) + 1, live.row.logprobs, branches)

    def _commit(self, live: LiveRow, guess: Guess, answer: Chosen) -> str | None:
        """Take the target's choices up to and including the first that differs from its candidate.

        Where that one is a runner-up, the choice after it is known too. Its key and value are not in the cache: it is fed
        once more, with the next round's candidates.
        """
        live.rounds += 1
        if not answer.tokens:
            live.cached += PREFILL_TOKENS
            return None
        if not live.prefill_rounds:
            live.prefill_seconds, live.prefill_rounds = time.perf_counter() - live.started, live.rounds
        proposed = len(guess.tokens)
        held = speculation.accepted(guess.tokens, answer.tokens)
        if proposed:
            live.acceptance.observe(proposed, held)
            self._acceptance.observe(proposed, held)
        # Of the answer's choices.
        taken = [*range(held + 1)]
        if guess.runners_up and held < proposed and (held, answer.tokens[held]) in guess.runners_up:
            behind = proposed + 1 + guess.runners_up.index((held, answer.tokens[held]))
            if answer.tokens[behind] >= 0:
                taken.append(behind)
        live.cached = len(live.tokens) + held
        self.engine.truncate(live.row.key, live.cached)
        reason, committed = None, 0
        for index in taken:
            token = answer.tokens[index]
            live.tokens.append(token)
            committed += 1
            reason = self._ends(live, token)
            if reason is not None:
                break
        del taken[committed:]
        if answer.logprobs:
            live.logprobs.extend(answer.logprobs[index] for index in taken)
        used = min(held, committed)
        live.proposed += proposed
        live.accepted += used
        self.tally.committed(proposed, used, committed, len(guess.runners_up), committed > held + 1)
        if not self.engine.exact:
            self.progress.near_ties += sum(answer.margins[index] < NEAR_TIE for index in taken)
        return reason

    def _ends(self, live: LiveRow, token: int) -> str | None:
        own = live.row.sampling.end_tokens
        stopped = live.writer.stopped_by(token)
        if stopped or token in (self._end_tokens if own is None else own):
            return "stop"
        if live.remaining == 0 or len(live.tokens) >= self.engine.context:
            return "length"
        return None

    def _finish(self, live: LiveRow, reason: str) -> RowResult:
        self._close(live)
        return RowResult(
            key=live.row.key,
            tokens=tuple(live.tokens[len(live.row.prompt) :]),
            text=live.writer.text(),
            finish_reason=reason,
            rounds=live.rounds,
            proposed=live.proposed,
            accepted=live.accepted,
            seconds=time.perf_counter() - live.started,
            logprobs=None if live.row.logprobs is None else live.writer.logprobs(live.logprobs),
            prefill_seconds=live.prefill_seconds,
            prefill_rounds=live.prefill_rounds,
        )

    def _close(self, live: LiveRow) -> None:
        self._prefixes.close(live.row.key)
        self.proposer.forget(live.row.key)
