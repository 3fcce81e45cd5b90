"""Jobs that repeat themselves, and such that do not: plain decoding, lookup and suffixes in turn, on one target.

    python benchmarks/repetition.py --shape 1b --batch 8 [--kinds extraction,edit,prose,words,noise] [--rows 48]

The small models at hand write nothing worth extracting, so the answers are given: each pass is the real one, over whatever
is fed, and the tokens of the row's answer stand in the place of the model's choices. So passes cost what they cost, and
candidates hold where a model that writes these answers would take them.

What does not depend on who else is at work: tokens a round, passes, and *times by costs*, the time in decoding by what
each pass should take, as the costs measured at the start have it. With `--costs 1:1,16:1.4,64:3.4` there is no model:
a pass over this many tokens takes so long (linear between), `--shape` is not looked at, and seconds mean nothing.

* extraction: a prompt has two records in prose, an answer says them as JSON.
* edit: a prompt is a function of Python's standard library; the answer is that function with a name changed.
* prose: docstrings of the standard library, the second half behind the first: ordinary text, each row of another module.
* words: nothing repeats itself but the words.
* noise: nothing at all.

Rows, seeds and turns are the same for all; every second turn goes the other way round. Suffixes begin each turn knowing
nothing. Last comes one line of JSON.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from inflate import SHAPES, model_directory

from outrider.workers.build import build_target
from outrider.workers.engines.costs import CostCurve, measure
from outrider.workers.engines.engine import Chosen, Engine, Feed
from outrider.workers.messages import ModelSpec, ReplicaSpec, Row, Sampling
from outrider.workers.models.model_info import POCKET, find
from outrider.workers.models.opening import OpenModel, open_model
from outrider.workers.models.tokenizer import Tokenizer

MODES = ("plain", "lookup", "suffix")
LONGEST_ANSWER, LONGEST_PROMPT = 256, 512
ANSWER_TOKENS = 1 << 21
FIRST = "Anna Bruno Clara David Elena Frank Greta Hugo Irene Jonas Karla Leo Marta Nils Olga Paul Rosa Simon Tessa Viktor"
LAST = "Berg Costa Diaz Evans Fischer Grant Hansen Ito Jensen Keller Lund Moreau Novak Olsen Perez Quinn Rossi Silva Weber"
CITIES = "Oslo Lisbon Berlin Madrid Paris Vienna Dublin Prague Zurich Milan Athens Warsaw Helsinki Geneva Porto Lyon"
TRADES = "baker nurse pilot tailor lawyer teacher plumber painter farmer dentist barber jeweller"
Text = tuple[str, str]


def extraction(rng: random.Random) -> Iterator[Text]:
    """(a prompt with records in prose, the records as JSON)."""

    def record() -> dict[str, Any]:
        first, last = rng.choice(FIRST.split()), rng.choice(LAST.split())
        return {
            "first_name": first,
            "last_name": last,
            "age": rng.randrange(20, 80),
            "city": rng.choice(CITIES.split()),
            "occupation": rng.choice(TRADES.split()),
            "email": f"{first.lower()}.{last.lower()}{rng.randrange(100)}@example.org",
        }

    while True:
        people = [record() for _ in range(2)]
        prose = " ".join(
            f"{each['first_name']} {each['last_name']}, {each['age']}, works as a {each['occupation']} in {each['city']} "
            f"and answers mail at {each['email']}."
            for each in people
        )
        prompt = f"Give the people of this text as JSON.\n\nText: {prose}\n\nJSON:\n"
        yield prompt, json.dumps(people, indent=2) + "\n"


def edit(rng: random.Random) -> Iterator[Text]:
    """(a function of the standard library, the function with its first argument renamed)."""
    functions = _functions()
    while True:
        source, name = rng.choice(functions)
        other = rng.choice(["source", "given", "item", "subject", "entry"])
        edited = "".join(part if not part.isidentifier() or part != name else other for part in _words(source))
        yield f"# In this function, rename {name} to {other}.\n{source}\n# The function with {other}:\n", edited


@cache
def _functions() -> list[tuple[str, str]]:
    return list(_found_functions())


def _found_functions() -> Iterator[tuple[str, str]]:
    for tree, source in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and 12 < (node.end_lineno or 0) - node.lineno < 30:
                names = [each.arg for each in node.args.args if each.arg != "self"]
                if names and len(names[0]) > 2:
                    yield str(ast.get_source_segment(source, node)), names[0]


def _words(source: str) -> Iterator[str]:
    """Splits source into identifiers and the characters between them."""
    word = ""
    for letter in source:
        if letter.isidentifier() or (word and letter.isalnum()):
            word += letter
            continue
        yield word
        yield letter
        word = ""
    yield word


def prose(rng: random.Random) -> Iterator[Text]:
    """(first half, second half) of module docstrings."""
    texts = [text for tree, _ in _modules() if (text := ast.get_docstring(tree)) and len(text) > 600]
    rng.shuffle(texts)
    for text in texts:
        middle = min(len(text) // 2, 900)
        yield text[:middle], text[middle : middle + 900]


def words(rng: random.Random) -> Iterator[Text]:
    known = sorted({word for text, _ in _take(prose(random.Random(0)), 60) for word in text.split()})
    while True:
        yield " ".join(rng.choices(known, k=60)), " " + " ".join(rng.choices(known, k=150))


def noise(rng: random.Random) -> Iterator[Text]:
    letters = [chr(code) for code in range(33, 127)]
    while True:
        yield "".join(rng.choices(letters, k=200)), "".join(rng.choices(letters, k=220))


@cache
def _modules() -> tuple[tuple[ast.Module, str], ...]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return tuple((ast.parse(source), source) for source in sources)


def _take(texts: Iterator[Text], count: int) -> list[Text]:
    return [text for text, _ in zip(texts, range(count), strict=False)]


KINDS: dict[str, Callable[[random.Random], Iterator[Text]]] = {
    "extraction": extraction,
    "edit": edit,
    "prose": prose,
    "words": words,
    "noise": noise,
}


class Scripted:
    """The engine with scripted choices: ``scripts`` has the tokens of each row, its prompt first."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.scripts: dict[int, Sequence[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        lengths = [self._engine.length(feed.row) for feed in feeds]
        answers = self._engine.feed(feeds)
        return [self._as_written(*each) for each in zip(feeds, lengths, answers, strict=True)]

    def _as_written(self, feed: Feed, length: int, answer: Chosen) -> Chosen:
        script = self.scripts.get(feed.row)
        if script is None:
            return answer
        first = length + len(feed.tokens) - feed.choose + 1
        written = [script[at] if at < len(script) else script[-1] for at in range(first, first + feed.choose)]
        return replace(answer, tokens=written)


