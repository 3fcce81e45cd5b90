"""Any transformers model as an engine, on any device of torch.

Several rows, each with its own number of new tokens, go through one forward pass as a single flat sequence: no padding
and no loop over rows around the model. The model's attention layers call ``hf_attention``, which gives every row its own
KV cache; all other operations of a decoder work token by token, whatever row a token belongs to.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from outrider.workers.engines import hf_attention
from outrider.workers.engines.corrections import KEPT_CHOICES, Corrections, KeptChoice, State
from outrider.workers.engines.engine import Chosen, DecodeFeed, DecodeResult, Feed, StopRule
from outrider.workers.engines.hf_attention import RowCache, Span
from outrider.workers.engines.hf_masks import ATTENTION_NAME, NotHonoured
from outrider.workers.engines.hf_rope import find_switch, rope_by_token
from outrider.workers.engines.hf_temperature import restore_temperatures, take_temperatures
from outrider.workers.engines.sampling import choose, log_probabilities
from outrider.workers.engines.stepwise import decode_in_steps
from outrider.workers.messages import Sampling

# A row that is this many tokens beyond the switch of its rope is never truncated to before it.
NEVER_TAKEN_BACK = 64


@dataclass(slots=True)
class RowState:
    """``tokens`` are all that the row was fed and that were not truncated."""

    sampling: Sampling
    prompt_length: int
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RaggedRow(RowState):
    """``caches`` has the keys and values: with long rope, those by the short (False) and by the long frequencies (True)."""

    caches: dict[bool, RowCache] = field(default_factory=dict)
    # By position: the number of tokens before the choice.
    kept_choices: dict[int, KeptChoice] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Portion:
    """One row's tokens in one pass, after those in its cache. ``long[i]``: token i takes the long frequencies of the
    rope."""

    cache: RowCache
    tokens: Sequence[int]
    choose: int
    long: Sequence[bool]


class HfEngine:
    """A transformers model fed with ragged batches."""

    attention = ATTENTION_NAME
    # Float kernels of other libraries may sum in another order for another batch.
    exact = False
    forks = True
    branches = False
    context_share = 0.0
    # Its passes do not say which experts they read.
    mixture = None
    ranker = skipper = None

    def __init__(self, model: PreTrainedModel, context: int, fused: bool = True) -> None:
        self.model = model
        self.learner: HfEngine | None = None
        self._corrections: Corrections | None = None
        # Where the model learns: the columns of the hidden states that ``_logits_and_states`` appends to the logits, and
        # the states of the current pass.
        self._state_columns = 0
        self._states: torch.Tensor | None = None
        self._hook: RemovableHandle | None = None
        self.context = context
        self.fused = fused
        self.vocabulary: int = vocabulary_of(model)
        self._rows: dict[int, RaggedRow] = {}
        self._keeps_some_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._switch = find_switch(model)
        self._rope = rope_by_token(model)
        self._temperatures = take_temperatures(model)
        self._attentions: int | None = None
        self.own_attention: str = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION_NAME)

    def release(self) -> None:
        """Leave the model as it was, for another engine."""
        self._rope.release()
        restore_temperatures(self._temperatures)
        if self._hook is not None:
            self._hook.remove()
        self.model.set_attn_implementation(self.own_attention)

    def correct_choices(self) -> None:
        """Set ``learner``, if the LM head is a plain linear layer: its input is the state that corrections multiply."""
        head = self.model.get_output_embeddings()
        if isinstance(head, torch.nn.Linear):
            self._corrections, self.learner, self._state_columns = Corrections(), self, head.in_features
            if self._hook is None:
                self._hook = head.register_forward_pre_hook(self._take_states)

    def _take_states(self, _: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self._states = given[0]

    def learn(self, row: int, first: int, tokens: Sequence[int]) -> tuple[int, int]:
        assert self._corrections is not None
        kept = self._rows[row].kept_choices
        told = [(kept[at], token) for at, token in enumerate(tokens, start=first) if at in kept]
        good = [self._corrections.learn(choice, token) for choice, token in told]
        return good.count(1), good.count(-1)

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        self._rows[row] = RaggedRow(sampling, prompt_length)

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        other = self._rows[source]
        new = self._rows[row] = RaggedRow(sampling, prompt_length, other.tokens[:length])
        for long, cache in other.caches.items():
            # Where keys keep the frequencies that they were computed with, those of the source are valid as long as both
            # rows take the same frequencies.
            same = cache.length
            if self._switch is not None and not self._switch.anew:
                theirs, ours = (self._sides(each, 0, length) for each in (other, new))
                same = next((at for at in range(length) if theirs[at] != ours[at]), length)
            new.caches[long] = cache.copy(min(length, same))

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        return decode_in_steps(self, decode_feeds, stop_rule)

    def length(self, row: int) -> int:
        return len(self._rows[row].tokens)

    def truncate(self, row: int, length: int) -> None:
        state = self._rows[row]
        del state.tokens[length:]
        for cache in state.caches.values():
            cache.length = min(cache.length, length)

    def close(self, row: int) -> None:
        del self._rows[row]

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        found = self._logits_and_states(feeds)
        answers, taken = [], 0
        for feed in feeds:
            row, of_feed = self._rows[feed.row], found[taken : taken + feed.choose]
            logits, states = self._split(of_feed)
            answer = choose_last(row, logits, feed)
            if self._corrections is not None:
                answer = self._corrected(row, feed, answer, logits, states.numpy())
            answers.append(answer)
            taken += feed.choose
        return answers

    def _corrected(self, row: RaggedRow, feed: Feed, own: Chosen, logits: torch.Tensor, states: State) -> Chosen:
        """The choices by corrected scores, where these are trusted. Both kinds are kept until ``learn``."""
        corrections = self._corrections
        assert corrections is not None
        better = [corrections.corrected(*pair) for pair in zip(logits.numpy(), states, strict=True)]
        corrected = choose_last(row, torch.from_numpy(np.stack(better)), feed) if better else own
        pairs = zip(own.tokens, corrected.tokens, states, strict=True)
        for at, (ours, theirs, state) in enumerate(pairs, start=len(row.tokens) - len(own.tokens) + 1):
            row.kept_choices.pop(at, None)
            # A copy: a view would keep all scores of the pass in memory.
            row.kept_choices[at] = KeptChoice(ours, theirs, state.copy())
        for at in list(row.kept_choices)[:-KEPT_CHOICES]:
            del row.kept_choices[at]
        return corrected if corrections.trusted else own

    def scores(self, feeds: Sequence[Feed]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.logits(feeds).numpy()
        return logits

    def logits(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Append the feeds' tokens to their rows; the scores after each of the last ``choose`` tokens of every feed."""
        return self._split(self._logits_and_states(feeds))[0]

    def _split(self, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = found.shape[1] - self._state_columns
        return found[:, :scores], found[:, scores:]

    def _logits_and_states(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """The logits; where the model learns, each row of them is followed by the hidden state that it was made from."""
        near, far, straddling = list(feeds), [], []
        for index, feed in enumerate(feeds):
            before = self._before_switch(feed)
            if before:
                # No pass straddles the switch: beyond it all keys of the row are computed anew.
                beyond = len(feed.tokens) - before
                near[index] = replace(feed, tokens=feed.tokens[:before], choose=max(0, feed.choose - beyond))
                far.append(replace(feed, tokens=feed.tokens[before:], choose=min(feed.choose, beyond)))
                straddling.append(index)
        scores = self._pass(near)
        for index, more in zip(straddling, self._pass(far), strict=True):
            scores[index] = torch.cat([scores[index], more])
        return torch.cat(scores)

    def _before_switch(self, feed: Feed) -> int:
        """How many of a feed's tokens come before the switch of the rope, where the feed crosses it and all keys change
        there; else 0."""
        row, switch = self._rows[feed.row], self._switch
        if switch is None or not switch.anew:
            return 0
        past = len(row.tokens)
        crosses = not switch.long(past + 1, row.prompt_length) and switch.long(past + len(feed.tokens), row.prompt_length)
        return switch.length - past if crosses else 0

    def _pass(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """One forward pass over feeds of different rows; the logits that each of them asked for."""
        if not feeds:
            return []
        rows = [self._rows[feed.row] for feed in feeds]
        portions = [self._portion(row, feed) for row, feed in zip(rows, feeds, strict=True)]
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        long: list[bool] = []
        spans: list[Span] = []
        for portion in portions:
            start, past = len(ids), portion.cache.length
            ids.extend(portion.tokens)
            positions.extend(range(past, past + len(portion.tokens)))
            long.extend(portion.long)
            wanted.extend(range(len(ids) - portion.choose, len(ids)))
            spans.append(Span(portion.cache, start, len(ids)))
        logits = self._forward(ids, positions, wanted, long, spans)
        for row, feed, portion in zip(rows, feeds, portions, strict=True):
            portion.cache.length += len(portion.tokens)
            row.tokens.extend(feed.tokens)
            self._forget_other_side(row)
        return list(logits.split([portion.choose for portion in portions]))

    def _portion(self, row: RaggedRow, feed: Feed) -> Portion:
        past, switch = len(row.tokens), self._switch
        anew = switch is not None and switch.anew
        side = anew and switch is not None and switch.long(past + len(feed.tokens), row.prompt_length)
        cache = row.caches.setdefault(side, RowCache())
        # The row's tokens that this cache lacks, since they were fed with the other frequencies or only forked.
        tokens = [*row.tokens[cache.length :], *feed.tokens]
        return Portion(cache, tokens, feed.choose, self._sides(row, cache.length, past + len(feed.tokens)))

    def _sides(self, row: RaggedRow, start: int, stop: int) -> list[bool]:
        """Whether each position takes the long frequencies, in a pass that ends at ``stop``."""
        switch = self._switch
        if switch is None:
            return [False] * (stop - start)
        if switch.anew:
            return [switch.long(stop, row.prompt_length)] * (stop - start)
        prompt = switch.long(0, row.prompt_length)
        return [prompt if at < row.prompt_length else at >= switch.length for at in range(start, stop)]

    def _forget_other_side(self, row: RaggedRow) -> None:
        if len(row.caches) > 1 and self._switch is not None and len(row.tokens) > self._switch.length + NEVER_TAKEN_BACK:
            del row.caches[False]

    @torch.inference_mode()
    def _forward(
        self, ids: list[int], positions: list[int], wanted: list[int], long: list[bool], spans: list[Span]
    ) -> torch.Tensor:
        """The logits after the wanted tokens of the flat sequence, as float32 on the host."""
        device = self.model.device
        keep = torch.tensor(wanted, dtype=torch.long, device=device)
        some = {"logits_to_keep": keep} if self._keeps_some_logits else {}
        places = torch.tensor(positions, device=device)
        hf_attention.current.begin(spans, places, self._temperatures, self.fused)
        if self._switch is not None:
            self._rope.long = torch.tensor(long, device=device)
        try:
            logits = self.model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=places[None],
                # All ones. Without a mask transformers takes positions that begin again for a packed batch of training.
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
                use_cache=False,
                **some,
            ).logits[0]
        finally:
            hf_attention.current.end()
            self._rope.long = None
        calls = hf_attention.current.calls
        if not calls or self._attentions not in (None, calls):
            raise NotHonoured("layers whose attention cannot be replaced")
        self._attentions = calls
        found = logits if self._corrections is None else torch.cat([logits, self._taken_states(logits)], dim=1)
        return (found if self._keeps_some_logits else found[keep]).float().cpu()

    def _taken_states(self, logits: torch.Tensor) -> torch.Tensor:
        states, self._states = self._states, None
        if states is None:
            # The model uses its head's matrix without calling the head, so no state is known and nothing is learned.
            return logits.new_zeros(len(logits), self._state_columns)
        return states[0].to(logits)


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many logits the LM head has. (Intel's extension packs its weight in blocks, whose shape does not say it.)"""
    head = model.get_output_embeddings()
    # Quantisation libraries have heads of their own kind without a ``weight``.
    found: int = head.out_features if hasattr(head, "out_features") else head.weight.shape[0]
    return found


def choose_last(row: RowState, logits: torch.Tensor, feed: Feed) -> Chosen:
    """One choice after each of the row's last ``len(logits)`` tokens, as the feed asks for them."""
    tokens, margins, logprobs = [], [], []
    if feed.masks is not None:
        feed.masks.of.wait()
    first = len(row.tokens) - len(logits) + 1
    for position, scores in enumerate(logits.numpy(), start=first):
        prompt: Counter[int] = Counter()
        written: Counter[int] = Counter()
        if row.sampling.looks_back:
            prompt = Counter(row.tokens[: row.prompt_length])
            written = Counter(row.tokens[row.prompt_length : position])
        mask = None if feed.masks is None else feed.masks.of.words[feed.masks.first + position - first]
        token, margin = choose(scores, row.sampling, position, prompt, written, mask)
        tokens.append(token)
        margins.append(margin)
        if feed.logprobs is not None:
            logprobs.append(log_probabilities(scores, token, feed.logprobs))
    return Chosen(tokens, margins, logprobs)
