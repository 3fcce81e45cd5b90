"""``outrider score``: the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from outrider.runner.cli.arguments import Config, with_options
from outrider.runner.cli.ending import until_interrupted


def score_command() -> Callable[..., None]:
    """Measure a model's perplexity on a text; against another model or precision, KL divergence and agreement too."""
    from outrider.runner.options.quality import ScoreSpec

    return with_options(ScoreSpec, _score)


def _score(
    given: dict[str, Any],
    config: Config = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print tokens, perplexity, kl and agreement as JSON, and nothing else.")
    ] = False,
) -> None:
    from outrider.runner.options.option import build_options
    from outrider.runner.options.quality import ScoreSpec
    from outrider.runner.quality.score import score

    spec = build_options(ScoreSpec, given, config)
    until_interrupted(lambda: score(spec, as_json=json_), "stopped before the text was scored to its end")
