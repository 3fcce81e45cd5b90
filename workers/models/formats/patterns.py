"""Regular expressions for layers' names in a checkpoint's configuration, which are not trusted: one could match for ever.

n unbounded repetitions in sequence take at most O(length^n) steps, so n is bounded. Nested repetitions, and repetitions of
alternatives, take exponential time and are refused; no checkpoint needs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _constants, _parser  # type: ignore[attr-defined]  # what re itself parses patterns with
from typing import Any

# Names have some 60 letters, and each repetition may end at any of them.
MOST_REPETITIONS = 4
REPETITIONS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
MANY = 16


class UnusablePattern(ValueError):
    """Why a pattern is not used."""


def compiled(pattern: str) -> re.Pattern[str]:
    try:
        found = re.compile(pattern)
        open_ended = [inner for operation, inner in _walk(_parser.parse(pattern)) if _repeats(operation, inner)]
    except (re.error, RecursionError, OverflowError) as error:
        raise UnusablePattern(f"is no pattern: {error}") from None
    if len(open_ended) > MOST_REPETITIONS:
        raise UnusablePattern(f"has more than {MOST_REPETITIONS} repetitions, and could take for ever to match")
    for _, _, body in open_ended:
        if any(_repeats(operation, inner) or operation is _constants.BRANCH for operation, inner in _walk(body)):
            raise UnusablePattern("repeats what may be matched in several ways, and could take for ever to match")
    return found


def _repeats(operation: Any, inner: Any) -> bool:
    """Whether this is a repetition without a bound, or with a large one."""
    return operation in REPETITIONS and inner[1] > MANY


def _walk(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """All operations of a parsed pattern, recursively."""
    for operation, inner in parsed:
        yield operation, inner
        for part in _parts(inner):
            yield from _walk(part)


def _parts(inner: Any) -> Iterator[Any]:
    if isinstance(inner, _parser.SubPattern):
        yield inner
    elif isinstance(inner, (tuple, list)):
        for each in inner:
            yield from _parts(each)
