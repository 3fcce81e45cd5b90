"""The line of a row that a program has handed over and that JSON cannot say: what it can say, and why not the rest."""

from __future__ import annotations

import json

# No line that JSON reads has it behind an object. It begins as the others do, by which lines of JSON are known.
MARK = b" #outrider: "


def written(said: bytes, problem: str) -> bytes:
    """``said`` is an object as a line of JSON has it."""
    return said + MARK + json.dumps(problem).encode() + b"\n"


def read(line: bytes) -> tuple[bytes, str] | None:
    """The object and the problem, of a line that is none of JSON; None where it is not of this kind."""
    said, mark, rest = line.rpartition(MARK)
    try:
        problem = json.loads(rest) if mark else None
    except ValueError:
        return None
    return (said, problem) if isinstance(problem, str) else None
