"""uvicorn's server, with our rules for idle connections and for stopping: clients that still wait get an error."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn

from outrider.runner.serve.connections import UNREAD_SECONDS, Connection, Idle

logger = logging.getLogger("outrider.serve")

# The time for writing refusals to open requests before uvicorn drops them.
LAST_SECONDS = 1.0
LOOK_SECONDS = 0.1
LET_GO_SECONDS = 0.5
SECONDS_BETWEEN_SENTENCES = 60.0


class HttpServer(uvicorn.Server):
    """On the first signal ``begin`` is called; shortly before ``timeout_graceful_shutdown`` is over, or on a second signal
    (``stopped_twice``), ``refuse``. ``stopped_before``: whether a signal came before uvicorn handled them. ``most``: the
    number of connections beyond which idle ones are closed.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        begin: Callable[[], None],
        refuse: Callable[[], None],
        stopped_before: Callable[[], bool] = lambda: False,
        most: int = 1 << 10,
    ) -> None:
        # uvicorn's default closes a connection 5 s after a response, just when clients that poll every 5 s ask again.
        config.timeout_keep_alive = int(UNREAD_SECONDS)
        super().__init__(config)
        self._idle = Idle(most)
        self._said: float | None = None
        self._letting_go: asyncio.Task[None] | None = None
        self._told_before = stopped_before
        self._begin = begin
        self._refuse = refuse
        self.stopped_twice = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. (uvicorn's handler drops open requests at a second SIGINT, and ignores a second SIGTERM.)"""
        if self.should_exit:
            self.stopped_twice = True
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        self._letting_go = asyncio.create_task(self._let_go())
        if self._told_before():
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._begin()
        if self._letting_go is not None:
            self._letting_go.cancel()
        refusing = asyncio.create_task(self._refuse_in_time())
        await super().shutdown(sockets)
        refusing.cancel()
        if self.force_exit:
            # uvicorn omits this if it is forced to exit, and logs a traceback.
            await self.lifespan.shutdown()

    async def _refuse_in_time(self) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() + (self.config.timeout_graceful_shutdown or 0) - LAST_SECONDS
        while not self.stopped_twice and loop.time() < latest:
            await asyncio.sleep(LOOK_SECONDS)
        self._refuse()
        await asyncio.sleep(LAST_SECONDS)
        self.force_exit = self.stopped_twice

    async def _let_go(self) -> None:
        """Close idle connections; uvicorn's own timeout does not cover those without a response yet."""
        loop = asyncio.get_running_loop()
        while True:
            self._idle.let_go(cast("set[Connection]", self.server_state.connections), loop.time())
            await asyncio.sleep(LET_GO_SECONDS)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log failed accepts at most once a minute: without free descriptors asyncio reports thousands a second."""
        if not str(context.get("message")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif self._said is None or loop.time() - self._said >= SECONDS_BETWEEN_SENTENCES:
            self._said = loop.time()
            why = getattr(context.get("exception"), "strerror", None)
            logger.error("no further connection can be taken: %s; those that are open go on (see ulimit -n)", why)
