"""What constraints cost a round, and what they save.

    python benchmarks/constraints.py masks [--rows 32] [--candidates 3] [--rounds 20] [--strings]
    python benchmarks/constraints.py job [--model 1b --draft pocket-draft] [--rows 24] [--batch 4]

`masks`: passes of a target of Qwen2-0.5B's shape with 151,936 tokens, random weights, rows amid the strings and numbers of
a JSON record: with masks and without, in turns; with `--strings` all of them amid strings with a `maxLength`, whose masks
take longest. A round "as it is" leaves out dear masks as the verifier does: the first of a string is made, and it has
`--string-tokens`. Others make all masks, beside the pass or before it, so that what making them takes shows. The tokenizer
is the pocket pair's with the words of Python's library on top. `job`: the same rows unconstrained and plain, and under a
schema plain and assisted, in turns, in one process. A shape such as 1b is the pocket target inflated
(`benchmarks/inflate.py`). The best of each counts, since other work on the machine only ever makes a round slower. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import sysconfig
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from forward import model_directory
from inflate import SHAPES

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
from outrider.workers.target import constraints
from outrider.workers.target.constraints import SHARE_OF_PASS, MaskMaker, fitting
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import Proposal
from outrider.workers.target.text_and_stop_strings import TextWriter

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
# Where rows stand when masks are timed, and how they go on.
PLACES = (
    ('{"identifier":', "1234,"),
    ('{"identifier":12,"customer_name":"', 'return of self"'),
    ('{"identifier":12,"customer_name":"John", "'.replace(" ", ""), "status"),
    ('{"identifier":12,"customer_name":"John","status":"open","lines":[{"description":"a ', 'list of values"'),
)


def large_tokenizer(path: Path) -> None:
    """Words of Python's own library beside the pocket pair's tokens, as many as a large vocabulary has."""
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


def large_model(path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(path)


def time_masks(args: argparse.Namespace) -> dict[str, float]:
    path = cache_directory() / "constraints-large"
    if not (path / "config.json").is_file():
        large_tokenizer(path)
        large_model(path)
    opened = open_model(ModelSpec(str(path), "native", args.precision))
    tokenizer = Tokenizer(path)
    grammars = Grammars(lambda: tokenizer.for_grammars(VOCABULARY, 0), VOCABULARY)
    grammar = grammar_of({"kind": "json", "value": RECORD})
    random = np.random.default_rng(1)
    rows, proposals = [], []
    places = PLACES[1::2] if args.strings else PLACES
    for key in range(args.rows):
        written, behind = places[key % len(places)]
        matching = grammars.matching(grammar, [0])
        so_far = tokens_along(matching, tokenizer, written)
        start = len(matching)
        proposal = tokens_along(matching, tokenizer, behind)[: args.candidates]
        matching.back(start)
        sampling = Sampling(temperature=args.temperature, seed=key, grammar=grammar)
        prompt = tuple(random.integers(1, 4000, PREFIX).tolist())
        writer = TextWriter(tokenizer.decode, (), (0,))
        rows.append(LiveRow(Row(key, prompt, 999, sampling), [*prompt, *so_far], writer, 0.0, matching=matching))
        proposals.append(fitting(rows[-1], Proposal(proposal), args.candidates))
        opened.engine.open(key, sampling, PREFIX)
        opened.engine.feed([Feed(key, rows[-1].tokens[:-1], 0)])
    maker = MaskMaker(VOCABULARY)

    def feeds_of(found: list[Proposal]) -> list[Feed]:
        return [
            Feed(live.row.key, [live.tokens[-1], *each.tokens], len(each.tokens) + 1)
            for live, each in zip(rows, found, strict=True)
        ]

    def one_round(kind: str, number: int) -> dict[str, float]:
        """``usual``: as the verifier does it. ``beside``, ``before``: all masks are made. ``none``: none."""
        for live in rows:
            opened.engine.truncate(live.row.key, len(live.tokens) - 1)
            first = (number + live.row.key // len(places)) % args.string_tokens == 0
            live.mask_seconds = 0.0 if kind != "usual" or first else standing[live.row.key]
        constraints.SHARE_OF_PASS = SHARE_OF_PASS if kind == "usual" else 0.0
        started = time.perf_counter()
        found = proposals
        if kind != "none":
            found = [fitting(live, each, args.candidates) for live, each in zip(rows, proposals, strict=True)]
            assert found == proposals
        feeds = feeds_of(found)
        if kind != "none":
            feeds = maker.begin(rows, feeds)
            if kind == "before":
                maker.finish()
        begun = time.perf_counter()
        opened.engine.feed(feeds)
        ended = time.perf_counter()
        maker.finish()
        return {"round": ended - started, "pass": ended - begun, "before": begun - started}

    def masks_alone() -> float:
        constraints.SHARE_OF_PASS = 0.0
        feeds = feeds_of(proposals)
        started = time.perf_counter()
        maker.begin(rows, feeds)
        maker.finish()
        return time.perf_counter() - started

    kinds = ("usual", "beside", "before", "none")
    for kind in ("beside", "before"):
        one_round(kind, 0)
    # What the verifier knows of a place behind its first.
    standing = [live.mask_costs[0] for live in rows]
    taken: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    alone = []
    for number in range(args.rounds + 1):
        for kind in kinds:
            found = one_round(kind, number)
            if number:  # the first warms up
                taken[kind].append(found)
        alone.append(masks_alone())
    best = {kind: {name: 1e3 * min(each[name] for each in taken[kind]) for name in taken[kind][0]} for kind in kinds}
    usual = {kind: 1e3 * median(each["round"] for each in taken[kind]) for kind in kinds}
    return {
        "masks": sum(len(each.tokens) + 1 for each in proposals),
        "round as it is, ms": best["usual"]["round"],
        "round with all masks made, ms": best["beside"]["round"],
        "round with all made already, ms": best["before"]["pass"] + best["beside"]["before"],
        "round without, ms": best["none"]["round"],
        "before the pass, ms": best["usual"]["before"],
        "masks alone, ms": 1e3 * min(alone),
        "share as it is": best["usual"]["round"] / best["none"]["round"] - 1.0,
        "share of making all": best["beside"]["round"] / best["none"]["round"] - 1.0,
        **{f"median round ({kind}), ms": usual[kind] for kind in kinds},
    }


def tokens_along(matching: Matching, tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens that lead through a text: as the grammar spells it where it forces one, else as the tokenizer does."""
    found: list[int] = []
    while text:
        token = matching.forced[0] if matching.forced else tokenizer.encode_rendered(text)[0]
        piece = tokenizer.token_bytes.bytes_of(token).decode()
        if not text.startswith(piece) or not matching.take(token):
            break
        found.append(token)
        text = text[len(piece) :]
    return found


