"""uvicorn, and how it ends: whoever still waits for an answer hears that the server is being stopped."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

# What is refused is written in this time, before uvicorn gives up what is left.
LAST_SECONDS = 1.0
LOOK_SECONDS = 0.1


class HttpServer(uvicorn.Server):
    """``begin`` is called when it was told to stop, ``refuse`` when open requests have had their time: the config's
    ``timeout_graceful_shutdown``, or until it is ``told_again``. ``told_before``: by a signal that came before uvicorn
    looked for any.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        begin: Callable[[], None],
        refuse: Callable[[], None],
        told_before: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(config)
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
        await super().startup(sockets)
        if self._told_before():
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._begin()
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
