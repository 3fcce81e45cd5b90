"""Plain and assisted decoding in turn, over the same rows, through `outrider run`.

    python benchmarks/assisted.py --shape 1b [--batch 4] [--draft-tokens 6] [--repeat 3]

The pair is made once: a target inflated from the bundled one, and a draft of 160 million parameters inflated from the same
with so much noise that a candidate holds in 0.8 of all cases, given that those before it did (3.95 tokens a round at k=6).
`--draft-noise 5` is a draft that never hits. Speeds are tokens over the target's seconds with rows, prompts included; every
second turn goes the other way round, so that a machine that becomes slower harms both. Last comes one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from inflate import SHAPES, inflate, made_once, model_directory
from job_runs import EXAMPLES, Ran, prompts_of, rows_of, run, write_rows

from outrider.workers.engines.costs import CostCurve
from outrider.workers.models.model_info import POCKET, find
from outrider.workers.models.packed_cache import cache_directory
from outrider.workers.speculation import MOST_CANDIDATES, DraftCost, LayoutKind, expected_tokens, round_seconds
from outrider.workers.target.slots import deepest, fill_slots

DRAFT = "160m"
# Measured at k=6: 0.55 gives 3.97 tokens a round on 1b. The value for 7b depends on the rows
# (docs/lab/2026-11-21-assisted-on-intel.md).
DRAFT_NOISE = {"1b": 0.55, "7b": 0.5}
DRAFT_SEED = 7
CHANCE = 0.8


def pair(shape: str, noise: float, draft: Path | None = None) -> tuple[Path, Path]:
    """The directories of target and draft, which are made if they are missing."""
    if draft is None:
        path = cache_directory() / "benchmarks" / f"{DRAFT}-noise-{noise:g}"
        draft = made_once(path, lambda partial: inflate(find(POCKET), partial, SHAPES[DRAFT], noise, DRAFT_SEED))
    return model_directory(shape), draft


def speed(ran: Ran) -> float:
    """Tokens a second of the time in which the target had rows."""
    replicas = ran.summary["replicas"]
    return float(sum(each["tokens"] for each in replicas) / sum(busy_seconds(each) for each in replicas))


def busy_seconds(replica: dict[str, Any]) -> float:
    return float(replica["seconds"] * (1.0 - replica["time"]["idle"]))


def tokens_a_round(lengths: Sequence[int], runners_up: int) -> float:
    """Tokens per round with candidates: accepted candidates, tokens from runners-up, and the target's own token."""
    rounds = sum(lengths)
    return 1.0 + (sum(length * count for length, count in enumerate(lengths)) + runners_up) / rounds if rounds else 1.0


def share_outside(ran: Ran) -> float:
    """The share of the time with rows in which neither model computed: the hop between them, and everything else."""
    time = ran.summary["time"]
    return float((time["hop"] + time["other"]) / (1.0 - time["idle"]))


@dataclass(frozen=True, slots=True)
class Stretch:
    """A row after its first tokens: the tokens written, the seconds, and the seconds of the target's passes: ``alone`` over
    the row's last token only, ``longer`` over candidates too."""

    tokens: int
    seconds: float
    alone: tuple[float, ...]
    longer: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def beside_ms(self) -> float:
        """Milliseconds per token outside plain passes: the cost of a draft that is never right, independent of the speed of
        passes. It includes the excess of passes with candidates over the median plain pass."""
        usual = statistics.median(self.alone) if self.alone else float("inf")
        plain = sum(self.alone) + sum(min(each, usual) for each in self.longer)
        return (self.seconds - plain) / self.tokens * 1e3


