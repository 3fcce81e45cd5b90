"""`prediction`: the expected text adds candidates and changes no text, right or wrong, with suffixes and with lookup."""

from __future__ import annotations

from dataclasses import replace

import pytest
from built import opened, target_of, write

from outrider.workers.messages import Row, RowResult, Sampling
from outrider.workers.models.model_info import POCKET, find
from outrider.workers.models.tokenizer import Tokenizer

TEXT = "class Queue:\n    def __init__(self):\n        self."
COUNT = 48


@pytest.fixture(scope="module")
def plain() -> dict[int, RowResult]:
    return written(rows())


def rows() -> list[Row]:
    prompt = tuple(Tokenizer(str(find(POCKET))).encode(TEXT))
    noise = Sampling(temperature=0.8, seed=5)
    return [Row(0, prompt, COUNT, Sampling()), Row(1, prompt, COUNT, noise), Row(2, prompt[:-2], COUNT, Sampling())]


def written(asked: list[Row], answer_tokens: int | None = None, lookup: bool = False) -> dict[int, RowResult]:
    target = target_of(opened(find(POCKET), "native", "w4a8"), 4, 8, lookup=lookup, answer_tokens=answer_tokens)
    return write(target, asked)[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("answer_tokens", "lookup"), [(1 << 12, False), (None, True)], ids=["suffix", "lookup"])
def test_what_is_expected_rightly_takes_a_third_of_the_passes(
    plain: dict[int, RowResult], answer_tokens: int | None, lookup: bool
) -> None:
    expecting = [replace(row, predicted=plain[row.key].tokens) for row in rows()]
    found, without = written(expecting, answer_tokens, lookup), written(rows(), answer_tokens, lookup)
    for key, result in plain.items():
        assert found[key].tokens == without[key].tokens == result.tokens
    assert sum(each.rounds for each in found.values()) < sum(each.rounds for each in plain.values()) / 3
    assert sum(each.rounds for each in found.values()) < sum(each.rounds for each in without.values()) / 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("answer_tokens", "lookup"), [(1 << 12, False), (None, True)], ids=["suffix", "lookup"])
def test_what_is_expected_wrongly_changes_nothing(
    plain: dict[int, RowResult], answer_tokens: int | None, lookup: bool
) -> None:
    for expected in ((7,) * 40, rows()[0].prompt * 3, tuple(reversed(plain[0].tokens))):
        found = written([replace(row, predicted=expected) for row in rows()], answer_tokens, lookup)
        assert {key: result.tokens for key, result in found.items()} == {key: each.tokens for key, each in plain.items()}


def test_an_edit_amid_what_is_expected_costs_a_few_passes(plain: dict[int, RowResult]) -> None:
    """As where code is written anew with a line changed."""
    tokens = plain[0].tokens
    edited = (*tokens[:16], 9, 9, *tokens[18:])
    whole, changed = (written([replace(rows()[0], predicted=expected)], 1 << 12)[0].rounds for expected in (tokens, edited))
    assert changed <= whole + 6
