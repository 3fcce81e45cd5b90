"""Whether a server of Ray's answers at its port."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

ANSWER_SECONDS = 5.0
POLL_SECONDS = 2.0
# How a gRPC connection begins: HTTP/2's preface, and no settings. The other end answers with its own at once.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def check_port(where: tuple[str, int]) -> None:
    """OSError if no server answers there. The kernel takes connections for a stopped one too, so a reply is awaited."""
    with socket.create_connection(where, timeout=ANSWER_SECONDS) as line:
        line.sendall(GREETING)
        # One that hangs up, since it wants another protocol, is there as well.
        line.recv(1)


def host_and_port(address: str) -> tuple[str, int]:
    """A ValueError where it is not HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not 0 < int(port) < 1 << 16:
        raise ValueError(address)
    host = host.strip("[]")
    host.encode("idna")  # as socket will, whose UnicodeError (a ValueError) for "10.0.0..1" would come late
    return host, int(port)


def answers_within(where: tuple[str, int], seconds: float, poll: float = POLL_SECONDS) -> bool:
    """Whether a server does; one that is just starting has so much time."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            check_port(where)
            return True
        if time.monotonic() + poll >= deadline:
            return False
        time.sleep(poll)
