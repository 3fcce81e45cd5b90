"""A batch's record in the store: how it begins, and its changes of status. ``now`` is in seconds since the epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.runner.serve.batch_requests import BatchRequest
from outrider.runner.serve.store import ERRORS, OUTPUT, Batch, File

# The keys of a batch's files in the API.
FILE_IDS = {OUTPUT: "output_file_id", ERRORS: "error_file_id"}
Change = Callable[[Batch], None]


def begun(name: str, asked: BatchRequest, now: int) -> dict[str, Any]:
    never = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": name,
        "object": "batch",
        "endpoint": asked.endpoint,
        "model": None,
        "errors": None,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + asked.seconds,
        **{f"{status}_at": None for status in never},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": None,
        "metadata": asked.metadata,
    }


def has_rows(batch: Batch) -> bool:
    """Whether rows of the batch may be done."""
    return batch.shown["in_progress_at"] is not None


def in_progress(rows: int, now: float) -> Change:
    def change(batch: Batch) -> None:
        batch.status = "in_progress"
        batch.shown["in_progress_at"] = int(now)
        batch.shown["request_counts"]["total"] = rows

    return change


def ending(ending: str, now: float, status: str | None = None) -> Change:
    """``ending``: the status that the batch will have once its files are written; ``status``: the one until then."""

    def change(batch: Batch) -> None:
        batch.ending = ending
        if status is not None:
            batch.status = status
            batch.shown[f"{status}_at"] = int(now)

    return change


def failed(errors: Sequence[dict[str, Any]], now: float) -> Change:
    """The batch has failed, and has no files."""

    def change(batch: Batch) -> None:
        batch.status = batch.ending = "failed"
        batch.shown["failed_at"] = int(now)
        batch.shown["errors"] = error_list(errors)

    return change


def broken(error: dict[str, Any]) -> Change:
    """The batch will have failed once its files are written."""

    def change(batch: Batch) -> None:
        batch.ending = "failed"
        batch.shown["errors"] = error_list([error])

    return change


def ended(
    ending: str,
    now: float,
    counts: dict[str, int] | None,
    usage: dict[str, Any] | None,
    files: Sequence[File],
    lost: dict[str, Any] | None,
) -> Change:
    """The batch has ended, with ``files``. ``lost``: an error entry about rows that stand in no file."""

    def change(batch: Batch) -> None:
        batch.status = ending
        batch.shown[f"{ending}_at"] = int(now)
        if counts is not None:
            batch.shown["request_counts"] = counts
        batch.shown["usage"] = usage
        if lost is not None and has_rows(batch):
            batch.shown["errors"] = error_list([lost])
        for file in files:
            batch.shown[FILE_IDS[file.purpose]] = file.id

    return change


def counted(done: int, failed: int) -> Change:
    def change(batch: Batch) -> None:
        batch.shown["request_counts"] |= {"completed": done, "failed": failed}

    return change


def error_list(errors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(errors)}
