"""A record as a line of a file, the id that it has of its row, and what is written of a row that has failed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

# The codes of error records: the row is wrong, in OpenAI's words too long for the model, or outrider is wrong.
INVALID, TOO_LONG_FOR_MODEL, INTERNAL = "invalid_request", "context_length_exceeded", "internal_error"


def error_line(row: int, custom_id: str, code: str, message: str) -> str:
    # A path may hold bytes that are no UTF-8, which no file of text can.
    error = {"code": code, "message": message.encode(errors="backslashreplace").decode()}
    return as_line({"id": f"batch_req_{row_id(row, custom_id)}", "custom_id": custom_id, "response": None, "error": error})


def row_id(row: int, custom_id: str) -> str:
    return hashlib.blake2b(f"{row}:{custom_id}".encode(), digest_size=12).hexdigest()


def as_line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)
