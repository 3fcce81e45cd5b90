"""The report's templates: what is put into them is escaped, and a name that they do not find is an error."""

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


def render_macro(name: str, given: object) -> str:
    """One of macros.html, alone."""
    return str(getattr(environment().get_template("macros.html").module, name)(given))