def stretches_after(trace: Path, tokens: int, skipped: int) -> list[Stretch]:
    """Each row of ``tokens`` tokens after its first ``skipped``, from a trace of one row at a time."""
    events = json.loads(trace.read_text())["traceEvents"]
    slices = [event for event in events if event.get("ph") == "X" and event["name"] in ("commit", "verify")]
    found: list[Stretch] = []
    passes: list[tuple[int, float]] = []
    written, begun = 0, None
    for event in sorted(slices, key=lambda event: event["ts"] + event["dur"]):
        if event["name"] == "verify":
            passes.append((event["args"]["tokens fed"], event["dur"] / 1e6))
            continue
        moment = (event["ts"] + event["dur"]) / 1e6
        written += event["args"].get("tokens committed", 0)
        if written >= tokens:
            if begun is not None:
                alone, longer = (tuple(took for fed, took in passes if (fed == 1) is one) for one in (True, False))
                found.append(Stretch(written - begun[1], moment - begun[0], alone, longer))
            written, begun = 0, None
        elif begun is None and written >= skipped:
            begun = (moment, written)
            passes.clear()
    return found


def decoding(ran: Ran) -> float:
    """Tokens per second of the rounds without prefill, with or without candidates."""
    rounds = [sums for each in ran.told["costs"].values() for sums in each["rounds"].values()]
    return float(sum(sums["tokens"] for sums in rounds) / sum(sums["seconds"] for sums in rounds))


def kept_of_forecast(ran: Ran) -> float:
    """Tokens per second of the rounds, divided by the job's forecast from its cost curves before each round."""
    rounds = [sums for each in ran.told["costs"].values() for sums in each["rounds"].values()]
    tokens, forecast = (sum(sums[key] for sums in rounds) for key in ("tokens", "forecast_tokens"))
    seconds, expected = (sum(sums[key] for sums in rounds) for key in ("seconds", "forecast_seconds"))
    return float(tokens / seconds / (forecast / expected))


def forecasts(ran: Ran) -> dict[str, str]:
    """For each layout the forecast and the measured seconds and tokens of a round."""
    found = {}
    for costs in ran.told["costs"].values():
        for name, sums in costs["rounds"].items():
            rounds = sums["rounds"]
            should, did = (sums[key] / rounds * 1e3 for key in ("forecast_seconds", "seconds"))
            gain, gained = (sums[key] / rounds for key in ("forecast_tokens", "tokens"))
            times = f"{should:.2f} ms forecast, {did:.2f} taken"
            found[name] = f"{times}; {gain:.2f} tokens forecast, {gained:.2f} gained; {rounds} rounds"
    return found


def expected_times(
    verify: Mapping[str, float], draft: Mapping[str, Mapping[str, float]], rows: int, chance: float, candidates: int | None
) -> float:
    """The speedup by the cost curves: tokens per second with ``candidates`` (None: the best number), over those without.

    As in job.json, ``verify`` has seconds by tokens fed, ``draft`` seconds of a step and of the hop by rows. Prefill is not
    included.
    """
    curve = CostCurve({int(count): seconds for count, seconds in verify.items()})
    draft_cost = DraftCost(_nearest(draft["step"], rows), _nearest(draft["hop"], rows))
    if candidates is None:
        filled = fill_slots(np.cumprod(np.full((rows, deepest(rows)), chance), axis=1), curve, draft_cost)
        return filled.rate / filled.plain_rate
    # No round has more than MOST_CANDIDATES.
    count = min(candidates, MOST_CANDIDATES)
    seconds = float(round_seconds(LayoutKind.SEQUENTIAL, curve(rows * (count + 1)), draft_cost, count, 0.0))
    return expected_tokens(chance, count) / seconds * curve(rows)


def _nearest(means: Mapping[str, float], rows: int) -> float:
    return means[min(means, key=lambda count: abs(int(count) - rows))]


