"""uvicorn, which connections it keeps, and how it ends: whoever still waits for an answer hears that it is stopped."""

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

# What is refused is written in this time, before uvicorn gives up what is left.
LAST_SECONDS = 1.0
LOOK_SECONDS = 0.1
LET_GO_SECONDS = 0.5
SECONDS_BETWEEN_SENTENCES = 60.0


class HttpServer(uvicorn.Server):
    """``begin`` is called when it was told to stop, ``refuse`` when open requests have had their time: the config's
    ``timeout_graceful_shutdown``, or until it is ``told_again``. ``told_before``: by a signal that came before uvicorn
    looked for any. More than ``most`` connections are kept only where all are answered.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        begin: Callable[[], None],
        refuse: Callable[[], None],
        told_before: Callable[[], bool] = lambda: False,
        most: int = 1 << 10,
    ) -> None:
        # uvicorn itself lets go of one five seconds after an answer, as clients that ask every five seconds ask again.
        config.timeout_keep_alive = int(UNREAD_SECONDS)
        super().__init__(config)
        self._idle = Idle(most)
        self._said: float | None = None
        self._letting_go: asyncio.Task[None] | None = None
        self._told_before = told_before
        self._begin = begin
        self._refuse = refuse
        self.told_again = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of a signal. uvicorn's own would let go of open requests at a second SIGINT, and wait at a second SIGTERM."""
        if self.should_exit:
            self.told_again = True
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._stumbled)
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
            # uvicorn leaves it out then, and tells at length that it was cancelled.
            await self.lifespan.shutdown()

    async def _refuse_in_time(self) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() + (self.config.timeout_graceful_shutdown or 0) - LAST_SECONDS
        while not self.told_again and loop.time() < latest:
            await asyncio.sleep(LOOK_SECONDS)
        self._refuse()
        await asyncio.sleep(LAST_SECONDS)
        self.force_exit = self.told_again

    async def _let_go(self) -> None:
        """uvicorn itself lets go of those alone that have had an answer, and much later."""
        loop = asyncio.get_running_loop()
        while True:
            self._idle.let_go(cast("set[Connection]", self.server_state.connections), loop.time())
            await asyncio.sleep(LET_GO_SECONDS)

    def _stumbled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio tells of each connection that finds no open file left, thousands a second, at length."""
        if not str(context.get("message")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif self._said is None or loop.time() - self._said >= SECONDS_BETWEEN_SENTENCES:
            self._said = loop.time()
            why = getattr(context.get("exception"), "strerror", None)
            logger.error("no further connection can be taken: %s; those that are open go on (see ulimit -n)", why)
