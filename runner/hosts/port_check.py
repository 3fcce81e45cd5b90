"""Whether a server of Ray answers at its port."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

ANSWER_SECONDS = 5.0
POLL_SECONDS = 2.0
# The beginning of a gRPC connection: HTTP/2's preface and empty settings. A server answers at once with its settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def check_port(where: tuple[str, int]) -> None:
    """OSError if no server answers. A reply is awaited, since the kernel accepts connections for a stopped process too."""
    with socket.create_connection(where, timeout=ANSWER_SECONDS) as line:
        line.sendall(GREETING)
        # A server that closes the connection (another protocol) is alive too.
        line.recv(1)


def host_and_port(address: str) -> tuple[str, int]:
    """Parse HOST:PORT; ValueError if it is malformed."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not 0 < int(port) < 1 << 16:
        raise ValueError(address)
    host = host.strip("[]")
    host.encode("idna")  # raises UnicodeError (a ValueError) for "10.0.0..1" now instead of in socket
    return host, int(port)


def answers_within(where: tuple[str, int], seconds: float, poll: float = POLL_SECONDS) -> bool:
    """Whether a server answers within ``seconds``, the time that a starting one has."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            check_port(where)
            return True
        if time.monotonic() + poll >= deadline:
            return False
        time.sleep(poll)
