"""Patterns of layers' names in a checkpoint's configuration. They are a stranger's: one could take for ever to match.

What can be matched in a number of ways that grows with a power of the name's length is bounded by that power; repetitions
within repetitions, or of alternatives, grow without bound, and no checkpoint needs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _constants, _parser  # type: ignore[attr-defined]  # what re itself parses patterns with
from typing import Any

# Names have some 60 letters, each of these may end at any of them.
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
    """Whether this is a repetition without an end, or with a far one."""
    return operation in REPETITIONS and inner[1] > MANY


def _walk(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """Every operation of a parsed pattern, with those inside of it."""
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
