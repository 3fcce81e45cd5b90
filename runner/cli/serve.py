"""``outrider serve``: the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from outrider.runner.cli.arguments import Config, with_options, words


def serve_command() -> Callable[..., None]:
    """Serve OpenAI's files, batches and single requests over HTTP; a restarted server goes on with its batches."""
    from outrider.runner.options.serve import ServeSpec

    return with_options(ServeSpec, _serve)


def _serve(
    given: dict[str, Any],
    config: Config = None,
    served: Annotated[
        list[str] | None,
        typer.Option(
            "-m", "--model", parser=words, metavar="NAME=MODEL", help="A model and its name for clients; may be repeated."
        ),
    ] = None,
) -> None:
    from outrider.runner.options.option import build_options
    from outrider.runner.options.serve import ServeSpec
    from outrider.runner.serve.serve import named_models, serve

    if served:
        given["models"] = named_models(served)
    serve(build_options(ServeSpec, given, config))
