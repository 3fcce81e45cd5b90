"""Forward passes over many rows, each behind a context of its own, against what memory and arithmetic allow.

    python benchmarks/inflate.py workers/pocket/target /tmp/many-heads --shape 1b --kv-heads 32 --vocabulary 8192
    python benchmarks/rows.py --model /tmp/many-heads --precision w4a8 --rows 1,8,32 --context 8,142,500 [--new 1,4]
        [--cache-precision int8]

The bound of a pass is the larger of its bytes (matrices, keys and values, once each) over the stream and its operations
over the peak of the units that do them. Stream and peaks are measured between the passes; the best of each counts, as do
the best passes. The last line is JSON: `ms[rows][context]` and `bound[rows][context]` are milliseconds for one new token a
row, those of other numbers stand under `ms_new[new]` and `bound_new[new]`. Of a mixture of experts all are counted as read.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forward import cache_bytes, matrix_bytes
from peaks import Peaks
from stream import Stream

from outrider.kernels import library
from outrider.kernels.program import Cache, Format, Kind
from outrider.workers.engines.engine import Feed
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.opening import open_model

# The tokens of a prefill pass, which has one row.
PREFILL = 256


@dataclass
class Yardsticks:
    """The best measurement of each so far."""

    stream: Stream
    peaks: Peaks
    gbs: float = 0.0
    int8: float = 0.0
    bf16: float = 0.0
    gflops: float = 0.0

    def measure(self) -> None:
        self.gbs = max(self.gbs, self.stream.gigabytes_a_second())
        self.int8 = max(self.int8, self.peaks.int8_gmacs())
        self.bf16 = max(self.bf16, self.peaks.bf16_gmacs())
        self.gflops = max(self.gflops, self.peaks.fma_gflops())


@dataclass
class Passes:
    """Seconds of each pass by (rows, context, new tokens a row)."""

    seconds: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)

    def best(self, cell: tuple[int, int, int]) -> float:
        return min(self.seconds[cell])


def weights_multiplied(engine: NativeEngine, formats: set[Format]) -> int:
    return sum(
        weight.rows * weight.columns
        for weight in engine.model.program.weights
        if not weight.table and weight.format in formats
    )


def attention_macs(engine: NativeEngine, tokens: int) -> int:
    """Multiply-accumulates of one query token's scores over this many tokens; the weighted sum of values takes as many."""
    ops = [op for op in engine.model.program.ops if op.kind is Kind.ATTENTION]
    return tokens * sum(op.heads * op.head_size for op in ops)


def attention_seconds(engine: NativeEngine, at: Yardsticks, tokens: int) -> float:
    """Seconds times 1e9 of attention of one query token over this many tokens. Scores over 8-bit keys are int8 products."""
    macs = attention_macs(engine, tokens)
    scores = macs / at.int8 if engine.model.program.cache is Cache.INT8 else 2 * macs / at.gflops
    return scores + 2 * macs / at.gflops


def bound(engine: NativeEngine, at: Yardsticks, rows: int, context: int, new: int) -> float:
    """The least seconds of a pass. int8, bf16 and fp32 units share the same ports, so their times add up."""
    size = matrix_bytes(engine) + rows * cache_bytes(engine, context + new)
    tokens = rows * new
    operations = tokens * (
        weights_multiplied(engine, {Format.W4A8, Format.W8A8}) / at.int8
        + weights_multiplied(engine, {Format.BF16, Format.W4ABF16}) / at.bf16
        + 2 * weights_multiplied(engine, {Format.FP32, Format.FP16, Format.W8AF32}) / at.gflops
        + attention_seconds(engine, at, context + new)
    )
    return max(size / at.gbs, operations) / 1e9


def measure(
    engine: NativeEngine, at: Yardsticks, rows: Sequence[int], contexts: Sequence[int], news: Sequence[int], rounds: int
) -> Passes:
    passes = Passes()
    every = range(max(rows))
    for row in every:
        engine.open(row, Sampling(), 1)
    for context in sorted(contexts):
        for row in every:
            while (held := engine.length(row)) < context:
                count = min(PREFILL, context - held)
                engine.feed([Feed(row, [3 + (token + 7 * row) % 101 for token in range(count)], 0)])
        for _ in range(rounds):
            at.measure()
            for count in rows:
                for new in news:
                    times = passes.seconds.setdefault((count, context, new), [])
                    for _ in range(3):
                        feeds = [Feed(row, [5 + row % 97] * new, new) for row in range(count)]
                        started = time.perf_counter()
                        engine.feed(feeds)
                        times.append(time.perf_counter() - started)
                        for row in range(count):
                            engine.truncate(row, context)
    for row in every:
        engine.close(row)
    return passes


def report(
    engine: NativeEngine, at: Yardsticks, passes: Passes, rows: Sequence[int], contexts: Sequence[int], new: int
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    print(f"{new} new a row, ms (times the bound):")
    print("".join(f"{f'behind {context}':>22}" for context in ("", *contexts)).replace("behind  ", "        "))
    milliseconds: dict[str, dict[str, float]] = {}
    bounds: dict[str, dict[str, float]] = {}
    for count in rows:
        cells = {context: passes.best((count, context, new)) for context in contexts}
        least = {context: bound(engine, at, count, context, new) for context in contexts}
        print(
            f"{count:>17} rows"
            + "".join(f"{f'{cells[each] * 1e3:.2f} ({cells[each] / least[each]:.2f})':>22}" for each in contexts)
        )
        milliseconds[str(count)] = {str(context): round(seconds * 1e3, 3) for context, seconds in cells.items()}
        bounds[str(count)] = {str(context): round(seconds * 1e3, 3) for context, seconds in least.items()}
    return milliseconds, bounds


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--cache-precision", choices=("auto", "int8"), default="auto")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32])
    parser.add_argument("--context", type=numbers, default=[8, 142, 500])
    parser.add_argument("--new", type=numbers, default=[1])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    cores = tuple(sorted(os.sched_getaffinity(0))[: arguments.threads])
    spec = ModelSpec(str(arguments.model), "native", arguments.precision, threads=len(cores), cores=cores)
    opened = open_model(replace(spec, cache_precision=arguments.cache_precision))
    engine = opened.engine
    assert isinstance(engine, NativeEngine)
    at = Yardsticks(Stream(cores), Peaks(cores))
    news = sorted({1, *arguments.new})
    passes = measure(engine, at, arguments.rows, arguments.context, news, arguments.rounds)
    print(
        f"{arguments.model}, {arguments.precision}, {len(cores)} threads, {library.instruction_set()}: "
        f"stream {at.gbs:.1f} GB/s, int8 {at.int8:.0f} GMAC/s, bf16 {at.bf16:.0f} GMAC/s, fp32 {at.gflops:.0f} GFLOP/s"
    )
    figures: dict[str, Any] = {
        "model": arguments.model.name,
        "precision": arguments.precision,
        "cache_precision": arguments.cache_precision,
        "threads": len(cores),
        "stream_gbs": round(at.gbs, 2),
        "vnni_gmacs": round(at.int8, 1),
        "bf16_gmacs": round(at.bf16, 1),
        "fma_gflops": round(at.gflops, 1),
        "ms_new": {},
        "bound_new": {},
    }
    for new in news:
        milliseconds, bounds = report(engine, at, passes, arguments.rows, arguments.context, new)
        if new == 1:
            figures |= {"ms": milliseconds, "bound": bounds}
        else:
            figures["ms_new"][str(new)] = milliseconds
            figures["bound_new"][str(new)] = bounds
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
