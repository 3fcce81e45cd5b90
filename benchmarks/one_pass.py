"""Candidates in one pass against as many steps: what passes take of a parallel draft, and of one that goes token by token.

    python benchmarks/one_pass.py --target DIR --steps DIR --one-pass DIR [--draft-tokens 6] [--batch 1]
    python benchmarks/one_pass.py --pair qwen3-8b+0.6b [--draft-tokens 6 8 12] [--batch 1 4]

All in this process, on the same threads, in turn: passes of the target over k + 1 tokens a row, of the one draft k steps in
one call (over two tokens, then one; none tries what the text went on with before), of the other once over k + 1. *times by
passes* is what a round with steps takes against a round with one pass that brings the same tokens: by shape alone, whatever
the models say (what they say: benchmarks/drafts.py). With --shortlist N steps of a draft that scores N tokens are measured,
too: *times by shortlist* is what a round with steps takes against one with these. With --pair there are no weights but
zeros, in memory, in the shapes of a pair that people use, which read and compute as much as those of the real models. Last
comes one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from outrider.kernels.native import NativeModel
from outrider.kernels.packer import Memory, packed_bytes
from outrider.kernels.program import Cache
from outrider.workers.engines.engine import CanShorten, DecodeFeed, Engine, Feed, StopRule
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.families import build_program
from outrider.workers.models.mask_token import mask_token_of
from outrider.workers.models.opening import open_model
from outrider.workers.models.packed import ALIGNMENT
from outrider.workers.precisions import PRECISIONS


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
    }


# Published configurations: (target, draft).
QWEN3: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 4096, "head_dim": 128}
LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 4096}
PAIRS = {
    "qwen3-8b+0.6b": (
        QWEN3 | _shape(4096, 36, 32, 8, 12288) | {"tie_word_embeddings": False},
        QWEN3 | _shape(1024, 28, 16, 8, 3072) | {"tie_word_embeddings": True},
    ),
    "llama-3-8b+1b": (
        LLAMA | _shape(4096, 32, 32, 8, 14336) | {"tie_word_embeddings": False},
        LLAMA | _shape(2048, 16, 32, 8, 8192) | {"tie_word_embeddings": True},
    ),
}
PREFIX, ROW = 64, 1 << 20
STEPS, ONE_PASS = "steps", "one pass"


def opened(path: Path, precision: str, threads: int, draft: bool) -> Engine:
    return open_model(ModelSpec(str(path), "native", precision, threads=threads, small_cache=draft)).engine


def of_zeros(config: dict[str, Any], precision: str, threads: int, draft: bool) -> list[Engine]:
    """Two engines of this shape over the same memory, written with zeros so that its pages exist."""
    chosen = PRECISIONS[precision]
    program = build_program(config, chosen.format, chosen.group, source="the shape")
    if draft and program.integer:
        program = replace(program, cache=Cache.INT8)
    sizes = [-(-packed_bytes(weight) // ALIGNMENT) * ALIGNMENT for weight in program.weights]
    memory = Memory(sum(sizes))
    memory.array.fill(0)
    assert memory.address is not None
    addresses = [memory.address + start for start in accumulate(sizes[:-1], initial=0)]
    models = [NativeModel(program, addresses, threads=threads, keep=memory) for _ in range(2)]
    return [NativeEngine(model, program.context) for model in models]


class Passes:
    """Times passes of one engine over rows with a short text."""

    def __init__(self, engine: Engine, first: int, rows: int) -> None:
        self._engine, self._rows = engine, range(first, first + rows)
        if isinstance(engine, NativeEngine):
            # These texts repeat, so guesses would be right, and a pass with several choices is no single step.
            engine.guess_room = 0
        for row in self._rows:
            engine.open(row, Sampling(), PREFIX)
            engine.feed([Feed(row, self._some(PREFIX), 0)])

    def seconds(self, tokens: int, choose: int) -> float:
        feeds = [Feed(row, self._some(tokens), choose) for row in self._rows]
        started = time.perf_counter()
        self._engine.feed(feeds)
        took = time.perf_counter() - started
        for row in self._rows:
            self._engine.truncate(row, PREFIX)
        return took

    def steps(self, count: int) -> float:
        """Seconds of ``count`` steps in one call that starts with two new tokens, as after a round that committed two."""
        never = StopRule((), (1.0,), 0.0)
        started = time.perf_counter()
        made = self._engine.decode([DecodeFeed(row, self._some(2), count, ()) for row in self._rows], never).steps
        took = time.perf_counter() - started
        assert len(made) == count, f"{len(made)} passes for {count} steps"
        for row in self._rows:
            self._engine.truncate(row, PREFIX)
        return took

    def _some(self, count: int) -> list[int]:
        return [(at * 2654435761 >> 7) % self._engine.vocabulary for at in range(count)]

    def close(self) -> None:
        for row in self._rows:
            self._engine.close(row)


def by_passes(engines: Sequence[Engine], count: int, rows: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a pass of the target, of a draft's steps, of one pass of a parallel draft, and of steps with a
    shortlist if ``engines`` has one."""
    # Both drafts may be one engine, so each has its own rows.
    passes = [Passes(engine, ROW + at * rows, rows) for at, engine in enumerate(engines)]
    took: list[list[float]] = []
    for _ in range(rounds + 2):
        verify = passes[0].seconds(count + 1, count + 1)
        by_steps = passes[1].steps(count)
        # Two committed tokens, and a mask for each candidate but the first.
        at_once = passes[2].seconds(count + 1, count)
        took.append([verify, by_steps, at_once, *(each.steps(count) for each in passes[3:])])
    for each in passes:
        each.close()
    verify, by_steps, at_once, *shorter = (statistics.median(column) for column in zip(*took[2:], strict=True))
    found = {
        "verify ms": round(verify * 1e3, 3),
        f"{STEPS} ms": round(by_steps * 1e3, 3),
        f"{ONE_PASS} ms": round(at_once * 1e3, 3),
        "times by passes": round((verify + by_steps) / (verify + at_once), 3),
    }
    for short in shorter:
        found[f"{STEPS} by shortlist ms"] = round(short * 1e3, 3)
        found["times by shortlist"] = round((verify + by_steps) / (verify + short), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--steps", type=Path, help="a draft that proposes token by token")
    parser.add_argument("--one-pass", type=Path, help="a parallel draft")
    parser.add_argument("--pair", choices=PAIRS, help="shapes instead of models")
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[6])
    parser.add_argument("--shortlist", type=int, help="tokens that a draft scores which is measured beside the others")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    paths = {"target": asked.target, STEPS: asked.steps, ONE_PASS: asked.one_pass}
    if asked.pair:
        shapes = PAIRS[asked.pair]
        target, draft = (of_zeros(shape, asked.precision, asked.threads, at > 0) for at, shape in enumerate(shapes))
        engines = [target[0], draft[0], *draft]
    else:
        if not all(paths.values()):
            parser.error("--target, --steps and --one-pass, or --pair")
        if mask_token_of(asked.one_pass) is None:
            parser.error(f"--one-pass: {asked.one_pass} names no mask token")
        models = [*paths.values(), asked.steps]
        engines = [opened(path, asked.precision, asked.threads, at > 0) for at, path in enumerate(models)]
    if asked.shortlist is None:
        engines.pop()
    else:
        assert isinstance(engines[-1], CanShorten)
        engines[-1].shorten(asked.shortlist)
    found: dict[str, Any] = {"passes": []}
    for batch, count in product(asked.batch, asked.draft_tokens):
        line = {"batch": batch, "k": count, **by_passes(engines, count, batch, asked.rounds)}
        found["passes"].append(line)
        print(line, flush=True)
    settings = {"batch": asked.batch, "threads": asked.threads, "precision": asked.precision}
    of = {"pair": asked.pair} if asked.pair else {name: str(path) for name, path in paths.items()}
    print(json.dumps({"asked": of | settings, **found}))


if __name__ == "__main__":
    main()
