"""Phrases that live display, summary and ``outrider status`` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.runner.printable import printable
from outrider.runner.report.error_kinds import ErrorKind
from outrider.runner.validation_errors import short


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "none"


def accepted_words(totals: Mapping[str, Any]) -> str:
    """The share of accepted candidates, to follow a speed; "" without candidates."""
    proposed = totals.get("proposed", 0)
    return f", {share(totals.get('accepted', 0), proposed)} accepted" if proposed else ""


def read_again_words(totals: Mapping[str, Any]) -> str:
    """The tokens that were prefilled twice because of deaths and stops; "" if there are none."""
    if not (twice := int(totals.get("read_again", 0))):
        return ""
    all_read = int(totals.get("prompt_tokens", 0)) + int(totals.get("resumed_tokens", 0))
    return f"{twice:,} tokens of prompts and answers ({share(twice, max(twice, all_read))} of all that was read)"


def failure_lines(kinds: Sequence[ErrorKind]) -> Iterable[str]:
    """A line for each kind of error of failed rows."""
    for kind in kinds:
        examples = ", ".join(map(short, kind.examples)) + (", …" if kind.rows > len(kind.examples) else "")
        yield printable(f"{kind.rows:,} × {kind.message} ({kind.code}: {examples})")
