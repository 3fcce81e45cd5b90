"""Each answer has an id of its own, under which OpenAI's clients show it (``_request_id``) and people speak of it."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"


class RequestIds:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # In the scope, since the answer to an unforeseen exception is written outside of this middleware.
        scope[HEADER] = name = f"req_{secrets.token_hex(16)}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER.encode(), name.encode())]}
            await send(message)

        await self._app(scope, receive, named)
