"""Perplexity of a model by precision, on text that the pocket pair was never trained on.

    python benchmarks/perplexity.py workers/pocket/target [--precisions fp32 bf16 w8a8 w4a8] [--tokens 30000] [--outliers]

``--outliers`` also measures a copy that computes the same function with a few channels scaled by 50 through norms and
weights, as OPT-6.7b's are: what a format loses on it beyond its loss on the original is the price of outliers.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from final_states import held_out_tokens
from outliers import with_outliers

from outrider.kernels.native import Feeding
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import ModelSpec
from outrider.workers.models.opening import open_model

WINDOW = 1024
PIECE = 256


def perplexity(engine: NativeEngine, tokens: Sequence[int], window: int = WINDOW) -> float:
    """Of windows that do not overlap; every token but a window's first is predicted."""
    loss, count = 0.0, 0
    for start in range(0, len(tokens) - 1, window):
        part = tokens[start : start + window + 1]
        row = engine.model.open()
        for first in range(0, len(part) - 1, PIECE):
            feed = part[first : min(first + PIECE, len(part) - 1)]
            logits = engine.model.forward([Feeding(row, feed, choose=0, logits=len(feed))])[0].logits.astype(np.float64)
            wanted = logits[np.arange(len(feed)), part[first + 1 : first + 1 + len(feed)]]
            top = logits.max(axis=1)
            loss += float((np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top - wanted).sum())
            count += len(feed)
        engine.model.close_row(row)
    return math.exp(loss / count)


def measure(path: Path, precision: str, tokens: Sequence[int], threads: int = 0) -> float:
    engine = open_model(ModelSpec(str(path), "native", precision, threads=threads)).engine
    assert isinstance(engine, NativeEngine)
    return perplexity(engine, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "w8a8", "w4a8"])
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--outliers", action="store_true")
    arguments = parser.parse_args()
    tokens = held_out_tokens(arguments.model, arguments.tokens)
    with tempfile.TemporaryDirectory() as scratch:
        copies = {"original": arguments.model}
        if arguments.outliers:
            copies["outliers"] = with_outliers(arguments.model, Path(scratch) / "outliers")
        table = {
            name: {kind: measure(path, kind, tokens, arguments.threads) for kind in arguments.precisions}
            for name, path in copies.items()
        }
    first = arguments.precisions[0]
    print(f"{'':10}" + "".join(f"{kind:>18}" for kind in arguments.precisions))
    for name, row in table.items():
        base = row[first]
        print(f"{name:10}" + "".join(f"{value:10.4f} {value / base - 1:+7.2%}" for value in row.values()))
    print(json.dumps({"tokens": len(tokens), "window": WINDOW, **table}))


if __name__ == "__main__":
    main()
