"""The options of a retry: those that the job was last run with, except those that must be given anew each time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from outrider.runner.hosts.submit import absolute_model
from outrider.runner.job.directory import DESCRIPTION, open_job, read_description
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import build_options
from outrider.workers.errors import JobError, UsageError

# A job directory may come from somebody else: job.json must not run a command, load a pickle or contact another host.
GIVEN_ANEW = frozenset({"on_end", "allow_pickle", "address", "metrics_port", "trace", "out"})


def retry_spec(directory: Path, options: Mapping[str, Any]) -> JobSpec:
    """The options that the job was last run with, overridden by those that are given now."""
    if "out" in options or "input" in options:
        raise UsageError("retry takes a job as it is; leave out its input and --out")
    with closing(open_job(directory)) as journal:
        description, _ = read_description(directory, journal)
    kept = description.get("spec")
    if not isinstance(kept, dict) or "input" not in kept:
        raise JobError(f"{directory / DESCRIPTION} does not say how the job was run; run it by its own command once more")
    # If no draft is to run now, the job's options about its draft are dropped too.
    left = GIVEN_ANEW | JobSpec.overruled({**kept, **options})
    usual = {name: value for name, value in kept.items() if name not in left} | _models_elsewhere(description)
    return build_options(JobSpec, {**usual, **options, "out": directory})


def _models_elsewhere(description: dict[str, Any]) -> dict[str, str]:
    """Absolute paths of models that were given relative to the job's working directory, and are not found from this one."""
    kept, resolved = description["spec"], description.get("models")
    if not isinstance(resolved, dict):  # of an older outrider
        return {}
    named = {name: kept[name] for name in ("model", "draft") if isinstance(kept.get(name), str)}
    return {name: resolved[name] for name, model in named.items() if name in resolved and absolute_model(model) == model}
