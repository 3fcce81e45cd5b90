"""Passes over the same model in several ways of storing its weights, in turn: what does each cost for its bytes?

    python benchmarks/storages.py [--config CONFIG.json] [--layers N] [--storages w4a8:g128 w4a8 Q4_0 Q4_K ...]

A storage is a precision that floats are rounded to on load, or one that a quantised checkpoint brings (Q2_K, Q4_0, Q8_0,
Q4_K, Q5_K, Q6_K, IQ2_S, IQ4_XS, MXFP4, NVFP4, MLX of 2 to 4 bits and MLX-5, MLX-6 and MLX-8, AWQ, AWQ-g32, AWQ-g64), with
/w4abf16, /w8af32 or, of floats, /bf16 behind it where activations are not int8; or FP8, FP8-rows (a scale for a block, and
for a row) and NF4, which have bf16. Weights are random, and one tile of each matrix stands for all. The stream is read
between the passes; the best of each counts. Last comes a line of
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from stream import Stream

from outrider.kernels import packer, packing, storage
from outrider.kernels.native import NativeFeed, NativeModel
from outrider.kernels.program import Codes, Format, Program, Scales, Storage, Weight
from outrider.kernels.quantised import E4M3
from outrider.workers.models.families import build_program
from outrider.workers.precisions import PRECISIONS

CONFIG = Path(__file__).parent / "shapes" / "configs" / "TinyLlama--TinyLlama-1.1B-Chat-v1.0.json"
TOKENS = (1, 4, 7, 8, 16, 32)
PREFIX = 16
# Name of a quantised checkpoint's format -> (storage, group).
STORAGES: Mapping[str, tuple[Storage, int]] = {
    "Q2_K": (Storage(Codes.INT2, Scales.FOUR_BITS), 16),
    "IQ2_S": (Storage(Codes.INT8, Scales.F32), 16),
    "IQ4_XS": (Storage(Codes.IQ4, Scales.F32), 32),
    "Q4_0": (Storage(Codes.INT4, Scales.F16), 32),
    "Q8_0": (Storage(Codes.INT8, Scales.F16), 32),
    "Q4_K": (Storage(Codes.INT4, Scales.SIX_BITS), 32),
    "Q5_K": (Storage(Codes.INT5, Scales.SIX_BITS), 32),
    "Q6_K": (Storage(Codes.INT6, Scales.EIGHT_BITS), 16),
    "MXFP4": (Storage(Codes.E2M1, Scales.E8M0), 32),
    "NVFP4": (Storage(Codes.E2M1, Scales.F32), 16),
    "NF4": (Storage(Codes.NF4, Scales.F32), 64),
    "MLX": (Storage(Codes.INT4, Scales.HALF_MINIMA), 64),
    "MLX-g32": (Storage(Codes.INT4, Scales.HALF_MINIMA), 32),
    "MLX-5": (Storage(Codes.INT5, Scales.HALF_MINIMA), 64),
    "MLX-6": (Storage(Codes.INT6, Scales.HALF_MINIMA), 64),
    "MLX-8": (Storage(Codes.INT8, Scales.HALF_MINIMA), 64),
    "FP8": (Storage(Codes.E4M3, Scales.F32), 128),
    "FP8-rows": (Storage(Codes.E4M3, Scales.BF16), 128),
    "AWQ": (Storage(Codes.INT4, Scales.WORDS, zeros=True), 128),
    "AWQ-g64": (Storage(Codes.INT4, Scales.F16, zeros=True), 64),
    "AWQ-g32": (Storage(Codes.INT4, Scales.F16, zeros=True), 32),
}


ONLY_IN_BF16 = (Codes.E4M3, Codes.NF4)


def program_in(values: Mapping[str, Any], name: str) -> Program:
    kind, _, activations = name.partition("/")
    if kind in PRECISIONS:
        return build_program(values, PRECISIONS[kind].format, PRECISIONS[kind].group)
    kept, channels = STORAGES[kind]
    program = build_program(values, PRECISIONS["bf16" if kept.codes in ONLY_IN_BF16 else activations or "w4a8"].format)
    weights = [each if each.table else replace(each, storage=kept, group=channels) for each in program.weights]
    return replace(program, weights=tuple(weights))


def fill(weight: Weight, view: np.ndarray) -> None:
    """Fills the view with finite weights of a sensible size: random codes, and headers with equal lanes."""
    generator = np.random.default_rng(weight.columns)
    if weight.table or weight.stored.codes is Codes.NONE:
        word = np.float32(0.01).view(np.uint32)
        words = view[: view.size // 4 * 4].view(np.uint32)
        words[:] = word if weight.format is Format.FP32 else word >> 16 | word & 0xFFFF0000
        return
    shape = storage.geometry(weight)
    size = shape.tile_bytes(weight.columns)
    tile = generator.integers(0, 256, size, np.uint8)

    def halves(count: int) -> np.ndarray:
        return np.full(count, 0.01, np.float16).view(np.uint8)

    zeros = np.full(shape.header - shape.scale_bytes, 8, np.uint8)
    factors = generator.integers(0, 256, 512, np.uint8)
    headers = {
        Scales.WORDS: np.full(32, np.float32(2**-7).view(np.uint32) | np.uint32(8)).view(np.uint8),
        Scales.E8M0: np.full(shape.header, 120, np.uint8),
        Scales.SIX_BITS: np.concatenate([halves(64), factors[:384]]),
        Scales.FACTORS: np.concatenate([np.full(32, 0x3A00A5C3, np.uint32).view(np.uint8), factors[:128]]),
        Scales.EIGHT_BITS: np.concatenate([factors, halves(32)]),
        Scales.FOUR_BITS: np.concatenate([halves(64), factors]),
        Scales.F32: np.full(shape.header // 4, 0.001, np.float32).view(np.uint8),
    }
    header = headers.get(weight.stored.scales, np.concatenate([halves(shape.scale_bytes // 2), zeros]))
    if weight.stored.codes is Codes.E4M3:
        # Normally distributed like trained weights, and scaled to the range of e4m3, so that almost none is subnormal.
        values = np.clip(generator.standard_normal(size, np.float32) * 100, -448, 448)
        tile[:] = np.searchsorted(E4M3[:127], np.abs(values)).clip(0, 126).astype(np.uint8) | np.signbit(
            values
        ) << np.uint8(7)
        if weight.stored.scales is Scales.F32:
            header = np.full(shape.header // 4, 0.0001, np.float32).view(np.uint8)
        else:
            header = packing.to_bf16(np.linspace(0.0001, 0.0002, shape.header // 2, dtype=np.float32)).view(np.uint8)
    step = shape.header + shape.code_bytes(shape.block)
    for at in range(0, size, step):
        tile[at : at + shape.header] = header
    for at in range(0, view.size - size + 1, size):
        view[at : at + size] = tile


class Timed:
    """One storage's model, and the best seconds of a pass by its number of tokens."""

    def __init__(self, values: Mapping[str, Any], name: str, cores: Sequence[int]) -> None:
        self.name = name
        # With one thread its CPU time is used, which excludes time taken by others on a shared machine.
        self.clock = time.thread_time if len(cores) == 1 else time.perf_counter
        program = program_in(values, name)
        sizes = [-(-packer.packed_bytes(weight) // 64) * 64 for weight in program.weights]
        self.memory = packer.Memory(sum(sizes))
        starts = np.cumsum([0, *sizes])
        for weight, start, size in zip(program.weights, starts, sizes, strict=False):
            fill(weight, self.memory.array[start : start + size])
        assert self.memory.address is not None
        addresses = [self.memory.address + int(start) for start in starts[:-1]]
        self.model = NativeModel(program, addresses, threads=len(cores), cores=cores, keep=self.memory)
        matrices = [weight for weight in program.weights if not weight.table]
        self.bytes = sum(packer.packed_bytes(weight) for weight in matrices)
        self.bits = 8 * self.bytes / sum(weight.rows * weight.columns for weight in matrices)
        self.row = self.model.open()
        self.model.forward([NativeFeed(self.row, [3] * PREFIX, choose=0)])
        self.best = dict.fromkeys(TOKENS, float("inf"))

    def turn(self, passes: int) -> None:
        for tokens in TOKENS:
            for _ in range(passes):
                started = self.clock()
                self.model.forward([NativeFeed(self.row, [5 + token % 97 for token in range(tokens)], choose=tokens)])
                self.best[tokens] = min(self.best[tokens], self.clock() - started)
                self.model.truncate(self.row, PREFIX)


def table(timed: Sequence[Timed], stream: float) -> dict[str, Any]:
    first = timed[0]
    print(f"stream {stream:.1f} GB/s; ms of a pass of M tokens, and for its bytes against {first.name}")
    print(f"{'':18}{'bits':>7}{'GB':>7}{'of stream':>10}" + "".join(f"{f'M={tokens}':>15}" for tokens in TOKENS))
    figures: dict[str, Any] = {"stream_gbs": round(stream, 2)}
    for each in timed:
        share = each.bytes / 1e9 / stream / each.best[1]
        row = f"{each.name:18}{each.bits:7.3f}{each.bytes / 1e9:7.3f}{share:10.1%}"
        for tokens, seconds in each.best.items():
            row += f"{seconds * 1e3:8.2f}{seconds / first.best[tokens] * first.bytes / each.bytes:7.2f}"
        print(row)
        best = {str(tokens): round(seconds * 1e3, 3) for tokens, seconds in each.best.items()}
        figures[each.name] = {
            "bits": round(each.bits, 4),
            "bytes": each.bytes,
            "share_of_stream": round(share, 4),
            "ms": best,
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, for less memory")
    parser.add_argument("--storages", nargs="+", default=["w4a8:g128", "w4a8", "w4a8:g64", "w4a8:g32", *STORAGES])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--passes", type=int, default=3)
    arguments = parser.parse_args()
    values = json.loads(arguments.config.read_text())
    if arguments.layers:
        values["num_hidden_layers"] = arguments.layers
    cores = sorted(os.sched_getaffinity(0))[: arguments.threads]
    # The stream's threads start before an engine pins this thread to the first core, since new threads inherit that.
    buffer = Stream(cores, 256 << 20)
    rates = [buffer.gigabytes_a_second()]
    timed = [Timed(values, name, cores) for name in arguments.storages]
    for _ in range(arguments.rounds):
        for each in timed:
            rates.append(buffer.gigabytes_a_second())
            each.turn(arguments.passes)
    print(json.dumps(table(timed, max(rates))))


if __name__ == "__main__":
    main()
