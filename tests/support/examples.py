"""What the fast set tries of a test: a tenth of the examples of a property, and some of the combinations of parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

PARAM = type(pytest.param())
ALL = "OUTRIDER_ALL_EXAMPLES" in os.environ


def examples(count: int) -> int:
    return count if ALL else -(-count // 10)


def names_of(given: str | Sequence[str]) -> Sequence[str]:
    return [name.strip() for name in given.split(",")] if isinstance(given, str) else given


def place(names: Sequence[str], values: Sequence[Any], given: Mapping[str, object]) -> int:
    """Where the values that a test is given stand in a list of parameters."""
    for number, each in enumerate(values):
        several = each.values if isinstance(each, PARAM) else each if len(names) > 1 else (each,)
        # By identity: values may be arrays, or no numbers.
        if all(given[name] is value for name, value in zip(names, several, strict=True)):
            return number
    raise LookupError(f"{names} of a test are in none of its lists: has it an iterator for a list?")


def diagonal(test: pytest.Function) -> int:
    """The sum of a test's places in its lists of parameters, and in those of its fixtures. Parameters that are given
    together have one place.

    pytest's indices are such places for fixtures only: for a test's own parameters they are places among all combinations.
    """
    lists = [(names_of(mark.args[0]), mark.args[1]) for mark in test.iter_markers("parametrize")]
    own = {name for names, _ in lists for name in names}
    of_fixtures = sum(index for name, index in test.callspec.indices.items() if name not in own)
    return of_fixtures + sum(place(names, values, test.callspec.params) for names, values in lists)
