"""The benchmark's arithmetic and its Markdown."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.runner.bench.table import (
    COLUMNS,
    Measured,
    comparison,
    comparison_table,
    first_difference,
    measured,
    table,
    totals,
    totals_line,
    typical,
)
from outrider.workers.messages import RowResult

RESULT = RowResult(
    key=1,
    tokens=tuple(range(31)),
    text="",
    finish_reason="length",
    rounds=12,
    proposed=40,
    accepted=20,
    seconds=3.5,
    prefill_seconds=0.5,
    prefill_rounds=2,
)


def row(total: float = 3.5, tokens: tuple[int, ...] = RESULT.tokens, proposed: int = 40) -> Measured:
    return Measured(8, tokens, total, 0.5, proposed, 20, 10, 4_000_000_000)


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_what_the_target_reports_becomes_the_classic_figures() -> None:
    one = measured(RESULT, 8, 4_000_000_000)
    assert one == row()
    assert one.seconds_a_token == pytest.approx(0.1)
    assert one.tokens_a_second == pytest.approx(10.0)
    assert one.accepted_share == 0.5
    assert one.tokens_a_round == 3.0


def test_the_table_is_github_markdown_with_exactly_these_columns() -> None:
    header, rule, first, second = cells(table([row(), row(total=1.0)]))
    assert header == [
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
    ]
    assert all(re.fullmatch("-+:", cell) for cell in rule)
    assert first == ["1", "8", "31", "3.50000", "500.000", "100.0000", "10.0000", "50.0", "3.00", "4.000"]
    assert second[0] == "2"
    assert len({len(line) for line in table([row(), row(total=1000.0)]).splitlines()}) == 1


@given(
    total=st.floats(0.01, 500.0), share=st.floats(0.001, 0.999), new_tokens=st.integers(2, 2000), rounds=st.integers(1, 9)
)
def test_what_is_printed_adds_up(total: float, share: float, new_tokens: int, rounds: int) -> None:
    one = Measured(8, (1,) * new_tokens, total, total * share, 0, 0, rounds, 1)
    printed = dict(zip(COLUMNS, cells(table([one]))[2], strict=True))
    step, prefill = float(printed["Time/Token (ms)"]), float(printed["Prefill Phase (ms)"])
    assert float(printed["Total Time (s)"]) * 1e3 == pytest.approx(prefill + (new_tokens - 1) * step, abs=0.2)
    assert one.seconds_a_token is not None
    assert 1e3 / one.seconds_a_token / 1e3 == pytest.approx(float(printed["Tokens/Sec"]), rel=1e-4, abs=1e-4)
    assert printed["Accepted (%)"] == "-"


def test_a_single_token_has_no_decoding() -> None:
    one = Measured(8, (5,), 0.5, 0.5, 0, 0, 0, 1)
    assert cells(table([one]))[2][5:9] == ["-", "-", "-", "-"]
    assert totals([one])["tokens_per_second"] is None
    assert "- tokens/s in decoding" in totals_line(totals([one]))


@pytest.mark.parametrize("tokens", [(), (5,)])
def test_answers_that_end_at_once_leave_the_decoding_of_the_others_as_it_is(tokens: tuple[int, ...]) -> None:
    short = Measured(8, tokens, 0.75, 0.5, 0, 0, 1, 1)
    assert cells(table([short]))[2][5:9] == ["-", "-", "-", "-"]
    alone, both = totals([row()]), totals([row(), short])
    for figure in ("tokens_per_second", "tokens_per_round", "accepted_percent"):
        assert both[figure] == alone[figure]
    assert both["tokens_per_second_total"] == pytest.approx((31 + len(tokens)) / 4.25)
    [compared] = comparison([short], [short])
    assert compared["speedup_decoding"] is None and compared["first_difference"] is None
    assert cells(comparison_table([compared]))[2][2:6] == [str(len(tokens)), "-", "-", "-"]


def test_answers_of_different_lengths_are_compared_token_by_token() -> None:
    [compared] = comparison([row(6.0, tokens=(1,) * 30)], [row(2.0, tokens=(1,) * 20)])
    assert compared["speedup_total"] == pytest.approx(2.0)
    assert cells(comparison_table([compared]))[2][2] == "30, 20"
    assert cells(comparison_table([compared]))[2][-1] == "up to 20"


def test_the_median_run_keeps_its_own_figures() -> None:
    assert typical([row(3.0), row(1.0), row(2.0)]) == row(2.0)
    assert typical([row(3.0), row(1.0)]) == row(1.0)


def test_assisted_against_plain() -> None:
    [compared] = comparison([row(6.5, proposed=0)], [row(3.5)])
    assert compared["speedup_decoding"] == pytest.approx(2.0)
    assert compared["speedup_total"] == pytest.approx(6.5 / 3.5)
    assert compared["first_difference"] is None
    assert cells(comparison_table([compared]))[2] == ["1", "8", "31", "5.0000", "10.0000", "2.00", "1.86", "yes"]


@pytest.mark.parametrize(
    ("left", "right", "first"),
    [((1, 2), (1, 2), None), ((1, 2, 3), (1, 5, 3), 2), ((1, 2), (1, 2, 3), 3), ((), (1,), 1)],
)
def test_where_two_answers_part(left: tuple[int, ...], right: tuple[int, ...], first: int | None) -> None:
    assert first_difference(left, right) == first


def test_all_examples_together_weigh_by_their_tokens() -> None:
    both = totals([row(3.5), Measured(8, (1,) * 11, 1.5, 0.5, 0, 0, 10, 5_000_000_000)])
    assert both["tokens_per_second"] == pytest.approx((30 + 10) / (3.0 + 1.0))
    assert both["tokens_per_second_total"] == pytest.approx((31 + 11) / 5.0)
    assert both["accepted_percent"] == pytest.approx(50.0)
    assert both["tokens_per_round"] == pytest.approx(2.0)
    assert both["peak_memory_gb"] == 5.0
