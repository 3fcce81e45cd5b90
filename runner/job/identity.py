"""A job's identity: the options and file digests that decide its texts, compared when the job is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from outrider.runner.job.journal import Journal
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import deciding
from outrider.workers.errors import JobChangedError
from outrider.workers.models.digests import is_of_this_kind
from outrider.workers.models.model_info import ModelInfo


def identity(spec: JobSpec, model_info: ModelInfo, input_digest: str, engine: str, precision: str) -> dict[str, Any]:
    """The options that decide the texts; for some the outcome (a digest, the engine chosen) instead of the option."""
    found = {"input": input_digest, "model": model_info.digest, "engine": engine, "precision": precision}
    return {name: found.get(name, getattr(spec, name)) for name in deciding(JobSpec)}


def kept_identity(journal: Journal) -> dict[str, Any]:
    """The identity that the job began with; options that its older outrider did not know have their defaults."""
    usual = {name: JobSpec.model_fields[name].get_default() for name in deciding(JobSpec)}
    kept: dict[str, Any] = journal.meta("identity") or {}
    return {name: value for name, value in usual.items() if value is not PydanticUndefined} | kept if kept else kept


def differences(kept: dict[str, Any], asked: dict[str, Any]) -> str:
    """The values that differ, each then and now, as part of a sentence; empty if none does."""
    different = [key for key in sorted(kept.keys() | asked.keys()) if kept.get(key) != asked.get(key)]
    return "; ".join(f"{key}: {_short(kept.get(key))} then, {_short(asked.get(key))} now" for key in different)


def check_same(kept: dict[str, Any], asked: dict[str, Any], what: str, directory: Path, retry_failed: bool = False) -> None:
    """Refuse to resume a job with another model, input or options. ``retry_failed``: ``retry`` has no --out to suggest."""
    if kept.get("model") != asked.get("model") and not is_of_this_kind(str(kept.get("model"))):
        raise JobChangedError(
            f"{directory} holds a job that was begun by an older outrider, which identified a model's weights "
            "otherwise: finish it with that version, or give another directory with --out"
        )
    if shown := differences(kept, asked):
        if retry_failed:
            raise JobChangedError(
                f"{directory} holds a job that was begun with {what} other than now ({shown}); run it as it was begun"
            )
        raise JobChangedError(
            f"{directory} holds a job that was begun with {what} other than now ({shown}); "
            "run it as it was begun, or give another directory with --out"
        )


def _short(value: Any) -> str:
    text = str(value).rpartition(":")[2]
    return f"{text[:12]}…" if len(text) == 64 else str(value)
