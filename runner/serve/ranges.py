"""Files as responses, whole or in the parts that a Range header asks for."""

from __future__ import annotations

import re
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import FileResponse, JSONResponse
from starlette.types import Receive, Scope, Send

from outrider.runner.serve.api_errors import ApiError

ONE = r"[ \t]*(?:\d{1,18}-\d{0,18}|-\d{1,18})[ \t]*"
RANGES = re.compile(rf"bytes=({ONE}(?:,{ONE})*)", re.ASCII | re.IGNORECASE)


class RangedFile(FileResponse):
    """A file response. A Range header that cannot be parsed is ignored (RFC 9110): the response is the whole file."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        asked = headers.get("range")
        size = Path(self.path).stat().st_size
        starts = None if asked is None else _starts(asked, size)
        if starts and min(starts) >= size and "if-range" not in headers:
            said = f"the file has {size:,} bytes, and the range {asked} begins behind them"
            refusal = ApiError(416, said, "Range", "range_not_satisfiable").body()
            await JSONResponse(refusal, 416, {"Content-Range": f"bytes */{size}"})(scope, receive, send)
            return
        # Of several ranges some may begin after the end: Starlette would refuse them all, so the header is dropped.
        if asked is not None and (not starts or max(starts) >= size):
            scope = {**scope, "headers": [(name, value) for name, value in scope["headers"] if name != b"range"]}
        await super().__call__(scope, receive, send)


def _starts(asked: str, size: int) -> list[int] | None:
    """The first bytes of the ranges; None if the header cannot be parsed, or a range ends before it begins."""
    if not (found := RANGES.fullmatch(asked.strip())):
        return None
    starts = []
    for each in found[1].split(","):
        first, _, last = each.strip().partition("-")
        if first and last and int(first) > int(last):
            return None
        starts.append(int(first) if first else max(0, size - int(last)))
    return starts
