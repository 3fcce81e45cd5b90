"""The Python binding of the compiled kernels: the engine, and sampling. Arrays are passed by pointer."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from ctypes import byref, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.library import (
    BatchStructure,
    DecodeStructure,
    KernelError,
    OpStructure,
    OptionsStructure,
    ProgramStructure,
    SamplingStructure,
    SliceStructure,
    WeightStructure,
    check,
    load,
)
from outrider.kernels.packer import weight_structure
from outrider.kernels.program import Op, Program, Slice
from outrider.kernels.sampling_values import SamplingValues


def _sampling(values: SamplingValues) -> SamplingStructure:
    """The C structure, which keeps its arrays alive."""
    count = len(values.logit_bias)
    tokens = (c_int32 * count)(*(token for token, _ in values.logit_bias))
    biases = (c_double * count)(*(bias for _, bias in values.logit_bias))
    ends = values.end_tokens or ()
    return SamplingStructure(
        values.temperature,
        values.top_p,
        values.min_p,
        values.repetition_penalty,
        values.presence_penalty,
        values.frequency_penalty,
        values.seed & 0xFFFFFFFFFFFFFFFF,
        tokens,
        biases,
        count,
        # A top_k beyond int32 is beyond any vocabulary.
        min(values.top_k, 0x7FFFFFFF),
        values.sample & 0xFFFFFFFF,
        values.min_tokens,
        (c_int32 * len(ends))(*ends),
        len(ends),
    )


def _slice(slice: Slice) -> SliceStructure:
    return SliceStructure(slice.buffer, slice.offset, slice.width)


def _op(op: Op) -> OpStructure:
    slices = (_slice(s) for s in (op.input, op.key, op.value, op.residual, op.output))
    numbers = (op.weight, op.bias, int(op.activation), op.integer, op.heads, op.kv_heads, op.head_size, op.window)
    return OpStructure(int(op.kind), *slices, *numbers, op.rotated, op.longest, op.epsilon, op.scale, op.cap)


@dataclass(frozen=True, slots=True)
class NativeFeed:
    """One row's part of a pass: ``tokens`` to append, a choice after each of the last ``choose``, logits after each of the
    last ``logits``.

    ``logprobs`` of 0 or more asks for each choice's log-probability and for those of as many of the likeliest tokens.
    ``branches`` are (after, token): a choice is also made after the first ``after`` tokens and ``token`` in place of the
    next one. ``first_mask`` of 0 or more is the index of the first choice's mask in the pass; the next choices have the
    next masks, those of branches none. ``states`` asks for the tokens' hidden states; ``given`` [tokens, columns] are the
    states that are given with the tokens, as bf16.
    """

    row: int
    tokens: Sequence[int]
    choose: int = 1
    logits: int = 0
    logprobs: int = -1
    branches: Sequence[tuple[int, int]] = ()
    first_mask: int = -1
    states: bool = False
    given: NDArray[np.uint16] | None = None


@dataclass(frozen=True, slots=True)
class NativeMasks:
    """The tokens that may be chosen: in each mask token t is bit t % 32 of word t // 32. ``ready[0]`` is 1 when all masks
    are complete."""

    words: NDArray[np.uint32]
    ready: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NativeOutput:
    """The results of one feed: the chosen tokens (those after branches last), their margins, and the logits asked for.

    A margin is the best score minus the second-best. ``logprobs``, if asked for, has for each choice the pairs (token,
    log-probability) of the choice, then of the likeliest tokens. ``runners_up``, if asked for, are the tokens with the
    second-best scores (-1: there is none).
    """

    tokens: list[int]
    margins: list[float]
    logits: NDArray[np.float32]
    logprobs: list[list[tuple[int, float]]]
    runners_up: list[int]
    states: NDArray[np.uint16] | None = None


@dataclass(frozen=True, slots=True)
class NativeDecodeFeed:
    """A row that decodes by itself: it is fed ``tokens``, then each choice, until it has made ``most`` choices or one of
    ``ends``."""

    row: int
    tokens: Sequence[int]
    most: int
    ends: Collection[int] = ()
    reach: float = 1.0
    miss_factor: float = 1.0
    given: NDArray[np.uint16] | None = None


# Tokens, their margins, and the runners-up (-1: there is none).
Choices = tuple[list[int], list[float], list[int]]


@dataclass(frozen=True, slots=True)
class NativeStopRule:
    """How a choice's margin lowers its row's reach, and when a row stops, or all of them (see outrider_kernels.h)."""

    bounds: Sequence[float] = ()
    usual: Sequence[float] = (1.0,)
    least_chance: float = 0.0
    least_reach: float = 0.0
    least_sum: float = 0.0


class NativeModel:
    """An engine: a program over packed weights, and its rows. Only one thread may use it at a time."""

    def __init__(
        self,
        program: Program,
        addresses: Sequence[int],
        *,
        threads: int = 1,
        cores: Sequence[int] | None = None,
        cache_bytes: int = 0,
        spin_microseconds: int = -1,
        keep: object = None,
    ) -> None:
        """``addresses`` are those of the packed weights, in the program's order; ``keep`` lives as long as the model."""
        self.program = program
        self._keep = keep
        self._engine = c_void_p()
        self._no_logits = np.empty((0, program.vocabulary), np.float32)
        if cores is not None and len(cores) != threads:
            raise ValueError(f"{len(cores)} cores for {threads} threads")
        ops = (OpStructure * len(program.ops))(*map(_op, program.ops))
        weights = (WeightStructure * len(program.weights))(*map(weight_structure, program.weights, addresses))
        buffers = (c_int32 * len(program.buffers))(*program.buffers)
        counts = (len(ops), len(weights), len(buffers), program.layers, program.vocabulary, program.context)
        structure = ProgramStructure(ops, weights, buffers, *counts, int(program.cache))
        core_array = (c_int32 * threads)(*cores) if cores is not None else None
        options = OptionsStructure(core_array, threads, spin_microseconds, cache_bytes)
        check(load().outrider_engine_create(byref(structure), byref(options), byref(self._engine)))

    def use_cores(self, cores: Sequence[int]) -> None:
        """From now on run one thread on each of these cores, the caller's on the first. Results stay equal bit by bit."""
        core_array = (c_int32 * len(cores))(*cores)
        check(load().outrider_engine_threads(self._engine, len(cores), core_array))

    def reserve(self, tokens: int, selected: int, cache_tokens: int) -> None:
        """Take memory now for passes of this many tokens and choices, and for this many tokens of cache (2 GB at most)."""
        check(load().outrider_engine_reserve(self._engine, tokens, selected, cache_tokens))

    def open(self, sampling: SamplingValues | None = None, prompt: int = 0) -> int:
        """Begins an empty row, whose first ``prompt`` tokens are its prompt. Without ``sampling``: ``SamplingValues()``."""
        row = c_int32()
        structure = _sampling(SamplingValues() if sampling is None else sampling)
        check(load().outrider_row_open(self._engine, byref(structure), prompt, byref(row)))
        return row.value

    def fork(self, source: int, length: int, sampling: SamplingValues | None = None, prompt: int = 0) -> int:
        """Begins a row with the first ``length`` tokens of another; their cache is shared until one of them writes."""
        row = c_int32()
        structure = _sampling(SamplingValues() if sampling is None else sampling)
        check(load().outrider_row_fork(self._engine, source, length, byref(structure), prompt, byref(row)))
        return row.value

    def skip(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens without computing them: tokens fed after them attend neither to them nor to any before them."""
        skipped = array("i", tokens)
        check(load().outrider_row_skip(self._engine, row, _address(skipped), len(skipped)))

    def truncate(self, row: int, length: int) -> None:
        check(load().outrider_row_truncate(self._engine, row, length))

    def close_row(self, row: int) -> None:
        check(load().outrider_row_close(self._engine, row))

    def length(self, row: int) -> int:
        length = int(load().outrider_row_length(self._engine, row))
        if length < 0:
            check(-length)
        return length

    def cache_use(self) -> tuple[int, int, int]:
        """Bytes of cache memory held, blocks in use, tokens in a block."""
        self._check_open()
        held, used, tokens = c_int64(), c_int64(), c_int32()
        load().outrider_cache_use(self._engine, byref(held), byref(used), byref(tokens))
        return held.value, used.value, tokens.value

    def forward(
        self, feeds: Sequence[NativeFeed], masks: NativeMasks | None = None, runners_up: bool = False
    ) -> list[NativeOutput]:
        """One pass over all feeds; the outputs are in the feeds' order. A choice is -1 where its mask allows no token.

        This code has to be fast: a small model's pass takes 2 ms, and evicts Python's data from the processor's caches.
        """
        choices = [max(0, feed.choose) + len(feed.branches) for feed in feeds]
        asked = array("i", [feed.row for feed in feeds])
        asked.extend([len(feed.tokens) for feed in feeds])
        asked.extend([feed.choose for feed in feeds])
        details = None
        if any(feed.logits or feed.logprobs >= 0 for feed in feeds):
            details = _Details(feeds, choices, self.program.vocabulary)
            asked.extend(details.asked)
        tokens_at = len(asked)
        for feed in feeds:
            asked.extend(feed.tokens)
        count = sum(choices)
        chosen, margins = array("i", [-1]) * count, array("d", [nan]) * count
        rows, counts, choose = _address(asked), _address(asked, len(feeds)), _address(asked, 2 * len(feeds))
        batch = BatchStructure(len(feeds), rows, counts, _address(asked, tokens_at), choose)
        batch.chosen, batch.margins = _address(chosen), _address(margins)
        second_best = array("i", chosen) if runners_up else array("i")
        if runners_up:
            batch.runners_up = _address(second_best)
        if any(feed.branches for feed in feeds):
            branches = _Branches(feeds)
            batch.branches, batch.branch_after, batch.branch_tokens = branches.counts, branches.after, branches.tokens
        if details is not None:
            batch.logits, batch.logprobs = _address(asked, 3 * len(feeds)), _address(asked, 4 * len(feeds))
            batch.logits_out = details.logits.ctypes.data
            batch.logprob_tokens, batch.logprob_values = _address(details.likeliest), _address(details.values)
        if masks is not None:
            mask_of = array("i", _masks_of(feeds))
            batch.masks, batch.mask_words = masks.words.ctypes.data, masks.words.shape[1]
            batch.mask_of, batch.masks_ready = _address(mask_of), masks.ready.ctypes.data
        states = None
        if any(feed.states for feed in feeds):
            states = _HiddenStates(feeds, self.program.hidden_out)
            batch.states, batch.states_out = states.wanted, states.out
        given = _Given(feeds, self.program)
        batch.given, batch.states_in = given.counts, given.states
        check(load().outrider_forward(self._engine, byref(batch)))
        answers, start = [], 0
        for feed, count in zip(feeds, choices, strict=True):
            place = slice(start, start + count)
            logits, logprobs = (self._no_logits, []) if details is None else details.take(feed, count)
            of_feed = None if states is None else next(states.by_feed)
            taken = (chosen[place].tolist(), margins[place].tolist(), logits, logprobs, second_best[place].tolist())
            answers.append(NativeOutput(*taken, of_feed))
            start += count
        return answers

    def rank(self, choice: int, count: int, mask: NDArray[np.uint32] | None = None) -> list[int]:
        """The ``count`` best tokens for one of the choices of the latest ``forward``; fewer if ``mask`` allows fewer."""
        tokens = array("i", [-1]) * count
        masked = (None, 0) if mask is None else (mask.ctypes.data, mask.size)
        check(load().outrider_rank(self._engine, choice, *masked, count, _address(tokens)))
        return [token for token in tokens if token >= 0]

    def correct(self, tokens: int) -> None:
        """From now on scores are corrected by what ``learn`` teaches; at most ``tokens`` tokens have corrections."""
        check(load().outrider_correct(self._engine, tokens))

    def shorten(self, tokens: int) -> None:
        """A shortlist: from now on only ``tokens`` tokens have logits (0: all): the most recently used ones, at first the
        ones with the lowest ids."""
        check(load().outrider_shorten(self._engine, tokens))

    def learn(self, row: int, first: int, tokens: Sequence[int]) -> tuple[int, int]:
        """Teaches the corrections: ``tokens`` are the target's after the row's first ``first`` tokens.

        Returns the number of the row's choices that corrections had made right, and of those that they had made wrong.
        """
        told, better, worse = array("i", tokens), c_int32(), c_int32()
        check(load().outrider_learn(self._engine, row, first, _address(told), len(told), byref(better), byref(worse)))
        return better.value, worse.value

    def experts_read(self) -> int:
        """The number of distinct experts that the latest ``forward`` used, summed over all layers."""
        self._check_open()
        return int(load().outrider_experts_read(self._engine))

    def decode(
        self, feeds: Sequence[NativeDecodeFeed], stopping: NativeStopRule, guess_room: int = 0
    ) -> tuple[list[Choices], list[tuple[int, float]]]:
        """Returns the choices of each feed, and (number of rows, seconds) of each pass.

        Guesses: where a row's last tokens have occurred in it before, the tokens that followed them are fed, too, up to
        ``guess_room`` tokens of all rows in one pass. Then a pass may make several choices for a row.
        """
        if not feeds:
            return [], []
        count, stride = len(feeds), max(feed.most for feed in feeds)
        columns = [[feed.row for feed in feeds], [len(feed.tokens) for feed in feeds], [feed.most for feed in feeds]]
        columns.append([len(feed.ends) for feed in feeds])
        asked = array("i", [number for column in columns for number in column])
        for feed in feeds:
            asked.extend(feed.tokens)
        ends_at = len(asked)
        for feed in feeds:
            asked.extend(feed.ends)
        beliefs = array("d", [feed.reach for feed in feeds] + [feed.miss_factor for feed in feeds])
        spans_at = len(beliefs)
        beliefs.extend(stopping.bounds)
        beliefs.extend(stopping.usual)
        made, chosen = array("i", bytes(4 * count)), array("i", bytes(4 * count * stride))
        runners_up = array("i", chosen)
        margins, seconds = array("d", bytes(8 * count * stride)), array("d", bytes(8 * stride))
        rows, counts, most, end_counts, tokens = (_address(asked, index * count) for index in range(5))
        ends, reach, miss_factor = _address(asked, ends_at), _address(beliefs), _address(beliefs, count)
        bounds, usual = _address(beliefs, spans_at), _address(beliefs, spans_at + len(stopping.bounds))
        least = (stopping.least_chance, stopping.least_reach, stopping.least_sum)
        numbers = (*least, len(stopping.usual), stride, guess_room)
        # The number of passes, then the number of rows in each.
        passes = array("i", bytes(4 * (1 + stride)))
        choices = (_address(made), _address(chosen), _address(runners_up), _address(margins))
        told = (*choices, _address(passes), _address(passes, 1), _address(seconds))
        given = _Given(feeds, self.program)
        asked_for = (rows, counts, tokens, most, end_counts, ends, reach, miss_factor, bounds, usual)
        run = DecodeStructure(count, *asked_for, *numbers, *told, given.counts, given.states)
        check(load().outrider_decode(self._engine, byref(run)))
        places = [slice(at * stride, at * stride + choices) for at, choices in enumerate(made)]
        made_of = [(chosen[place].tolist(), margins[place].tolist(), runners_up[place].tolist()) for place in places]
        return made_of, list(zip(passes[1 : 1 + passes[0]], seconds, strict=False))

    def _check_open(self) -> None:
        """For calls that have no status."""
        if not self._engine:
            raise KernelError("invalid", "the engine is closed")

    def close(self) -> None:
        """Ends the threads and frees the cache, once no other thread calls the engine. Safe to call again."""
        engine, self._engine = self._engine, c_void_p()
        if engine:
            load().outrider_engine_destroy(engine)

    def __enter__(self) -> NativeModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _masks_of(feeds: Sequence[NativeFeed]) -> Iterator[int]:
    for feed in feeds:
        yield from range(feed.first_mask, feed.first_mask + feed.choose) if feed.first_mask >= 0 else [-1] * feed.choose
        yield from [-1] * len(feed.branches)


def _address(values: array[Any], index: int = 0) -> int:
    return values.buffer_info()[0] + index * values.itemsize


class _Given:
    """The states that are given with the feeds' tokens. ``counts`` and ``states`` are addresses; None: no states."""

    def __init__(self, feeds: Sequence[NativeFeed | NativeDecodeFeed], program: Program) -> None:
        self.counts = self.states = None
        given = [feed.given for feed in feeds if feed.given is not None]
        if given:
            columns = program.hidden_in
            if columns and any(states.ndim != 2 or states.shape[1] != columns for states in given):
                shapes = ", ".join(str(states.shape) for states in given)
                raise ValueError(f"states of {shapes} for a program that takes {columns} columns")
            self._counts = array("i", [0 if feed.given is None else len(feed.given) for feed in feeds])
            self._states = np.ascontiguousarray(np.concatenate(given), np.uint16)
            self.counts, self.states = _address(self._counts), self._states.ctypes.data


class _Branches:
    """The branches of a pass's feeds. ``counts``, ``after`` and ``tokens`` are addresses."""

    def __init__(self, feeds: Sequence[NativeFeed]) -> None:
        every = [branch for feed in feeds for branch in feed.branches]
        self._numbers = array("i", [len(feed.branches) for feed in feeds])
        self._numbers.extend([after for after, _ in every])
        self._numbers.extend([token for _, token in every])
        self.counts, self.after = _address(self._numbers), _address(self._numbers, len(feeds))
        self.tokens = _address(self._numbers, len(feeds) + len(every))


class _HiddenStates:
    """The hidden states that a pass returns. ``wanted`` and ``out`` are addresses; ``by_feed`` has those of each feed."""

    def __init__(self, feeds: Sequence[NativeFeed], columns: int) -> None:
        fed = [len(feed.tokens) if feed.states else 0 for feed in feeds]
        self._wanted = array("i", [feed.states for feed in feeds])
        self._out = np.empty((sum(fed), columns), np.uint16)
        self.wanted, self.out = _address(self._wanted), self._out.ctypes.data
        self.by_feed = iter(np.split(self._out, np.cumsum(fed)[:-1]))


class _Details:
    """The logits and log-probabilities that a pass is asked for; ``take`` returns those of the next feed."""

    def __init__(self, feeds: Sequence[NativeFeed], choices: Sequence[int], vocabulary: int) -> None:
        # A choice takes one element for itself, and one for each of the likeliest tokens.
        places = [count * (1 + max(-1, feed.logprobs)) for count, feed in zip(choices, feeds, strict=True)]
        # An empty array has no address, so feeds without choices ask for no log-probabilities.
        explained = [feed.logprobs if count else -1 for count, feed in zip(places, feeds, strict=True)]
        self.asked = [*(feed.logits for feed in feeds), *explained]
        self.logits = np.full((sum(max(0, feed.logits) for feed in feeds), vocabulary), nan, np.float32)
        self.likeliest, self.values = array("i", [-1]) * sum(places), array("d", [nan]) * sum(places)
        self._position = self._place = 0

    def take(self, feed: NativeFeed, choices: int) -> tuple[NDArray[np.float32], list[list[tuple[int, float]]]]:
        position, place, size = self._position, self._place, 1 + max(-1, feed.logprobs)
        self._position += max(0, feed.logits)
        self._place += choices * size
        pairs = list(zip(self.likeliest[place : self._place], self.values[place : self._place], strict=True))
        by_choice = [pairs[start : start + size] for start in range(0, len(pairs), size)] if size else []
        return self.logits[position : self._position], by_choice


def log_probabilities(logits: NDArray[np.float32], chosen: int, count: int) -> list[tuple[int, float]]:
    """The log-probability of one token, then those of the ``count`` likeliest, each with its token. For tests."""
    values = np.ascontiguousarray(logits, np.float32)
    tokens, found = np.full(1 + count, -1, np.int32), np.full(1 + count, np.nan)
    arguments = (values.ctypes.data, values.size, chosen, count, tokens.ctypes.data, found.ctypes.data)
    check(load().outrider_log_probabilities(*arguments))
    return list(zip(tokens.tolist(), found.tolist(), strict=True))


def choose(
    logits: NDArray[np.float32],
    sampling: SamplingValues,
    history: Sequence[int],
    prompt: int,
    with_scores: bool = True,
    mask: NDArray[np.uint32] | None = None,
) -> tuple[int, int, float, NDArray[np.float64]]:
    """The sampler alone: the token after ``history``, the runner-up, the margin, the scores before the noise. For tests."""
    values = np.ascontiguousarray(logits, np.float32)
    past = np.asarray(history, np.int32)
    scores = np.full(values.size, np.nan)
    margin = np.full(1, np.nan)
    chosen, runner_up = c_int32(), c_int32()
    structure = _sampling(sampling)
    check(
        load().outrider_choose(
            values.ctypes.data,
            values.size,
            byref(structure),
            past.ctypes.data,
            past.size,
            prompt,
            None if mask is None else mask.ctypes.data,
            byref(chosen),
            byref(runner_up),
            margin.ctypes.data,
            scores.ctypes.data if with_scores else None,
        )
    )
    return chosen.value, runner_up.value, float(margin[0]), scores
