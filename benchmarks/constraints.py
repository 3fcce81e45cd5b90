"""What constraints cost a round, and what they save.

    python benchmarks/constraints.py masks [--rows 64] [--batch 32] [--candidates 3] [--rounds 5] [--strings]
    python benchmarks/constraints.py job [--model 1b --draft pocket-draft] [--rows 24] [--batch 4]

`masks`: a job of rows that write a JSON record, by the pocket target inflated to 1b with 151,936 tokens, whose candidates
are what it will write, seven of ten; each pass also without masks, before or after it in turn. So the difference is what
masks cost: to look which candidates may come, to make masks beside the pass, to choose among what they allow. A choice that
was made among all tokens and is not allowed shows in the number of passes. With `--strings` the record is strings with a
`maxLength`, whose masks take longest. Tokens that the pocket pair lacks are words of Python's library. `job`: the same rows
unconstrained and plain, and under a schema plain and assisted, in turns, in one process; the best of each counts. A shape
such as 1b is the pocket target inflated (`benchmarks/inflate.py`). The last line is JSON.

`masks` writes its model once, 3.2 GB under `benchmarks` of outrider's cache; so does `job` with that of a shape.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from inflate import SHAPES, inflate, made_once, model_directory

from outrider.workers.build import Draft, build_draft, build_target
from outrider.workers.constraints.grammars import grammar_of
from outrider.workers.constraints.matching import Grammars, Matching
from outrider.workers.engines.costs import measure
from outrider.workers.engines.engine import Feed
from outrider.workers.messages import ModelSpec, ReplicaSpec, Row, RowResult, Sampling
from outrider.workers.models.model_info import find
from outrider.workers.models.opening import open_model
from outrider.workers.models.packed_cache import cache_directory
from outrider.workers.models.tokenizer import Tokenizer
from outrider.workers.speculation import CandidateRequest, DraftCost
from outrider.workers.target import constraints
from outrider.workers.target.constraints import SHARE_OF_PASS, MaskMaker
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import NoProposer, PendingProposals, Proposal, Proposer
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier

VOCABULARY = 151_936
WORD = re.compile(r' ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|[A-Za-z]+[",:]+')
PREFIX = 64
RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer"},
        "customer_name": {"type": "string", "maxLength": 16},
        "status": {"enum": ["open", "closed", "waiting"]},
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"description": {"type": "string", "maxLength": 16}, "amount": {"type": "integer"}},
                "required": ["description", "amount"],
                "additionalProperties": False,
            },
        },
        "paid_in_advance": {"type": "boolean"},
    },
    "required": ["identifier", "customer_name", "status", "lines", "paid_in_advance"],
    "additionalProperties": False,
}
STRINGS = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 16} for name in ("first", "second", "third", "fourth")},
    "required": ["first", "second", "third", "fourth"],
    "additionalProperties": False,
}


def large_tokenizer(path: Path) -> None:
    """Writes a tokenizer of VOCABULARY tokens: the pocket pair's, and words of Python's library."""
    source = find("pocket")
    content: dict[str, Any] = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    known = content["model"]["vocab"]
    words: Counter[str] = Counter()
    roots = (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")))
    for file in (each for root in roots for each in sorted(root.rglob("*.py"))):
        if len(words) > 2 * VOCABULARY:
            break
        words.update(WORD.findall(file.read_text(errors="ignore")))
    letters = {ord(" "): "Ġ"}
    for word, _ in words.most_common():
        if len(known) == VOCABULARY:
            break
        if word.isascii():
            known.setdefault(word.translate(letters), len(known))
    if len(known) != VOCABULARY:
        raise SystemExit(f"the library's sources have words for {len(known):,} tokens only")
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


class Paired:
    """Repeats each pass of a job without masks, right before or after it in turn, since the machine's speed changes."""

    def __init__(self, verifier: Verifier) -> None:
        self.with_masks: list[float] = []
        self.without: list[float] = []
        self._engine = verifier.engine
        # The mask maker may be that of an earlier job, so the class's methods are wrapped, not the object's.
        self._fitting = verifier._fitting
        self._begin = partial(MaskMaker.begin, verifier._masks)
        self._finish = partial(MaskMaker.finish, verifier._masks)
        self._settle = partial(MaskMaker.settle, verifier._masks)
        self._seconds = 0.0
        verifier._fitting = self.fitting  # type: ignore[method-assign]
        verifier._masks.begin = self.begin  # type: ignore[method-assign]
        verifier._masks.finish = self.finish  # type: ignore[method-assign]
        verifier._masks.settle = self.settle  # type: ignore[method-assign]

    def fitting(self, live: LiveRow, proposal: Proposal) -> Proposal:
        started = time.perf_counter()
        found = self._fitting(live, proposal)
        self._seconds += time.perf_counter() - started
        return found

    def begin(self, rows: Sequence[LiveRow], feeds: Sequence[Feed]) -> list[Feed]:
        self._rows, self._feeds = rows, feeds
        if len(self.without) % 2:
            self._free_pass()
            self._take_back()
        self._started = time.perf_counter()
        return self._begin(rows, feeds)

    def settle(self, *args: Any) -> None:
        started = time.perf_counter()
        self._settle(*args)
        self.with_masks[-1] += time.perf_counter() - started

    def finish(self) -> None:
        self._finish()
        self.with_masks.append(self._seconds + time.perf_counter() - self._started)
        self._seconds = 0.0
        if len(self.without) < len(self.with_masks):
            self._take_back()
            self._free_pass()

    def _free_pass(self) -> None:
        started = time.perf_counter()
        self._engine.feed(self._feeds)
        self.without.append(time.perf_counter() - started)

    def _take_back(self) -> None:
        for live in self._rows:
            self._engine.truncate(live.row.key, live.cached)


