"""One forward pass of M tokens, against what reading its weights once must cost.

    python benchmarks/forward.py --shape 1b --precision w4a8 [--peer transformers]
    python benchmarks/forward.py --model CHECKPOINT_OR_FILE.gguf --precision w4abf16

Of a mixture of experts the tokens have nothing in common, and what a pass must read is what its tokens need. A prefill is
held against the units' peak (peaks.py): the time that its products with matrices take at the peak of int8, or of bf16 where
activations are not int8, and those of attention at that of fp32, which the same ports do.

A precision may have a group (w4a8:g128); a checkpoint that comes quantised is run as it is stored. `bits` says how many a
weight takes, scales included.

The model is inflated from the bundled pocket target on first use and kept in outrider's cache directory. Stream bandwidth
is measured between the passes, because on a shared machine both move; the best of each counts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from inflate import SHAPES, model_directory
from peaks import Peaks
from stream import Stream

from outrider.kernels import library, packer
from outrider.kernels.program import Format, Kind
from outrider.workers.engines.engine import Feed
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.opening import open_model

TOKENS = (1, 2, 4, 7, 8, 16, 32)
PREFIX = 16
PREFILL = 512
LONG_CONTEXT = 2000
# Formats whose activations are not int8. (fp32 is not among them: routers have it in every program.)
FLOATS = {Format.BF16, Format.W4ABF16, Format.W8AF32, Format.FP16}
ROW = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Best seconds by number of tokens at a short context, of a prefill, and at a long context (empty: not measured)."""

    short: dict[int, float]
    prefill: float
    long: dict[int, float]
    experts: dict[int, list[int]] = field(default_factory=dict)
    """How many experts passes at a short context read, of a mixture."""


Pass = Callable[[int, int], float]


def time_native(engine: NativeEngine, between: Callable[[], None], rounds: int, long_context: bool) -> Timing:
    taken = itertools.count()
    experts: dict[int, list[int]] = {}

    def one(tokens: int, context: int) -> float:
        engine.truncate(ROW, context)
        # Other tokens each time: the experts of the same ones would be in the processor's caches.
        fed = [next(taken) * 2654435761 % engine.vocabulary for _ in range(tokens)]
        feeds = [Feed(ROW, fed, tokens if tokens < PREFILL else 1)]
        started = time.perf_counter()
        engine.feed(feeds)
        seconds = time.perf_counter() - started
        if engine.mixture is not None:
            experts.setdefault(tokens, []).append(engine.mixture.read)
        return seconds

    def grow(context: int) -> None:
        while engine.length(ROW) < context:
            count = min(PREFILL, context - engine.length(ROW))
            engine.feed([Feed(ROW, [3 + token % 101 for token in range(count)], 0)])

    engine.open(ROW, Sampling(), PREFIX)
    try:
        timing = _time(one, grow, between, rounds, long_context)
        return replace(timing, experts=experts)
    finally:
        engine.close(ROW)