def speedups_by_curves(
    plain: Ran, with_draft: Ran, rows: int, candidates: int | None, chance: float | None
) -> tuple[float, float] | None:
    """The speedups by two cost curves of the target's passes: the assisted job's at its end, and the plain job's at its
    start, when nothing else ran. The costs of the draft are the assisted job's in both."""
    (before,), (costs,) = (list(each.told["costs"].values()) for each in (plain, with_draft))
    draft = costs["draft"].get("shared") or costs["draft"].get("")
    tried = sum(sums["tried"] for sums in costs["rounds"].values())
    if not draft or not draft["step"] or not tried:
        return None
    accepted = sum(sums["accepted"] for sums in costs["rounds"].values())
    chance = accepted / tried if chance is None else chance
    at_work, idle = (
        expected_times(curve, draft, rows, chance, candidates) for curve in (costs["verify"], before["verify_at_start"])
    )
    return at_work, idle


def against_curves(
    plain: Sequence[Ran], assisted: Sequence[Ran], rows: int, candidates: int | None, noise: float | None
) -> dict[str, Any]:
    """The speedup by cost curves, and the share of that gain that was measured: medians over turns with candidates."""
    chance = CHANCE if noise is None else None
    turns = [
        (expected, decoding(right) / decoding(left))
        for left, right in zip(plain, assisted, strict=True)
        if (expected := speedups_by_curves(left, right, rows, candidates, chance)) is not None
    ]
    found: dict[str, Any] = {}
    for at, name in enumerate(("at work", "idle")):
        expected = statistics.median(each[at] for each, _ in turns) if turns else None
        found[f"times by curves {name}"] = None if expected is None else round(expected, 3)
        if expected is not None and expected > 1.0:
            times = statistics.median(times for _, times in turns)
            found[f"of that gain, {name}"] = round((times - 1.0) / (expected - 1.0), 3)
    return found


