"""The race's tables: each engine's rate in each mode at each batch, and outrider's over the best of the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.race.programs.protocol import Answer
from outrider.runner.bench.table import first_difference, markdown

OURS = "outrider"
# The suffix of the name of an engine that runs a second time, at the end.
AGAIN = ", again"


@dataclass
class Lane:
    """One engine in one mode at one batch size: the answers of its turns (each has a few requests in sequence), and the
    measurements of the machine just before them.
    """

    engine: str
    mode: str
    batch: int
    new_tokens: int
    prompt_tokens: int
    stream_gbs: float = 0.0
    int8_gmacs: int = 0
    turns: list[list[Answer]] = field(default_factory=list)

    def _median(self, rate: Callable[[list[Answer]], float]) -> float:
        return median(map(rate, self.turns))

    @property
    def rate(self) -> float:
        """New tokens per second, with the time of prefill included."""
        written = self.batch * self.new_tokens
        return self._median(lambda turn: written * len(turn) / sum(answer.seconds for answer in turn))

    @property
    def decoding_rate(self) -> float:
        return self._median(
            lambda turn: sum(answer.decoded for answer in turn) / sum(answer.decoding_seconds for answer in turn)
        )

    @property
    def rate_of_both(self) -> float:
        """Tokens of prompts and answers per second, as llama.cpp counts them."""
        return self.rate * (1 + self.prompt_tokens / self.new_tokens)

    @property
    def a_round(self) -> float | None:
        found = [answer.a_round for turn in self.turns for answer in turn if answer.a_round is not None]
        return median(found) if found else None

    def texts(self) -> list[list[int]] | None:
        """The tokens of all rows in the first turn; None if the engine does not return tokens."""
        found: list[list[int]] = []
        for answer in self.turns[0]:
            if answer.tokens is None:
                return None
            found += answer.tokens
        return found


def same(lane: Lane, other: Lane | None) -> str:
    """The number of rows with the same tokens in both lanes, for the table."""
    if other is None or (ours := lane.texts()) is None or (theirs := other.texts()) is None:
        return "-"
    equal = sum(first_difference(left, right) is None for left, right in zip(ours, theirs, strict=True))
    return f"{equal}/{len(ours)}"


def table(lanes: Sequence[Lane]) -> str:
    header = [
        "Engine",
        "Mode",
        "Batch",
        "Tokens/Sec",
        "In decoding",
        "Prompts and answers",
        "Tokens/Round",
        "Same as its plain",
        "Stream, GB/s",
        "Int8, GMAC/s",
    ]
    plain = {(lane.engine, lane.batch): lane for lane in lanes if lane.mode == "plain"}
    cells = [
        [
            lane.engine,
            lane.mode,
            str(lane.batch),
            f"{lane.rate:.1f}",
            f"{lane.decoding_rate:.1f}",
            f"{lane.rate_of_both:.0f}",
            "-" if lane.a_round is None else f"{lane.a_round:.2f}",
            same(lane, plain.get((lane.engine, lane.batch))),
            f"{lane.stream_gbs:.1f}",
            str(lane.int8_gmacs),
        ]
        for lane in sorted(lanes, key=lambda lane: (lane.batch, -lane.rate))
    ]
    return markdown(header, cells)


def against(lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """For each batch size our best rate over the best of all other engines, and over each one's best, with prefill ("rate")
    and in decoding.

    An engine's best is over its modes, ours over our modes in all precisions that were run; "with" and "of" name them.
    outrider's second run at the end does not count, since no other engine has one.
    """
    found = []
    for batch in sorted({lane.batch for lane in lanes}):
        here = [lane for lane in lanes if lane.batch == batch]
        ours = [lane for lane in here if lane.engine.startswith(OURS) and not lane.engine.endswith(AGAIN)]
        others = [lane for lane in here if not lane.engine.startswith(OURS)]
        entry: dict[str, Any] = {"batch": batch}
        for name in ("rate", "decoding_rate"):
            if not ours or not others:
                continue
            our_best = max(ours, key=lambda lane: getattr(lane, name))
            mine = getattr(our_best, name)
            bests = {lane.engine: lane for lane in sorted(others, key=lambda lane: getattr(lane, name))}
            best = max(bests.values(), key=lambda lane: getattr(lane, name))
            entry[name] = {
                "ours": round(mine, 1),
                "with": f"{our_best.engine}, {our_best.mode}",
                "best": round(getattr(best, name), 1),
                "of": f"{best.engine}, {best.mode}",
                "times": round(mine / getattr(best, name), 2),
                "times_each": {engine: round(mine / getattr(lane, name), 2) for engine, lane in bests.items()},
            }
        found.append(entry)
    return found


@dataclass
class Ran:
    """A run of an engine in one of its kinds: the measurements of the machine before it, its lanes, and the error if it
    failed. ``code`` is the working copy that ran it.
    """

    engine: str
    kind: str
    stream_gbs: float
    int8_gmacs: int
    about: str = ""
    seconds: int = 0
    failed: str | None = None
    lanes: list[Lane] = field(default_factory=list)
    code: str = ""


def of_other_code(race: Sequence[Ran], code: str) -> list[str]:
    """A sentence for each engine that was run by another working copy."""
    return [
        f"{ran.engine} ({ran.kind}) ran with a working copy {ran.code or 'of no commit that is known'}, this one is {code}"
        for ran in race
        if ran.code != code
    ]


def shown(race: Sequence[Ran], code: str) -> str:
    """The report of a race as text. ``code`` is the working copy that prints it."""
    lanes = [lane for ran in race for lane in ran.lanes]
    lines = [table(lanes), ""]
    for ran in race:
        said = ran.about if ran.failed is None else f"failed: {ran.failed}"
        before = f"before it: stream {ran.stream_gbs} GB/s, int8 {ran.int8_gmacs} GMAC/s"
        lines.append(f"* {ran.engine}: {said} ({before}; {ran.seconds} s)")
    lines += [f"* {sentence}" for sentence in of_other_code(race, code)]
    return "\n".join([*lines, "", *map(json.dumps, against(lanes))])


def write_races(path: Path, races: Mapping[str, Sequence[Ran]]) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps({title: [asdict(ran) for ran in race] for title, race in races.items()}) + "\n")
    partial.replace(path)


def read_races(path: Path) -> dict[str, list[Ran]]:
    found = json.loads(path.read_text())
    return {
        title: [Ran(**{**ran, "lanes": list(map(_lane, ran["lanes"]))}) for ran in race] for title, race in found.items()
    }


def _lane(content: dict[str, Any]) -> Lane:
    return Lane(**{**content, "turns": [[Answer(**answer) for answer in turn] for turn in content["turns"]]})