class AtOnce:
    """Constraints for a draft that are there when they are asked for."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def matching(self, grammar: str, ends: Any) -> Matching:
        return self._grammars.matching(grammar, ends)


def time_job(args: argparse.Namespace) -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    from built import InProcess

    path = model_directory(args.model, find("pocket")) if args.model in SHAPES else find(args.model)
    opened = open_model(ModelSpec(str(path), "native", args.precision))
    drafting = open_model(ModelSpec(str(find(args.draft)), "native", "w8a8"))
    tokenizer = Tokenizer(find("pocket"))
    verify_seconds = measure(opened.engine)
    grammar = grammar_of({"kind": "json", "value": RECORD})

    def constrained_draft() -> Draft:
        vocabulary = drafting.engine.vocabulary
        grammars = Grammars(lambda: tokenizer.for_grammars(vocabulary, 0), vocabulary)
        return build_draft(ModelSpec("", "native", ""), ReplicaSpec(args.batch, None), drafting, AtOnce(grammars))

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
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--candidates", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--strings", action="store_true", help="(masks) all rows amid strings with a maxLength")
    parser.add_argument("--string-tokens", type=int, default=4, help="(masks) so many tokens has a string")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--model", default="1b", help="a shape, or a model")
    parser.add_argument("--draft", default="pocket-draft")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    figures = time_masks(args) if args.what == "masks" else time_job(args)
    for name, value in figures.items():
        print(f"{name:32} {value:10.3f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
