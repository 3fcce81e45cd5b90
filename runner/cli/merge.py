"""``outrider merge``: the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.runner.cli.arguments import Config, with_options
from outrider.runner.cli.ending import until_interrupted

STOPPED = "stopped; the same command begins anew"


def merge_command() -> Callable[..., None]:
    """Merge a LoRA adapter (PEFT's) into its model: a checkpoint that runs like any other."""
    from outrider.runner.options.quality import MergeSpec

    return with_options(MergeSpec, _merge)


def _merge(given: dict[str, Any], config: Config = None) -> None:
    from outrider.runner.options.option import build_options
    from outrider.runner.options.quality import MergeSpec
    from outrider.runner.quality.merge import merge

    spec = build_options(MergeSpec, given, config)
    until_interrupted(lambda: merge(spec), STOPPED)
