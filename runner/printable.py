"""Escapes control characters in text of an input, a model or a path, so that a terminal prints and does not obey them."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # control characters, line ends among them
    "\ud800-\udfff"  # halves of surrogate pairs, as which Python keeps a path's bytes that are no UTF-8
    "\u2028\u2029"  # line and paragraph separators
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that change the direction of the text around them
    "\u200b\u2060-\u2064\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible characters
    "]"
)


def printable(text: object) -> str:
    """The text on one line, with unsafe characters as Python's escape sequences."""
    return _UNSAFE.sub(_escaped, str(text))


def printable_lines(text: str) -> str:
    """The same for a text of several lines: line ends and tabs stay."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in "\n\t" else _escaped(found), text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