class NoModel:
    """An engine without a model, which only keeps the lengths of rows."""

    exact, forks, branches, context, vocabulary = True, False, False, 1 << 16, 1 << 16
    mixture = ranker = skipper = None

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        self._lengths[row] = 0

    def length(self, row: int) -> int:
        return self._lengths[row]

    def truncate(self, row: int, length: int) -> None:
        self._lengths[row] = length

    def close(self, row: int) -> None:
        del self._lengths[row]

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        for feed in feeds:
            self._lengths[feed.row] += len(feed.tokens)
        return [Chosen([0] * feed.choose, [1.0] * feed.choose) for feed in feeds]


class FixedCosts(CostCurve):
    def observe(self, tokens: int, seconds: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: ``decoding`` are the seconds of rounds without prefill, ``beside`` those outside passes."""

    tokens: int
    seconds: float
    decoding_tokens: int
    decoding: float
    beside: float
    priced: float
    rounds: int
    tokens_a_round: float
    proposed: int
    accepted: int
    from_others: int


def write(model: OpenModel, mode: str, rows: Sequence[Row], batch: int, curve: CostCurve, tokenizer: Tokenizer) -> Turn:
    replica_spec = ReplicaSpec(
        batch,
        0 if mode == "plain" else None,
        model=False,
        lookup=mode == "lookup",
        suffix=mode == "suffix",
        answer_tokens=ANSWER_TOKENS,
    )
    verifier = build_target(
        ModelSpec("", model.kind, ""), replica_spec, model, tokenizer, type(curve)(curve.points)
    ).verifier
    verifier.add(rows)
    decoding = beside = priced = 0.0
    decoding_tokens = 0
    started = time.perf_counter()
    while not verifier.idle:
        before, verified = time.perf_counter(), verifier.counters.verify_seconds
        verifier.round()
        took, done = time.perf_counter() - before, verifier.last_round
        if done is not None and done.steady:
            decoding += took
            beside += took - (verifier.counters.verify_seconds - verified)
            decoding_tokens += done.gained
            priced += curve(done.fed)
    seconds, counted = time.perf_counter() - started, verifier.counters
    return Turn(
        counted.tokens,
        seconds,
        decoding_tokens,
        decoding,
        beside,
        priced,
        counted.rounds,
        counted.tokens / counted.row_rounds,
        counted.proposed,
        counted.accepted,
        counted.others_accepted,
    )


def open_shape(shape: str, precision: str, threads: int) -> tuple[Tokenizer, OpenModel]:
    path = find(POCKET) if shape == POCKET else model_directory(shape)
    return Tokenizer(path), open_model(ModelSpec(str(path), "native", precision, threads=threads))


def rows_of(texts: Sequence[Text], tokenizer: Tokenizer, scripts: dict[int, Sequence[int]]) -> list[Row]:
    rows = []
    for key, (prompt, answer) in enumerate(texts):
        head = tokenizer.encode(prompt)[-LONGEST_PROMPT:]
        tail = tokenizer.encode(answer)[:LONGEST_ANSWER]
        scripts[key] = [*head, *tail]
        rows.append(Row(key, tuple(head), len(tail), Sampling(end_tokens=())))
    return rows


def measure_kind(
    kind: str,
    model: OpenModel,
    tokenizer: Tokenizer,
    batch: int,
    count: int,
    repeat: int,
    modes: Sequence[str],
    curve: CostCurve,
) -> dict[str, Any]:
    assert isinstance(model.engine, Scripted)
    turns: dict[str, list[Turn]] = {mode: [] for mode in modes}
    for turn in range(repeat):
        texts = _take(KINDS[kind](random.Random(turn)), count)
        for mode in modes if turn % 2 == 0 else reversed(modes):
            rows = rows_of(texts, tokenizer, model.engine.scripts)
            turns[mode].append(write(model, mode, rows, batch, curve, tokenizer))
            model.engine.scripts.clear()
    found: dict[str, Any] = {}
    for mode, took in turns.items():
        pairs = list(zip(turns[modes[0]], took, strict=True))
        found[mode] = {
            "times": round(statistics.median(plain.seconds / each.seconds for plain, each in pairs), 3),
            "times in decoding": round(
                statistics.median(
                    each.decoding_tokens / each.decoding / (plain.decoding_tokens / plain.decoding) for plain, each in pairs
                ),
                3,
            ),
            "times by costs": round(
                statistics.median(
                    each.decoding_tokens / each.priced / (plain.decoding_tokens / plain.priced) for plain, each in pairs
                ),
                3,
            ),
            "tokens/s": round(statistics.median(each.tokens / each.seconds for each in took), 1),
            "tokens a round": round(statistics.mean(each.tokens_a_round for each in took), 2),
            "passes": sum(each.rounds for each in took),
            "proposed": sum(each.proposed for each in took),
            "accepted": sum(each.accepted for each in took),
            "from others": sum(each.from_others for each in took),
            "beside passes %": round(100 * sum(each.beside for each in took) / sum(each.decoding for each in took), 2),
        }
        print(f"{kind:<11} {mode:<7} {json.dumps(found[mode])}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*sorted(SHAPES), POCKET], default="1b")
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--modes", default=",".join(MODES), help="the first is what the others are held against")
    parser.add_argument("--costs", help="no model: what passes cost, by their tokens")
    parser.add_argument("--threads", type=int, default=0)
    asked = parser.parse_args()
    kinds, modes = asked.kinds.split(","), asked.modes.split(",")
    if unknown := {*kinds} - {*KINDS} | {*modes} - {*MODES}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    if asked.costs:
        costs = {int(tokens): float(cost) for tokens, cost in (each.split(":") for each in asked.costs.split(","))}
        curve: CostCurve = FixedCosts(costs)
        opened = OpenModel(cast("Engine", NoModel()), "native", (), [], {})
        tokenizer, name = Tokenizer(find(POCKET)), "no model"
    else:
        tokenizer, opened, name = *open_shape(asked.shape, asked.precision, asked.threads), asked.shape
        curve = measure(opened.engine)
    model = replace(opened, engine=Scripted(opened.engine), end_tokens=())
    figures = {
        kind: measure_kind(kind, model, tokenizer, asked.batch, asked.rows, asked.repeat, modes, curve) for kind in kinds
    }
    print(json.dumps({"shape": name, "batch": asked.batch, "rows": asked.rows, "figures": figures}))


if __name__ == "__main__":
    main()
