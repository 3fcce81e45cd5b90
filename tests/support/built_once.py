"""What takes long to build and no test changes: built once in each process of tests."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import typer.testing
from typer.main import get_command

_built = cache(get_command)


class CliRunner(typer.testing.CliRunner):
    """typer's builds all commands of a program for each call; ours are built once, as in a process of the program."""

    def invoke(self, *arguments: Any, **more: Any) -> typer.testing.Result:
        with mock.patch.object(typer.testing, "_get_command", _built):
            return super().invoke(*arguments, **more)
