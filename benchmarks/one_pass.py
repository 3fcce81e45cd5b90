"""Candidates in one pass against as many steps: a parallel draft, and one that proposes token by token, for one target.

    python benchmarks/one_pass.py --target DIR --steps DIR --one-pass DIR [--draft-tokens 6] [--batch 1] [--turns 3]
    python benchmarks/one_pass.py --pair qwen3-8b+0.6b [--draft-tokens 6 8 12] [--batch 1 4]

All in this process, on the same threads, one after the other. First what passes take, in turn: of the target over k + 1
tokens a row, of the one draft k steps in one call (over two tokens, then one), of the other once over k + 1. *times by
passes* is what a round with steps takes against a round with one pass that brings the same tokens: by shape alone, whatever
the models say. Unless --passes-only, rows are then written: plainly, and with either draft for each of --draft-tokens
(`auto`: each round chooses); every second turn goes the other way round. Tokens a second are those of rounds in which no
prompt is read. Texts must be the same. With --pair there are no weights but zeros, in memory, in the shapes of a pair that
people use: passes only, which read and compute as much as those of the real models. Last comes one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from built import Answered, InProcess
from door import EXAMPLES, prompts_of

from outrider.kernels.native import NativeModel
from outrider.kernels.packer import Memory, packed_bytes
from outrider.kernels.program import Cache
from outrider.workers.build import Draft, Target, build_draft, build_target
from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines.costs import CostCurve, measure
from outrider.workers.engines.engine import DecodeFeed, Engine, Feed, StopRule
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import DraftRequest, ModelSpec, ReplicaSpec, Row, RowResult, Sampling
from outrider.workers.models.families import build_program
from outrider.workers.models.mask_token import mask_token_of
from outrider.workers.models.opening import OpenModel, open_model
from outrider.workers.models.packed import ALIGNMENT
from outrider.workers.models.tokenizer import Tokenizer
from outrider.workers.precisions import PRECISIONS


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
    }


# As published, the draft second.
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
STEPS, ONE_PASS, PLAIN = "steps", "one pass", "plain"


class Beside(InProcess):
    """A draft in this process, and the time that it has taken."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.seconds = 0.0

    def ask(self, request: DraftRequest) -> Answered:
        answered = super().ask(request)
        self.seconds += answered.reply.seconds
        return answered


def opened(path: Path, precision: str, threads: int, draft: bool) -> tuple[OpenModel, ModelSpec]:
    mask_token = mask_token_of(path) if draft else None
    spec = ModelSpec(str(path), "native", precision, threads=threads, small_cache=draft, mask_token=mask_token)
    return open_model(spec), spec


