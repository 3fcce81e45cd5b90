"""The attention function of transformers' models in passes over many rows of different lengths, as one flat sequence.

A model passes the features of its attention as keywords. Each is computed as in transformers' eager attention, or refused
by its name: an unknown keyword that is not None is never ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from outrider.workers.engines.hf_masks import ATTENTION_NAME, NotHonoured, RaggedMask
from outrider.workers.engines.hf_temperature import Temperature

FIRST_CAPACITY = 64
# Keywords that do not change the result: positions (masks are made by row, and rope is applied already), and requests for
# further outputs.
WITHOUT_EFFECT = frozenset(
    (
        *("position_ids", "cache_position", "position_embeddings", "cache", "past_key_values", "past_key_value"),
        "use_cache",
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
        # The window is in the mask; transformers hands it over for kernels that take no masks.
        *("sliding_window", "deterministic"),
    )
)
MEANINGS = {
    "position_bias": "a bias by position",
    "relative_position_bias": "a bias by position",
    "alibi": "a bias by distance",
    "indices": "attention to selected tokens",
    "block_indices": "attention to selected blocks",
    "head_mask": "a mask of heads",
}


class LayerCache:
    """One attention's keys and values of one row, each (kv heads, capacity, head size); grows by doubling."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        # This many tokens were written; after a truncation fewer are valid (``RowCache.length``).
        self.stop = 0

    def append(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values after the first ``start`` tokens; returns those of all tokens up to the last written."""
        if start > self.stop:
            raise NotHonoured("layers that leave out tokens")
        stop = start + keys.shape[1]
        if self.keys is None or self.values is None or stop > self.keys.shape[1]:
            capacity = max(FIRST_CAPACITY, 1 << (stop - 1).bit_length())
            self.keys = _grown(self.keys, keys, capacity, start)
            self.values = _grown(self.values, values, capacity, start)
        self.keys[:, start:stop] = keys
        self.values[:, start:stop] = values
        self.stop = stop
        return self.keys[:, :stop], self.values[:, :stop]

    def copy(self, length: int) -> LayerCache:
        """A cache of its own with the first tokens of this one."""
        other = LayerCache()
        if self.keys is not None and self.values is not None:
            other.keys, other.values = self.keys[:, :length].clone(), self.values[:, :length].clone()
            other.stop = min(length, self.stop)
        return other


def _grown(old: torch.Tensor | None, like: torch.Tensor, capacity: int, used: int) -> torch.Tensor:
    new = like.new_empty((like.shape[0], capacity, like.shape[2]))
    if old is not None:
        new[:, :used] = old[:, :used]
    return new


@dataclass(slots=True)
class RowCache:
    """The keys and values of a row's first ``length`` tokens, one ``LayerCache`` for each attention of a pass, in order."""

    length: int = 0
    layers: list[LayerCache] = field(default_factory=list)

    def layer(self, index: int) -> LayerCache:
        if index == len(self.layers):
            self.layers.append(LayerCache())
        return self.layers[index]

    def copy(self, length: int) -> RowCache:
        length = min(length, self.length)
        return RowCache(length, [layer.copy(length) for layer in self.layers] if length else [])


@dataclass(frozen=True, slots=True)
class Span:
    """Where in the flat sequence one row's new tokens lie."""

    cache: RowCache
    start: int
    stop: int


class Pass(threading.local):
    """The forward pass in progress, for the attention layers to find. One pass a thread at a time."""

    def __init__(self) -> None:
        self.spans: Sequence[Span] = ()
        self.positions = torch.empty(0)
        self.temperatures: Mapping[torch.nn.Module, Temperature] = {}
        self.fused = True
        # How many attentions were called so far. They are identified by their order: some models share one module among
        # layers.
        self.calls = 0

    def begin(
        self,
        spans: Sequence[Span],
        positions: torch.Tensor,
        temperatures: Mapping[torch.nn.Module, Temperature],
        fused: bool,
    ) -> None:
        self.spans, self.positions, self.temperatures, self.fused, self.calls = spans, positions, temperatures, fused, 0

    def end(self) -> None:
        self.spans = ()


current = Pass()


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RaggedMask | None = None,
    scaling: float | None = None,
    dropout: float | None = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query (1, heads, tokens, size), key and value (1, kv heads, tokens, size)."""
    _refuse_unknown(others)
    if dropout:
        raise NotHonoured("dropout")
    if attention_mask is None:
        # Without a mask, is_causal says whether a token attends to later ones.
        if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
            raise NotHonoured("attention to tokens that come later")
        attention_mask = RaggedMask()
    elif not isinstance(attention_mask, RaggedMask):
        raise NotHonoured("a mask of its own")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotHonoured("attention to something else than the row's own tokens")
    if module in current.temperatures:
        query = current.temperatures[module].applied(query, current.positions)
    number, current.calls = current.calls, current.calls + 1
    sinks = None if s_aux is None else s_aux.reshape(-1)
    if sinks is not None and sinks.numel() != query.shape[1]:
        raise NotHonoured("sinks that differ by token")
    fused = current.fused and softcap is None and sinks is None
    output = query.new_empty((query.shape[2], query.shape[1], value.shape[3]))
    for span in current.spans:
        past = span.cache.length
        tokens = slice(span.start, span.stop)
        keys, values = span.cache.layer(number).append(past, key[0, :, tokens], value[0, :, tokens])
        first, mask = attention_mask.of(past, span.stop - span.start, query.device)
        keys, values = keys[None, :, first:], values[None, :, first:]
        if fused:
            attention = _fused(query[:, :, tokens], keys, values, mask, scaling)
        else:
            attention = _eager(query[:, :, tokens], keys, values, mask, scaling, softcap, sinks)
        output[tokens] = attention[0].transpose(0, 1)
    return output[None], None


def _refuse_unknown(keywords: dict[str, Any]) -> None:
    for name, value in keywords.items():
        if value is not None and value is not False and name not in WITHOUT_EFFECT:
            raise NotHonoured(MEANINGS.get(name, f'what it calls "{name}"'))


def _fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=keys.shape[1] != query.shape[1]
    )


def _eager(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(softcap * tanh(scale * Q Kᵀ / softcap)) V, with the matrix of scores in memory.

    ``sinks`` are one more score for each head in the softmax, without a value.
    """
    copies = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(copies, dim=1), values.repeat_interleave(copies, dim=1)
    scores = query @ keys.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.float().softmax(dim=-1).to(query.dtype) @ values
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).float().softmax(dim=-1)[..., :-1].to(query.dtype) @ values


AttentionInterface.register(ATTENTION_NAME, attend)
