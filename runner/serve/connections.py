"""Connections that nobody asks anything through: they are let go, so that whoever asks finds one of the open files left."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Any, Protocol

# A request has begun to be answered once its head is whole, so slow ones have so long for that.
IDLE_SECONDS = 30.0
# What it has been sent is lost then, where it does not read it.
UNREAD_SECONDS = 300.0
# Beside a connection stands a file that is written or read, and then there is all else that is open.
OPEN_FILES_EACH = 4
MOST_FILES = 1 << 16


class Connection(Protocol):
    """What of uvicorn's protocols is looked at."""

    @property
    def cycle(self) -> Any: ...

    @property
    def transport(self) -> Any: ...


def raise_open_files() -> int:
    """As many as this process may give itself, which are told. Of 1,024, the usual number, idle connections take all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


class Idle:
    """Which connections wait for a request, and since when. ``most`` connections are kept where some of them are idle."""

    def __init__(self, most: int) -> None:
        self._most = most
        # With what was asked last: who asks again and again is seen between its requests, and is not idle.
        self._since: dict[Connection, tuple[Any, float]] = {}

    def let_go(self, connections: Iterable[Connection], now: float) -> None:
        """Of those that have been idle for too long; of more than ``most`` those that have been so for longest, too.

        One that is seen idle for the first time may be amid its first request.
        """
        all_ = list(connections)
        idle = [each for each in all_ if each.cycle is None or each.cycle.response_complete]
        known = [each for each in idle if each in self._since and self._since[each][0] is each.cycle]
        before = {each: self._since[each] for each in known}
        self._since = {each: before.get(each, (each.cycle, now)) for each in idle}
        known.sort(key=lambda each: self._since[each][1])
        over = max(0, len(all_) - self._most)
        for place, each in enumerate(known):
            seconds = now - self._since[each][1]
            if seconds >= UNREAD_SECONDS:
                each.transport.abort()
            elif place < over or seconds >= IDLE_SECONDS:
                each.transport.close()