def figures(plain: Sequence[Ran], assisted: Sequence[Ran]) -> dict[str, Any]:
    """Medians over the turns, in each of which both jobs ran, and further figures of the assisted job of median speed."""
    ranked = sorted(assisted, key=speed)
    middle = ranked[(len(ranked) - 1) // 2]
    lengths = middle.summary["accepted_lengths"]
    layout = next(iter(middle.told.get("layouts", {}).values()), {})
    turns = list(zip(plain, assisted, strict=True))
    times = [speed(right) / speed(left) for left, right in turns]
    return {
        "plain tokens/s": round(statistics.median(map(speed, plain)), 2),
        "assisted tokens/s": round(statistics.median(map(speed, assisted)), 2),
        "times": round(statistics.median(times), 3),
        "times in rounds alone": round(statistics.median(decoding(right) / decoding(left) for left, right in turns), 3),
        "times of each turn": [round(each, 3) for each in times],
        "tokens a round": round(tokens_a_round(lengths, middle.summary["runners_up_accepted"]), 3),
        "accepted lengths": lengths,
        "mean k": middle.summary["mean_k"],
        "time": middle.summary["time"],
        "in no forward pass": round(share_outside(middle), 4),
        "layout": layout.get("took"),
        "layout in words": layout.get("sentence"),
        "forecasts": forecasts(middle),
        "rate, of the forecasts": round(statistics.median(map(kept_of_forecast, assisted)), 3),
        "same bytes": all(left.same_as(right) for left, right in pairwise([*plain, *assisted])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(DRAFT_NOISE), default="1b")
    parser.add_argument("--draft-noise", type=float, help=f"default: {DRAFT_NOISE}")
    parser.add_argument("--draft", type=Path, help="a directory instead of the inflated draft")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--draft-tokens", default="auto")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--draft-precision", default="w4a8")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[EXAMPLES], help="JSON lines with a prompt each")
    parser.add_argument("--remembered", action="store_true", help="find the layout out in a job that does not count")
    parser.add_argument("--after", type=int, help="also the speed after this many tokens of each row; needs --batch 1")
    parser.add_argument("--work", type=Path, help="keep the jobs here")
    parser.add_argument("options", nargs="*", help="more options for the assisted jobs, after --")
    asked = parser.parse_args()
    if asked.after is not None and (asked.batch != 1 or asked.after >= asked.tokens):
        parser.error("--after needs --batch 1, and more --tokens than that")
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(asked, asked.work or Path(temporary))
    for name, value in found.items():
        print(f"{name:24} {value}")
    asked_for = vars(asked) | {"work": None, "draft": str(asked.draft or ""), "prompts": list(map(str, asked.prompts))}
    print(json.dumps({"asked": asked_for, **found}))


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    noise = DRAFT_NOISE[asked.shape] if asked.draft_noise is None else asked.draft_noise
    target, draft = pair(asked.shape, noise, asked.draft)
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    write_rows(rows, rows_of(prompts_of(asked.prompts), asked.rows))
    common = ["-m", str(target), "--precision", asked.precision, "--engine", "native", "--ignore-eos"]
    common += ["--batch", str(asked.batch), "--max-tokens", str(asked.tokens)]
    with_draft = ["--draft", str(draft), "--draft-precision", asked.draft_precision, "--draft-tokens", asked.draft_tokens]
    with_draft += asked.options
    if asked.remembered:
        forget_layouts(str(target), str(draft))
        run(rows, folder / "found-out", [*common, *with_draft])
    plain: list[Ran] = []
    assisted: list[Ran] = []
    stretches: dict[str, list[list[Stretch]]] = {"plain": [], "assisted": []}
    for turn in range(asked.repeat):
        if not asked.remembered:
            forget_layouts(str(target), str(draft))
        jobs = [("plain", ["--draft", "none"], plain), ("assisted", with_draft, assisted)]
        for name, options, kept in jobs if turn % 2 == 0 else reversed(jobs):
            trace = folder / f"{name}-{turn}.trace.json"
            tracing = ["--trace", str(trace)] if asked.after is not None else []
            kept.append(run(rows, folder / f"{name}-{turn}", [*common, *options, *tracing]))
            print(f"{name}: {speed(kept[-1]):.1f} tokens/s", file=sys.stderr, flush=True)
            if asked.after is not None:
                stretches[name].append(stretches_after(trace, asked.tokens, asked.after))
    found = figures(plain, assisted)
    candidates = None if asked.draft_tokens == "auto" else int(asked.draft_tokens)
    found |= against_curves(plain, assisted, asked.batch, candidates, asked.draft_noise)
    if asked.after is not None:
        found |= after(stretches["plain"], stretches["assisted"], asked.after)
    return found


def after(plain: Sequence[Sequence[Stretch]], assisted: Sequence[Sequence[Stretch]], skipped: int) -> dict[str, Any]:
    """The draft's gain or cost after a row's first tokens. Turns are compared singly, since a machine's speed changes."""
    if not all(jobs and all(jobs) for jobs in (plain, assisted)):
        return {f"tokens/s after {skipped}": "a round passed over all that was left of a row: ask for more --tokens"}
    rates = [[statistics.median(each.rate for each in job) for job in jobs] for jobs in (plain, assisted)]
    beside = [statistics.median(each.beside_ms for job in jobs for each in job) for jobs in (plain, assisted)]
    token_ms = statistics.median(1e3 / each.rate for job in plain for each in job)
    times = [right / left for left, right in zip(*rates, strict=True)]
    return {
        f"tokens/s after {skipped}": [round(statistics.median(each), 2) for each in rates],
        "times after them": round(statistics.median(times), 3),
        "of each turn": [round(each, 3) for each in times],
        "ms a token in no pass": [round(each, 3) for each in beside],
        "which costs": round((beside[1] - beside[0]) / token_ms, 4),
    }


def forget_layouts(target: str, draft: str) -> None:
    """Deletes the layouts that were measured for this pair in earlier jobs."""
    for file in (cache_directory() / "layouts").glob("*.json"):
        key = json.loads(file.read_text())["key"]
        if target in key and draft in key:
            file.unlink()


if __name__ == "__main__":
    main()
