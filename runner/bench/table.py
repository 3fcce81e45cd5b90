"""The benchmark's tables in GitHub Markdown: pure arithmetic over the target's reports of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.workers.messages import RowResult

COLUMNS = (
    "Example#",
    "Prompt Length (tokens)",
    "New Tokens Generated",
    "Total Time (s)",
    "Prefill Phase (ms)",
    "Time/Token (ms)",
    "Tokens/Sec",
    "Accepted (%)",
    "Tokens/Round",
    "Peak Memory (GB)",
)
COMPARED = (
    "Example#",
    "Prompt Length (tokens)",
    "New Tokens Generated",
    "Plain (Tokens/Sec)",
    "Assisted (Tokens/Sec)",
    "Speed-up (decoding)",
    "Speed-up (total)",
    "Same Tokens",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One example's figures.

    The first token comes out of the prefill, so decoding writes ``new_tokens - 1`` of them:
    total = prefill + (new_tokens - 1) x time a token.
    """

    prompt_length: int
    tokens: tuple[int, ...]
    total_seconds: float
    prefill_seconds: float
    proposed: int
    accepted: int
    decode_rounds: int
    peak_bytes: int

    @property
    def new_tokens(self) -> int:
        return len(self.tokens)

    @property
    def decoded(self) -> int:
        """The tokens after the first; an answer may have no token at all."""
        return max(0, self.new_tokens - 1)

    @property
    def seconds_with_prompt(self) -> float | None:
        """Total time per new token."""
        return self.total_seconds / self.new_tokens if self.new_tokens else None

    @property
    def decode_seconds(self) -> float:
        return self.total_seconds - self.prefill_seconds

    @property
    def seconds_a_token(self) -> float | None:
        return self.decode_seconds / self.decoded if self.decoded else None

    @property
    def tokens_a_second(self) -> float | None:
        step = self.seconds_a_token
        return 1.0 / step if step else None

    @property
    def accepted_share(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def tokens_a_round(self) -> float | None:
        return self.decoded / self.decode_rounds if self.decoded and self.decode_rounds else None

    def record(self) -> dict[str, Any]:
        """For the JSON file, in the table's units."""
        step, share = self.seconds_a_token, self.accepted_share
        return {
            "prompt_length": self.prompt_length,
            "new_tokens": self.new_tokens,
            "total_seconds": self.total_seconds,
            "prefill_ms": self.prefill_seconds * 1e3,
            "ms_per_token": None if step is None else step * 1e3,
            "tokens_per_second": self.tokens_a_second,
            "accepted_percent": None if share is None else share * 100,
            "tokens_per_round": self.tokens_a_round,
            "peak_memory_gb": self.peak_bytes / 1e9,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "tokens": list(self.tokens),
        }


def measured(result: RowResult, prompt_length: int, peak_bytes: int) -> Measured:
    return Measured(
        prompt_length=prompt_length,
        tokens=result.tokens,
        total_seconds=result.seconds,
        prefill_seconds=result.prefill_seconds,
        proposed=result.proposed,
        accepted=result.accepted,
        decode_rounds=result.rounds - result.prefill_rounds,
        peak_bytes=peak_bytes,
    )


def typical(runs: Sequence[Measured]) -> Measured:
    """The run of median total time. One run's own figures, so that they still add up."""
    return sorted(runs, key=lambda run: run.total_seconds)[(len(runs) - 1) // 2]


def table(rows: Sequence[Measured]) -> str:
    cells = [
        (
            str(number),
            str(row.prompt_length),
            str(row.new_tokens),
            _number(row.total_seconds, 5),
            _number(row.prefill_seconds * 1e3, 3),
            _number(row.seconds_a_token, 4, 1e3),
            _number(row.tokens_a_second, 4),
            _number(row.accepted_share, 1, 100),
            _number(row.tokens_a_round, 2),
            _number(row.peak_bytes, 3, 1e-9),
        )
        for number, row in enumerate(rows, start=1)
    ]
    return markdown(COLUMNS, cells)


def comparison(plain: Sequence[Measured], assisted: Sequence[Measured]) -> list[dict[str, Any]]:
    """Assisted against plain, example by example. ``first_difference``: position from 1; None if the answers are equal."""
    return [
        {
            "prompt_length": left.prompt_length,
            "new_tokens": left.new_tokens,
            "assisted_new_tokens": right.new_tokens,
            "plain_tokens_per_second": left.tokens_a_second,
            "assisted_tokens_per_second": right.tokens_a_second,
            "speedup_decoding": _ratio(right.tokens_a_second, left.tokens_a_second),
            # Per token, since answers that differ may have different lengths.
            "speedup_total": _ratio(left.seconds_with_prompt, right.seconds_with_prompt),
            "first_difference": first_difference(left.tokens, right.tokens),
        }
        for left, right in zip(plain, assisted, strict=True)
    ]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    if tuple(left) == tuple(right):
        return None
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs, start=1) if a != b), min(len(left), len(right)) + 1)


def comparison_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        (
            str(number),
            str(row["prompt_length"]),
            _lengths(row["new_tokens"], row["assisted_new_tokens"]),
            _number(row["plain_tokens_per_second"], 4),
            _number(row["assisted_tokens_per_second"], 4),
            _number(row["speedup_decoding"], 2),
            _number(row["speedup_total"], 2),
            "yes" if row["first_difference"] is None else f"up to {row['first_difference'] - 1}",
        )
        for number, row in enumerate(rows, start=1)
    ]
    return markdown(COMPARED, cells)


def _lengths(plain: int, assisted: int) -> str:
    return str(plain) if plain == assisted else f"{plain}, {assisted}"


def totals(rows: Sequence[Measured]) -> dict[str, float | None]:
    """All examples together: decoding only, and with the prompts."""
    decoded = sum(row.decoded for row in rows)
    # An answer of one token has no decoding time.
    seconds = sum(row.decode_seconds for row in rows if row.decoded)
    rounds = sum(row.decode_rounds for row in rows if row.decoded)
    proposed = sum(row.proposed for row in rows)
    return {
        "tokens_per_second": _ratio(decoded, seconds),
        "tokens_per_second_total": _ratio(sum(row.new_tokens for row in rows), sum(row.total_seconds for row in rows)),
        "accepted_percent": _ratio(100 * sum(row.accepted for row in rows), proposed),
        "tokens_per_round": _ratio(decoded, rounds),
        "peak_memory_gb": max(row.peak_bytes for row in rows) / 1e9,
    }


def totals_line(all_: dict[str, float | None], of: str = "All examples") -> str:
    parts = [
        f"{_number(all_['tokens_per_second'], 2)} tokens/s in decoding",
        f"{_number(all_['tokens_per_second_total'], 2)} with the prompts",
        f"{_number(all_['tokens_per_round'], 2)} tokens a round",
    ]
    if all_["accepted_percent"] is not None:
        parts.append(f"{_number(all_['accepted_percent'], 1)}% of the candidates accepted")
    return f"{of}: {', '.join(parts)}."


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table whose columns also line up on a terminal."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))} |"

    rule = f"|{'|'.join('-' * (width + 1) + ':' for width in widths)}|"
    return "\n".join([line(header), rule, *map(line, rows)])


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"
