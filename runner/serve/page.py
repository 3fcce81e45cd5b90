"""The page at ``/``: an empty shell without authentication, and its data, for which the printed link has a token."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from outrider.runner.serve.auth import report_signature
from outrider.runner.serve.service import Service

MOST_SHOWN = 100
REPORT_HEADERS = {
    "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@cache
def shell() -> tuple[str, dict[str, str]]:
    """The page, and headers that allow only its own script and style."""
    folder = Path(__file__).with_name("page_parts")
    style, script = (folder / "page.css").read_text(), (folder / "page.js").read_text()
    page = (folder / "page.html").read_text().replace("/*style*/", style).replace("/*script*/", script)
    policy = f"default-src 'none'; connect-src 'self'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    headers = {
        "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return page, headers


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def data(service: Service, keys: Sequence[str]) -> dict[str, Any]:
    """The newest batches and the models, as the page's script reads them."""
    found = service.list_batches(None, MOST_SHOWN)
    return {
        "models": [{"name": name, "state": state} for name, state in service.runner.state().items()],
        "batches": [_batch(service, batch, keys) for batch in found["data"]],
        "more": found["has_more"],
    }


def _batch(service: Service, batch: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    counts, pace = batch["request_counts"], service.pace(batch["id"])
    shown = {
        "id": batch["id"],
        "model": batch["model"],
        "status": batch["status"],
        "created_at": batch["created_at"],
        "total": counts["total"],
        "completed": counts["completed"],
        "failed": counts["failed"],
        "metadata": batch["metadata"] or {},
        "errors": [_said(entry) for entry in (batch["errors"] or {"data": []})["data"]][:3],
        "tokens_per_second": None,
        "seconds_left": None,
        "acceptance": None,
        "report": None,
    }
    if pace is not None and batch["status"] == "in_progress":
        rows, tokens = pace.speed()
        left = counts["total"] - counts["completed"] - counts["failed"]
        shown["tokens_per_second"] = round(tokens, 1)
        shown["seconds_left"] = round(left / rows) if rows else None
        if pace.progress.proposed:
            shown["acceptance"] = round(pace.progress.accepted / pace.progress.proposed, 3)
    if service.has_report(batch["id"]):
        shown["report"] = f"/page/reports/{batch['id']}?sign={report_signature(keys, batch['id'])}"
    return shown


def _said(entry: dict[str, Any]) -> str:
    return entry["message"] if entry["line"] is None else f"line {entry['line']}: {entry['message']}"
