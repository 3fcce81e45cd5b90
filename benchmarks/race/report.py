"""The race's tables: each engine's rate in each mode at each batch, and outrider's over the best of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.race.programs.protocol import Answer
from outrider.runner.bench.table import first_difference, markdown

OURS = "outrider"


@dataclass
class Lane:
    """One engine in one mode at one batch: the answers of its turns, each a few requests, one after the other."""

    engine: str
    mode: str
    batch: int
    new_tokens: int
    prompt_tokens: int
    turns: list[list[Answer]] = field(default_factory=list)

    def _median(self, rate: Callable[[list[Answer]], float]) -> float:
        return median(map(rate, self.turns))

    @property
    def rate(self) -> float:
        """New tokens a second, prompts read meanwhile."""
        written = self.batch * self.new_tokens
        return self._median(lambda turn: written * len(turn) / sum(answer.seconds for answer in turn))

    @property
    def decoding_rate(self) -> float:
        return self._median(
            lambda turn: sum(answer.decoded for answer in turn) / sum(answer.decoding_seconds for answer in turn)
        )

    @property
    def rate_of_both(self) -> float:
        """Tokens of prompts and answers a second, as llama.cpp counts them."""
        return self.rate * (1 + self.prompt_tokens / self.new_tokens)

    @property
    def a_round(self) -> float | None:
        found = [answer.a_round for turn in self.turns for answer in turn if answer.a_round is not None]
        return median(found) if found else None

    def texts(self) -> list[list[int]] | None:
        """Of the first turn, all of its calls."""
        found: list[list[int]] = []
        for answer in self.turns[0]:
            if answer.tokens is None:
                return None
            found += answer.tokens
        return found


def same(lane: Lane, other: Lane | None) -> str:
    """How many rows got the same tokens."""
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
        ]
        for lane in sorted(lanes, key=lambda lane: (lane.batch, -lane.rate))
    ]
    return markdown(header, cells)


def against(lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """For each batch our best rate over the best of all others, with prompts and in decoding."""
    found = []
    for batch in sorted({lane.batch for lane in lanes}):
        here = [lane for lane in lanes if lane.batch == batch]
        entry: dict[str, Any] = {"batch": batch}
        for name in ("rate", "decoding_rate"):
            ours = [lane for lane in here if lane.engine.startswith(OURS)]
            others = [lane for lane in here if not lane.engine.startswith(OURS)]
            if ours and others:
                best = max(others, key=lambda lane: getattr(lane, name))
                mine = max(getattr(lane, name) for lane in ours)
                entry[name] = {
                    "ours": round(mine, 1),
                    "best": round(getattr(best, name), 1),
                    "of": f"{best.engine}, {best.mode}",
                    "times": round(mine / getattr(best, name), 2),
                }
        found.append(entry)
    return found


def as_json(lane: Lane) -> dict[str, Any]:
    answers = [[{**asdict(answer), "tokens": None} for answer in turn] for turn in lane.turns]
    return {
        "engine": lane.engine,
        "mode": lane.mode,
        "batch": lane.batch,
        "tokens_per_second": round(lane.rate, 2),
        "decoding": round(lane.decoding_rate, 2),
        "prompts_and_answers": round(lane.rate_of_both, 2),
        "tokens_per_round": lane.a_round,
        "turns": answers,
    }
