"""Text of an input, a model or a path, made safe to print: a terminal obeys control characters, a person reads them."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # control characters, line ends among them
    "\ud800-\udfff"  # halves of surrogate pairs, as which Python keeps a path's bytes that are no UTF-8
    "\u2028\u2029"  # line and paragraph separators
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what turns the direction of the text around it
    "\u200b\u2060-\u2064\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # what nobody sees
    "]"
)


def printable(text: object) -> str:
    """The text on one line, with everything in it that a terminal would obey as Python escapes it."""
    return _UNSAFE.sub(_escaped, str(text))


def printable_lines(text: str) -> str:
    """The same for a text of several lines, whose line ends and tabs stay."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in "\n\t" else _escaped(found), text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
