"""The errors of failed rows, grouped by kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.runner.counted import counted

MOST_KINDS = 20
MOST_EXAMPLES = 5
# Messages that agree up to this length are one kind.
SAME_UP_TO = 160


@dataclass(slots=True)
class ErrorKind:
    code: str
    message: str
    rows: int = 0
    examples: list[str] = field(default_factory=list)


def error_kinds(records: Iterable[str], most: int = MOST_KINDS) -> list[ErrorKind]:
    """The kinds of errors, the most frequent first; kinds beyond ``most`` are counted together."""
    found: dict[tuple[str, str], ErrorKind] = {}
    for record in records:
        entry = json.loads(record)
        error = entry["error"]
        key = (error["code"], _kind(error["message"]))
        if key not in found and len(found) >= 50 * MOST_KINDS:
            key = ("others", "")
        kind = found.setdefault(key, ErrorKind(key[0], error["message"] if key[1] else "of many kinds"))
        kind.rows += 1
        if len(kind.examples) < MOST_EXAMPLES:
            kind.examples.append(entry["custom_id"])
    kinds = sorted(found.values(), key=lambda kind: -kind.rows)
    shown, rest = kinds[:most], kinds[most:]
    if rest:
        examples = [example for kind in rest for example in kind.examples][:MOST_EXAMPLES]
        shown.append(ErrorKind("others", counted(len(rest), "other kind"), sum(kind.rows for kind in rest), examples))
    return shown


def _kind(message: str) -> str:
    """A message without its numbers, such as lines and token ids."""
    return re.sub(r"\d+", "#", message)[:SAME_UP_TO]
