"""The variables that a chat template reads."""

from __future__ import annotations

from functools import lru_cache

from jinja2 import Environment, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

# Variables and functions that transformers passes to every template.
GIVEN = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now")
)


class Generation(Extension):
    """``{% generation %}``, transformers' tag around the model's own text."""

    tags = {"generation"}  # noqa: RUF012 (as in its base)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=4)  # a model may have a template for rows with tools beside the usual one
def template_variables(template: str) -> frozenset[str]:
    environment = Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    return frozenset(meta.find_undeclared_variables(environment.parse(template))) - GIVEN - environment.globals.keys()
