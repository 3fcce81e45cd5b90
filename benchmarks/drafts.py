"""Drafts of several kinds beside one target, in turn: tokens a round, what the draft takes of a round, tokens a second.

    python benchmarks/drafts.py --target DIR --drafts DIR DIR suffix [--draft-tokens auto 6] [--batch 1 8] [--turns 3]

A draft is a model that proposes token by token, a parallel one, a head, one of the words `suffix` and `lookup`, or a model
with a word, as in DIR+suffix; bundled ones go by their names. Of DIR:fixed (DIR:fixed+suffix) the guesses stay the model's
own, others learn in the course of each turn; DIR:whole reads texts whole, others as much of them as pays; DIR:2048 scores
this many tokens of its vocabulary, DIR:0 all, others as many as the program takes by itself. All are in this
process on the same threads, one after the other, so the way between processes is left out. The same rows are written
plainly and with each draft, for each of --draft-tokens (`auto`: each round chooses); every second turn goes the other way
round. Tokens a second are those of rounds with a full batch in which no prompt is read, and held to what the cost curves
foresaw of the same rounds; with prompts, of all rounds. Texts must be the same. Last comes one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from built import Answered, InProcess
from job_runs import EXAMPLES, prompts_of

from outrider.workers.build import build_draft, build_target
from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines.costs import CostCurve, measure
from outrider.workers.messages import DraftRequest, ModelSpec, ReplicaSpec, Row, RowResult, Sampling, TargetCounters
from outrider.workers.models.head_pairs import states_of
from outrider.workers.models.mask_token import mask_token_of
from outrider.workers.models.model_info import find, read_model_info
from outrider.workers.models.opening import OpenModel, open_model
from outrider.workers.models.tokenizer import Tokenizer

PLAIN, WORDS, FIXED, WHOLE = "plain", ("suffix", "lookup"), ":fixed", ":whole"
ANSWER_TOKENS = 200_000


class TimedTransport(InProcess):
    """A transport to a draft in this process that sums the draft's seconds."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.seconds = 0.0

    def ask(self, request: DraftRequest) -> Answered:
        answered = super().ask(request)
        self.seconds += answered.reply.seconds
        return answered


@dataclass(frozen=True, slots=True)
class Opened:
    """A draft's model, its spec, and for parallel drafts the cost curve of its passes."""

    model: OpenModel
    spec: ModelSpec
    curve: CostCurve | None


@dataclass(frozen=True, slots=True)
class Turn:
    """One draft in one turn: tokens and seconds of the rounds with a full batch and without prefill, their forecasts, the
    seconds of all rounds, and the target's counters.
    """

    tokens: int
    seconds: float
    forecast_tokens: float
    forecast_seconds: float
    draft_seconds: float
    all_seconds: float
    counted: TargetCounters


class Race:
    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        path = find(asked.target)
        paths = {
            model: find(re.sub(r":\d+$", "", model.removesuffix(FIXED).removesuffix(WHOLE)))
            for each in asked.drafts
            if (model := model_and_word(each)[0])
        }
        target_info = read_model_info(str(path))
        heads = [info for each in paths.values() if (info := read_model_info(str(each))).head]
        states = {states_of(target_info, head) for head in heads}
        if len(states) > 1:
            raise SystemExit("--drafts: heads that read different layers of the target run one at a time")
        self._target_spec = ModelSpec(
            str(path), "native", asked.precision, threads=asked.threads, states=next(iter(states), ())
        )
        self._target = open_model(self._target_spec)
        self._target_curve = measure(self._target.engine)
        self.tokenizer = Tokenizer(path)
        self._drafts = {name: self._open(each, path) for name, each in paths.items()}

    def _open(self, path: Path, target: Path) -> Opened:
        head = read_model_info(str(path)).head
        mask_token = None if head else mask_token_of(path)
        spec = ModelSpec(
            str(path),
            "native",
            self._asked.draft_precision or self._asked.precision,
            threads=self._asked.threads,
            small_cache=True,
            mask_token=mask_token,
            target=str(target) if head else "",
        )
        model = open_model(spec)
        return Opened(model, spec, None if mask_token is None else measure(model.engine))

    def write(
        self, name: str, count: int | None, batch: int, rows: Sequence[Row]
    ) -> tuple[Turn, dict[int, tuple[int, ...]]]:
        model, word = model_and_word(name)
        opened = self._drafts.get(model)
        replica_spec = ReplicaSpec(
            batch,
            count,
            model=opened is not None,
            lookup=word == "lookup",
            suffix=word == "suffix",
            answer_tokens=ANSWER_TOKENS,
            draft_learns=not model.endswith(FIXED),
            draft_shortlist=int(scored[1]) if (scored := re.search(r":(\d+)$", model)) else None,
            runners_up=self._asked.runners_up,
        )
        # Only for a head the target's passes return hidden states.
        states = self._target_spec.states if opened is not None and opened.model.head else ()
        spec = replace(self._target_spec, path="", states=states)
        target = build_target(spec, replica_spec, self._target, self.tokenizer, self._target_curve.snapshot())
        beside = None
        if opened is not None:
            curve = None if opened.curve is None else opened.curve.snapshot()
            drafter = build_draft(replace(opened.spec, path=""), replica_spec, opened.model, pass_seconds=curve).drafter
            if model.endswith(WHOLE):
                drafter.read_whole_texts()
            beside = TimedTransport(drafter)
            target.link.attach(beside)
        verifier, tokens, seconds, forecast_tokens, forecast_seconds = target.verifier, 0, 0.0, 0.0, 0.0
        verifier.add(rows)
        began = time.perf_counter()
        ended: dict[int, tuple[int, ...]] = {}
        while not verifier.idle:
            before = time.perf_counter()
            done = verifier.round()
            took = time.perf_counter() - before
            ended.update({each.key: each.tokens for each in done if isinstance(each, RowResult)})
            last = verifier.last_round
            if last is not None and last.steady and last.live == batch:
                tokens += last.gained
                seconds += took
                if last.forecast is not None:
                    forecast_tokens += last.forecast.tokens
                    forecast_seconds += last.forecast.seconds
        drafting = 0.0 if beside is None else beside.seconds
        all_seconds = time.perf_counter() - began
        return Turn(tokens, seconds, forecast_tokens, forecast_seconds, drafting, all_seconds, verifier.counters), ended


