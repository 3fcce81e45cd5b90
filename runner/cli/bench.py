"""``outrider bench``: the command line. It takes the spellings of the older tools too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.runner.cli.arguments import Config, with_options
from outrider.runner.cli.ending import until_interrupted

STOPPED_MEASURING = "stopped before all examples were measured; no file was written"


def bench_command() -> Callable[..., None]:
    """Measure a target, with and without its draft: one row at a time, the classic tables as GitHub Markdown."""
    from outrider.runner.options.bench import BenchSpec

    return with_options(BenchSpec, _bench)


def _bench(given: dict[str, Any], config: Config = None) -> None:
    from outrider.runner.bench.bench import bench
    from outrider.runner.bench.tasks import QUANTIZE, quantize_options
    from outrider.runner.options.bench import BenchSpec
    from outrider.runner.options.option import build_options
    from outrider.runner.options.quality import QuantizeSpec

    spec = build_options(BenchSpec, given, config)
    if spec.task != QUANTIZE:
        until_interrupted(lambda: bench(spec), STOPPED_MEASURING)
        return
    from outrider.runner.cli.quantize import STOPPED
    from outrider.runner.quality.quantize import quantize

    asked = build_options(QuantizeSpec, quantize_options(spec))
    until_interrupted(lambda: quantize(asked), STOPPED)
