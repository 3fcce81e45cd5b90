"""Lets allocations of a call of the kernels fail in turn; run with ``no_memory.cpp`` preloaded, and names of cases.

Of each chain of calls within the kernels the first and the last that it makes; with ``--all`` every one, which takes twice
as long. After each failure the call must have said so, the engine's rows must be as they were, and the same call, made
again, must give what it gives in an engine where nothing failed. Prints for each case how many allocations failed.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from kernel_models import BY_COLUMN, DELTA, HYBRID, LLAMA, LONG, MIXTURE, QWEN, SHARED, Packed, Shape, packed, tokens

from outrider.kernels.library import KernelError, load
from outrider.kernels.native import NativeDecodeFeed, NativeFeed, NativeModel, NativeStopRule
from outrider.kernels.packing import weight_offsets
from outrider.kernels.program import Format
from outrider.kernels.sampling_values import SamplingValues
from outrider.kernels.suffixes import Gain, Suffixes

SHIM = ctypes.CDLL(None)
# Those of every shape.
VOCABULARY = 90
SAMPLED = SamplingValues(temperature=0.9, top_p=0.8, repetition_penalty=1.1, seed=5)
Call = Callable[[NativeModel, list[int]], Any]
# In which failures are looked for; closing a row needs no memory.
ARMED = (
    *("engine_create", "engine_threads", "engine_reserve", "row_open", "row_fork", "row_skip", "row_truncate", "row_close"),
    *("forward", "decode", "correct", "shorten", "learn", "suffixes_advance", "suffixes_end", "suffixes_learn"),
)


@dataclass(frozen=True)
class Case:
    """``call`` is made with the engine and its rows: two with texts of ``held`` tokens, and a fork of the first.

    ``cut``: tokens that rows had before and that a truncation took back. ``exact``: a failed call leaves no trace at all.
    """

    call: Call
    shape: Shape = LLAMA
    prepare: Callable[[NativeModel], object] = id
    held: int = 45
    cut: int = 0
    exact: bool = True


def text(count: int, seed: int) -> list[int]:
    return tokens(replace(LLAMA, vocabulary=VOCABULARY), count, seed)


def forward(engine: NativeModel, rows: list[int], counts: tuple[int, int] = (70, 33), choose: int = 3) -> Any:
    """One token for the fork, of which a block is copied; more for the others, with all that can be asked for."""
    long, other = counts
    feeds = [
        NativeFeed(rows[0], text(long, 11), choose, 2, 2, branches=[(long - 2, 5), (long - 1, 6)]),
        NativeFeed(rows[1], text(other, 12), choose, 4),
        NativeFeed(rows[2], text(1, 13)),
    ]
    outputs = engine.forward(feeds, runners_up=True)
    return [(out.tokens, out.runners_up, out.margins, out.logits.tobytes(), out.logprobs) for out in outputs]


def decode(engine: NativeModel, rows: list[int], most: int = 4) -> Any:
    feeds = [NativeDecodeFeed(row, text(2, row) * 3, most) for row in rows]
    return engine.decode(feeds, NativeStopRule(), guess_room=8)[0]


def skip(engine: NativeModel, rows: list[int]) -> Any:
    engine.skip(rows[2], text(90, 3))
    return engine.length(rows[2]), engine.forward([NativeFeed(rows[2], [1, 2, 3])])[0].tokens


def fork(engine: NativeModel, rows: list[int]) -> Any:
    row = engine.fork(rows[1], engine.length(rows[1]) - 2, SAMPLED, 10)
    try:
        return row, engine.forward([NativeFeed(row, [1, 2, 3])])[0].tokens
    finally:
        engine.close_row(row)


def open_row(engine: NativeModel, rows: list[int]) -> Any:
    row = engine.open(replace(SAMPLED, logit_bias=((3, 1.0), (4, 2.0)), end_tokens=(5, 6)), 7)
    engine.close_row(row)
    return row


def create(engine: NativeModel, rows: list[int]) -> Any:
    with new_engine(HYBRID) as another:
        return another.forward([NativeFeed(another.open(), text(3, 1))])[0].tokens


def learn(engine: NativeModel, rows: list[int]) -> Any:
    chosen = engine.forward([NativeFeed(rows[0], [1, 2, 3, 4, 5], choose=5)])[0].tokens
    told = [(token + 1) % VOCABULARY for token in chosen]
    engine.learn(rows[0], engine.length(rows[0]) - 4, told)
    return engine.forward([NativeFeed(rows[0], [9])])[0].tokens


def suffixes(engine: NativeModel, rows: list[int]) -> Any:
    """Of a failed call nothing may be left but a row that is not known any more."""
    known = KNOWN_SUFFIXES.setdefault(engine, Suffixes(2048))
    for turn in range(4):
        known.advance([Gain(row, text(90, row + turn) + text(9, 40), 50, 4) for row in rows], 0.1)
    known.end(rows[0], text(30, 50))
    known.learn(text(200, 51))
    return known.advance([Gain(rows[1], text(3, 40), 0, 4)], 0.1)


KNOWN_SUFFIXES = WeakKeyDictionary[NativeModel, Suffixes]()

CASES = {
    "forward": Case(forward),
    "window": Case(forward, QWEN),
    "shared": Case(forward, SHARED),
    "experts": Case(forward, MIXTURE),
    "long rope behind": Case(forward, LONG),
    "long rope across": Case(lambda engine, rows: forward(engine, rows, (16, 9), choose=9), LONG, held=9),
    "convolution": Case(forward, HYBRID),
    "convolution cut back": Case(forward, HYBRID, cut=60),
    "delta": Case(forward, DELTA),
    "delta cut back": Case(forward, DELTA, cut=60),
    "by column cut back": Case(forward, BY_COLUMN, cut=60),
    "decode": Case(decode),
    "decode delta": Case(decode, DELTA),
    "decode long rope": Case(lambda engine, rows: decode(engine, rows, 3), LONG, held=12),
    "skip": Case(skip),
    "fork": Case(fork),
    "fork delta": Case(fork, DELTA, cut=20),
    "fork long rope": Case(fork, LONG),
    "open": Case(open_row),
    "create": Case(create),
    "suffixes": Case(suffixes, exact=False),
    "learn": Case(learn, prepare=lambda engine: engine.correct(8), exact=False),
    "correct": Case(lambda engine, rows: (engine.correct(8), decode(engine, rows))),
    "shorten": Case(lambda engine, rows: (engine.shorten(48), forward(engine, rows))),
    "shorten again": Case(
        lambda engine, rows: (engine.shorten(32), forward(engine, rows)), prepare=lambda e: e.shorten(48)
    ),
    "shortened": Case(forward, prepare=lambda engine: engine.shorten(48)),
    "reserve": Case(lambda engine, rows: (engine.reserve(64, 8, 999), forward(engine, rows))),
    "threads": Case(lambda engine, rows: (engine.use_cores([-1, -1, -1]), forward(engine, rows))),
    "fewer threads": Case(lambda engine, rows: (engine.use_cores([-1]), forward(engine, rows))),
}


# A chain of calls, as one number, and how many of its allocations succeed before the one that fails.
Place = tuple[int, int]


def watch() -> None:
    """Has the library's calls watched from here on; what Python allocates is not."""
    SHIM.no_memory_chain.restype = ctypes.c_uint64
    SHIM.no_memory_after.argtypes = (ctypes.c_uint64, ctypes.c_long)
    for name in ARMED:
        _watch(f"outrider_{name}")


