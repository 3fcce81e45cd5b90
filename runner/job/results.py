"""Results in OpenAI's batch format: a record per row, and files of them in input order that are replaced atomically.

Records are the same in two runs of a job: ids are derived from the row, and "created" is 0.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from outrider.runner.job.carried_columns import CarriedReader, with_carried
from outrider.runner.job.journal import DONE, FAILED, Journal, StoredRow
from outrider.runner.job.record_line import as_line, error_line, row_id
from outrider.workers.constraints.tool_forms import MISTRAL, calls_of
from outrider.workers.errors import JobError, OutriderError, UsageError, unwritable
from outrider.workers.messages import Logprobs, RowResult
from outrider.workers.models.reasoning import Split, split

RESULTS, ERRORS = "results.jsonl", "errors.jsonl"
# A writer locks its temporary file right after it makes it: one this old without a lock was left by a writer that died.
LEFTOVER_SECONDS = 60.0


def result_record(row: StoredRow, samples: Sequence[RowResult], model: str) -> str:
    """The record of a finished row; ``samples``: its answers in the order of their numbers."""
    tokens = sum(len(sample.tokens) for sample in samples)
    known_as = row_id(row.row, row.custom_id)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if row.kind == 'chat' else 'cmpl'}-{known_as}",
        "object": "chat.completion" if row.kind == "chat" else "text_completion",
        "created": 0,
        "model": model,
        "choices": [_choice(row, index, sample) for index, sample in enumerate(samples)],
        "usage": {
            "prompt_tokens": len(row.prompt),
            "completion_tokens": tokens,
            "total_tokens": len(row.prompt) + tokens,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{known_as}", "body": body}
    return as_line({"id": f"batch_req_{known_as}", "custom_id": row.custom_id, "response": response, "error": None})


def error_record(row: StoredRow, code: str, message: str) -> str:
    return error_line(row.row, row.custom_id, code, message)


def message_of(record: str) -> str:
    """The message of an error record."""
    message: str = json.loads(record)["error"]["message"]
    return message


def _choice(row: StoredRow, index: int, sample: RowResult) -> dict[str, Any]:
    reason, answer = sample.finish_reason, dict[str, Any]()
    if row.kind == "chat":
        answer["message"] = _message(row, index, sample.text)
        # As OpenAI does: with a named function the finish_reason stays "stop".
        if "tool_calls" in answer["message"] and reason == "stop" and row.request["tools"][2] != "named":
            reason = "tool_calls"
    else:
        answer["text"] = _text(sample)
    return {"index": index, **answer, "logprobs": _logprobs(row.kind, sample), "finish_reason": reason}


def _message(row: StoredRow, index: int, text: str) -> dict[str, Any]:
    """The message of a chat's answer: reasoning, content and tool calls taken apart."""
    reasoning, content = split(text, *row.request["reasoning"]) if "reasoning" in row.request else Split(None, text)
    message: dict[str, Any] = (
        {"role": "assistant"}
        if reasoning is None
        else {
            "role": "assistant",
            "reasoning_content": reasoning,
        }
    )
    kind, names, _ = row.request.get("tools", ("", (), ""))
    rest, calls = calls_of(content, kind, names) if kind else (content, [])
    if not calls:
        return {**message, "content": content}
    made = [
        {
            "id": _call_id(row, index, place, kind),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(calls)
    ]
    return {**message, "content": rest or None, "tool_calls": made}


def _call_id(row: StoredRow, index: int, place: int, kind: str) -> str:
    """The same in each run of the job. The prompt is hashed in, so that ids differ between turns of a conversation."""
    known = f"{row.row}:{row.custom_id}:{index}:{place}:{','.join(map(str, row.prompt))}"
    digest = hashlib.blake2b(known.encode(), digest_size=12).hexdigest()
    # Mistral's templates refuse ids of other lengths.
    return digest[:9] if kind == MISTRAL else f"call_{digest}"


def _text(sample: RowResult) -> str:
    return sample.text if sample.echo is None else sample.echo.text + sample.text


def _logprobs(kind: str, sample: RowResult) -> dict[str, Any] | None:
    if sample.logprobs is None:
        return None
    logprobs = sample.logprobs
    if kind == "chat":
        rows = zip(sample.tokens, logprobs.chosen, logprobs.likeliest, strict=True)
        content = [
            {
                **_chat_token(logprobs, token, chosen),
                "top_logprobs": [_chat_token(logprobs, other, value) for other, value in likeliest],
            }
            for token, chosen, likeliest in rows
        ]
        return {"content": content, "refusal": None}
    written = _completion_logprobs(sample.tokens, logprobs)
    if sample.echo is None or sample.echo.logprobs is None:
        return written
    prompt = _completion_logprobs(sample.echo.tokens, sample.echo.logprobs)
    # The first token has no probability, since nothing precedes it.
    prompt["token_logprobs"][0] = prompt["top_logprobs"][0] = None
    written["text_offset"] = [len(sample.echo.text) + offset for offset in written["text_offset"]]
    return {key: prompt[key] + values for key, values in written.items()}


def _completion_logprobs(tokens: Sequence[int], logprobs: Logprobs) -> dict[str, list[Any]]:
    return {
        "text_offset": list(logprobs.offsets),
        "tokens": [_completion_token(logprobs, token) for token in tokens],
        "token_logprobs": list(logprobs.chosen),
        # The generated token is always among them, so there may be one more than was asked for.
        "top_logprobs": [
            _by_text(logprobs, (*likeliest, (token, chosen)))
            for token, chosen, likeliest in zip(tokens, logprobs.chosen, logprobs.likeliest, strict=True)
        ],
    }


def _by_text(logprobs: Logprobs, values: Iterable[tuple[int, float]]) -> dict[str, float]:
    """Log-probabilities by the tokens' texts; of tokens with the same text the likelier."""
    named: dict[str, float] = {}
    for token, value in values:
        named.setdefault(_completion_token(logprobs, token), value)
    return named


def _chat_token(logprobs: Logprobs, token: int, value: float) -> dict[str, Any]:
    piece = logprobs.token_bytes[token]
    return {"token": _readable(piece, ""), "logprob": value, "bytes": list(piece)}


def _completion_token(logprobs: Logprobs, token: int) -> str:
    return _readable(logprobs.token_bytes[token], "bytes:")


def _readable(piece: bytes, prefix: str) -> str:
    """A token's text; for a part of a UTF-8 character its bytes in hexadecimal, as OpenAI writes them."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in piece)


def write_results(journal: Journal, directory: Path) -> tuple[Path, Path]:
    """Write results.jsonl and errors.jsonl, each atomically."""
    results, errors = directory / RESULTS, directory / ERRORS
    write_atomically(results, _lines(journal, DONE))
    write_atomically(errors, _lines(journal, FAILED))
    return results, errors


def _lines(journal: Journal, state: int) -> Iterator[str]:
    carried = CarriedReader(journal)
    return (with_carried(record, carried.of(row)) for row, record in journal.whole_records(state))


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Replace a file: a reader sees the old one or the new one, also after a power failure."""
    with atomically(path) as stream:
        for line in lines:
            stream.write(line.encode() + b"\n")


@contextmanager
def atomically(path: Path, kind: type[OutriderError] = JobError) -> Iterator[IO[bytes]]:
    """A stream to a temporary file that replaces ``path`` when the block ends without an error."""
    check_file_or_nothing(path, kind)
    try:
        _remove_leftovers(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as stream:
                # The lock shows other writers that this one lives (``_remove_leftovers``). Where the file system has no
                # locks, they leave the file alone.
                with suppress(OSError):
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise unwritable(error, f"{path} cannot be written: {error.strerror}", kind) from None


def check_file_or_nothing(path: Path, kind: type[OutriderError] = UsageError) -> None:
    """Refuse a directory, pipe, socket or device where a file is to be written."""
    try:
        found = path.stat().st_mode
    except OSError:  # missing, or an error that writing will raise
        return
    if not stat.S_ISREG(found):
        what = "a directory" if stat.S_ISDIR(found) else "a pipe, a socket or a device"
        raise kind(f"{path} is {what}, and a file of that name is to be written: move it away")


def sync_folder(folder: Path) -> None:
    """fsync a directory, so that files that were created or renamed in it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of this file's writers that were killed."""
    leftover = re.compile(rf"\.{re.escape(path.name)}\.\d+(-[0-9a-f]+)?")
    for each in list(path.parent.iterdir()):
        if not leftover.fullmatch(each.name):
            continue
        with suppress(OSError), each.open("r+b") as left:
            # A new, empty file may not be locked yet.
            if os.fstat(left.fileno()).st_size or time.time() - os.fstat(left.fileno()).st_mtime > LEFTOVER_SECONDS:
                fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                each.unlink()
