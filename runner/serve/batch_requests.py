"""The body of a request to create a batch, strictly checked, and the model that the batch's input names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from outrider.runner.job.source import Source
from outrider.runner.printable import printable
from outrider.runner.serve.api_errors import ApiError, unsupported
from outrider.runner.validation_errors import short, shown
from outrider.workers.errors import UsageError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
SECONDS = {"h": 3600, "d": 86400}
LONGEST_WINDOW = 366 * 86400
MOST_PAIRS, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512
KEYS = ("input_file_id", "endpoint", "completion_window", "metadata")
# Lines that are looked at for the first row; blank lines before it are errors that admission reports.
LINES_LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class BatchRequest:
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None

    @property
    def seconds(self) -> int:
        return window_seconds(self.completion_window)


def parse(body: object) -> BatchRequest:
    if not isinstance(body, dict):
        raise ApiError(400, "send an object (application/json)")
    if unknown := sorted(key for key in body.keys() - set(KEYS) if body[key] is not None):
        raise unsupported(unknown[0])
    for key in KEYS[:3]:
        if not isinstance(body.get(key), str):
            missing = key not in body
            said = f'"{key}" is missing' if missing else f'"{key}" must be a text, got {shown(body[key])}'
            raise ApiError(400, said, key, "missing_required_parameter" if missing else "invalid_type")
    if body["endpoint"] not in ENDPOINTS:
        said = f'"endpoint" must be one of {", ".join(ENDPOINTS)}, got {shown(body["endpoint"])}'
        raise ApiError(400, said, "endpoint", "invalid_endpoint")
    window_seconds(body["completion_window"])
    metadata = _metadata(body.get("metadata"))
    return BatchRequest(body["input_file_id"], body["endpoint"], body["completion_window"], metadata)


def window_seconds(window: str) -> int:
    """The seconds of a completion window. OpenAI accepts "24h" only; here any hours or days are accepted."""
    found = WINDOW.fullmatch(window)
    seconds = int(found[1]) * SECONDS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_WINDOW:
        said = f'"completion_window" must be hours or days such as "24h" or "7d", up to 366d, got {shown(window)}'
        raise ApiError(400, said, "completion_window", "invalid_completion_window")
    return seconds


def _metadata(given: object) -> dict[str, str] | None:
    if given is None:
        return None
    pairs = given.items() if isinstance(given, dict) else [("", given)]
    fitting = {
        key: value
        for key, value in pairs
        if isinstance(value, str) and 0 < len(key) <= LONGEST_KEY and len(value) <= LONGEST_VALUE
    }
    if len(fitting) < len(pairs) or len(pairs) > MOST_PAIRS:
        said = (
            f'"metadata" must hold at most {MOST_PAIRS} texts of at most {LONGEST_VALUE} characters, '
            f"under names of at most {LONGEST_KEY}"
        )
        raise ApiError(400, said, "metadata", "invalid_metadata")
    return fitting


def error_entry(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """An entry of a batch's ``errors.data``."""
    return {"code": code, "message": printable(message), "param": param, "line": line}


def model_of(path: Path, models: Sequence[str]) -> tuple[str | None, Mapping[str, Any] | None]:
    """The model that the first row names, or None and an error entry if it is not served.

    If the first row cannot be read, the first model is taken; admission will report the error.
    """
    line, first = _first_row(path)
    body = first.get("body") if isinstance(first, dict) else None
    asked = body.get("model") if isinstance(body, dict) else None
    if isinstance(asked, str) and asked in models:
        return asked, None
    if isinstance(asked, str):
        said = f'the model "{short(asked)}" is not served here; there is {", ".join(models)}'
        return None, error_entry("model_not_found", said, line, "body.model")
    if isinstance(body, dict) and asked is None and len(models) > 1:
        said = f'"model" is missing; there is {", ".join(models)}'
        return None, error_entry("missing_required_parameter", said, line, "body.model")
    return models[0], None


def _first_row(path: Path) -> tuple[int, Any]:
    lines = Source(path).lines()
    try:
        for number, line in enumerate(islice(lines, LINES_LOOKED_AT), start=1):
            if line is not None and line.strip():
                return number, json.loads(line)
    except (UsageError, ValueError, RecursionError):
        pass
    return 1, None
