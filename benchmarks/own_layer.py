"""A target's own layer for multi-token prediction (--draft mtp) against a draft model: what their steps take, by shape.

    python benchmarks/own_layer.py [--pair qwen3.5-4b+0.8b] [--draft-tokens 1 2 3] [--rounds 12]

As benchmarks/one_pass.py --pair: no weights but zeros, in memory, in the shapes of a pair that people use. In turn: passes
of the target over one token and over k + 1, k steps of the draft model, and k steps of the layer, each scoring all tokens
and as many as --draft-shortlist auto has it. *share* is the steps' part of a round that verifies with such a pass. How many
candidates are accepted is for the weights to say. Last comes one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from one_pass import PREFIX, Passes, of_zeros

from outrider.kernels.native import NativeModel
from outrider.kernels.packer import Memory, packed_bytes
from outrider.kernels.program import Cache
from outrider.workers.engines.engine import DecodeFeed, StopRule
from outrider.workers.engines.head import HeadEngine
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import Sampling
from outrider.workers.models.families import build_mtp
from outrider.workers.models.mtp import mtp_layer
from outrider.workers.models.packed import ALIGNMENT
from outrider.workers.precisions import PRECISIONS

QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "max_position_embeddings": 4096,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, delta_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "linear_num_value_heads": delta_heads,
    }


PAIRS = {"qwen3.5-4b+0.8b": (_sizes(2560, 9216, 32, 16, 4, 32), _sizes(1024, 3584, 24, 8, 2, 16))}


class Layer:
    """Times steps of an MTP layer over one row."""

    def __init__(self, config: dict[str, Any], precision: str, threads: int) -> None:
        chosen = PRECISIONS[precision]
        program = build_mtp(mtp_layer(config, "the shape"), chosen.format, chosen.group, source="the shape")
        program = replace(program, cache=Cache.INT8) if program.integer else program
        sizes = [-(-packed_bytes(weight) // ALIGNMENT) * ALIGNMENT for weight in program.weights]
        memory = Memory(sum(sizes))
        memory.array.fill(0)
        assert memory.address is not None
        addresses = [memory.address + start for start in accumulate(sizes[:-1], initial=0)]
        model = NativeModel(program, addresses, threads=threads, keep=memory)
        self.engine, self.size = HeadEngine(model, program.context), sum(sizes)
        self.engine.guess_room = 0
        self.engine.open(0, Sampling(), PREFIX)
        self.engine.skip(0, [1] * PREFIX)

    def steps(self, count: int) -> float:
        """Seconds of ``count`` steps in one call that starts with two committed tokens."""
        self.engine.give(0, np.zeros((2, self.engine.model.program.hidden_in), np.uint16))
        made = self.engine.decode([DecodeFeed(0, [1, 2], count, ())], StopRule((), (1.0,), 0.0)).steps
        self.engine.truncate(0, PREFIX)
        assert len(made) == count, f"{len(made)} passes for {count} steps"
        return sum(seconds for _, seconds in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=PAIRS, default=next(iter(PAIRS)))
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    shapes = [QWEN3_5 | sizes for sizes in PAIRS[asked.pair]]
    target = Passes(of_zeros(shapes[0], asked.precision, asked.threads, False)[0], 1, 1)
    draft_engines = of_zeros(shapes[1], asked.precision, asked.threads, True)
    layers = [Layer(shapes[0], asked.precision, asked.threads) for _ in range(2)]
    scored = []
    for engine in (draft_engines[1], layers[1].engine):
        assert isinstance(engine, NativeEngine)
        scored.append(engine.shorten(None))
    drafts = [Passes(engine, 1, 1) for engine in draft_engines]
    lines = []
    for count in asked.draft_tokens:
        took = []
        for _ in range(asked.rounds + 2):
            passes = [target.seconds(1, 1), target.seconds(count + 1, count + 1)]
            took.append([*passes, *(each.steps(count) for each in (*drafts, *layers))])
        medians = [statistics.median(column) * 1e3 for column in zip(*took[2:], strict=True)]
        names = ("one token", "k + 1 tokens", "draft", "draft, shortlist", "layer", "layer, shortlist")
        line: dict[str, Any] = {"k": count, **{name: round(each, 2) for name, each in zip(names, medians, strict=True)}}
        verify = medians[1]
        line["share"] = {name: round(each / (verify + each), 3) for name, each in zip(names[2:], medians[2:], strict=True)}
        lines.append(line)
        print(line, flush=True)
    settings = {"pair": asked.pair, "precision": asked.precision, "threads": asked.threads, "scored": scored}
    print(json.dumps({"asked": settings, "layer bytes": layers[0].size, "passes": lines}))


if __name__ == "__main__":
    main()
