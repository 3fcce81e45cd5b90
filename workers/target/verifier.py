"""The target's loop: it owns the committed tokens of its rows, and runs the rounds of propose and verify."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from outrider.workers import speculation
from outrider.workers.constraints.grammars import BadConstraint
from outrider.workers.constraints.matching import Grammars, Matching
from outrider.workers.engines.costs import CostCurve
from outrider.workers.engines.engine import Chosen, Engine, Feed
from outrider.workers.engines.prefix_cache import PrefixCache
from outrider.workers.messages import PartialTokens, Row, RowFailure, RowResult
from outrider.workers.speculation import LayoutKind
from outrider.workers.target.asking_policy import AskingPolicy
from outrider.workers.target.constraints import MaskMaker, fitting
from outrider.workers.target.forecast import Forecast, Round
from outrider.workers.target.live_row import (
    BadScores,
    LiveRow,
    NoSuchToken,
    context_of,
    problem_of,
    without_invalid_resumption,
)
from outrider.workers.target.prompt_scores import prompt_scores
from outrider.workers.target.proposers import NO_PROPOSAL, PendingProposals, Proposal, Proposer, Source
from outrider.workers.target.statistics import TargetStatistics
from outrider.workers.target.suffix_finder import SuffixFinder, ask
from outrider.workers.target.text_and_stop_strings import TextWriter

# A pass reads at most this many tokens of a row's prompt.
PREFILL_TOKENS = 512
# Two scores closer than this may change places when float kernels sum in another order.
NEAR_TIE = 1e-4
# The engine's row number for scoring a prompt's own tokens. Rows of the job are numbered from 0; -1 is ``costs.PROBE_ROW``.
SCORED_ROW = -2


@dataclass(slots=True)
class _Asked:
    """The candidates that were asked for: of which rows, how many, and the forecast of the round with them.

    ``waits``: the proposer was asked for some; candidates found in texts are there already.
    """

    rows: list[LiveRow] = field(default_factory=list)
    counts: Sequence[int] = ()
    answer: PendingProposals | None = None
    waits: bool = False
    forecast: Forecast | None = None


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass of the target: the choices of each row, and ``shares``, the tokens and branches that each row fed.

    ``read`` of these tokens were of prompts, and ``context`` tokens were in the rows' caches before.
    """

    answers: list[Chosen]
    shares: list[int]
    read: int
    context: int
    started: float
    ended: float
    experts_read: int

    @property
    def seconds(self) -> float:
        return self.ended - self.started


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
        statistics: TargetStatistics | None = None,
        runners_up: bool = True,
        grammars: Grammars | None = None,
        finder: SuffixFinder | None = None,
        with_states: bool = False,
    ) -> None:
        """``with_states``: passes return the hidden states of the rows' tokens, for a head."""
        self.engine = engine
        self._with_states = with_states
        self.proposer = proposer
        self.batch = batch
        self.finder = finder
        branches = runners_up and engine.branches
        self.policy = AskingPolicy(proposer, verify_seconds, draft_tokens, engine.context, branches, finder)
        self.statistics = statistics or TargetStatistics()
        self.counters = self.statistics.counters
        self.last_round: Round | None = None
        self._prefix_cache = PrefixCache(engine, prefix_tokens)
        self._grammars = grammars
        self._masks = MaskMaker(engine)
        self._new_writer = new_writer
        self._end_tokens = frozenset(end_tokens)
        self._waiting: deque[Row] = deque()
        self._rows: list[LiveRow] = []
        self._asked = _Asked()
        self._round_ended: float | None = None
        self._added = 0

    # One round

    def round(self) -> list[RowResult | RowFailure]:
        """One pass of the target. Rows that end in it leave at once, and waiting ones take their places in the next."""
        ended: list[RowResult | RowFailure] = list(self._admit())
        self.last_round = None
        if not self._rows:
            self._round_ended = None
            return ended
        rows, forecast, drafted = list(self._rows), self._forecast(), self._asked.waits
        assisted = all(live.row.assisted for live in rows)
        proposals = [self._fitting(live, proposal) for live, proposal in zip(rows, self._take_proposals(), strict=True)]
        done = self._verify(rows, proposals)
        accepted = [
            speculation.accepted(proposal.tokens, answer.tokens)
            for proposal, answer in zip(proposals, done.answers, strict=True)
        ]
        runners_up_before = self.counters.runners_up_accepted
        ended += self._commit_all(rows, proposals, done, accepted)
        runners_up_accepted = self.counters.runners_up_accepted - runners_up_before

        with_some = sum(bool(proposal.tokens) for proposal in proposals)
        runners_up_tried = sum(len(proposal.runners_up) for proposal in proposals)
        self.policy.observe_runners_up(with_some, runners_up_tried, runners_up_accepted)
        # A round lasts from one request for candidates to the next.
        began, self._round_ended = self._round_ended, time.perf_counter()
        # Asked for now, taken in the next round: until then the draft works in parallel with the target.
        self._ask()
        self.policy.verify_seconds.observe_pass(done.shares, done.seconds, done.experts_read, done.context)
        self.counters.plain_rounds += not with_some
        self.last_round = Round(
            proposed=tuple(proposal.choices(len(proposal.tokens)) for proposal in proposals),
            accepted=tuple(proposal.choices(count) for proposal, count in zip(proposals, accepted, strict=True)),
            live=len(rows),
            steady=assisted and done.read == 0,
            read=done.read,
            fed=sum(done.shares),
            verifying=done.seconds,
            forecast=forecast,
            runners_up_accepted=runners_up_accepted,
        )
        if began is not None:
            self.policy.observe_round(self.last_round, drafted, self._round_ended - began)
        return ended

    def _verify(self, rows: Sequence[LiveRow], proposals: Sequence[Proposal]) -> _Pass:
        """Feed each row its pending tokens and its candidates; the choices of rows under a grammar obey it."""
        feeds = [self._feed(live, proposal) for live, proposal in zip(rows, proposals, strict=True)]
        read = sum(len(feed.tokens) - 1 for live, feed in zip(rows, feeds, strict=True) if live.reads_its_prompt)
        shares = [len(feed.tokens) + len(feed.branches) for feed in feeds]
        context = context_of(rows)

        started = time.perf_counter()
        feeds = self._masks.begin(rows, feeds)
        try:
            answers = self.engine.feed(feeds)
        finally:
            self._masks.finish()
        verified = time.perf_counter()
        experts_read = 0 if self.engine.mixture is None else self.engine.mixture.read
        self.statistics.verified(started, verified, len(feeds), sum(shares))

        first = 0
        for live, proposal, answer in zip(rows, proposals, answers, strict=True):
            if answer.tokens:
                self._masks.settle(live, proposal.tokens, answer.tokens, first, self._end_tokens)
            first += len(answer.tokens)
        return _Pass(answers, shares, read, context, started, verified, experts_read)

    def _commit_all(
        self, rows: Sequence[LiveRow], proposals: Sequence[Proposal], done: _Pass, accepted: Sequence[int]
    ) -> list[RowResult | RowFailure]:
        """Commit the choices of a pass; the rows that end with it."""
        ended: list[RowResult | RowFailure] = []
        tokens_before = self.counters.tokens
        for live, proposal, answer, count in zip(rows, proposals, done.answers, accepted, strict=True):
            try:
                reason = self._commit(live, proposal, answer, count)
            except (NoSuchToken, BadScores) as error:
                self._rows.remove(live)
                ended.append(self._fail(live, error))
                continue
            if reason is not None:
                self._rows.remove(live)
                ended.append(self._finish(live, reason))
        self.statistics.round_ended(done.ended, len(rows), self.counters.tokens - tokens_before)
        return ended

    def _ask(self) -> None:
        """Ask for candidates of the rows that have read their prompts."""
        rows = [live for live in self._rows if not live.reads_its_prompt and live.row.assisted]
        started = time.perf_counter()
        request, forecast = self.policy.request(rows)
        self.statistics.decided(started, len(rows), sum(request.counts))
        answer = None
        wanted = sum(count for at, count in enumerate(request.counts) if at not in request.found)
        if any(request.counts):
            started = time.perf_counter()
            if self.finder is None:
                answer = self.proposer.ask(rows, request)
            else:
                answer = ask(self.proposer, self.finder, rows, request)
            if wanted:
                self.statistics.waited("ask", started, len(rows), wanted)
        self._asked = _Asked(rows, request.counts, answer, wanted > 0, forecast)
        # Counted after the request was sent, so that the draft does not wait for it.
        self.statistics.asked(request.counts)

    def _take_proposals(self) -> list[Proposal]:
        """What was proposed for each row of the batch; nothing for those that were not asked for."""
        asked = self._asked
        if asked.answer is None:
            return [NO_PROPOSAL] * len(self._rows)
        started = time.perf_counter()
        proposals, asked.answer = asked.answer(), None
        if asked.waits:
            made = sum(len(proposal.tokens) for proposal in proposals if proposal.source is not Source.SUFFIX)
            self.statistics.waited("waiting for draft", started, len(proposals), made)
        by_key = {
            live.row.key: self._sane(proposal, count, live.cached)
            for live, proposal, count in zip(asked.rows, proposals, asked.counts, strict=True)
        }
        found = [by_key.get(live.row.key, NO_PROPOSAL) for live in self._rows]
        if asked.forecast is None:
            return found
        pending = sum(min(live.pending, PREFILL_TOKENS) for live in self._rows)
        constrained = [at for at, live in enumerate(self._rows) if live.matching is not None]
        return self.policy.cut_to_slots(found, pending, asked.forecast, constrained)

    def _sane(self, proposal: Proposal, count: int, cached: int) -> Proposal:
        """The proposal up to its first token that the model does not have. (A draft may send any ids.)"""
        tokens, vocabulary = proposal.tokens[:count], self.engine.vocabulary
        for index, token in enumerate(tokens):
            if not 0 <= token < vocabulary:
                tokens = tokens[:index]
                break
        if not proposal.runners_up or not self.policy.runners_up or cached > speculation.LONGEST_WITH_RUNNERS_UP:
            return proposal._replace(tokens=tokens, runners_up=())
        some = proposal.runners_up[: speculation.MOST_RUNNERS_UP]
        usable = [each for each in some if 0 <= each[0] < len(tokens) and 0 <= each[1] < vocabulary]
        return proposal._replace(tokens=tokens, runners_up=usable)

    def _fitting(self, live: LiveRow, proposal: Proposal) -> Proposal:
        if live.matching is None or live.pending > PREFILL_TOKENS:
            return proposal
        return fitting(live, proposal, min(live.remaining - 1, self.engine.context - len(live.tokens)))

    def _feed(self, live: LiveRow, proposal: Proposal) -> Feed:
        new = live.tokens[live.cached :]
        # Without candidates the head needs no states.
        states = self._with_states and live.row.assisted and self.policy.draft_tokens != 0
        if len(new) > PREFILL_TOKENS:
            return Feed(live.row.key, new[:PREFILL_TOKENS], 0, states=states)
        branches = [(len(new) + position, token) for position, token in proposal.runners_up]
        fed, choices = [*new, *proposal.tokens], len(proposal.tokens) + 1
        return Feed(live.row.key, fed, choices, live.row.logprobs, branches, states=states)

    def _commit(self, live: LiveRow, proposal: Proposal, answer: Chosen, accepted: int) -> str | None:
        """Commit the target's choices up to and including the first that differs from its candidate.

        Where that one is a runner-up, the choice after it is known too. The runner-up's key and value are not in the cache,
        so it is fed once more, with the next round's candidates.
        """
        live.rounds += 1
        if not answer.tokens:
            live.cached += PREFILL_TOKENS
            self._keep_states(live, answer, live.cached - PREFILL_TOKENS)
            return None
        if live.reads_its_prompt:
            live.prefill_seconds, live.prefill_rounds = time.perf_counter() - live.started, live.rounds
        if proposal.source is not Source.SUFFIX:
            # Candidates from suffixes have their own estimate of chances.
            self.policy.observe_row(live, proposal.choices(len(proposal.tokens)), proposal.choices(accepted))
        first, written = live.cached, len(live.tokens)
        live.cached = written + accepted
        self.engine.truncate(live.row.key, live.cached)
        taken, reason = self._append(live, answer, _choices_taken(proposal, answer, accepted))
        self._keep_states(live, answer, first)
        if reason is None:
            reason, forced = live.append_forced(self._end_tokens, self.engine.context)
            self.statistics.forced(forced)
        if live.matching is not None:
            self.policy.observe_forced(1 + proposal.choices(accepted), len(live.tokens) - written)
        if answer.logprobs:
            live.logprobs.extend(answer.logprobs[index] for index in taken)
        self._count(live, proposal, answer, accepted, taken)
        return reason

    def _append(self, live: LiveRow, answer: Chosen, taken: Sequence[int]) -> tuple[Sequence[int], str | None]:
        """Append the choices with these indices to the row, up to one that ends it. Returns the indices of those that were
        appended, and why the row ends (None: it does not)."""
        for count, index in enumerate(taken, start=1):
            if math.isnan(answer.margins[index]):
                raise BadScores
            reason = live.append(answer.tokens[index], self._end_tokens, self.engine.context)
            live.took(index)
            if reason is not None:
                return taken[:count], reason
        return taken, None

    def _count(self, live: LiveRow, proposal: Proposal, answer: Chosen, accepted: int, taken: Sequence[int]) -> None:
        proposed, committed = len(proposal.tokens), len(taken)
        used = min(accepted, committed)
        live.proposed += proposed
        live.accepted += used
        self.statistics.committed(proposed, used, committed, len(proposal.runners_up), committed > accepted + 1)
        if proposal.source is not Source.DRAFT:
            self.statistics.found(proposed, used, sum(proposal.from_others[:used]))
        if not self.engine.exact:
            self.counters.near_ties += sum(answer.margins[index] < NEAR_TIE for index in taken)

    def _keep_states(self, live: LiveRow, answer: Chosen, first: int) -> None:
        """Keep the states of the fed tokens that stay in the cache; ``first`` is the position of the first fed token."""
        if answer.states is not None:
            live.states.add(first, answer.states[: live.cached - first])

    def _forecast(self) -> Forecast | None:
        """The forecast of this round, if it was made for all its rows."""
        return self._asked.forecast if len(self._asked.rows) == len(self._rows) else None

    # Rows that come and go

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._rows

    @property
    def in_store(self) -> int:
        """Rows that have not begun."""
        return len(self._waiting)

    def work_left(self, job_rows: int) -> float:
        """The most tokens that are still to be written, if the job has ``job_rows`` in all (0: unknown, infinitely
        many)."""
        if not job_rows:
            return math.inf
        here = [each.row.max_tokens for each in self._rows] + [row.max_tokens - len(row.resumed) for row in self._waiting]
        to_come = max(0, job_rows - self._added) * sum(here) / max(1, len(here))
        waiting = sum(row.max_tokens - len(row.resumed) for row in self._waiting)
        return sum(each.remaining for each in self._rows) + waiting + to_come

    def add(self, rows: Iterable[Row]) -> None:
        before = len(self._waiting)
        self._waiting.extend(rows)
        self._added += len(self._waiting) - before

    def cancel(self, keys: Collection[int]) -> None:
        """Drop rows that another replica has finished; keys of other rows are ignored."""
        self._waiting = deque(row for row in self._waiting if row.key not in keys)
        gone = [live for live in self._rows if live.row.key in keys]
        if gone and self._asked.answer is not None:
            self._asked.answer()  # a proposer needs the rows until its answer is taken
            self._asked.answer = None
        for live in gone:
            self._rows.remove(live)
            self._close(live)

    def learn(self, answers: Sequence[Sequence[int]]) -> None:
        """Add the answers of other replicas to the suffixes."""
        if self.finder is not None:
            self.finder.learn(answers)

    def written(self) -> list[PartialTokens]:
        """The tokens that unfinished rows have gained since the last call."""
        return [gained for live in self._rows if (gained := live.gained()) is not None]

    def _admit(self) -> Iterable[RowResult | RowFailure]:
        later: list[Row] = []
        while self._waiting and len(self._rows) < self.batch:
            row = self._waiting.popleft()
            problem = problem_of(row.prompt, self.engine)
            if problem is not None:
                yield RowFailure(row.key, problem)
                continue
            try:
                row, matching = self._with_matching(without_invalid_resumption(row, self.engine.vocabulary))
            except BadConstraint as error:
                yield RowFailure(row.key, f"the row's constraint cannot be used: {error}")
                continue
            shared = self._prefix_cache.open(row.key, row.prompt, row.sampling, written=row.resumed)
            if shared is None:
                later.append(row)
                continue
            live = LiveRow(row, list(row.prompt), self._new_writer(row), time.perf_counter(), cached=shared)
            live.matching = matching
            live.acceptance = self.policy.new_row_acceptance()
            try:
                reason = self._begin(live)
            except (NoSuchToken, BadScores) as error:
                yield self._fail(live, error)
                continue
            if reason is None:
                self._rows.append(live)
            else:
                yield self._finish(live, reason)
        self._waiting.extendleft(reversed(later))

    def _begin(self, live: LiveRow) -> str | None:
        """Give a new row what it has before its first pass: scores of its prompt, resumed and forced tokens. The finish
        reason if it ends with them."""
        row = live.row
        if row.echo is not None and row.logprobs is not None:
            live.prompt_scores = prompt_scores(self.engine, SCORED_ROW, row.prompt, row.logprobs, self._prompt_passed)
            if any(math.isnan(value) for entry in live.prompt_scores for _, value in entry):
                raise BadScores
        reason = live.resume(self._end_tokens, self.engine.context)
        if reason is None:
            reason, forced = live.append_forced(self._end_tokens, self.engine.context)
            self.statistics.forced(forced)
        self.counters.prompt_tokens += len(row.prompt)
        self.counters.prompt_tokens_reused += min(live.cached, len(row.prompt))
        self.counters.resumed_tokens += len(row.resumed)
        return reason

    def _prompt_passed(self, started: float, ended: float, tokens: int) -> None:
        """Count a pass that scored a prompt: it has no candidates, and no row gains a token."""
        self.statistics.verified(started, ended, 1, tokens)
        self.counters.plain_rounds += 1

    def _finish(self, live: LiveRow, reason: str) -> RowResult:
        self._close(live)
        return live.result(reason)

    def _fail(self, live: LiveRow, error: NoSuchToken | BadScores) -> RowFailure:
        """No token of the model fits the grammar, llguidance has failed, or the scores are not numbers."""
        self._close(live)
        if isinstance(error, BadScores):
            return RowFailure(
                live.row.key,
                f"after {len(live.tokens) - len(live.row.prompt)} tokens the model's logits are not finite: fp16 ends at "
                "65,504; choose --precision bf16 or fp32",
            )
        why = f": {error}" if str(error) else ""
        return RowFailure(
            live.row.key,
            f"after {len(live.tokens) - len(live.row.prompt)} tokens no token of the model satisfies the row's "
            f"constraint{why}",
        )

    def _with_matching(self, row: Row) -> tuple[Row, Matching | None]:
        """The row and the state of its grammar; without resumed tokens that were written under another grammar."""
        if not row.sampling.grammar:
            return row, None
        if self._grammars is None:
            raise BadConstraint("the model has no token that ends a text")
        ends = self._end_tokens if row.sampling.end_tokens is None else row.sampling.end_tokens
        matching = self._grammars.matching(row.sampling.grammar, sorted(ends))
        if not all(map(matching.take, row.resumed)):
            row = replace(row, resumed=(), resumed_logprobs=())
        matching.truncate(0)
        return row, matching

    def _close(self, live: LiveRow) -> None:
        self._prefix_cache.close(live.row.key)
        self.proposer.forget(live.row.key)
        if self.finder is not None:
            self.finder.ended(live)

    # What the layout decides

    def set_layout(self, kind: LayoutKind, draft_tokens: int | None) -> None:
        """Use another layout from the next round on. Candidates that were asked for are dropped."""
        self._take_proposals()
        self._asked = _Asked()
        self.policy.layout_kind, self.policy.draft_tokens = kind, draft_tokens
        self.policy.layout_changed()


def _choices_taken(proposal: Proposal, answer: Chosen, accepted: int) -> list[int]:
    """The indices of the committed choices in the answer: those at accepted candidates, the one that differs, and the one
    after it where that is a runner-up."""
    taken = [*range(accepted + 1)]
    proposed = len(proposal.tokens)
    if proposal.runners_up and accepted < proposed and (accepted, answer.tokens[accepted]) in proposal.runners_up:
        after_runner_up = proposed + 1 + proposal.runners_up.index((accepted, answer.tokens[accepted]))
        if answer.tokens[after_runner_up] >= 0:
            taken.append(after_runner_up)
    return taken
