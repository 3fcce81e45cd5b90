"""A model on our own kernels: passes of which no bit depends on what else is in the batch, singly or several in a call."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from outrider.kernels.library import KernelError
from outrider.kernels.native import Feeding, NativeModel, SelfFeeding, Stopping
from outrider.workers.engines.engine import Chosen, Feed, Ran, Run, Trust
from outrider.workers.errors import WorkerError
from outrider.workers.messages import Sampling
from outrider.workers.speculation import MOST_CANDIDATES, MOST_RUNNERS_UP

logger = logging.getLogger(__name__)

# Memory that is taken before the work: every row's cache for its first tokens, and that of passes over as much as the first
# rows' prompts and candidates commonly come to.
RESERVED_ROW, RESERVED_PROMPT, RESERVED_CHOICES = 256, 128, 5 + MOST_RUNNERS_UP
LEAST_PASS, MOST_PASS, MOST_CHOICES = 512, 2048, 128


class NativeEngine:
    """Rows are named by the caller's numbers here and by the kernels' own below."""

    exact = True
    forks = True
    branches = True

    def __init__(self, model: NativeModel, context: int) -> None:
        self.model = model
        self.context = context
        self.vocabulary = model.program.vocabulary
        self._rows: dict[int, int] = {}

    def reserve(self, rows: int) -> None:
        """Take the memory that so many rows at once commonly need. A wish: where it fails, it is taken as it is needed."""
        tokens = min(max(LEAST_PASS, rows * RESERVED_PROMPT), MOST_PASS)
        choices = min(MOST_CANDIDATES + rows * RESERVED_CHOICES, MOST_CHOICES)
        try:
            self.model.reserve(tokens, choices, rows * min(RESERVED_ROW, self.context))
        except KernelError as error:
            logger.info("memory for %d rows was not taken beforehand: %s", rows, error)

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        if row in self._rows:
            self.close(row)
        self._rows[row] = self.model.open(self._known(sampling), prompt_length)

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        """The cache is shared until one of the two writes."""
        forked = self.model.fork(self._rows[source], length, self._known(sampling), prompt_length)
        if row in self._rows:
            self.close(row)
        self._rows[row] = forked

    def length(self, row: int) -> int:
        return self.model.length(self._rows[row])

    def truncate(self, row: int, length: int) -> None:
        if length < self.length(row):
            self.model.truncate(self._rows[row], length)

    def close(self, row: int) -> None:
        self.model.close_row(self._rows.pop(row))

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        try:
            answers = self.model.forward([self._feeding(feed) for feed in feeds])
        except KernelError as error:
            raise WorkerError(f"the native engine could not run a pass over {len(feeds)} rows: {error}") from error
        return [Chosen(answer.tokens, answer.margins, answer.logprobs) for answer in answers]

    def run(self, runs: Sequence[Run], trust: Trust) -> Ran:
        feeds = [SelfFeeding(self._rows[run.row], run.tokens, run.most, run.ends, run.reach, run.doubt) for run in runs]
        stopping = Stopping(trust.bounds, trust.usual, trust.least_chance, trust.least_reach, trust.least_sum)
        try:
            choices, seconds = self.model.run_on(feeds, stopping)
        except KernelError as error:
            raise WorkerError(f"the native engine could not go on with {len(runs)} rows: {error}") from error
        chosen = [Chosen(tokens, leads, runners_up=runners_up) for tokens, leads, runners_up in choices]
        going = [sum(len(each.tokens) > step for each in chosen) for step in range(len(seconds))]
        return Ran(chosen, list(zip(going, seconds, strict=True)))

    def _feeding(self, feed: Feed) -> Feeding:
        logprobs = -1 if feed.logprobs is None else feed.logprobs
        return Feeding(self._rows[feed.row], feed.tokens, feed.choose, logprobs=logprobs, branches=feed.branches)

    def _known(self, sampling: Sampling) -> Sampling:
        """Without the tokens that this model lacks: a draft is handed the target's sampling, and may have fewer."""
        ends = sampling.end_tokens or ()
        if all(token < self.vocabulary for token in (*ends, *(token for token, _ in sampling.logit_bias))):
            return sampling
        return replace(
            sampling,
            logit_bias=tuple((token, bias) for token, bias in sampling.logit_bias if token < self.vocabulary),
            end_tokens=tuple(token for token in ends if token < self.vocabulary),
        )