def _time(one: Pass, grow: Callable[[int], None], between: Callable[[], None], rounds: int, long_context: bool) -> Timing:
    short: dict[int, list[float]] = {tokens: [] for tokens in TOKENS}
    prefills, long = [], {tokens: [float("inf")] for tokens in (1, 7)} if long_context else {}
    grow(PREFIX)
    for turn in range(rounds):
        between()
        for tokens, times in short.items():
            times += [one(tokens, PREFIX) for _ in range(3)]
        if turn < max(1, rounds // 4):
            prefills.append(one(PREFILL, PREFIX))
    if long_context:
        grow(LONG_CONTEXT)
        for _ in range(rounds):
            between()
            for tokens, times in long.items():
                times += [one(tokens, LONG_CONTEXT) for _ in range(3)]
    best = {tokens: min(times) for tokens, times in short.items()}
    return Timing(best, min(prefills), {tokens: min(times) for tokens, times in long.items()})


def time_transformers(path: Path, cores: Collection[int], between: Callable[[], None], rounds: int) -> Timing:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    # The engine's first pass has pinned this thread to one core.
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def one(tokens: int, context: int) -> float:
        surplus = cache.get_seq_length() - context
        if surplus > 0:
            cache.crop(-surplus)
        ids = torch.tensor([[5 + token % 97 for token in range(tokens)]])
        started = time.perf_counter()
        keep = tokens if tokens < PREFILL else 1
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits.argmax(-1)
        return time.perf_counter() - started

    def grow(context: int) -> None:
        one(context - cache.get_seq_length(), cache.get_seq_length())

    return _time(one, grow, between, rounds, False)


def matrix_bytes(engine: NativeEngine) -> int:
    """The bytes that a pass must read: all packed matrices, the LM head included."""
    return sum(packer.packed_bytes(weight) for weight in engine.model.program.weights if not weight.table)


def experts_bytes(engine: NativeEngine) -> int:
    """The bytes of all experts' matrices."""
    program = engine.model.program
    return sum(
        packer.packed_bytes(weight)
        for op in program.ops
        if op.kind is Kind.EXPERTS
        for weight in program.weights[op.weight : op.weight + op.heads]
    )


def needed_bytes(engine: NativeEngine, timing: Timing, tokens: int) -> float:
    """The bytes that a pass over this many tokens must read; of the experts only those that were chosen count."""
    if engine.mixture is None:
        return matrix_bytes(engine)
    experts, every = experts_bytes(engine), sum(router.experts for router in engine.mixture.routers)
    return matrix_bytes(engine) - experts + experts * fmean(timing.experts[tokens]) / every


def products_of_prefill(engine: NativeEngine) -> tuple[int, int]:
    """(products with matrices, products of attention) of a prefill. After the last layer's SELECT one token goes on."""
    program = engine.model.program
    tokens, matrices, attention = PREFILL, 0, 0
    for op in program.ops:
        if op.kind is Kind.SELECT:
            tokens = 1
        elif op.kind in (Kind.LINEAR, Kind.EXPERTS, Kind.HEADS):
            weight = program.weights[op.weight]
            times = {Kind.LINEAR: 1, Kind.EXPERTS: op.kv_heads, Kind.HEADS: op.heads}[op.kind]
            matrices += tokens * weight.rows * weight.columns * times
        elif op.kind is Kind.ATTENTION:
            seen = (PREFIX + token + 1 for token in range(PREFILL - tokens, PREFILL))
            attention += op.heads * (op.head_size + op.value_size) * sum(min(keys, op.window or keys) for keys in seen)
    return matrices, attention


def bits_a_weight(engine: NativeEngine) -> float:
    """Bits per weight of the matrices, scales included."""
    weights = sum(weight.rows * weight.columns for weight in engine.model.program.weights if not weight.table)
    return 8 * matrix_bytes(engine) / weights


def cache_bytes(engine: NativeEngine, tokens: int) -> int:
    return tokens * engine.model.program.token_bytes


def report(engine: NativeEngine, timing: Timing, stream: float, peak: float, gflops: float) -> dict[str, Any]:
    base = timing.short[1]
    ideals = {tokens: needed_bytes(engine, timing, tokens) / 1e9 / stream for tokens in timing.short}
    ideal = ideals[1]
    print(
        f"{matrix_bytes(engine) / 1e9:.3f} GB of matrices, stream {stream:.1f} GB/s: "
        f"{ideal * 1e3:.2f} ms to read what a token needs"
    )
    print(f"{'M':>6} {'ms':>9} {'of M=1':>7} {'of stream':>10} {'experts':>9}")
    for tokens, seconds in timing.short.items():
        read = f"{fmean(timing.experts[tokens]):9.0f}" if timing.experts else ""
        print(f"{tokens:6} {seconds * 1e3:9.2f} {seconds / base:7.2f} {ideals[tokens] / seconds:10.1%} {read}")
    matrices, attention = products_of_prefill(engine)
    of_matrices = matrices / (peak * 1e9) / timing.prefill
    share = of_matrices + attention / (gflops / 2 * 1e9) / timing.prefill
    print(
        f"prefill of {PREFILL}: {PREFILL / timing.prefill:.0f} tokens a second, {share:.1%} of the peak of {peak:.0f} "
        f"GMAC/s and {gflops:.0f} GFLOP/s, {of_matrices:.1%} by products with matrices alone"
    )
    figures: dict[str, Any] = {
        "stream_gbs": round(stream, 2),
        "bits": round(bits_a_weight(engine), 4),
        "ms": {str(tokens): round(seconds * 1e3, 3) for tokens, seconds in timing.short.items()},
        "share_of_stream": round(ideal / base, 4),
        "ratio_m7": round(timing.short[7] / base, 3),
        "ratio_m16": round(timing.short[16] / base, 3),
        "prefill_tokens_per_second": round(PREFILL / timing.prefill, 1),
        "prefill_share_of_peak": round(share, 4),
        "prefill_share_by_matrices": round(of_matrices, 4),
    }
    if timing.experts:
        figures["experts"] = {str(tokens): round(fmean(timing.experts[tokens]), 1) for tokens in timing.short}
    for tokens, seconds in timing.long.items():
        attention = seconds - timing.short[tokens]
        reading = cache_bytes(engine, LONG_CONTEXT) / stream / 1e9
        print(
            f"attention over {LONG_CONTEXT}, M={tokens}: {attention * 1e3:.2f} ms, {attention / reading:.2f} of its bytes"
        )
        figures[f"attention_ratio_m{tokens}"] = round(attention / reading, 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--model", type=Path, help="a model directory instead of the shape's inflated one")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--peer", choices=["transformers"], help="also measure this one, in bf16, on the same weights")
    arguments = parser.parse_args()
    path = arguments.model or model_directory(arguments.shape)

    started = time.perf_counter()
    cores = tuple(sorted(os.sched_getaffinity(0))[: arguments.threads])
    opened = open_model(ModelSpec(str(path), "native", arguments.precision, threads=len(cores), cores=cores))
    load_seconds = time.perf_counter() - started
    engine = opened.engine
    assert isinstance(engine, NativeEngine)
    print(f"{path}: {'; '.join(opened.notes)}; opened in {load_seconds:.1f} s", flush=True)
    engine.open(ROW, Sampling(), PREFIX)
    engine.feed([Feed(ROW, [1] * PREFILL, 1)])
    engine.close(ROW)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    buffer, units = Stream(cores), Peaks(cores)
    rates: list[float] = []
    peaks: list[float] = []
    floats: list[float] = []
    in_int8 = not {weight.format for weight in engine.model.program.weights if not weight.table} & FLOATS

    def read() -> None:
        rates.append(buffer.gigabytes_a_second())
        peaks.append(units.int8_gmacs() if in_int8 else units.bf16_gmacs())
        floats.append(units.fma_gflops())

    timing = time_native(engine, read, arguments.rounds, arguments.shape == "7b")
    figures = {
        "shape": arguments.model.name if arguments.model else arguments.shape,
        "precision": arguments.precision,
        "threads": len(cores),
    }
    figures |= report(engine, timing, max(rates), max(peaks), max(floats))
    figures |= {"peak_rss": peak, "load_seconds": round(load_seconds, 2), "isa": library.instruction_set()}
    if arguments.peer:
        del engine, opened
        peer = time_transformers(path, cores, read, max(2, arguments.rounds // 3))
        ratio = peer.prefill / timing.prefill
        print(f"transformers bf16: {', '.join(f'M={m} {s * 1e3:.1f} ms' for m, s in peer.short.items())}")
        print(f"transformers bf16: prefill {PREFILL / peer.prefill:.0f} tokens a second; ours is {ratio:.2f} times that")
        figures["transformers_ms"] = {str(tokens): round(seconds * 1e3, 2) for tokens, seconds in peer.short.items()}
        figures["prefill_ratio"] = round(ratio, 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
