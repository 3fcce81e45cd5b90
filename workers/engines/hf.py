"""Any transformers model as an engine, on any device torch knows.

Several rows, each with its own number of new tokens, go through one forward pass as a single flat sequence: no padding
and no loop over rows around the model. The model's own attention layers call back into ``attend``, which gives every row
its own cache; everything else in a decoder works token by token and does not care which row a token belongs to.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from outrider.workers.engines.engine import Chosen, Feed, Ran, Run, Trust
from outrider.workers.engines.sampling import choose, log_probabilities
from outrider.workers.engines.stepwise import run_in_steps
from outrider.workers.messages import Sampling

ATTENTION_NAME = "outrider_ragged"
FIRST_CAPACITY = 64


class LayerCache:
    """One layer's keys and values of one row, each (kv heads, capacity, head size); grows by doubling."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def append(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write after ``start`` tokens and return everything up to the end of what was written."""
        stop = start + keys.shape[1]
        if self.keys is None or self.values is None or stop > self.keys.shape[1]:
            capacity = max(FIRST_CAPACITY, 1 << (stop - 1).bit_length())
            self.keys = _grown(self.keys, keys, capacity, start)
            self.values = _grown(self.values, values, capacity, start)
        self.keys[:, start:stop] = keys
        self.values[:, start:stop] = values
        return self.keys[:, :stop], self.values[:, :stop]

    def copy(self, length: int) -> LayerCache:
        """A cache of its own with the first tokens of this one."""
        other = LayerCache()
        if self.keys is not None and self.values is not None:
            other.keys, other.values = self.keys[:, :length].clone(), self.values[:, :length].clone()
        return other


def _grown(old: torch.Tensor | None, like: torch.Tensor, capacity: int, used: int) -> torch.Tensor:
    new = like.new_empty((like.shape[0], capacity, like.shape[2]))
    if old is not None:
        new[:, :used] = old[:, :used]
    return new


@dataclass(slots=True)
class RowState:
    """What an engine knows of a row. ``tokens`` are all the tokens whose keys and values the cache holds."""

    sampling: Sampling
    prompt_length: int
    tokens: list[int] = field(default_factory=list)
    layers: dict[int, LayerCache] = field(default_factory=dict)

    def layer(self, index: int) -> LayerCache:
        return self.layers.setdefault(index, LayerCache())


@dataclass(frozen=True, slots=True)
class Span:
    """Where in the flat sequence one row's new tokens lie."""

    row: RowState
    start: int
    stop: int


# The spans of the forward pass in progress, for the attention layers to find. One pass a thread at a time.
_current = threading.local()


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query (1, heads, tokens, size), key and value (1, kv heads, tokens, size)."""
    layer = module.layer_idx
    output = query.new_empty((query.shape[2], query.shape[1], value.shape[3]))
    for span in _current.spans:
        past = len(span.row.tokens)
        tokens = slice(span.start, span.stop)
        keys, values = span.row.layer(layer).append(past, key[0, :, tokens], value[0, :, tokens])
        first = 0 if sliding_window is None else max(0, past + 1 - sliding_window)
        keys, values = keys[:, first:], values[:, first:]
        mask = _mask(past, span.stop - span.start, first, sliding_window, query.device)
        attention = _fused if _current.fused else _eager
        output[tokens] = attention(query[:, :, tokens], keys[None], values[None], mask, scaling)[0].transpose(0, 1)
    return output[None], None


def _fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=keys.shape[1] != query.shape[1]
    )


def _eager(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Attention spelled out, as models wrote it before there were fused kernels: the scores exist as a matrix."""
    copies = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(copies, dim=1), values.repeat_interleave(copies, dim=1)
    scores = query @ keys.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.float().softmax(dim=-1).to(query.dtype) @ values


