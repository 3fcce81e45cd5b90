"""A request's body, in pieces as they arrive; an error once the server is being stopped or the client has stalled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from threading import Event

from starlette.requests import Request

from outrider.runner.serve.api_errors import SERVER, ApiError
from outrider.runner.serve.model_hosts import CLOSING

# Well below the time in which refusals are written (`http_server.LAST_SECONDS`).
LOOK_SECONDS = 0.2
# A client that sends nothing for this long is refused.
STALLED_SECONDS = 60.0


async def pieces(request: Request, stopping: Event) -> AsyncGenerator[bytes, None]:
    """The pieces of the body."""
    stream = request.stream()
    coming: asyncio.Future[bytes | None] | None = None
    loop, since = asyncio.get_running_loop(), 0.0
    try:
        while not stopping.is_set():
            if coming is None:
                coming, since = asyncio.ensure_future(anext(stream, None)), loop.time()
            if not (await asyncio.wait((coming,), timeout=LOOK_SECONDS))[0]:
                if loop.time() - since > STALLED_SECONDS:
                    raise ApiError(408, f"no part of the request has arrived for {STALLED_SECONDS:.0f} s; send it again")
                continue
            some, coming = coming.result(), None
            if some is None:
                return
            yield some
    finally:
        if coming is not None:
            coming.cancel()
    raise ApiError(CLOSING.status, CLOSING.sentence, kind=SERVER)
