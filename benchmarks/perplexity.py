"""Perplexity of a model by precision, on text that the pocket pair was never trained on, or on that of a file.

    python benchmarks/perplexity.py workers/pocket/target [--precisions fp32 w4a8 Q4_0] [--tokens 30000] [--outliers]
    python benchmarks/perplexity.py MODEL --text held-out.txt --tokens 15000 --window 512

Behind each stands how much more it is than the first one's, and the standard error of that over windows (of 1,024 tokens,
if not said otherwise). A type of GGUF in capitals is a copy of the model whose matrices, embedding and head included, the
gguf package rounds to it; it runs in int8 activations. ``w4a8+int8`` keeps keys and values in 8 bits, too. ``--outliers``
also measures a copy that computes the same function with a few channels scaled by 50 through norms and weights, as
OPT-6.7b's are: what a format loses on it beyond its loss on the original is the price of outliers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from held_out import held_out_tokens
from outliers import with_outliers

from outrider.kernels.native import NativeFeed
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import ModelSpec
from outrider.workers.models.opening import open_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from gguf_models import mostly, write_gguf

WINDOW = 1024
PIECE = 256
# GGUF types whose copies run in w8a8; others run in w4a8.
EIGHT_BITS = ("Q8_0", "Q6_K", "Q5_0", "Q5_1", "Q5_K")

Losses = np.ndarray[tuple[int], np.dtype[np.float64]]


def losses(engine: NativeEngine, tokens: Sequence[int], window: int = WINDOW) -> Losses:
    """The mean loss per token of each window. Windows do not overlap; all tokens except a window's first are predicted."""
    means = []
    for start in range(0, len(tokens) - 1, window):
        part = tokens[start : start + window + 1]
        row = engine.model.open()
        loss = 0.0
        for first in range(0, len(part) - 1, PIECE):
            feed = part[first : min(first + PIECE, len(part) - 1)]
            logits = engine.model.forward([NativeFeed(row, feed, choose=0, logits=len(feed))])[0].logits.astype(np.float64)
            wanted = logits[np.arange(len(feed)), part[first + 1 : first + 1 + len(feed)]]
            top = logits.max(axis=1)
            loss += float((np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top - wanted).sum())
        engine.model.close_row(row)
        means.append(loss / (len(part) - 1))
    return np.array(means)


def measure(path: Path, kind: str, tokens: Sequence[int], window: int, scratch: Path, threads: int = 0) -> Losses:
    precision, _, cache_precision = kind.partition("+")
    if kind[0] == "Q" or kind == "MXFP4":
        family = json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
        path = write_gguf(path, scratch / f"{path.name}-{kind}.gguf", mostly(kind), architecture=family)
        precision = "w8a8" if kind in EIGHT_BITS else "w4a8"
    spec = ModelSpec(str(path), "native", precision, threads=threads, cache_precision=cache_precision or "auto")
    engine = open_model(spec).engine
    assert isinstance(engine, NativeEngine)
    return losses(engine, tokens, window)


def tokens_of(path: Path, text: Path, count: int) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    # ``count`` tokens have fewer than 8 characters each on average.
    ids: list[int] = tokenizer.encode(text.read_text(encoding="utf-8")[: count * 8]).ids
    return ids[:count]


def compared(more: Losses) -> str:
    """The increase of perplexity over the first precision, exp(mean) - 1, with its standard error."""
    error = f"± {more.std(ddof=1) / np.sqrt(len(more)):.2%}" if len(more) > 1 else "(one window, so no standard error)"
    return f"{np.expm1(more.mean()):+8.2%} {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "w8a8", "w4a8"])
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--text", type=Path, help="instead of what the pocket pair was never trained on")
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--outliers", action="store_true")
    arguments = parser.parse_args()
    window, text = arguments.window, arguments.text
    tokens = (
        tokens_of(arguments.model, text, arguments.tokens) if text else held_out_tokens(arguments.model, arguments.tokens)
    )
    # A last window of a few tokens would count as much as the others in the standard error.
    tokens = tokens[: (len(tokens) - 1) // window * window + 1] if len(tokens) > window else tokens
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copies = {"original": arguments.model}
        if arguments.outliers:
            copies["outliers"] = with_outliers(arguments.model, Path(folder) / "outliers")
        for name, path in copies.items():
            base: Losses | None = None
            for kind in arguments.precisions:
                found = measure(path, kind, tokens, window, Path(folder), arguments.threads)
                base = found if base is None else base
                table.setdefault(name, {})[kind] = float(np.exp(found.mean()))
                print(f"{name:10}{kind:>10}{np.exp(found.mean()):10.4f} {compared(found - base)}", flush=True)
    print(json.dumps({"tokens": len(tokens), "window": window, **table}))


if __name__ == "__main__":
    main()
