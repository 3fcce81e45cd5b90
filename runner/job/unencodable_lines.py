"""Lines of rows from a Python program that JSON cannot hold: the part that it can hold, and the problem."""

from __future__ import annotations

import json

# Valid JSON cannot have this after an object. The line still begins with "{", by which lines of JSON are recognised.
MARK = b" #outrider: "


def written(said: bytes, problem: str) -> bytes:
    """The line of a row; ``said``: the object with the part that JSON can hold."""
    return said + MARK + json.dumps(problem).encode() + b"\n"


def read(line: bytes) -> tuple[bytes, str] | None:
    """The object and the problem of such a line; None for other lines."""
    said, mark, rest = line.rpartition(MARK)
    try:
        problem = json.loads(rest) if mark else None
    except ValueError:
        return None
    return (said, problem) if isinstance(problem, str) else None
