"""A row while it is in the batch: its tokens, how far the cache has them, and what it ends with."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from outrider.workers import speculation
from outrider.workers.constraints.matching import Matching
from outrider.workers.engines.engine import Engine
from outrider.workers.messages import PartialTokens, Row, RowResult
from outrider.workers.target.held_states import HeldStates
from outrider.workers.target.text_and_stop_strings import TextWriter

# A grammar's hash, and the last tokens before a place.
Kind = tuple[int, tuple[int, ...]]
TOKENS_OF_A_KIND = 4
# So many tokens of a prompt stand before what its answer is expected to be, too.
FOUND_BY = 16


def context_of(rows: Iterable[LiveRow]) -> int:
    """The tokens in the caches of a pass's rows."""
    return sum(live.cached for live in rows)


def kind_behind(grammar: str, tokens: Sequence[int]) -> Kind:
    """Of the place behind these tokens: those that were forced before it, or the last few."""
    return hash(grammar), tuple(tokens[-TOKENS_OF_A_KIND:])


class NoSuchToken(Exception):
    """The row's constraint allows none of the tokens that the model can write; what the library says of it, if anything."""


class BadScores(Exception):
    """The model's scores behind the row's last token are not numbers."""


@dataclass(slots=True)
class LiveRow:
    """``tokens`` are the prompt and everything committed; the cache may lag behind them.

    The driver has been told the first ``reported`` of the committed tokens.
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
    # Of the prompt, where the row asks for it back.
    prompt_scores: list[list[tuple[int, float]]] = field(default_factory=list)
    reported: int = 0
    # How far the answer has come in what it must be, where the row asks for that.
    matching: Matching | None = None
    # What the last mask took that was made for it, 0 where that says nothing of the next; the same behind each choice of
    # this pass; and which of those are made among all tokens, since their masks would take too long.
    mask_seconds: float = 0.0
    mask_costs: list[float] = field(default_factory=list)
    open_choices: list[bool] = field(default_factory=list)
    # What kind of place the next one is, where something was forced before it.
    kind: Kind | None = None
    # Of its tokens, where there is a head to read them.
    states: HeldStates = field(default_factory=HeldStates)

    @property
    def text_before(self) -> tuple[int, ...]:
        """What is to be known as having stood before the row's tokens, by whoever looks for candidates in texts: what its
        author expects, behind the prompt's last tokens, which are what it is found by at the answer's beginning."""
        row = self.row
        return (*row.prompt[-FOUND_BY:], *row.predicted) if row.predicted else ()

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def remaining(self) -> int:
        return len(self.row.prompt) + self.row.max_tokens - len(self.tokens)

    @property
    def reads_its_prompt(self) -> bool:
        return not self.prefill_rounds

    def took(self, choice: int) -> None:
        """The choice was committed: what its mask took is what is known of the next."""
        self.kind = None
        if choice < len(self.mask_costs):
            self.mask_seconds = self.mask_costs[choice]

    def append(self, token: int, end_tokens: Collection[int], context: int) -> str | None:
        """Commit a token; why the row ends with it, if it does. ``end_tokens`` are the model's."""
        if self.matching is not None and not self.matching.take(token):
            raise NoSuchToken(self.matching.problem)
        self.tokens.append(token)
        own = self.row.sampling.end_tokens
        if self.writer.stopped_by(token) or token in (end_tokens if own is None else own):
            return "stop"
        if self.remaining == 0 or len(self.tokens) >= context:
            return "length"
        return None

    def append_forced(self, end_tokens: Collection[int], context: int) -> tuple[str | None, int]:
        """Commit what must come next, where nothing is to be said of it; why the row ends with it, and how much it was."""
        reason, count = None, 0
        while reason is None and self.row.logprobs is None and self.matching is not None and self.matching.forced:
            reason = self.append(self.matching.forced[0], end_tokens, context)
            count += 1
        if count and reason is None:
            self.mask_seconds = 0.0
            self.kind = kind_behind(self.row.sampling.grammar, self.tokens[-count:])
        return reason, count

    def resume(self, end_tokens: Collection[int], context: int) -> str | None:
        """Take in what an earlier target has written; why the row has ended with it, if it has."""
        # With `echo` no token at all may be asked for.
        reason = None if self.row.max_tokens else "length"
        for token in self.row.resumed:
            reason = self.append(token, end_tokens, context)
            self.reported += 1
            if reason is not None:
                break
        self.logprobs = list(self.row.resumed_logprobs[: self.reported])
        return reason

    def gained(self) -> PartialTokens | None:
        """What was committed since this was asked last."""
        first, reported = len(self.row.prompt) + self.reported, self.reported
        if len(self.tokens) <= first:
            return None
        self.reported = len(self.tokens) - len(self.row.prompt)
        logprobs = tuple(map(tuple, self.logprobs[reported:]))
        return PartialTokens(self.row.key, reported, tuple(self.tokens[first:]), logprobs, self.proposed, self.accepted)

    def result(self, reason: str) -> RowResult:
        return RowResult(
            key=self.row.key,
            tokens=tuple(self.tokens[len(self.row.prompt) :]),
            text=self.writer.text(),
            finish_reason=reason,
            rounds=self.rounds,
            proposed=self.proposed,
            accepted=self.accepted,
            seconds=time.perf_counter() - self.started,
            logprobs=None if self.row.logprobs is None else self.writer.logprobs(self.logprobs),
            prefill_seconds=self.prefill_seconds,
            prefill_rounds=self.prefill_rounds,
            echo=None if self.row.echo is None else self.writer.echo(self.row, self.prompt_scores),
        )


def problem_of(prompt: Sequence[int], engine: Engine) -> str | None:
    """Why the engine cannot take this prompt."""
    if not prompt:
        return "the prompt has no tokens"
    if len(prompt) >= engine.context:
        return f"the prompt has {len(prompt)} tokens, the model holds {engine.context}"
    strange = next((token for token in prompt if not 0 <= token < engine.vocabulary), None)
    return None if strange is None else f"token {strange} is not one of the model's {engine.vocabulary}"


def as_far_as_usable(row: Row, vocabulary: int) -> Row:
    """The row; from its start where what is said to be written of it cannot be."""
    known = all(0 <= token < vocabulary for token in row.resumed)
    reported = len(row.resumed_logprobs) == (0 if row.logprobs is None else len(row.resumed))
    return row if known and reported else replace(row, resumed=(), resumed_logprobs=())
