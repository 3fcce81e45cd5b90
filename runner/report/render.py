"""Renders the report's Jinja2 templates, with autoescape; an undefined name is an error."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@cache
def environment() -> Environment:
    folder = Path(__file__).with_name("templates")
    return Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def render(template: str, /, **given: object) -> str:
    return environment().get_template(template).render(**given)
