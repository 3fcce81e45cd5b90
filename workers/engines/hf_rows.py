"""A transformers model that cannot feed ragged batches, one row at a time, on transformers' own cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from outrider.workers.engines.engine import Chosen, Feed, Ran, Run, Trust
from outrider.workers.engines.hf import RowState, choose_last
from outrider.workers.engines.stepwise import run_in_steps
from outrider.workers.messages import Sampling


class HfRowEngine:
    # A row alone is still fed in other portions when it is assisted.
    exact = False
    branches = False
    # transformers' own caches cannot begin with a part of another.
    forks = False

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        self.model = model
        self.context = context
        self.vocabulary: int = model.get_output_embeddings().weight.shape[0]
        self._rows: dict[int, RowState] = {}
        self._caches: dict[int, DynamicCache] = {}

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        self._rows[row] = RowState(sampling, prompt_length)
        self._caches[row] = DynamicCache(config=self.model.config)

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        self.open(row, sampling, prompt_length)
        self.feed([Feed(row, self._rows[source].tokens[:length], 0)])

    def run(self, runs: Sequence[Run], trust: Trust) -> Ran:
        return run_in_steps(self, runs, trust)

    def length(self, row: int) -> int:
        return len(self._rows[row].tokens)

    def truncate(self, row: int, length: int) -> None:
        surplus = len(self._rows[row].tokens) - length
        if surplus > 0:
            del self._rows[row].tokens[length:]
            # A negative count is how many to remove.
            self._caches[row].crop(-surplus)

    def close(self, row: int) -> None:
        del self._rows[row], self._caches[row]

    @torch.inference_mode()
    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        answers = []
        for feed in feeds:
            row, cache = self._rows[feed.row], self._caches[feed.row]
            ids = torch.tensor([list(feed.tokens)], device=self.model.device)
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0]
            row.tokens.extend(feed.tokens)
            last = logits[len(feed.tokens) - feed.choose :].float().cpu()
            answers.append(choose_last(row, last, feed.logprobs))
        return answers