def _watch(name: str) -> None:
    function = getattr(load(), name)

    def watched(*arguments: Any) -> Any:
        SHIM.no_memory_watch(1)
        status = function(*arguments)
        SHIM.no_memory_watch(0)
        return status

    setattr(load(), name, watched)


def places(every: bool) -> list[Place]:
    """Of the allocations since the last that was to fail, in their order."""
    seen = Counter[int]()
    found = []
    for number in range(SHIM.no_memory_count()):
        chain = SHIM.no_memory_chain(number)
        found.append((chain, seen[chain]))
        seen[chain] += 1
    return [(chain, place) for chain, place in found if every or place in (0, seen[chain] - 1)]


@cache
def weights_of(shape: Shape) -> tuple[Packed, list[int]]:
    model = packed(shape, Format.W4A8)
    return model, [model.memory.ctypes.data + offset for offset in weight_offsets(model.program)[0]]


def new_engine(shape: Shape) -> NativeModel:
    model, addresses = weights_of(shape)
    return NativeModel(model.program, addresses, threads=2, keep=model)


def begin(case: Case) -> tuple[NativeModel, list[int]]:
    engine = new_engine(case.shape)
    case.prepare(engine)
    rows = [engine.open(SamplingValues(), 5), engine.open(SAMPLED, 5)]
    engine.forward([NativeFeed(row, text(case.held + case.cut, row)) for row in rows])
    for row in rows:
        engine.truncate(row, case.held)
    return engine, [*rows, engine.fork(rows[0], case.held - 1, SAMPLED, 5)]


def attempt(case: Case, place: Place, wanted: Any) -> bool:
    """Whether the allocation was asked for, and so failed. (Which thread does a piece of work is not always the same.)"""
    engine, rows = begin(case)
    lengths = [engine.length(row) for row in rows]
    SHIM.no_memory_after(*place)
    try:
        found = case.call(engine, rows)
        failed = False
    except KernelError as error:
        assert error.status == "no memory" and error.message, error
        failed = True
    reached = SHIM.no_memory_left() < 0
    SHIM.no_memory_after(0, -1)
    if failed:
        # After a failure in a choice the tokens have been fed. In a decode each pass feeds some.
        for row, length in zip(rows, lengths, strict=True):
            assert engine.length(row) >= length, f"row {row} has lost tokens"
            engine.truncate(row, length)
        another = engine.open()
        assert another == len(rows), "a row was left open"
        engine.close_row(another)
        found = case.call(engine, rows)
    assert found == wanted or not case.exact, f"{found} is not {wanted}"
    for row in rows:
        engine.close_row(row)
    assert engine.cache_use()[1] == 0, "blocks of the cache are lost"
    engine.close()
    return reached


def main(words: list[str]) -> None:
    watch()
    for name in [word for word in words if word != "--all"] or CASES:
        case = CASES[name]
        engine, rows = begin(case)
        SHIM.no_memory_after(0, -1)
        wanted = case.call(engine, rows)
        failed = sum(attempt(case, place, wanted) for place in places("--all" in words))
        print(f"{name}: {failed}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
