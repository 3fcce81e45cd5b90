"""Who listens beyond the loopback address, read from the kernel."""

from __future__ import annotations

import os
import socket

import pytest

from outrider.runner.hosts.listeners import beyond_loopback


@pytest.mark.parametrize(
    ("family", "address", "wide"),
    [
        (socket.AF_INET, "127.0.0.1", False),
        (socket.AF_INET, "127.8.9.10", False),
        (socket.AF_INET, "0.0.0.0", True),
        (socket.AF_INET6, "::1", False),
        (socket.AF_INET6, "::", True),
        (socket.AF_INET6, "::ffff:127.0.0.1", False),
        (socket.AF_INET6, "::ffff:0.0.0.0", True),
    ],
)
def test_a_listener_is_wide_where_other_machines_can_reach_it(family: int, address: str, wide: bool) -> None:
    before = beyond_loopback([os.getpid()])
    with socket.socket(family) as one:
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        one.bind((address, 0))
        assert beyond_loopback([os.getpid()]) == before, "nobody can connect to it yet"
        one.listen()
        port = one.getsockname()[1]
        found = [where for pid, where in beyond_loopback([os.getpid(), 0]) if (pid, where) not in before]
    assert found == ([f"{address.removeprefix('::ffff:')}:{port}"] if wide else [])
    assert beyond_loopback([os.getpid()]) == before
