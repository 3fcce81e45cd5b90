"""What a person gave on the command line, old spellings translated; defaults are the specifications' own."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import typer

from outrider.workers.errors import UsageError

NO_DRAFT = "none"


def given(context: typer.Context, leave_out: set[str]) -> dict[str, Any]:
    """The options that stand on the command line, by their names."""
    options = {
        name: value
        for name, value in context.params.items()
        if name not in leave_out and _stands_on_command_line(context, name)
    }
    with suppress(KeyError, ValueError):  # not given, or no number: the specification says what it may be
        options["draft_tokens"] = int(options["draft_tokens"])
    if not options.pop("assisted", True):
        if options.get("draft", NO_DRAFT) != NO_DRAFT:
            raise UsageError(f"--no-assisted runs without a draft, --draft {options['draft']} with one: leave out one")
        options["draft"] = NO_DRAFT
    if options.pop("do_sample", False):
        # What those who sample without saying how warm have always got.
        options.setdefault("temperature", 1.0)
    return options


def _stands_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
