"""How deeply JSON may be nested.

What a row holds is handed from process to process, and into templates and grammars, and each that walks it has a limit of
its own, which is another one than that of Python's parser.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MOST_LEVELS = 200


def check_levels(text: str, value: Any) -> Any:
    """What a text of JSON holds, as it is; a ``RecursionError``, as Python's own parser raises it, where it is too deep."""
    if text.count("[") + text.count("{") > MOST_LEVELS:
        level, levels = [value], 0
        while level := [inner for each in level for inner in _inside(each) if isinstance(inner, list | dict)]:
            levels += 1
            if levels >= MOST_LEVELS:
                raise RecursionError
    return value


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
