"""Closes idle connections, so that new ones find a free file descriptor."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Any, Protocol

# A connection without a request for this long is closed; a client has this long to send a request's head.
IDLE_SECONDS = 30.0
# Then it is aborted, even if the client has not read the last response to its end.
UNREAD_SECONDS = 300.0
# File descriptors reckoned per connection: its own, a file that is read or written, and a reserve for everything else.
OPEN_FILES_EACH = 4
MOST_FILES = 1 << 16


class Connection(Protocol):
    """The attributes of uvicorn's protocols that are used."""

    @property
    def cycle(self) -> Any: ...

    @property
    def transport(self) -> Any: ...


def raise_open_files() -> int:
    """Raise the limit of open files as far as allowed, and return it. The usual 1,024 are few for idle connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


class Idle:
    """Since when connections wait for a request. Beyond ``most`` connections idle ones are closed at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        # By connection: its last request and the time. Another request since then shows that it was not idle in between.
        self._since: dict[Connection, tuple[Any, float]] = {}

    def let_go(self, connections: Iterable[Connection], now: float) -> None:
        """Close connections that have been idle for too long, and beyond ``most`` those that have been so the longest.

        One that is seen idle for the first time is kept, since it may be sending its first request.
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
