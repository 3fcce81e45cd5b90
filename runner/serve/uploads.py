"""Uploads of files, written to the data directory as they arrive, and the deletion of uploaded files."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool

from outrider.runner.job.results import sync_folder
from outrider.runner.serve.api_errors import ApiError, unsupported
from outrider.runner.serve.names import FILE, Folders, new_file_id
from outrider.runner.serve.store import File, Store
from outrider.runner.validation_errors import short
from outrider.workers.errors import JobError

PURPOSE = "batch"
# The bytes of a form's other fields and of its parts' headers together.
MOST_FIELD_BYTES = 16 << 10
# What the parser gets at a time, in a thread.
AT_ONCE = 64 << 10
UNFINISHED = ".upload-"
# Transfer encodings that leave the content as it is.
PLAIN = (b"", b"7bit", b"8bit", b"binary")
# `filename*`, a name that is not ASCII, which the parser ignores.
EXTENDED_NAME = re.compile(rb";\s*filename\*\s*=\s*\"?(utf-8|iso-8859-1)'[^'\"]*'([^;\"\s]*)", re.IGNORECASE)
# Errors in a form are reported to the client, not logged.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)

logger = logging.getLogger("outrider.serve")


async def receive(content_type: str, stream: AsyncIterator[bytes], store: Store, folders: Folders, most: int) -> File:
    """Take a form with a ``file`` and its ``purpose``, and keep the file."""
    kind, options = parse_options_header(content_type.encode("latin-1"))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise ApiError(400, 'send a form (multipart/form-data) with "file" and "purpose"', "file")
    name = new_file_id()
    temporary = folders.files / f"{UNFINISHED}{name}"
    try:
        with await run_in_threadpool(temporary.open, "xb") as target:
            form = _Form(options[b"boundary"], target, most)
            async for some in stream:
                for first in range(0, len(some), AT_ONCE):
                    await run_in_threadpool(form.feed, some[first : first + AT_ONCE])
            form.end()
            await run_in_threadpool(os.fsync, target.fileno())
        return await run_in_threadpool(_keep, temporary, form, name, store, folders)
    except FormParserError as error:
        raise ApiError(400, f"the form cannot be read: {error}", "file") from None
    except OSError as error:
        raise ApiError(507, f"the file cannot be kept: {error.strerror}", "file", "no_space", "server_error") from None
    finally:
        temporary.unlink(missing_ok=True)


def _keep(temporary: Path, form: _Form, name: str, store: Store, folders: Folders) -> File:
    """Store the file's entry, then rename the file; after a kill in between ``sweep`` finishes the upload."""
    file = File(name, int(time.time()), form.size, form.filename, PURPOSE)
    sync_folder(folders.files)
    store.add_file(file)
    try:
        temporary.replace(folders.file(name))
        sync_folder(folders.files)
    except OSError:
        delete(name, store, folders)
        raise
    return file


def delete(name: str, store: Store, folders: Folders) -> None:
    """Rename the file back to its temporary name, then delete its entry and the file; ``sweep`` finishes after a kill."""
    path, temporary = folders.file(name), folders.files / f"{UNFINISHED}{name}"
    with suppress(FileNotFoundError):
        path.replace(temporary)
        sync_folder(folders.files)
    try:
        store.remove_file(name)
    except JobError:
        with suppress(FileNotFoundError):
            temporary.replace(path)
        raise
    temporary.unlink(missing_ok=True)


def sweep(store: Store, folders: Folders) -> None:
    """Finish uploads and deletions that a killed server left half done; other files stay."""
    known, unknown = store.file_ids(), list[str]()
    for path in list(folders.files.iterdir()):
        name = path.name.removeprefix(UNFINISHED)
        if not FILE.fullmatch(name) or path.is_symlink() or not path.is_file():
            continue
        if path.name == name:
            unknown += [] if name in known else [name]
        elif name in known:
            path.replace(folders.file(name))
        else:
            path.unlink()
    if unknown:
        said = "%s holds files that %s does not know (%d, such as %s): put back a copy of it that does, or remove them"
        logger.warning(said, folders.files, store.path, len(unknown), min(unknown))


class _Form:
    """The parser's callbacks: the bytes of ``file`` go to the target, ``purpose`` is kept."""

    def __init__(self, boundary: bytes, target: IO[bytes], most: int) -> None:
        self.size = 0
        self.filename = ""
        self._target = target
        self._most = most
        self._fields: dict[str, bytes] = {}
        self._name = ""
        self._header, self._value, self._headers = b"", b"", dict[bytes, bytes]()
        self._small = 0
        self._has_file = self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_end": self._end,
            },
        )

    def feed(self, some: bytes) -> None:
        self._parser.write(some)

    def end(self) -> None:
        """Check the form once it is complete."""
        self._parser.finalize()
        if not self._ended:
            raise ApiError(400, "the form ends in the middle; send it anew", "file")
        if unknown := sorted(self._fields.keys() - {"purpose"}):
            raise unsupported(unknown[0])
        if not self._has_file:
            raise ApiError(400, '"file" is missing', "file", "missing_required_parameter")
        if "purpose" not in self._fields:
            said = f'"purpose" is missing; send "{PURPOSE}" beside the file'
            raise ApiError(400, said, "purpose", "missing_required_parameter")
        purpose = self._fields["purpose"].decode(errors="replace")
        if purpose != PURPOSE:
            raise ApiError(400, f'"purpose" must be "{PURPOSE}", got "{short(purpose)}"', "purpose", "invalid_purpose")
        if not self.size:
            raise ApiError(400, "the file is empty", "file", "empty_file")

    def _part_begins(self) -> None:
        self._headers, self._header, self._value = {}, b"", b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += self._counted(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._counted(data[start:end])

    def _header_ends(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def _headers_end(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"")
        _, options = parse_options_header(disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if not self._name:
            said = 'a part of the form has no name; each needs "Content-Disposition: form-data" with a name'
            raise ApiError(400, said, "file")
        encoding = self._headers.get(b"content-transfer-encoding", b"").strip().lower()
        if encoding not in PLAIN:
            given, part = short(encoding.decode(errors="replace")), short(self._name)
            said = f'"Content-Transfer-Encoding: {given}" is not supported; send what is in "{part}" as it is'
            raise ApiError(400, said, part)
        if self._name in self._fields or (self._name == "file" and self._has_file):
            part = short(self._name)
            raise ApiError(400, f'the form holds several parts called "{part}"; send one at a time', part)
        if self._name != "file":
            self._fields[self._name] = b""
            return
        self._has_file = True
        # Only shown by the API; never used as a path.
        self.filename = Path(_filename(disposition, options)).name or "input.jsonl"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name != "file":
            self._fields[self._name] += self._counted(data[start:end])
            return
        self.size += end - start
        if self.size > self._most:
            said = f"the file is larger than the {self._most:,} bytes that this server takes; see --most-upload"
            raise ApiError(413, said, "file", "file_too_large")
        self._target.write(memoryview(data)[start:end])

    def _end(self) -> None:
        self._ended = True

    def _counted(self, some: bytes) -> bytes:
        self._small += len(some)
        if self._small > MOST_FIELD_BYTES:
            raise ApiError(400, "the form's fields are too long", "purpose")
        return some


def _filename(disposition: bytes, options: dict[bytes, bytes]) -> str:
    if b"filename" not in options and (found := EXTENDED_NAME.search(disposition)):
        return unquote_to_bytes(found[2]).decode(found[1].decode(), errors="replace")
    return options.get(b"filename", b"").decode(errors="replace")