def _mask(past: int, count: int, first: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which keys from ``first`` on each of ``count`` new tokens sees; None where each sees them all."""
    if count == 1:
        return None
    positions = torch.arange(past, past + count, device=device)[:, None]
    keys = torch.arange(first, past + count, device=device)[None]
    seen = keys <= positions
    return seen if window is None else seen & (keys > positions - window)


AttentionInterface.register(ATTENTION_NAME, attend)


class HfEngine:
    """A transformers model that feeds ragged batches."""

    attention = ATTENTION_NAME
    # Float kernels of other libraries may sum in another order for another batch.
    exact = False
    forks = True
    branches = False

    def __init__(self, model: PreTrainedModel, context: int, fused: bool = True) -> None:
        self.model = model
        self.context = context
        self.fused = fused
        self.vocabulary: int = model.get_output_embeddings().weight.shape[0]
        self._rows: dict[int, RowState] = {}
        self._keeps_some_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        model.set_attn_implementation(ATTENTION_NAME)

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        self._rows[row] = RowState(sampling, prompt_length)

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        other = self._rows[source]
        layers = {index: layer.copy(length) for index, layer in other.layers.items()}
        self._rows[row] = RowState(sampling, prompt_length, other.tokens[:length], layers)

    def run(self, runs: Sequence[Run], trust: Trust) -> Ran:
        return run_in_steps(self, runs, trust)

    def length(self, row: int) -> int:
        return len(self._rows[row].tokens)

    def truncate(self, row: int, length: int) -> None:
        del self._rows[row].tokens[length:]

    def close(self, row: int) -> None:
        del self._rows[row]

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        logits = self.logits(feeds)
        answers, taken = [], 0
        for feed in feeds:
            answers.append(choose_last(self._rows[feed.row], logits[taken : taken + feed.choose], feed.logprobs))
            taken += feed.choose
        return answers

    def logits(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Append the feeds' tokens to their rows; the scores after each of the last ``choose`` tokens of every feed."""
        spans: list[Span] = []
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for feed in feeds:
            row = self._rows[feed.row]
            past, start = len(row.tokens), len(ids)
            ids.extend(feed.tokens)
            positions.extend(range(past, past + len(feed.tokens)))
            wanted.extend(range(len(ids) - feed.choose, len(ids)))
            spans.append(Span(row, start, len(ids)))
        logits = self._forward(ids, positions, wanted, spans)
        for feed, span in zip(feeds, spans, strict=True):
            span.row.tokens.extend(feed.tokens)
        return logits

    @torch.inference_mode()
    def _forward(self, ids: list[int], positions: list[int], wanted: list[int], spans: list[Span]) -> torch.Tensor:
        """The logits after the wanted tokens of the flat sequence, as float32 on the host."""
        device = self.model.device
        keep = torch.tensor(wanted, dtype=torch.long, device=device)
        some = {"logits_to_keep": keep} if self._keeps_some_logits else {}
        _current.spans, _current.fused = spans, self.fused
        try:
            logits = self.model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                **some,
            ).logits[0]
        finally:
            _current.spans = []
        return (logits if self._keeps_some_logits else logits[keep]).float().cpu()


def choose_last(row: RowState, logits: torch.Tensor, explain: int | None = None) -> Chosen:
    """One choice after each of the row's last ``len(logits)`` tokens, with log-probabilities where a number is given."""
    tokens, margins, logprobs = [], [], []
    first = len(row.tokens) - len(logits) + 1
    for position, scores in enumerate(logits.numpy(), start=first):
        prompt: Counter[int] = Counter()
        written: Counter[int] = Counter()
        if row.sampling.looks_back:
            prompt = Counter(row.tokens[: row.prompt_length])
            written = Counter(row.tokens[row.prompt_length : position])
        token, margin = choose(scores, row.sampling, position, prompt, written)
        tokens.append(token)
        margins.append(margin)
        if explain is not None:
            logprobs.append(log_probabilities(scores, token, explain))
    return Chosen(tokens, margins, logprobs)
