"""How often a draft chooses what its target chooses, on held-out text, and what that means for speculation.

    python benchmarks/agreement.py TARGET DRAFT [--tokens 4096] [--engine native --precision w4a8]

Sets the noise of an inflated pair: raise it until the rate is the one wanted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from held_out import held_out_tokens

from outrider.workers.engines.engine import Engine, Feed
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.opening import open_model

WINDOW = 512
# The first positions of a window have little context; a row has such positions only once, so they are not counted.
SKIPPED = 64


def choices(engine: Engine, tokens: Sequence[int], temperature: float) -> list[int]:
    """The engine's choice after every token of every window, with the same noise for every model."""
    chosen: list[int] = []
    for row, start in enumerate(range(0, len(tokens) - WINDOW + 1, WINDOW)):
        engine.open(row, Sampling(temperature=temperature, seed=row), WINDOW)
        window = tokens[start : start + WINDOW]
        chosen += engine.feed([Feed(row, window, WINDOW - SKIPPED)])[0].tokens
        engine.close(row)
    return chosen


def agreement(target: Engine, draft: Engine, tokens: Sequence[int], temperature: float) -> float:
    pairs = zip(choices(target, tokens, temperature), choices(draft, tokens, temperature), strict=True)
    same = [left == right for left, right in pairs]
    return sum(same) / len(same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--engine", default="native", choices=["native", "hf"])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--draft-precision")
    arguments = parser.parse_args()
    if arguments.tokens < WINDOW:
        parser.error(f"--tokens: {arguments.tokens} make no window of {WINDOW}; give {WINDOW} or more")
    tokens = held_out_tokens(arguments.target, arguments.tokens)
    precisions = (arguments.precision, arguments.draft_precision or arguments.precision)
    target, draft = (
        open_model(ModelSpec(str(path), arguments.engine, precision)).engine
        for path, precision in zip((arguments.target, arguments.draft), precisions, strict=True)
    )
    rates = {name: agreement(target, draft, tokens, heat) for name, heat in (("greedy", 0.0), ("temperature_1", 1.0))}
    for name, rate in rates.items():
        expected = {k: sum(rate**i for i in range(k + 1)) for k in (3, 6)}
        rounds = ", ".join(f"{tokens:.2f} at k={k}" for k, tokens in expected.items())
        print(f"{name}: {rate:.1%} agree; tokens a round if misses were independent: {rounds}")
    print(json.dumps({name: round(rate, 4) for name, rate in rates.items()}))


if __name__ == "__main__":
    main()
