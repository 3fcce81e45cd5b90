"""``outrider quantize``: the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.runner.cli.arguments import Config, with_options
from outrider.runner.cli.ending import until_interrupted

STOPPED = "stopped; the same command goes on where it was"


def quantize_command() -> Callable[..., None]:
    """Round a model's weights to 4 or 8 bits, calibrated on text: a checkpoint that vLLM and transformers read as well.

    Layers are read from disk one by one. The same command resumes a run that was stopped.
    """
    from outrider.runner.options.quality import QuantizeSpec

    return with_options(QuantizeSpec, _quantize)


def _quantize(given: dict[str, Any], config: Config = None) -> None:
    from outrider.runner.options.option import build_options
    from outrider.runner.options.quality import QuantizeSpec
    from outrider.runner.quality.quantize import quantize

    spec = build_options(QuantizeSpec, given, config)
    until_interrupted(lambda: quantize(spec), STOPPED)
