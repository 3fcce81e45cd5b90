"""The options of outrider serve."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from outrider.runner.options.option import Option
from outrider.runner.options.shared import Options
from outrider.runner.options.values import Name, NamedPath


def _hostname(value: str) -> str:
    """A host name as in a Host header, without the port."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?", value):
        raise ValueError(
            "be a name of letters, digits, - and . alone, such as batch.example.org (no http://, port or path)"
        )
    return value


class ServeSpec(Options):
    """The server"""

    data: Annotated[
        NamedPath,
        Option(
            help="Directory of files and batches; a server that is started with it again goes on with them.",
            decides_text=False,
            metavar="DIR",
        ),
    ] = Path("outrider-data")
    # On the command line: -m NAME=MODEL, repeated.
    models: Annotated[
        dict[str, Name],
        Option(help="The models by the names that clients call them.", decides_text=False, on_command_line=False),
    ] = Field(default_factory=dict)
    model: Annotated[Name, Option(help="See models.", decides_text=False, on_command_line=False)] = "pocket"
    host: Annotated[Name, Option(help="The address to listen at.", decides_text=False, metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535), Option(help="The port to listen at; 0: a free one.", decides_text=False)
    ] = 8000
    hostname: Annotated[
        tuple[Annotated[str, AfterValidator(_hostname)], ...],
        Option(
            help="Host names that clients use, such as batch.example.org,b.lan; requests under others are refused.",
            decides_text=False,
        ),
    ] = ()
    api_key_file: Annotated[
        NamedPath | None,
        Option(
            help="The keys that clients may use, one a line [default: one is made, in api-key under --data].",
            decides_text=False,
            metavar="FILE",
        ),
    ] = None
    most_upload: Annotated[int, Field(ge=1, le=1 << 20), Option(help="Largest upload, in MiB.", decides_text=False)] = 2048
    turn: Annotated[
        float,
        Field(gt=0.0),
        Option(help="Seconds that a model keeps the machine while another one's batches wait.", decides_text=False),
    ] = 600.0
    max_tokens: Annotated[
        int, Field(ge=1), Option(help="Most new tokens of a row, where the row does not say.", decides_text=True)
    ] = 128
