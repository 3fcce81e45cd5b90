"""pydantic's errors as the rest of a sentence: 'must be a whole number, got 1.5'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import ErrorDetails

LONGEST_SHOWN = 60
OWN = "Value error, "
# What Python writes otherwise than JSON and YAML do, in which nearly all values are given.
WORDS: Mapping[object, str] = {True: "true", False: "false", None: "null"}

# By pydantic's error type; braces are filled from the error's context.
MUST = {
    "bool_parsing": "be true or false",
    "bool_type": "be true or false",
    "dict_type": "be an object",
    "finite_number": "be a finite number",
    "float_parsing": "be a number",
    "float_type": "be a number",
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be at least {ge}",
    "int_from_float": "be a whole number",
    "int_parsing": "be a whole number",
    "int_parsing_size": "be a whole number of fewer digits",
    "int_type": "be a whole number",
    "less_than": "be less than {lt}",
    "less_than_equal": "be at most {le}",
    "missing": "be there",
    "literal_error": "be {expected}",
    "model_type": "be an object",
    "path_type": "be a path",
    "string_sub_type": "be a text",
    "string_too_short": "not be empty",
    "string_type": "be a text",
    "string_unicode": "be a text",
    "tuple_type": "be a list",
}


def must(error: ErrorDetails, of_python: bool = False) -> str:
    """``must …, got …``; a ValueError of our own validators holds the text between the two."""
    kind, limits = error["type"], error.get("ctx", {})
    if kind == "too_long":
        return f"must have at most {limits['max_length']} entries, got {limits['actual_length']}"
    if kind == "value_error":
        wanted = error["msg"].removeprefix(OWN).removeprefix("must ")
    elif kind in MUST:
        wanted = MUST[kind].format(**{name: _spelled(limit) for name, limit in limits.items()})
    else:
        # No field of ours has such an error today; one that gets it some day is still reported in a sentence.
        wanted = f"be otherwise ({error['msg']})"
    return f"must {wanted}, got {shown(error['input'], of_python)}"


def _spelled(limit: Any) -> str:
    """A number with all its digits, since a limit may differ from the given value in the last digit only."""
    if not isinstance(limit, int | float):
        return str(limit)
    return f"{limit:,.0f}" if isinstance(limit, float) and limit.is_integer() else f"{limit:,}"


def where(error: ErrorDetails) -> str:
    """The path of the value: ``"stop"[1]``, ``"logit_bias"["5"]``."""
    first, *inner = error["loc"] or ("the entry",)
    steps = "".join(f"[{step}]" if isinstance(step, int) else f'["{short(step)}"]' for step in inner)
    return f'"{short(str(first))}"{steps}'


def shown(value: object, of_python: bool = False) -> str:
    """A value as Python writes it, short enough for a sentence. ``of_python``: ``True`` was given as that, not as JSON's
    ``true``."""
    if isinstance(value, tuple):  # an option of values separated by commas
        return short(", ".join(map(str, value)))
    text = ""
    for piece in _pieces(value, {} if of_python else WORDS):
        text += piece
        if len(text) > LONGEST_SHOWN:
            break
    return short(text)


def _pieces(value: object, words: Mapping[object, str]) -> Iterator[str]:
    """``repr``, piece by piece: by a few aliases of YAML a list has billions of entries."""
    if isinstance(value, str):
        yield repr(value[:LONGEST_SHOWN])
    elif isinstance(value, list):
        yield "["
        for index, each in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(each, words)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for index, (name, each) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(name, words)
            yield ": "
            yield from _pieces(each, words)
        yield "}"
    elif value is None or isinstance(value, bool):
        yield words.get(value, repr(value))
    else:
        yield repr(value)


def short(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."
