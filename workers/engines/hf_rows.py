"""Any transformers model that cannot run ragged batches: one row at a time, on transformers' own cache."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from outrider.workers.engines.engine import Chosen, DecodeFeed, DecodeResult, Feed, StopRule
from outrider.workers.engines.hf import RowState, choose_last, vocabulary_of
from outrider.workers.engines.hf_batching import RowFeeding
from outrider.workers.engines.stepwise import decode_in_steps
from outrider.workers.messages import Sampling

# How many copies of a row's cache are kept where it cannot be truncated: one for each pass, so that a draft can go back so
# many steps.
STATES_KEPT = 8
# The keywords under which models take and return their cache: the first is transformers' default since 5.24.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


@dataclass(frozen=True, slots=True)
class SavedState:
    """Copies of those parts of a row's cache after ``length`` tokens that cannot be truncated."""

    length: int
    parts: Any


@dataclass(slots=True)
class CachedRow(RowState):
    """A row and the model's cache of its first ``held`` tokens."""

    cache: Any = None
    held: int = 0
    earlier: deque[SavedState] = field(default_factory=lambda: deque(maxlen=STATES_KEPT))


class HfRowEngine:
    # Each row is alone in a pass, but with candidates it is divided into other passes.
    exact = False
    branches = False
    # Its passes do not say which experts they read.
    mixture = None
    context_share = 0.0
    ranker = learner = skipper = None
    # transformers' own caches cannot begin with a part of another.
    forks = False

    def __init__(self, model: PreTrainedModel, context: int, feeding: RowFeeding = RowFeeding.CACHED) -> None:
        self.model = model
        self.context = context
        self.feeding = feeding
        self.vocabulary: int = vocabulary_of(model)
        self._rows: dict[int, CachedRow] = {}
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])
        self._none = torch.empty(0, self.vocabulary)
        # Positions are passed, as transformers' generation does: the default of some models is wrong.
        self._takes_positions = "position_ids" in parameters

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        self._rows[row] = CachedRow(sampling, prompt_length)

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        """Copies the tokens only: they are read with the first feed."""
        self._rows[row] = CachedRow(sampling, prompt_length, self._rows[source].tokens[:length])

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        return decode_in_steps(self, decode_feeds, stop_rule)

    def length(self, row: int) -> int:
        return len(self._rows[row].tokens)

    def truncate(self, row: int, length: int) -> None:
        state = self._rows[row]
        del state.tokens[length:]
        if state.held > length:
            self._truncate_cache(state, length)

    def close(self, row: int) -> None:
        del self._rows[row]

    @torch.inference_mode()
    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        answers = []
        for feed in feeds:
            logits = self._logits(feed)
            answers.append(choose_last(self._rows[feed.row], logits, feed))
        return answers

    @torch.inference_mode()
    def logits(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """As ``HfEngine.logits``."""
        return torch.cat([self._logits(feed) for feed in feeds])

    def scores(self, feeds: Sequence[Feed]) -> NDArray[np.float32]:
        scores: NDArray[np.float32] = self.logits(feeds).numpy()
        return scores

    def _logits(self, feed: Feed) -> torch.Tensor:
        """Append the tokens to their row; the scores after each of the last ``choose``, as float32 on the host."""
        row = self._rows[feed.row]
        row.tokens.extend(feed.tokens)
        if self.feeding is RowFeeding.WHOLE:
            scores = self._model(row.tokens, 0, use_cache=False)[0] if feed.choose else self._none
        elif self.feeding is RowFeeding.STEPPED:
            # Tokens without a choice wait for the next feed with one: a prompt must be read in one pass.
            scores = self._step(row) if feed.choose else self._none
        else:
            scores = self._go_on(row, row.tokens[row.held :])
        return scores[len(scores) - feed.choose :].float().cpu()

    def _step(self, row: CachedRow) -> torch.Tensor:
        first = row.tokens[: max(1, row.prompt_length)] if row.cache is None else []
        scores = [self._go_on(row, first)] if first else []
        scores.extend(self._go_on(row, [token]) for token in row.tokens[row.held :])
        return torch.cat(scores)

    def _go_on(self, row: CachedRow, tokens: Sequence[int]) -> torch.Tensor:
        """Feed the tokens that follow the cached ones."""
        if row.cache is None:
            row.cache = self._new_cache()
        elif self._needs_copies(row.cache):
            row.earlier.append(SavedState(row.held, self._copies(row.cache)))
        given = {} if row.cache is None else {self._cache_name: row.cache}
        logits, outputs = self._model(tokens, row.held, use_cache=True, **given)
        row.cache = getattr(outputs, self._cache_name, row.cache)
        row.held += len(tokens)
        return logits

    def _model(self, tokens: Sequence[int], past: int, **given: Any) -> tuple[torch.Tensor, Any]:
        device = self.model.device
        if self._takes_positions:
            given["position_ids"] = torch.arange(past, past + len(tokens), device=device)[None]
        outputs = self.model(input_ids=torch.tensor([list(tokens)], device=device), **given)
        return outputs.logits[0], outputs

    def _new_cache(self) -> Cache | None:
        """A DynamicCache for the model's kinds of layers; None where the model makes a cache of another class."""
        if not self.model._supports_default_dynamic_cache():
            return None
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def _needs_copies(self, cache: Any) -> bool:
        return type(cache) is not DynamicCache or not all(map(_can_be_truncated, cache.layers))

    def _copies(self, cache: Any) -> Any:
        if type(cache) is not DynamicCache:
            return copy.deepcopy(cache)
        return {index: copy.deepcopy(layer) for index, layer in enumerate(cache.layers) if not _can_be_truncated(layer)}

    def _truncate_cache(self, row: CachedRow, length: int) -> None:
        """Truncate the cache to ``length`` tokens, or restore an earlier copy: the tokens in between are read again."""
        if row.cache is not None and not self._needs_copies(row.cache):
            # crop takes a negative number as how many tokens to remove.
            row.cache.crop(length - row.held)
            row.held = length
            return
        while row.earlier and row.earlier[-1].length > length:
            row.earlier.pop()
        if not row.earlier:
            row.cache, row.held = None, 0
            return
        state = row.earlier.pop()
        if type(row.cache) is not DynamicCache:
            row.cache = state.parts
        else:
            for index, layer in enumerate(row.cache.layers):
                if index in state.parts:
                    row.cache.layers[index] = state.parts[index]
                else:
                    layer.crop(state.length - row.held)
        row.held = state.length


def _can_be_truncated(layer: Any) -> bool:
    """Only a layer that keeps all keys and values: windows, recurrent states and convolutions have dropped earlier ones."""
    return type(layer) is DynamicLayer
