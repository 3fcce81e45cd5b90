"""Records as lines of results.jsonl and errors.jsonl: error records, ids and JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Any

# Codes of error records: the row is wrong; it is too long for the model (OpenAI's code); a fault of outrider.
INVALID, TOO_LONG_FOR_MODEL, INTERNAL = "invalid_request", "context_length_exceeded", "internal_error"


def error_line(row: int, custom_id: str, code: str, message: str) -> str:
    # A path in the message may hold bytes that are not UTF-8.
    error = {"code": code, "message": message.encode(errors="backslashreplace").decode()}
    return as_line({"id": f"batch_req_{row_id(row, custom_id)}", "custom_id": custom_id, "response": None, "error": error})


def row_id(row: int, custom_id: str) -> str:
    return hashlib.blake2b(f"{row}:{custom_id}".encode(), digest_size=12).hexdigest()


def as_line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)
