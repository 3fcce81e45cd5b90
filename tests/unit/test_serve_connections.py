"""Whom the server lets go: connections that nobody asks anything through, requests that stop coming or say two lengths."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import uvicorn
from fake_server import KEY, FakeServer, until

from outrider.runner.serve import bodies, connections, http_server
from outrider.runner.serve.connections import IDLE_SECONDS, UNREAD_SECONDS, Idle, raise_open_files
from outrider.runner.serve.http_server import HttpServer

HEAD = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\n"
FORM = "Content-Type: multipart/form-data; boundary=b\r\n"


@dataclass
class Cycle:
    response_complete: bool


@dataclass(eq=False)
class FakeConnection:
    """Its own transport, too."""

    cycle: Any = None
    ended: list[str] = field(default_factory=list)

    @property
    def transport(self) -> FakeConnection:
        return self

    def close(self) -> None:
        self.ended.append("close")

    def abort(self) -> None:
        self.ended.append("abort")


def test_idle_connections_are_let_go_and_those_at_work_are_not() -> None:
    asked, answered, new = FakeConnection(Cycle(False)), FakeConnection(Cycle(True)), FakeConnection()
    idle = Idle(10)
    idle.let_go([asked, answered], 0.0)
    idle.let_go([asked, answered, new], IDLE_SECONDS - 1)
    assert not answered.ended
    idle.let_go([asked, answered, new], IDLE_SECONDS)
    assert (asked.ended, answered.ended, new.ended) == ([], ["close"], [])
    # One that does not read what it was sent stays open until then.
    idle.let_go([asked, answered, new], UNREAD_SECONDS)
    assert (asked.ended, answered.ended, new.ended) == ([], ["close", "abort"], ["close"])


def test_one_that_is_asked_again_is_idle_anew() -> None:
    idle, each = Idle(10), FakeConnection(Cycle(True))
    idle.let_go([each], 0.0)
    each.cycle = Cycle(False)
    idle.let_go([each], IDLE_SECONDS)
    each.cycle = Cycle(True)
    idle.let_go([each], IDLE_SECONDS + 1)
    idle.let_go([each], 2 * IDLE_SECONDS)
    assert not each.ended


def test_one_that_is_asked_between_all_looks_is_never_idle() -> None:
    """Answers take milliseconds, looks are half a second apart: who polled was let go after 30 s, amid a request."""
    idle, each = Idle(0), FakeConnection(Cycle(True))
    for second in range(2 * int(UNREAD_SECONDS)):
        idle.let_go([each], float(second))
        each.cycle = Cycle(True)
    assert not each.ended


def test_a_connection_that_has_had_an_answer_is_let_go_as_others_are(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By uvicorn's own rule after 5 s, just when clients that ask every 5 s ask again."""
    assert served.server.config.timeout_keep_alive > IDLE_SECONDS
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.1)
    got = served.told(f"GET /v1/models HTTP/1.1\r\n{HEAD}\r\n")
    assert got.startswith("HTTP/1.1 200"), "and the connection has ended, or this would wait"


def test_of_too_many_those_that_have_been_idle_for_longest_go_first() -> None:
    first, second, third, asked = FakeConnection(), FakeConnection(), FakeConnection(), FakeConnection(Cycle(False))
    idle = Idle(2)
    idle.let_go([first], 0.0)
    idle.let_go([second, first], 1.0)
    idle.let_go([third, second, asked, first], 2.0)
    # The third was seen for the first time, perhaps amid its first request.
    assert [each.ended for each in (first, second, third, asked)] == [["close"], ["close"], [], []]


@pytest.mark.parametrize(
    ("limits", "raised", "told"),
    [
        ((1024, 20000), (20000, 20000), 20000),
        ((1024, resource.RLIM_INFINITY), (1 << 16, resource.RLIM_INFINITY), 1 << 16),
        ((300, 300), None, 300),
        ((1 << 17, 1 << 20), None, 1 << 17),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 1 << 16),
    ],
)
def test_it_gives_itself_more_open_files(limits: tuple[int, int], raised: tuple[int, int] | None, told: int) -> None:
    with mock.patch.object(resource, "getrlimit", return_value=limits), mock.patch.object(resource, "setrlimit") as set_:
        assert raise_open_files() == told
    assert [call.args[1] for call in set_.call_args_list] == ([] if raised is None else [raised])


@dataclass
class Served:
    fake: FakeServer
    server: HttpServer

    def told(self, *pieces: str, seconds: float = 20.0) -> str:
        """What a connection reads to its end when it has sent these pieces."""
        port = self.server.servers[0].sockets[0].getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
            for piece in pieces:
                connection.sendall(piece.encode())
            got = b""
            while some := connection.recv(1 << 16):
                got += some
        return got.decode()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(http_server, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(http_server, "LET_GO_SECONDS", 0.02)
    fake = FakeServer(tmp_path / "data")
    fake.service.start()
    config = uvicorn.Config(fake.app, port=0, log_config=None, timeout_graceful_shutdown=1, lifespan="on", ws="none")
    server = HttpServer(config, lambda: None, fake.service.refuse_requests)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, "server")
    yield Served(fake, server)
    server.should_exit = True
    thread.join(10)
    fake.service.close(at_once=True)


def test_a_connection_through_which_no_request_comes_is_let_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.1)
    assert served.told() == ""
    assert served.told("GET /v1/models HTTP/1.1\r\nHost: loc") == ""


@pytest.mark.parametrize("place", ["/v1/files", "/v1/batches", "/v1/completions"])
def test_a_request_that_stops_coming_is_refused(served: Served, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(bodies, "STALLED_SECONDS", 0.2)
    monkeypatch.setattr(bodies, "LOOK_SECONDS", 0.05)
    got = served.told(f"POST {place} HTTP/1.1\r\n{HEAD}{FORM}Content-Length: 5000\r\n\r\n--b")
    assert got.startswith("HTTP/1.1 408") and "no part of the request has arrived for 0 s; send it again" in got
    assert list(served.fake.folders.files.iterdir()) == []


def test_a_request_that_says_two_lengths_is_refused(served: Served) -> None:
    """A proxy may go by the other one."""
    body = '{"model": "small"}'
    chunked = f"{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    both = f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked\r\n"
    got = served.told(f"POST /v1/completions HTTP/1.1\r\n{HEAD}{both}\r\n{chunked}")
    assert got.startswith("HTTP/1.1 400") and "connection: close" in got.lower()
    assert "the request has both Content-Length and Transfer-Encoding; leave out one" in got


def test_connections_that_find_no_open_file_are_told_of_in_one_sentence(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    loop = mock.Mock(spec=asyncio.AbstractEventLoop)
    loop.time.return_value = 5.0
    full = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    with caplog.at_level(logging.ERROR, "outrider.serve"):
        for _ in range(1000):
            served.server._on_loop_error(loop, full)
    said = "no further connection can be taken: Too many open files; those that are open go on (see ulimit -n)"
    assert [record.getMessage() for record in caplog.records] == [said]
    loop.default_exception_handler.assert_not_called()
    served.server._on_loop_error(loop, {"message": "another"})
    loop.default_exception_handler.assert_called_once_with({"message": "another"})