class KnownCandidates(NoProposer):
    """Proposes candidates of which 70% are right, from the known texts of the rows."""

    def __init__(self, texts: dict[int, Sequence[int]], candidates: int) -> None:
        self._texts, self._candidates = texts, candidates

    def ask(self, rows: Sequence[LiveRow], request: CandidateRequest) -> PendingProposals:
        proposals = []
        for live in rows:
            written = len(live.tokens) - len(live.row.prompt)
            tokens = list(self._texts[live.row.key][written : written + self._candidates])
            right = next(
                (at for at in range(len(tokens)) if (live.row.key * 31 + (written + at) * 17) % 10 >= 7), len(tokens)
            )
            proposals.append(Proposal([*tokens[:right], *tokens[right - 1 : right] * (right < len(tokens))]))
        return lambda: proposals

    def draft_cost(self, rows: int) -> DraftCost | None:
        return DraftCost(0.0)


def large_model() -> Path:
    """The pocket target in the shape 1b with the large vocabulary, which is made if it is missing."""

    def make(path: Path) -> None:
        inflate(find("pocket"), path, replace(SHAPES["1b"], vocabulary=VOCABULARY), noise=0.02)
        large_tokenizer(path)

    return made_once(cache_directory() / "benchmarks" / "1b-large-vocabulary", make)


class MasksJob:
    """Rows that write a JSON record, run again and again on one model.

    ``open_places``: as in a job, some choices are made among all tokens, where the mask would take too long. Without them
    all masks are made.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        path = large_model()
        self._opened = open_model(ModelSpec(str(path), "native", args.precision))
        self._tokenizer = tokenizer = Tokenizer(path)
        self._grammars = Grammars(lambda: tokenizer.for_grammars(VOCABULARY, 0), VOCABULARY)
        self._costs = measure(self._opened.engine)
        self._batch, self._candidates = args.batch, args.candidates
        grammar = grammar_of({"kind": "json", "value": STRINGS if args.strings else RECORD})
        random = np.random.default_rng(1)
        self._rows = [
            Row(
                key,
                tuple(random.integers(1, 4000, PREFIX).tolist()),
                100,
                Sampling(args.temperature, seed=key, grammar=grammar),
            )
            for key in range(args.rows)
        ]
        # A mask maker is kept between runs, as in a long job: it has measured the time of masks and the share of choices
        # that they refuse.
        self._makers: dict[bool, MaskMaker] = {}

    def write(self, open_places: bool, proposer: Proposer) -> dict[int, Sequence[int]]:
        """The rows' tokens."""
        return self._run(self._verifier(open_places, proposer))

    def measure(self, open_places: bool, proposer: Proposer) -> tuple[dict[int, Sequence[int]], Paired]:
        """The rows' tokens, and the seconds of each pass with and without masks."""
        verifier = self._verifier(open_places, proposer)
        paired = Paired(verifier)
        return self._run(verifier), paired

    def _verifier(self, open_places: bool, proposer: Proposer) -> Verifier:
        tokenizer = self._tokenizer
        verifier = Verifier(
            engine=self._opened.engine,
            new_writer=lambda row: TextWriter(tokenizer.decode, (), (0,)),
            proposer=proposer,
            batch=self._batch,
            draft_tokens=self._candidates,
            verify_seconds=self._costs,
            end_tokens=self._opened.end_tokens,
            grammars=self._grammars,
        )
        verifier._masks = self._makers.setdefault(open_places, verifier._masks)
        constraints.SHARE_OF_PASS = SHARE_OF_PASS if open_places else 0.0
        return verifier

    def _run(self, verifier: Verifier) -> dict[int, Sequence[int]]:
        verifier.add(self._rows)
        texts: dict[int, Sequence[int]] = {}
        while not verifier.idle:
            for result in verifier.round():
                assert isinstance(result, RowResult), result
                texts[result.key] = result.tokens
        return texts


