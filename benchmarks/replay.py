"""Recorded rows, written again on a clock that passes move: the choice of candidates, judged without a machine's noise.

    python benchmarks/replay.py --target DIR --draft DIR --prompts FILE --recorded rows.json [--draft-tokens auto 3 4 5]
        [--passes 1:21,2:21.8,4:23,8:31,16:60,128:430] [--step 2.1] [--hop 0.8] [--read 0.35] [--batch 1]
        [--live] [--suffix]

Where --recorded is no file yet, the target writes the rows, and in each of their places the draft guesses the next tokens,
which takes some seconds a row. Then the verifier, its policy and the drafter, as they are in this working copy, write the
same rows with what was recorded in the place of models. Passes, steps and the hop between the two take the milliseconds
that are named here; Python's time counts in the hop alone. The same command gives the same figures, so one working copy can
be held against another by the last percent. Texts must be the recorded ones. Last comes one line of JSON.

With --live the draft itself guesses, and learns; its passes take what is named here all the same. So two versions of the
kernels can be compared as well, by OUTRIDER_LIBRARY. With --suffix there are candidates from texts beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from clocked import Clock, ClockedTarget, ClockedTransport
from drafts import ANSWER_TOKENS
from fakes import FakeEngine
from job_runs import prompts_of

from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines.costs import CostCurve
from outrider.workers.engines.engine import CanLearn, Chosen, DecodeFeed, DecodeResult, Engine, Feed, StopRule
from outrider.workers.engines.stepwise import decode_in_steps
from outrider.workers.messages import ModelSpec, Row, RowResult, Sampling
from outrider.workers.models.opening import open_model
from outrider.workers.models.tokenizer import Tokenizer
from outrider.workers.speculation import MOST_CANDIDATES
from outrider.workers.target.draft_link import DraftLink
from outrider.workers.target.suffix_finder import SuffixFinder
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier

PASSES = "1:21,2:21.8,3:22.4,4:23.05,5:24.1,6:25.95,7:28.4,8:30.8,9:34.9,12:44,16:59.5,32:110,64:215,128:430"
# A row: "text" with the prompt first, and "guesses": for each number of answer tokens, from 0 on, the draft's next tokens,
# margins and runners-up.
Recorded = dict[str, Any]
EVERYTHING = StopRule((1.0,), (1.0, 1.0), 1.0)


def _spec(asked: argparse.Namespace, path: Path) -> ModelSpec:
    return ModelSpec(str(path), "native", asked.precision, threads=asked.threads, small_cache=path == asked.draft)


def open_draft(asked: argparse.Namespace, learns: bool) -> Engine:
    model = open_model(_spec(asked, asked.draft))
    if learns and isinstance(model.engine, CanLearn):
        model.engine.correct_choices()
    return model.engine


def record(asked: argparse.Namespace) -> list[Recorded]:
    tokenizer = Tokenizer(asked.target)
    encoded = map(tokenizer.encode, prompts_of(asked.prompts))
    prompts = [ids[: asked.prompt_tokens] for ids in encoded if len(ids) >= asked.prompt_tokens][: asked.rows]
    target, draft = open_model(_spec(asked, asked.target)).engine, open_draft(asked, learns=False)
    rows = []
    for key, prompt in enumerate(prompts):
        for engine in (target, draft):
            engine.open(key, Sampling(end_tokens=()), len(prompt))
        text = prompt + target.feed([Feed(key, prompt, 1)])[0].tokens
        while len(text) <= len(prompt) + asked.tokens:
            text += target.feed([Feed(key, text[-1:], 1)])[0].tokens
        guesses = []
        for at in range(len(prompt), len(prompt) + asked.tokens):
            new = text[draft.length(key) : at]
            chosen = draft.decode([DecodeFeed(key, new, MOST_CANDIDATES, ())], EVERYTHING).chosen[0]
            guesses.append((chosen.tokens, chosen.margins, chosen.runners_up))
            draft.truncate(key, at)
        for engine in (target, draft):
            engine.close(key)
        rows.append({"text": text, "prompt": len(prompt), "guesses": guesses})
        print(f"recorded {key + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return rows


class Draft(FakeEngine):
    def __init__(self, rows: Sequence[Recorded], clock: Clock, step: float, read: float) -> None:
        super().__init__(context=1 << 16, vocabulary=1 << 30)
        self._recorded, self._clock, self._step, self._read = rows, clock, step, read
        self.steps = 0

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        self.steps += 1
        self._clock.now += max(self._step, self._read * sum(len(feed.tokens) for feed in feeds))
        return [self._feed(feed) for feed in feeds]

    def _feed(self, feed: Feed) -> Chosen:
        cache, row = self.rows[feed.row], self._recorded[feed.row]
        cache.extend(feed.tokens)
        if not feed.choose:
            return Chosen([], [])
        right = next(
            (at for at, pair in enumerate(zip(cache, row["text"], strict=False)) if pair[0] != pair[1]), len(cache)
        )
        behind = right - row["prompt"]
        if behind >= len(row["guesses"]) or len(cache) - right >= MOST_CANDIDATES:
            return Chosen([0], [0.0], runners_up=[-1])
        token, margin, runner_up = (values[len(cache) - right] for values in row["guesses"][behind])
        return Chosen([token], [margin], runners_up=[runner_up])

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        found: dict[int, list[int]] = {feed.row: [] for feed in decode_feeds}
        result = decode_in_steps(_Listening(self, found), decode_feeds, stop_rule)
        for feed, chosen in zip(decode_feeds, result.chosen, strict=True):
            chosen.runners_up.extend(found[feed.row])
        return result


class Live:
    """A real draft, whose passes advance the clock by the stated times."""

    def __init__(self, engine: Engine, clock: Clock, step: float, read: float) -> None:
        self._engine, self._clock, self._step, self._read = engine, clock, step, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _pass(self, tokens: int) -> float:
        seconds = max(self._step, self._read * tokens)
        self._clock.now += seconds
        return seconds

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        self._pass(sum(len(feed.tokens) for feed in feeds))
        return self._engine.feed(feeds)

    def decode(self, decode_feeds: Sequence[DecodeFeed], stop_rule: StopRule) -> DecodeResult:
        result = self._engine.decode(decode_feeds, stop_rule)
        fed = sum(len(feed.tokens) for feed in decode_feeds)
        steps = [(rows, self._pass(fed if index == 0 else rows)) for index, (rows, _) in enumerate(result.steps)]
        return DecodeResult(result.chosen, steps)


class _Listening:
    """A draft whose runners-up are recorded in ``found`` on each pass."""

    def __init__(self, draft: Draft, found: dict[int, list[int]]) -> None:
        self._draft, self._found = draft, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        answers = self._draft.feed(feeds)
        for feed, answer in zip(feeds, answers, strict=True):
            self._found[feed.row] += answer.runners_up
        return answers


def replay(rows: Sequence[Recorded], count: int | None, asked: argparse.Namespace) -> dict[str, float]:
    """Replays the rows: figures of rounds with a full batch and without prefill, and of whole rows."""
    passes = CostCurve({int(size): float(ms) / 1e3 for size, ms in (each.split(":") for each in asked.passes.split(","))})
    live = open_draft(asked, learns=True) if asked.live else None
    real, clock = time.perf_counter, Clock()
    time.perf_counter = clock
    try:
        link, costs = DraftLink(5.0), (clock, asked.step / 1e3, asked.read / 1e3)
        draft = Draft(rows, *costs) if live is None else Live(live, *costs)
        verifier = Verifier(
            engine=ClockedTarget([row["text"] for row in rows], clock, passes),
            new_writer=lambda row: TextWriter(lambda tokens: "", row.stop, ()),
            proposer=link,
            batch=asked.batch,
            draft_tokens=count,
            verify_seconds=passes.snapshot(),
            end_tokens=(),
            finder=SuffixFinder(ANSWER_TOKENS) if asked.suffix else None,
        )
        link.attach(ClockedTransport(Drafter(draft, ()), clock, asked.hop / 1e3))
        verifier.add(
            Row(key, tuple(row["text"][: row["prompt"]]), len(row["guesses"]), Sampling(end_tokens=()))
            for key, row in enumerate(rows)
        )
        ended: dict[int, RowResult] = {}
        rounds, tokens, seconds, fed = 0, 0, 0.0, 0
        while not verifier.idle:
            before = clock.now
            ended.update({each.key: each for each in verifier.round() if isinstance(each, RowResult)})
            last = verifier.last_round
            if last is not None and last.steady and last.live == asked.batch:
                rounds, tokens, seconds, fed = (
                    rounds + 1,
                    tokens + last.gained,
                    seconds + clock.now - before,
                    fed + last.fed,
                )
    finally:
        time.perf_counter = real
    written = sum(len(each.tokens) for each in ended.values())
    if any(list(ended[key].tokens) != row["text"][row["prompt"] : -1] for key, row in enumerate(rows)):
        raise SystemExit("a text is not the recorded one")
    return {
        "tokens/s in rounds": round(tokens / seconds, 2),
        "prompts included": round(written / clock.now, 2),
        "tokens a row and round": round(tokens / rounds / asked.batch, 2),
        "fed a row": round(fed / rounds / asked.batch, 2),
        "ms a round": round(1e3 * seconds / rounds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", type=Path, required=True)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSON lines with a prompt each")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=94)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--draft-tokens", nargs="+", default=["auto", "0", "2", "3", "4", "5", "6"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--passes", default=PASSES, help="milliseconds of the target's passes by their tokens")
    parser.add_argument("--step", type=float, default=2.1, help="of the draft")
    parser.add_argument("--hop", type=float, default=0.8, help="to the draft and back, and its Python")
    parser.add_argument("--live", action="store_true", help="the draft itself guesses, and learns")
    parser.add_argument("--suffix", action="store_true", help="candidates from texts beside the draft's")
    parser.add_argument("--read", type=float, default=0.35, help="a token of a text that the draft does not know yet")
    asked = parser.parse_args()
    if not asked.recorded.is_file():
        if None in (asked.target, asked.draft, asked.prompts):
            parser.error("--recorded: no such file; --target, --draft and --prompts make it")
        asked.recorded.write_text(json.dumps(record(asked)))
    if asked.live and asked.draft is None:
        parser.error("--live needs --draft")
    rows = json.loads(asked.recorded.read_text())
    found = {each: replay(rows, None if each == "auto" else int(each), asked) for each in asked.draft_tokens}
    for name, figures in found.items():
        print(f"{name:5} {figures}")
    print(json.dumps({"asked": vars(asked), **found}, default=str))


if __name__ == "__main__":
    main()