def model_and_word(name: str) -> tuple[str, str]:
    model, _, word = name.rpartition("+")
    return (model, word) if word in WORDS else (name, "")


def figures(turns: Sequence[Turn], plain: float) -> dict[str, Any]:
    def total(counter: str) -> int:
        return sum(int(getattr(each.counted, counter)) for each in turns)

    rounds, rate = total("rounds"), rate_of(turns)
    forecast = sum(each.forecast_tokens for each in turns) / (sum(each.forecast_seconds for each in turns) or float("inf"))
    return {
        "tokens/s": round(rate, 2),
        "times plain": round(rate / plain, 3),
        "with prompts": round(total("tokens") / sum(each.all_seconds for each in turns), 2),
        "of what was forecast": round(rate / forecast, 3) if forecast else None,
        "tokens a round": round(total("tokens") / total("row_rounds"), 3),
        "ms of draft a round": round(1e3 * sum(each.draft_seconds for each in turns) / rounds, 3),
        "ms of target a round": round(1e3 * sum(each.counted.verify_seconds for each in turns) / rounds, 3),
        "draft passes a round": round(total("draft_passes") / rounds, 2),
        "unread": total("draft_skipped"),
        "mean k": round(total("asked") / max(1, total("asking_rows")), 2),
        "accepted": [total("accepted"), total("proposed")],
        "runners-up accepted": total("runners_up_accepted"),
    }


def rate_of(turns: Sequence[Turn]) -> float:
    return sum(each.tokens for each in turns) / sum(each.seconds for each in turns)


def called(name: str, count: int | None) -> str:
    return name if name == PLAIN else f"{Path(name).name}, k={'auto' if count is None else count}"


def run(race: Race, asked: argparse.Namespace, batch: int) -> dict[str, Any]:
    encoded = map(race.tokenizer.encode, prompts_of(asked.prompts))
    least = asked.prompt_tokens or 0
    prompts = [tuple(prompt[: asked.prompt_tokens]) for prompt in encoded if len(prompt) >= least]
    if not prompts:
        raise SystemExit(f"--prompt-tokens: no prompt has {least} tokens")
    kinds: list[tuple[str, int | None]] = [(PLAIN, 0)]
    kinds += [(name, count) for count in asked.draft_tokens for name in asked.drafts]
    took: dict[str, list[Turn]] = {}
    same = True
    for turn in range(asked.turns):
        count_of_rows = asked.rows * batch
        chosen = [(turn * count_of_rows + at) % len(prompts) for at in range(count_of_rows)]
        rows = [
            Row(
                at,
                prompts[number],
                asked.tokens,
                Sampling(temperature=asked.temperatures[at % len(asked.temperatures)], seed=number, end_tokens=()),
            )
            for at, number in enumerate(chosen)
        ]
        said = []
        for name, count in kinds if turn % 2 == 0 else reversed(kinds):
            found, text = race.write(name, count, batch, rows)
            took.setdefault(called(name, count), []).append(found)
            said.append(text)
        same = same and all(each == said[0] for each in said)
    plain = rate_of(took[PLAIN])
    return {"batch": batch, "race": {name: figures(turns, plain) for name, turns in took.items()}, "same texts": same}


def count_of(text: str) -> int | None:
    return None if text == "auto" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--drafts", nargs="+", default=["pocket-draft", "pocket-parallel", "pocket-head", "suffix"])
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--draft-precision", help="[the target's]")
    parser.add_argument("--draft-tokens", type=count_of, nargs="+", default=[None], help="numbers, and auto")
    parser.add_argument("--runners-up", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=int, default=4, help="in a turn, for each place in the batch")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, help="cut prompts to this many tokens, and leave out shorter ones")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="of rows, in turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", type=Path, nargs="+", default=[EXAMPLES], help="JSON lines with a prompt each")
    asked = parser.parse_args()
    race, found = Race(asked), []
    for batch in asked.batch:
        found.append(run(race, asked, batch))
        for name, line in found[-1]["race"].items():
            print(f"batch {batch}: {name:28} {line}", flush=True)
    same = all(each["same texts"] for each in found)
    print(f"same texts: {same}")
    print(json.dumps({"asked": vars(asked), "batches": found}, default=str))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
