"""A model on our own kernels: no bit of a row's logits depends on what else is in the batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.library import KernelError
from outrider.kernels.native import (
    NativeDecodeFeed,
    NativeFeed,
    NativeMasks,
    NativeModel,
    NativeOutput,
    NativeStopRule,
)
from outrider.kernels.packer import packed_bytes
from outrider.kernels.program import RECURRENT, Kind, Op, Program
from outrider.workers.engines.engine import MOST_MARGIN, Chosen, DecodeFeed, DecodeResult, Feed, Mixture, Router, StopRule
from outrider.workers.engines.stepwise import decode_in_steps
from outrider.workers.errors import WorkerError
from outrider.workers.messages import Sampling
from outrider.workers.speculation import MOST_CANDIDATES, MOST_RUNNERS_UP

logger = logging.getLogger(__name__)

# The most tokens of one pass. The activations of more tokens no longer fit into the processor's caches: 32 prompts of 94
# tokens took a tenth longer in one pass.
PASS_TOKENS = 512
# Draft steps feed guesses up to this many tokens of a pass: while it is bound by reading weights, they hardly add time.
GUESS_ROOM = 8
# The number of tokens whose logits are corrected where a draft learns. Each takes a dot product with the hidden state of
# every choice; together they are at most this share of a pass's multiplications.
MOST_CORRECTED, LEAST_CORRECTED, CORRECTING_SHARE = 512, 32, 0.02
# A draft scores this share of its vocabulary where the vocabulary is large, and the LM head a large share of a pass.
LARGE_VOCABULARY, LARGE_SHARE, SCORED_SHARE = 16384, 0.125, 0.25
# Memory that is allocated when the model is opened: this many tokens of each row's cache, and the buffers of a pass.
RESERVED_ROW, RESERVED_CHOICES, MOST_CHOICES = 256, 5 + MOST_RUNNERS_UP, 128


def reserved(rows: int, context: int) -> tuple[int, int, int]:
    """The memory to allocate in advance for this many rows at once: (tokens of a pass, choices, tokens in caches)."""
    choices = min(MOST_CANDIDATES + rows * RESERVED_CHOICES, MOST_CHOICES)
    return PASS_TOKENS, choices, rows * min(RESERVED_ROW, context)


def head_of(program: Program) -> Op:
    """The LM head."""
    return next(op for op in reversed(program.ops) if op.kind is Kind.LINEAR)


def scored_tokens(program: Program, asked: int | None) -> int:
    """How many tokens a draft scores that was asked for this many at most (0: all, None: as many as pay)."""
    head, vocabulary = head_of(program), program.vocabulary
    if head.output.width != vocabulary:
        return head.output.width
    if asked is None:
        products = sum(weight.rows * weight.columns for weight in program.weights if not weight.table)
        share = vocabulary * head.input.width / products
        asked = round(SCORED_SHARE * vocabulary) if vocabulary >= LARGE_VOCABULARY and share >= LARGE_SHARE else 0
    return asked if 0 < asked < vocabulary else vocabulary


def _context_share(program: Program) -> float:
    """Windows are left out: ``ContextCost`` learns from passes how much less they cost."""
    kept = sum(op.kv_heads * (op.head_size + op.value_size) for op in program.caches)
    read = sum(packed_bytes(weight) for weight in program.weights if not weight.table)
    return kept * program.cache.element_bytes / read


def _routers(program: Program) -> list[Router]:
    found: list[Router] = []
    latest: Op | None = None
    for op in program.ops:
        if op.kind is Kind.ROUTE:
            latest = op
        elif op.kind is Kind.EXPERTS and not op.integer and latest is not None:
            found.append(Router(op.heads, latest.kv_heads * op.heads / latest.heads))
    return found


class NativeEngine:
    """``_rows`` maps the caller's numbers of rows to the kernels' own."""

    exact = True
    forks = True
    branches = True

    def __init__(self, model: NativeModel, context: int) -> None:
        self.model = model
        self.context = context
        self.vocabulary = model.program.vocabulary
        self.guess_room = GUESS_ROOM
        self._rows: dict[int, int] = {}
        self.learner: NativeEngine | None = None
        routers = _routers(model.program)
        self.mixture = Mixture(tuple(routers)) if routers else None
        # In a mixture of experts the weights that are read depend on the tokens.
        self.context_share = 0.0 if routers else _context_share(model.program)
        # With long rope a feed may take several passes, and only the latest can be ranked.
        self.ranker = None if any(op.longest for op in model.program.ops) else _Ranker(model)
        # Long rope and recurrent states need all tokens from the first on.
        reads_all = any(op.longest or op.kind in RECURRENT for op in model.program.ops)
        self.skipper: NativeEngine | None = None if reads_all else self

    def correct_choices(self) -> None:
        """Set ``learner``. For drafts only: no choice of a target may depend on another row."""
        program = self.model.program
        products = sum(weight.rows * weight.columns for weight in program.weights if not weight.table)
        state = next(op.input.width for op in reversed(program.ops) if op.kind is Kind.LINEAR)
        tokens = round(CORRECTING_SHARE * products / state)
        self.model.correct(max(LEAST_CORRECTED, min(MOST_CORRECTED, tokens)))
        self.learner = self

    def shorten(self, tokens: int | None) -> int:
        program = self.model.program
        scored = scored_tokens(program, tokens)
        if head_of(program).output.width == self.vocabulary:
            self.model.shorten(scored if scored < self.vocabulary else 0)
        return scored

    def learn(self, row: int, first: int, tokens: Sequence[int]) -> tuple[int, int]:
        return self.model.learn(self._rows[row], first, tokens)

    def reserve(self, rows: int) -> None:
        """Allocate the memory that this many rows usually need. If that fails, it is allocated as it is needed."""
        try:
            self.model.reserve(*reserved(rows, self.context))
        except KernelError as error:
            logger.info("memory for %d rows was not allocated in advance: %s", rows, error)

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        if row in self._rows:
            self.close(row)
        self._rows[row] = self.model.open(self._known(sampling), prompt_length)

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        """Blocks of the cache are shared until one of the two rows writes to them."""
        forked = self.model.fork(self._rows[source], length, self._known(sampling), prompt_length)
        if row in self._rows:
            self.close(row)
        self._rows[row] = forked

    def skip(self, row: int, tokens: Sequence[int]) -> None:
        try:
            self.model.skip(self._rows[row], tokens)
        except KernelError as error:
            raise WorkerError(f"the native engine could not skip {len(tokens)} tokens: {error}") from error

    def length(self, row: int) -> int:
        return self.model.length(self._rows[row])

    def truncate(self, row: int, length: int) -> None:
        if length < self.length(row):
            self.model.truncate(self._rows[row], length)

    def close(self, row: int) -> None:
        self.model.close_row(self._rows.pop(row))

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        masks = next((feed.masks.of for feed in feeds if feed.masks is not None), None)
        native_masks = None if masks is None else NativeMasks(masks.words, masks.ready)
        runners_up = any(feed.runners_up for feed in feeds)
        answers, experts_read = list[NativeOutput](), 0
        try:
            for together in _passes(feeds):
                answers += self.model.forward([self._feeding(feed) for feed in together], native_masks, runners_up)
                experts_read += 0 if self.mixture is None else self.model.experts_read()
        except KernelError as error:
            raise WorkerError(f"the native engine could not run a pass over {len(feeds)} rows: {error}") from error
        if self.mixture is not None:
            self.mixture.read = experts_read
        return [Chosen(each.tokens, each.margins, each.logprobs, each.runners_up, each.states) for each in answers]

    def scores(self, feeds: Sequence[Feed]) -> NDArray[np.float32]:
        asked = [NativeFeed(self._rows[feed.row], feed.tokens, choose=0, logits=feed.choose) for feed in feeds]
        try:
            return np.concatenate([answer.logits for answer in self.model.forward(asked)])
        except KernelError as error:
            raise WorkerError(f"the native engine could not run a pass over {len(feeds)} rows: {error}") from error

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        if any(feed.guide is not None for feed in decode_feeds):
            # The guide must be asked for a mask between two steps.
            return decode_in_steps(self, decode_feeds, stop_rule)
        feeds = [
            NativeDecodeFeed(
                self._rows[feed.row],
                feed.tokens,
                feed.most,
                feed.ends,
                feed.reach,
                feed.miss_factor,
                self._given(feed),
            )
            for feed in decode_feeds
        ]
        stopping = NativeStopRule(
            stop_rule.bounds, stop_rule.usual, stop_rule.least_chance, stop_rule.least_reach, stop_rule.least_sum
        )
        try:
            choices, steps = self.model.decode(feeds, stopping, self.guess_room)
        except KernelError as error:
            raise WorkerError(f"the native engine could not go on with {len(decode_feeds)} rows: {error}") from error
        chosen = [
            Chosen(tokens, [min(margin, MOST_MARGIN) for margin in margins], runners_up=runners_up)
            for tokens, margins, runners_up in choices
        ]
        return DecodeResult(chosen, steps)

    def _feeding(self, feed: Feed) -> NativeFeed:
        logprobs = -1 if feed.logprobs is None else feed.logprobs
        first_mask = -1 if feed.masks is None else feed.masks.first
        return NativeFeed(
            self._rows[feed.row],
            feed.tokens,
            feed.choose,
            0,
            logprobs,
            branches=feed.branches,
            first_mask=first_mask,
            states=feed.states,
            given=self._given(feed),
        )

    def _given(self, feed: Feed | DecodeFeed) -> NDArray[np.uint16] | None:
        """The target's states of the tokens, for the engine of a head."""
        return None

    def _known(self, sampling: Sampling) -> Sampling:
        """The sampling without tokens that this model lacks: a draft gets the target's, and may have a smaller
        vocabulary."""
        ends = sampling.end_tokens or ()
        if all(token < self.vocabulary for token in (*ends, *(token for token, _ in sampling.logit_bias))):
            return sampling
        return replace(
            sampling,
            logit_bias=tuple((token, bias) for token, bias in sampling.logit_bias if token < self.vocabulary),
            end_tokens=tuple(token for token in ends if token < self.vocabulary),
        )


class _Ranker:
    def __init__(self, model: NativeModel) -> None:
        self._model = model

    @property
    def most_tokens(self) -> int:
        return PASS_TOKENS

    def rank(self, choice: int, count: int, mask: NDArray[np.uint32] | None = None) -> Sequence[int]:
        try:
            return self._model.rank(choice, count, mask)
        except KernelError as error:
            raise WorkerError(f"the native engine could not rank the tokens of choice {choice}: {error}") from error


def _passes(feeds: Sequence[Feed]) -> Iterator[list[Feed]]:
    """The feeds in their order, divided into passes of at most PASS_TOKENS tokens, or of one larger feed."""
    together, tokens = list[Feed](), 0
    for feed in feeds:
        count = len(feed.tokens) + len(feed.branches)
        if together and tokens + count > PASS_TOKENS:
            yield together
            together, tokens = [], 0
        together.append(feed)
        tokens += count
    if together:
        yield together
