"""A transformers model that cannot feed ragged batches, one row at a time, on transformers' own cache."""

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
from outrider.workers.engines.stepwise import decode_in_steps
from outrider.workers.engines.ways import RowFeeding
from outrider.workers.messages import Sampling

# Earlier states of a row that are kept, where a cache cannot be cut: one a pass, so as many steps as a draft takes back.
STATES_KEPT = 8
# Under which names models take and give what they remember of a row: the first is transformers' own since 5.24.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


@dataclass(frozen=True, slots=True)
class SavedState:
    """A row's cache as it was after ``length`` tokens: what cannot be cut to that, as a copy."""

    length: int
    parts: Any


@dataclass(slots=True)
class CachedRow(RowState):
    """A row with what the model remembers of its first ``held`` tokens."""

    cache: Any = None
    held: int = 0
    earlier: deque[SavedState] = field(default_factory=lambda: deque(maxlen=STATES_KEPT))


class HfRowEngine:
    # A row alone is still fed in other portions when it is assisted.
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
        # As transformers' own generation does: what a model takes them to be without is not always right.
        self._takes_positions = "position_ids" in parameters

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        self._rows[row] = CachedRow(sampling, prompt_length)

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        """The tokens; they are read with the first that are fed."""
        self._rows[row] = CachedRow(sampling, prompt_length, self._rows[source].tokens[:length])

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        return decode_in_steps(self, decode_feeds, stop_rule)

    def length(self, row: int) -> int:
        return len(self._rows[row].tokens)

    def truncate(self, row: int, length: int) -> None:
        state = self._rows[row]
        del state.tokens[length:]
        if state.held > length:
            self._go_back(state, length)

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
        """What ``HfEngine.logits`` is."""
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
            # What nobody asks about waits: a prompt must come in one pass.
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
        """Read the tokens behind what is held."""
        if row.cache is None:
            row.cache = self._new_cache()
        elif self._must_copy(row.cache):
            row.earlier.append(SavedState(row.held, self._copied(row.cache)))
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
        """transformers' own, by the model's layers; None where the model makes another kind."""
        if not self.model._supports_default_dynamic_cache():
            return None
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def _must_copy(self, cache: Any) -> bool:
        return type(cache) is not DynamicCache or not all(map(_can_be_cut, cache.layers))

    def _copied(self, cache: Any) -> Any:
        if type(cache) is not DynamicCache:
            return copy.deepcopy(cache)
        return {index: copy.deepcopy(layer) for index, layer in enumerate(cache.layers) if not _can_be_cut(layer)}

    def _go_back(self, row: CachedRow, length: int) -> None:
        """To the cache after ``length`` tokens, or after fewer: those that it then lacks are read again."""
        if row.cache is not None and not self._must_copy(row.cache):
            # A negative count is how many to remove.
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


def _can_be_cut(layer: Any) -> bool:
    """Only a cache that keeps every token can: windows, states and convolutions have forgotten what came before."""
    return type(layer) is DynamicLayer
