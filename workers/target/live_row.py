"""A row while it is in the batch: its tokens, how many of them are cached, and its result."""

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

# (hash of a grammar, last tokens before a position): by this key the cost of masks is remembered (``MaskMaker``).
MaskKey = tuple[int, tuple[int, ...]]
TOKENS_OF_A_KEY = 4
# This many last tokens of a prompt are put before the text that the user predicts, so that lookup finds its beginning.
PROMPT_BEFORE_PREDICTED = 16


def context_of(rows: Iterable[LiveRow]) -> int:
    """The tokens in the caches of a pass's rows."""
    return sum(live.cached for live in rows)


def mask_key(grammar: str, tokens: Sequence[int]) -> MaskKey:
    """The key of the position after these tokens: tokens that were forced before it, or the last few."""
    return hash(grammar), tuple(tokens[-TOKENS_OF_A_KEY:])


class NoSuchToken(Exception):
    """The row's grammar allows no token of the model. The message is llguidance's error, if there is one."""


class BadScores(Exception):
    """The model's scores after the row's last token are not numbers."""


@dataclass(slots=True)
class LiveRow:
    """``tokens`` are the prompt and all committed tokens; the engine's cache has the first ``cached`` of them.

    The first ``reported`` committed tokens were sent to the driver.
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
    # Log-probabilities of the prompt's tokens, for `echo`.
    prompt_scores: list[list[tuple[int, float]]] = field(default_factory=list)
    reported: int = 0
    # The state of the row's grammar.
    matching: Matching | None = None
    # Seconds of the row's last mask (0: the next may take another time); the same for each choice of the current pass; and
    # which of these choices have no mask (are open), since theirs would take too long.
    mask_seconds: float = 0.0
    mask_costs: list[float] = field(default_factory=list)
    open_choices: list[bool] = field(default_factory=list)
    # The key of the next mask, where forced tokens come before it.
    next_mask_key: MaskKey | None = None
    # Hidden states of its tokens, where the draft is a head.
    states: HeldStates = field(default_factory=HeldStates)

    @property
    def text_before(self) -> tuple[int, ...]:
        """Text that lookup and suffixes index before the row's tokens: the tokens that the user predicts, after the last
        tokens of the prompt, by which the beginning of the prediction is found."""
        row = self.row
        return (*row.prompt[-PROMPT_BEFORE_PREDICTED:], *row.predicted) if row.predicted else ()

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
        """The choice with this index was committed: the cost of its mask is the estimate for the next one."""
        self.next_mask_key = None
        if choice < len(self.mask_costs):
            self.mask_seconds = self.mask_costs[choice]

    def append(self, token: int, end_tokens: Collection[int], context: int) -> str | None:
        """Commit a token; returns the finish reason if the row ends with it. ``end_tokens`` are the model's."""
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
        """Commit the tokens that the grammar forces (none with log-probabilities, which need a pass). The finish reason if
        the row ends with them, and how many they are."""
        reason, count = None, 0
        while reason is None and self.row.logprobs is None and self.matching is not None and self.matching.forced:
            reason = self.append(self.matching.forced[0], end_tokens, context)
            count += 1
        if count and reason is None:
            self.mask_seconds = 0.0
            self.next_mask_key = mask_key(self.row.sampling.grammar, self.tokens[-count:])
        return reason, count

    def resume(self, end_tokens: Collection[int], context: int) -> str | None:
        """Commit the tokens that an earlier target has written; the finish reason if the row has ended with them."""
        # max_tokens may be 0 with `echo`.
        reason = None if self.row.max_tokens else "length"
        for token in self.row.resumed:
            reason = self.append(token, end_tokens, context)
            self.reported += 1
            if reason is not None:
                break
        self.logprobs = list(self.row.resumed_logprobs[: self.reported])
        return reason

    def gained(self) -> PartialTokens | None:
        """The tokens that were committed since the last call."""
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


def without_invalid_resumption(row: Row, vocabulary: int) -> Row:
    """The row; without its resumed tokens where these do not fit the model or its log-probabilities."""
    known = all(0 <= token < vocabulary for token in row.resumed)
    reported = len(row.resumed_logprobs) == (0 if row.logprobs is None else len(row.resumed))
    return row if known and reported else replace(row, resumed=(), resumed_logprobs=())