def of_zeros(config: dict[str, Any], precision: str, threads: int, draft: bool) -> Engine:
    """An engine of this shape over memory that has been written, with zeros."""
    chosen = PRECISIONS[precision]
    program = build_program(config, chosen.format, chosen.group, source="the shape")
    if draft and program.integer:
        program = replace(program, cache=Cache.INT8)
    sizes = [-(-packed_bytes(weight) // ALIGNMENT) * ALIGNMENT for weight in program.weights]
    memory = Memory(sum(sizes))
    memory.array.fill(0)
    assert memory.address is not None
    addresses = [memory.address + start for start in accumulate(sizes[:-1], initial=0)]
    return NativeEngine(NativeModel(program, addresses, threads=threads, keep=memory), program.context)


class Passes:
    """Passes of one engine over rows behind a short text."""

    def __init__(self, engine: Engine, first: int, rows: int) -> None:
        self._engine, self._rows = engine, range(first, first + rows)
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
        """A call that goes on from two tokens, as behind a round that brought two."""
        never = StopRule((), (1.0,), 0.0)
        started = time.perf_counter()
        self._engine.decode([DecodeFeed(row, self._some(2), count, ()) for row in self._rows], never)
        took = time.perf_counter() - started
        for row in self._rows:
            self._engine.truncate(row, PREFIX)
        return took

    def _some(self, count: int) -> list[int]:
        return [(at * 2654435761 >> 7) % self._engine.vocabulary for at in range(count)]

    def close(self) -> None:
        for row in self._rows:
            self._engine.close(row)


def by_passes(target: Engine, steps: Engine, one_pass: Engine, count: int, rows: int, rounds: int) -> dict[str, Any]:
    # Both drafts may be one engine.
    passes = [Passes(engine, ROW + at * rows, rows) for at, engine in enumerate((target, steps, one_pass))]
    took: list[tuple[float, float, float]] = []
    for _ in range(rounds + 2):
        verify = passes[0].seconds(count + 1, count + 1)
        by_steps = passes[1].steps(count)
        # The two tokens that a row brings on average, and a mask for each candidate but the first.
        took.append((verify, by_steps, passes[2].seconds(count + 1, count)))
    for each in passes:
        each.close()
    verify, by_steps, at_once = (statistics.median(column) for column in zip(*took[2:], strict=True))
    return {
        "verify ms": round(verify * 1e3, 3),
        f"{STEPS} ms": round(by_steps * 1e3, 3),
        f"{ONE_PASS} ms": round(at_once * 1e3, 3),
        "times by passes": round((verify + by_steps) / (verify + at_once), 3),
    }


@dataclass(frozen=True, slots=True)
class Took:
    tokens: int
    seconds: float
    row_rounds: int
    all_tokens: int
    rounds: int
    draft_seconds: float
    draft_passes: int
    mean_k: float


def written(target: Target, rows: Sequence[Row], beside: Beside | None) -> tuple[Took, dict[int, tuple[int, ...]]]:
    """The rounds in which no prompt was read, and what the rows say."""
    verifier, tokens, seconds = target.verifier, 0, 0.0
    verifier.add(rows)
    ended: dict[int, tuple[int, ...]] = {}
    while not verifier.idle:
        before = time.perf_counter()
        done = verifier.round()
        took = time.perf_counter() - before
        ended.update({each.key: each.tokens for each in done if isinstance(each, RowResult)})
        if verifier.last_round is not None and verifier.last_round.steady:
            tokens += verifier.last_round.gained
            seconds += took
    counted = verifier.counters
    return (
        Took(
            tokens,
            seconds,
            counted.row_rounds,
            counted.tokens,
            counted.rounds,
            0.0 if beside is None else beside.seconds,
            counted.draft_passes,
            counted.asked / max(1, counted.asking_rows),
        ),
        ended,
    )


def race(asked: argparse.Namespace, models: dict[str, tuple[OpenModel, ModelSpec]]) -> dict[str, Any]:
    tokenizer = Tokenizer(asked.target)
    prompts = [tuple(tokenizer.encode(text)) for text in prompts_of(asked.prompts)]
    curves = {name: measure(model.engine) for name, (model, _) in models.items()}
    kinds: list[tuple[str, int | None]] = [(PLAIN, 0)]
    for count in asked.draft_tokens:
        kinds += [(STEPS, count), (ONE_PASS, count)]
    took: dict[str, list[Took]] = {}
    texts: set[str] = set()
    for turn in range(asked.turns):
        rows = [
            Row(at, prompts[(turn * asked.rows + at) % len(prompts)], asked.tokens, Sampling(end_tokens=()))
            for at in range(asked.rows)
        ]
        said = []
        for name, count in kinds if turn % 2 == 0 else reversed(kinds):
            found, text = one_kind(name, count, models, curves, asked.batch[0], rows, tokenizer)
            took.setdefault(_called(name, count), []).append(found)
            said.append(text)
        texts.add("same" if all(each == said[0] for each in said) else "other")
    plain = _rate(took[PLAIN])
    lines = {}
    for called, turns in took.items():
        rounds = sum(each.rounds for each in turns)
        lines[called] = {
            "tokens/s": round(_rate(turns), 2),
            "times plain": round(_rate(turns) / plain, 3),
            "tokens a round": round(sum(each.all_tokens for each in turns) / sum(each.row_rounds for each in turns), 3),
            "ms of draft a round": round(1e3 * sum(each.draft_seconds for each in turns) / rounds, 3),
            "draft passes a round": round(sum(each.draft_passes for each in turns) / rounds, 2),
            "mean k": round(statistics.mean(each.mean_k for each in turns), 2),
        }
    return {"race": lines, "same texts": texts == {"same"}}


def _called(name: str, count: int | None) -> str:
    return name if name == PLAIN else f"{name}, k={'auto' if count is None else count}"


def _rate(turns: Sequence[Took]) -> float:
    return sum(each.tokens for each in turns) / sum(each.seconds for each in turns)


def one_kind(
    name: str,
    count: int | None,
    models: dict[str, tuple[OpenModel, ModelSpec]],
    curves: dict[str, CostCurve],
    batch: int,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
) -> tuple[Took, dict[int, tuple[int, ...]]]:
    fresh: Callable[[str], CostCurve] = lambda which: CostCurve(curves[which].points)  # noqa: E731
    model, _ = models["target"]
    replica_spec = ReplicaSpec(batch, count, model=name != PLAIN)
    target = build_target(ModelSpec("", "native", ""), replica_spec, model, tokenizer, fresh("target"))
    if name == PLAIN:
        return written(target, rows, None)
    drafting, spec = models[name]
    draft_spec = ModelSpec("", "native", "", mask_token=spec.mask_token)
    draft: Draft = build_draft(draft_spec, replica_spec, drafting, pass_seconds=fresh(name))
    beside = Beside(draft.drafter)
    target.link.attach(beside)
    return written(target, rows, beside)


def _count(text: str) -> int | None:
    return None if text == "auto" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--steps", type=Path, help="a draft that proposes token by token")
    parser.add_argument("--one-pass", type=Path, help="a parallel draft")
    parser.add_argument("--pair", choices=PAIRS, help="shapes instead of models")
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--draft-tokens", type=_count, nargs="+", default=[6, None], help="numbers, and auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="with models the first counts")
    parser.add_argument("--rows", type=int, default=6, help="in a turn")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12, help="of passes")
    parser.add_argument("--passes-only", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", type=Path, nargs="+", default=[EXAMPLES], help="JSON lines with a prompt each")
    asked = parser.parse_args()
    paths = {"target": asked.target, STEPS: asked.steps, ONE_PASS: asked.one_pass}
    models: dict[str, tuple[OpenModel, ModelSpec]] = {}
    if asked.pair:
        shapes = PAIRS[asked.pair]
        target, draft = (of_zeros(shape, asked.precision, asked.threads, at > 0) for at, shape in enumerate(shapes))
        engines = [target, draft, draft]
    else:
        if not all(paths.values()):
            parser.error("--target, --steps and --one-pass, or --pair")
        models = {name: opened(path, asked.precision, asked.threads, name != "target") for name, path in paths.items()}
        if models[ONE_PASS][1].mask_token is None:
            parser.error(f"--one-pass: {asked.one_pass} names no mask token")
        engines = [model.engine for model, _ in models.values()]
    found: dict[str, Any] = {"passes": []}
    for batch, count in product(asked.batch, filter(None, asked.draft_tokens)):
        line = {"batch": batch, "k": count, **by_passes(engines[0], engines[1], engines[2], count, batch, asked.rounds)}
        found["passes"].append(line)
        print(line, flush=True)
    if models and not asked.passes_only:
        found |= race(asked, models)
        for called, line in found["race"].items():
            print(f"{called:18} {line}")
        print(f"same texts: {found['same texts']}")
    settings = {"batch": asked.batch, "threads": asked.threads, "precision": asked.precision, "turns": asked.turns}
    of = {"pair": asked.pair} if asked.pair else {name: str(path) for name, path in paths.items()}
    print(json.dumps({"asked": of | settings, **found}))


if __name__ == "__main__":
    main()
