"""A job's failed rows once more: what its options were, but for those that a person has to give each time."""

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

# A directory may come from somebody else: what it says runs no command, trusts no pickle and calls no other host.
GIVEN_ANEW = frozenset({"on_end", "allow_pickle", "address", "metrics_port", "trace", "out"})


def retry_spec(directory: Path, options: Mapping[str, Any]) -> JobSpec:
    """The options that the job was last run with, and over them those that are given now."""
    if "out" in options or "input" in options:
        raise UsageError("retry takes a job as it is; leave out its input and --out")
    with closing(open_job(directory)) as journal:
        description, _ = read_description(directory, journal)
    kept = description.get("spec")
    if not isinstance(kept, dict) or "input" not in kept:
        raise JobError(f"{directory / DESCRIPTION} does not say how the job was run; run it by its own command once more")
    # A draft that is left out now takes with it what was said of it.
    left = GIVEN_ANEW | JobSpec.overruled({**kept, **options})
    usual = {name: value for name, value in kept.items() if name not in left} | _models_elsewhere(description)
    return build_options(JobSpec, {**usual, **options, "out": directory})


def _models_elsewhere(description: dict[str, Any]) -> dict[str, str]:
    """The models whose paths led somewhere in the working directory in which the job ran, and do not in this one."""
    kept, resolved = description["spec"], description.get("models")
    if not isinstance(resolved, dict):  # of an older outrider
        return {}
    named = {name: kept[name] for name in ("model", "draft") if isinstance(kept.get(name), str)}
    return {name: resolved[name] for name, model in named.items() if name in resolved and absolute_model(model) == model}
