"""Turns a row's constraint (schema, expression, choice, tools, grammar) into a grammar of llguidance, and checks it.

To be called in a process with limits: a schema comes from the user and may take any amount of time and memory to compile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from outrider.workers.constraints.schemas import inexact, left_out
from outrider.workers.constraints.tool_forms import ToolForm
from outrider.workers.constraints.tool_grammars import TokenOf, schema_in, tool_grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# The library's defaults, written out so that another version of it accepts the same rows.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
LONGEST_ERROR = 300
# The options of llguidance that a schema may set in "x-guidance". Others would let the library ignore unknown keywords.
SCHEMA_OPTIONS = frozenset({"whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator"})
COMPACT = {"whitespace_flexible": False}
# The attributes of rules that are not supported, and each %json, which a schema follows. Strings, expressions, comments and
# special tokens of Lark are matched first, so that such a word within them is skipped.
NOT_HONOURED = re.compile(
    r"""(?x) "(?:\\.|[^"\\\n])*" | /(?!/)(?:\\.|[^/\\])+/ | (?:\#|//)[^\n]* | <[^<>\s]+>
    | (?P<attribute>max_tokens|temperature)\s*= | (?P<json>%json)\s*"""
)


class BadConstraint(ValueError):
    """Why a row's constraint cannot be used, as the end of a sentence."""


def grammar_of(constraint: Mapping[str, Any], token_of: TokenOf = lambda mark: None) -> str:
    """``constraint`` has a ``kind`` (json, regex, choice, grammar) and its ``value``, for json also ``options``.

    The kind ``tools`` has the keys that `tool_grammars.py` lists; ``token_of`` gives the token of a mark, or None.
    """
    kind = constraint["kind"]
    if kind == "tools":
        return tool_grammar(constraint, token_of)
    value = constraint["value"]
    match kind:
        case "json":
            return _json_grammar(value, constraint.get("options", {}))
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            # A string of Lark is spelled as one of JSON.
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in value))
        case _:
            return _own_grammar(value)


def usable_grammar_of(constraint: Mapping[str, Any], tokenizer: LLTokenizer, token_of: TokenOf) -> str:
    """The grammar; a BadConstraint where it allows no answer at all, which names the function whose schema is at fault."""
    for name, schema in constraint.get("tools", ()):
        try:
            refuse_unusable(_json_grammar(schema_in(ToolForm(*constraint["form"]), schema), {}), tokenizer)
        except BadConstraint as error:
            raise BadConstraint(f'"parameters" of the function "{name}": {error}') from None
    grammar = grammar_of(constraint, token_of)
    refuse_unusable(grammar, tokenizer)
    return grammar


def _json_grammar(schema: Any, options: Mapping[str, Any]) -> str:
    _check_schema(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=cast("JsonCompileOptions", {**COMPACT, **options}))
    except ValueError as error:
        raise BadConstraint(f"the schema cannot be compiled: {shortened(error)}") from None


def _check_schema(schema: Any) -> None:
    """A BadConstraint where the library would ignore a keyword, or change a number."""
    if not isinstance(schema, dict):
        return
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict) or (unknown := sorted(own.keys() - SCHEMA_OPTIONS)):
        named = f'"{unknown[0]}"' if isinstance(own, dict) else "what stands there"
        raise BadConstraint(f'"x-guidance" of a schema holds {", ".join(sorted(SCHEMA_OPTIONS))}; remove {named}')
    if (found := left_out(schema)) is not None:
        key, place = map(shortened, found)
        raise BadConstraint(f'"{key}" at {place} of the schema cannot be enforced; correct its spelling or remove it')
    if (changed := inexact(schema)) is not None:
        key, place, number = map(shortened, changed)
        raise BadConstraint(
            f'"{key}" at {place} of the schema has the number {number}, which would be rounded; give a number of 15 digits '
            "or fewer, or a text"
        )


def _own_grammar(text: str) -> str:
    try:
        lark = any_to_lark(text)
        for found in NOT_HONOURED.finditer(lark):
            if found["attribute"]:
                raise BadConstraint(f'the grammar\'s attribute "{found["attribute"]}" is not supported; remove it')
            if found["json"]:
                _check_schema(json.JSONDecoder().raw_decode(lark, found.end())[0])
        return LLMatcher.grammar_from_lark(lark)
    except BadConstraint:
        raise
    except Exception as error:  # the conversion from GBNF is Python that may stumble over any text
        raise BadConstraint(f"the grammar cannot be read: {shortened(error)}") from None


def refuse_unusable(grammar: str, tokenizer: LLTokenizer) -> None:
    """A BadConstraint where the grammar allows no first token, or is too large."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise BadConstraint(f"it cannot be compiled: {shortened(matcher.get_error())}")


def shortened(error: object) -> str:
    """The first line of the library's error, printable and of limited length, for a sentence of ours."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    line = "".join(letter if letter.isprintable() else " " for letter in line).rstrip(".,:; ")
    return line if len(line) <= LONGEST_ERROR else f"{line[:LONGEST_ERROR]}…"
