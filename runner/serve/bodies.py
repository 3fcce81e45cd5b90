"""A request's body, piece by piece as it comes, until the server is being stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from threading import Event

from starlette.requests import Request

from outrider.runner.serve.api_errors import SERVER, ApiError
from outrider.runner.serve.model_hosts import CLOSING

# Well within the time in which refusals are written (`http_server.LAST_SECONDS`).
LOOK_SECONDS = 0.2


async def pieces(request: Request, stopping: Event) -> AsyncGenerator[bytes, None]:
    """Whoever is still sending then hears so, as those do who wait for an answer."""
    stream = request.stream()
    coming: asyncio.Future[bytes | None] | None = None
    try:
        while not stopping.is_set():
            if coming is None:
                coming = asyncio.ensure_future(anext(stream, None))
            if not (await asyncio.wait((coming,), timeout=LOOK_SECONDS))[0]:
                continue
            some, coming = coming.result(), None
            if some is None:
                return
            yield some
    finally:
        if coming is not None:
            coming.cancel()
    raise ApiError(CLOSING.status, CLOSING.sentence, kind=SERVER)
