"""Plain and assisted decoding of the same rows by the same pair of actors, some seconds of each in turn.

    python benchmarks/paired.py --shape 1b --batch 4 [--rows 16] [--pairs 12] [--draft-tokens 2]

Whole jobs (assisted.py) meet different minutes of a machine whose memory is a third faster in some than in others; here
either kind meets all of them. Every pair is a batch of prompts, answered without a draft and with it, the first of the two
in turn; texts must be the same. With --rows more rows than a batch follow one another, as in a job: of one batch the last
rows that end leave the others' places empty, which a draft's uneven rows suffer from and plain ones do not. What the target
learns of its passes in one kind it knows in the other.
Last comes one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assisted import DRAFT_NOISE, forget_layouts, pair
from job_runs import EXAMPLES, prompts_of
from unleased import unleased_replica

from outrider.runner.hosts.ray_start import local_ray
from outrider.runner.planning.topology import ray_resources, read_topology
from outrider.workers.messages import ReplicaSpec, Row, Sampling
from outrider.workers.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from outrider.runner.bench.pair import Pair

START_SECONDS = 600.0
MODES = ("plain", "assisted")
# The layout is chosen during at most this many warm-up batches, which do not count.
MOST_WARM_UPS = 20


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: seconds including prefill; tokens and seconds of the rounds without prefill; and the forecasts of both by
    the cost curves before each round.
    """

    seconds: float
    tokens: float
    round_seconds: float
    forecast_tokens: float
    forecast_seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.round_seconds


class Runner:
    def __init__(self, both: Pair, new_tokens: int) -> None:
        self._both = both
        self._new_tokens = new_tokens
        self._key = 0

    def run(self, mode: str, prompts: list[list[int]]) -> tuple[Turn, list[tuple[int, ...]]]:
        self._both.set_layout("plain" if mode == "plain" else None)
        before = self._sums()
        sampling = Sampling(end_tokens=())
        rows = [Row(self._key + at, tuple(ids), self._new_tokens, sampling) for at, ids in enumerate(prompts)]
        self._key += len(rows)
        started = time.perf_counter()
        results = self._both.answers(rows)
        seconds = time.perf_counter() - started
        sums = [new - old for new, old in zip(self._sums(), before, strict=True)]
        return Turn(seconds, *sums), [result.tokens for result in results]

    def _sums(self) -> list[float]:
        rounds = self._both.costs.get("rounds", {}).values()
        return [sum(each[key] for each in rounds) for key in ("tokens", "seconds", "forecast_tokens", "forecast_seconds")]


def measure(runner: Runner, batches: list[list[list[int]]]) -> dict[str, Any]:
    took: dict[str, list[Turn]] = {mode: [] for mode in MODES}
    same = True
    for number, prompts in enumerate(batches):
        texts = {}
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            measured, texts[mode] = runner.run(mode, prompts)
            took[mode].append(measured)
        same = same and texts["plain"] == texts["assisted"]
    pairs = list(zip(took["plain"], took["assisted"], strict=True))
    rates = [right.rate / left.rate for left, right in pairs]
    plain, assisted = (sum_of(took[mode]) for mode in MODES)
    forecast = (assisted.forecast_tokens / assisted.forecast_seconds) / (plain.forecast_tokens / plain.forecast_seconds)
    return {
        "times": round(statistics.median(left.seconds / right.seconds for left, right in pairs), 3),
        "times in rounds alone": round(statistics.median(rates), 3),
        "whole": [round(plain.seconds / assisted.seconds, 3), round(assisted.rate / plain.rate, 3)],
        "forecast in rounds": round(forecast, 3),
        "quartiles": [round(each, 3) for each in statistics.quantiles(rates, n=4)],
        "plain tokens/s in rounds": round(statistics.median(left.rate for left, _ in pairs), 1),
        "assisted": round(statistics.median(right.rate for _, right in pairs), 1),
        "same texts": same,
    }


def sum_of(turns: list[Turn]) -> Turn:
    return Turn(*(sum(values) for values in zip(*map(astuple, turns), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(DRAFT_NOISE), default="1b")
    parser.add_argument("--target", type=Path, help="a model's directory instead of the shape's")
    parser.add_argument("--draft", type=Path, help="likewise the draft's, which may be given alone")
    parser.add_argument("--draft-noise", type=float, help=f"default: {DRAFT_NOISE}")
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rows", type=int, help="in a turn; default: one batch")
    parser.add_argument("--draft-tokens", type=int, help="default: whatever is best in each round")
    parser.add_argument("--runners-up", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=Path, nargs="+", default=[EXAMPLES], help="JSON lines with a prompt each")
    asked = parser.parse_args()
    if asked.rows is not None and asked.rows < 1:
        parser.error("--rows: one at least")
    if asked.pairs < 2:
        parser.error("--pairs: two at least")
    machine = read_topology()
    if len(machine.usable_cores) < 2:
        parser.error("one core only: there the pair has one layout, which cannot be held to plain decoding")
    if asked.target is not None and asked.draft is None:
        parser.error("--target: name its --draft too")
    noise = DRAFT_NOISE[asked.shape] if asked.draft_noise is None else asked.draft_noise
    target, draft = (asked.target, asked.draft) if asked.target else pair(asked.shape, noise, asked.draft)
    tokenizer = Tokenizer(target)
    prompts = [tokenizer.encode(text) for text in prompts_of(asked.prompts)]
    rows = asked.rows or asked.batch
    batches = [
        [prompts[(start + at) % len(prompts)] for at in range(rows)]
        for start in range(0, (asked.pairs + MOST_WARM_UPS) * rows, rows)
    ]
    replica_spec = ReplicaSpec(batch=asked.batch, draft_tokens=asked.draft_tokens, runners_up=asked.runners_up)
    plan_of_pair = unleased_replica(machine, str(target), str(draft), asked.precision, replica_spec)
    forget_layouts(str(target), str(draft))
    with ExitStack() as stack:
        lost = stack.enter_context(local_ray(len(machine.usable_cores), ray_resources(machine)))
        # Imported here, since Ray reads its token on import.
        from outrider.runner.bench.pair import Pair

        both = stack.enter_context(Pair(plan_of_pair, START_SECONDS, lost))
        runner = Runner(both, asked.tokens)
        for warm_up in batches[asked.pairs :]:
            if both.layout is not None:
                break
            runner.run("assisted", warm_up)
        found = measure(runner, batches[: asked.pairs])
        found["layout"] = None if both.layout is None else both.layout.sentence
        found["rounds"] = both.costs.get("rounds")
        found["costs"] = {name: both.costs.get(name) for name in ("verify", "draft", "experts")}
    for name, value in found.items():
        print(f"{name:26} {value}")
    print(json.dumps({"asked": vars(asked) | {"draft": draft}, **found}, default=str))


if __name__ == "__main__":
    main()