def time_masks(args: argparse.Namespace) -> dict[str, float]:
    job = MasksJob(args)
    texts = job.write(False, NoProposer())
    known = KnownCandidates(texts, args.candidates)
    job.write(True, known)  # warms up
    figures: dict[str, float] = {}
    for name, open_places in (("as it is", True), ("all masks made", False)):
        with_masks, without, passes = [], [], []
        for _ in range(args.rounds):
            written, paired = job.measure(open_places, known)
            assert written == texts, "a text depends on its candidates or on open places"
            with_masks += paired.with_masks
            without += paired.without
            passes.append(len(paired.without))
        figures |= {
            f"{name}: passes": median(passes),
            f"{name}: ms a pass": 1e3 * median(with_masks),
            f"{name}: ms a pass without masks": 1e3 * median(without),
            f"{name}: share of masks, median of passes": median(
                each / free - 1.0 for each, free in zip(with_masks, without, strict=True)
            ),
            f"{name}: share of masks, of the job": sum(with_masks) / sum(without) - 1.0,
        }
    return figures


class CompiledAtOnce:
    """Constraints for a draft, compiled when they are asked for (not in the background)."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def matching(self, grammar: str, ends: Any) -> Matching:
        return self._grammars.matching(grammar, ends)


def time_job(args: argparse.Namespace) -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    from built import InProcess

    path = model_directory(args.model) if args.model in SHAPES else find(args.model)
    opened = open_model(ModelSpec(str(path), "native", args.precision))
    drafting = open_model(ModelSpec(str(find(args.draft)), "native", "w8a8"))
    tokenizer = Tokenizer(find("pocket"))
    verify_seconds = measure(opened.engine)
    grammar = grammar_of({"kind": "json", "value": RECORD})

    def constrained_draft() -> Draft:
        vocabulary = drafting.engine.vocabulary
        grammars = Grammars(lambda: tokenizer.for_grammars(vocabulary, 0), vocabulary)
        return build_draft(ModelSpec("", "native", ""), ReplicaSpec(args.batch, None), drafting, CompiledAtOnce(grammars))

    def run(rows: list[Row], assisted: bool) -> tuple[float, dict[int, RowResult], float]:
        target = build_target(
            ModelSpec("", "native", ""),
            ReplicaSpec(args.batch, None, model=assisted),
            opened,
            tokenizer,
            verify_seconds,
        )
        if assisted:
            target.link.attach(InProcess(constrained_draft().drafter))
        target.verifier.add(rows)
        ended: dict[int, RowResult] = {}
        started = time.perf_counter()
        while not target.verifier.idle:
            ended.update({each.key: each for each in target.verifier.round() if isinstance(each, RowResult)})
        tokens = sum(len(each.tokens) for each in ended.values())
        return tokens / (time.perf_counter() - started), ended, target.verifier.counters.forced_tokens / tokens

    prompts = [tuple(tokenizer.encode(f"def f{key}(x):\n    return")) for key in range(args.rows)]
    ends = opened.end_tokens
    free = [Row(key, each, 64, Sampling(args.temperature, seed=key, end_tokens=())) for key, each in enumerate(prompts)]
    fit = [replace(row, max_tokens=200, sampling=replace(row.sampling, grammar=grammar, end_tokens=ends)) for row in free]
    rates: dict[str, list[float]] = {"free and plain": [], "fitting and plain": [], "fitting and assisted": []}
    forced = 0.0
    for _ in range(args.rounds):
        rates["free and plain"].append(run(free, False)[0])
        rate, plain, forced = run(fit, False)
        rates["fitting and plain"].append(rate)
        rate, assisted, _ = run(fit, True)
        rates["fitting and assisted"].append(rate)
        assert all(plain[key].tokens == assisted[key].tokens for key in plain), "assisted text is not plain text"
    figures = {f"{name}, tokens/s": max(each) for name, each in rates.items()}
    figures["forced"] = forced
    for name in ("fitting and plain", "fitting and assisted"):
        figures[f"{name}, times"] = max(rates[name]) / max(rates["free and plain"])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("masks", "job"))
    parser.add_argument("--rows", type=int, default=0, help="64 for masks, 24 for a job")
    parser.add_argument("--candidates", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strings", action="store_true", help="(masks) a record of strings with a maxLength")
    parser.add_argument("--batch", type=int, default=0, help="rows at once: 32 for masks, 4 for a job")
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--model", help="(job) a shape, or a model [1b]")
    parser.add_argument("--draft", help="(job) [pocket-draft]")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    if args.what == "masks" and (args.model or args.draft):
        parser.error("masks: the model is the pocket target inflated; --model and --draft are for a job")
    args.model, args.draft = args.model or "1b", args.draft or "pocket-draft"
    args.rows = args.rows or (64 if args.what == "masks" else 24)
    args.batch = args.batch or (32 if args.what == "masks" else 4)
    figures = time_masks(args) if args.what == "masks" else time_job(args)
    for name, value in figures.items():
        print(f"{name:64} {value:10.3f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
