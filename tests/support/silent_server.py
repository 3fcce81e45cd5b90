"""A server that sends its model's process no messages."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any
from unittest import mock


def silent_server(send: Callable[[dict[str, Any]], object]) -> mock.Mock:
    """The process's end of the link. ``receive`` waits: a bare mock would answer at once, and the thread that reads the
    messages would take a core for as long as the tests run."""
    return mock.Mock(send=send, receive=SimpleQueue[dict[str, Any]]().get)
