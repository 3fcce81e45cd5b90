"""``outrider serve``: refusals before it listens, and its output."""

from __future__ import annotations

import builtins
import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import uvicorn
from fake_server import KEY, FakeServer, line, until

from outrider.runner.cli.main import main
from outrider.runner.options.serve import ServeSpec
from outrider.runner.serve import http_server
from outrider.runner.serve import serve as module
from outrider.runner.serve.http_server import HttpServer
from outrider.runner.serve.serve import serve
from outrider.runner.serve.store import STORE, Store
from outrider.workers.errors import JobError, JobHeldError, ModelError, NoSpaceError, UsageError


def test_one_server_at_a_time_has_the_data(tmp_path: Path) -> None:
    with module._data_lock(tmp_path / "data"):
        assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
        with pytest.raises(JobHeldError, match="is served by another outrider serve"), module._data_lock(tmp_path / "data"):
            pass
    with module._data_lock(tmp_path / "data"):
        pass


def test_data_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--data: .* cannot be written"), module._data_lock(tmp_path / "file" / "data"):
        pass
    with (
        pytest.raises(UsageError, match=r"--data: .*/file is not a directory, or is a broken link"),
        module._data_lock(tmp_path / "file"),
    ):
        pass


@pytest.mark.parametrize("name", ["b.lan:18734", "http://c.lan", "c.lan/v1", "d lan", ".lan", "*.lan", "bücher.lan", ""])
def test_a_name_under_which_no_request_can_come_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "serve", mock.Mock())
    monkeypatch.setattr(sys, "argv", ["outrider", "serve", "--data", str(tmp_path), "--hostname", f"b.lan, {name}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    wanted = "be a name of letters, digits, - and . alone, such as batch.example.org (no http://, port or path)"
    assert capfd.readouterr().err == f"outrider: --hostname: must {wanted}, got {name!r}\n"
    module.serve.assert_not_called()  # type: ignore[attr-defined]


def test_names_are_taken_as_they_are_told_to_clients() -> None:
    names = ("batch.example.org", "B_1.lan.", "xn--bcher-kva.lan", "10.0.0.7")
    assert ServeSpec(hostname=names).hostname == names


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot listen at"):
            module._listen("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("host", ["192.0.2.1", "nobody.invalid"])
def test_an_address_of_another_machine_is_refused_as_that(host: str) -> None:
    with pytest.raises(UsageError, match=rf'--host: "{host}" is no address of this machine \(.+\); give another --host'):
        module._listen(host, 0)


def test_without_the_extra_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "uvicorn":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"needs uvicorn: pip install 'outrider\[serve\]'"):
        serve(ServeSpec(data=tmp_path / "data"))
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_model_that_is_not_there_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        serve(ServeSpec(data=tmp_path / "data", models={"big": str(tmp_path / "nothing")}))
    assert not (tmp_path / "data" / STORE).exists()


# How it is stopped


class Served:
    """A server with the fake runner in a thread, on a port of this machine."""

    def __init__(self, data: Path, grace: int, monkeypatch: pytest.MonkeyPatch, stopped_before: bool = False) -> None:
        monkeypatch.setattr(http_server, "LAST_SECONDS", 0.5)
        self.fake, self.said = FakeServer(data), list[str]()
        config = uvicorn.Config(self.fake.app, port=0, log_config=None, timeout_graceful_shutdown=grace, lifespan="on")
        self.fake.service.start()
        refuse = self.fake.service.refuse_requests
        self.server = HttpServer(config, lambda: self.said.append("begun"), refuse, lambda: stopped_before)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        until(lambda: self.server.started, "server")

    def asked(self, prompt: str, **body: Any) -> Future[tuple[int, str | None, str]]:
        """What a request that is open by now gets: status, Retry-After and text."""
        before, answer = len(self.fake.runner.open), Future[tuple[int, str | None, str]]()
        port = self.server.servers[0].sockets[0].getsockname()[1]
        asked = json.dumps({"model": "small", "prompt": prompt, **body})

        def ask() -> None:
            connection = HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("POST", "/v1/completions", asked, {"Authorization": f"Bearer {KEY}"})
            got = connection.getresponse()
            answer.set_result((got.status, got.headers["Retry-After"], got.read().decode()))
            connection.close()

        threading.Thread(target=ask, daemon=True).start()
        until(lambda: len(self.fake.runner.open) > before, "request")
        return answer

    def told(self, number: int) -> None:
        self.server.handle_exit(number, None)

    def ended(self) -> None:
        self._thread.join(5)
        assert not self._thread.is_alive()
        self.fake.service.close(at_once=True)


@pytest.mark.parametrize(
    ("grace", "signals"), [(1, [signal.SIGINT]), (60, [signal.SIGINT] * 2), (60, [signal.SIGTERM] * 2)]
)
def test_whoever_waits_for_an_answer_hears_that_the_server_stops(
    tmp_path: Path, grace: int, signals: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When their time is over, or at once where it is told so again."""
    served = Served(tmp_path / "data", grace, monkeypatch)
    whole, streamed = served.asked("never"), served.asked("begun", stream=True)
    for number in signals:
        served.told(number)
    status, again, text = whole.result(10)
    assert (status, again) == (503, "10")
    assert json.loads(text)["error"]["message"] == "the server is being stopped"
    first, error, done = streamed.result(10)[2].split("\n\n")[:3]
    assert "one " in first and "the server is being stopped" in error and done == "data: [DONE]"
    served.ended()
    assert served.said == ["begun"] and served.server.stopped_twice == (len(signals) > 1)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("place", ["/v1/files", "/v1/batches", "/v1/completions"])
def test_whoever_still_sends_hears_that_the_server_stops(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(tmp_path / "data", 60, monkeypatch)
    connection = HTTPConnection("127.0.0.1", served.server.servers[0].sockets[0].getsockname()[1], timeout=30)
    connection.putrequest("POST", place)
    connection.putheader("Authorization", f"Bearer {KEY}")
    connection.putheader("Content-Type", "multipart/form-data; boundary=b")
    connection.putheader("Content-Length", "5000")
    connection.endheaders(b"--b")
    until(lambda: served.server.server_state.tasks, "request")
    served.told(signal.SIGTERM)
    served.told(signal.SIGTERM)
    got = connection.getresponse()
    assert (got.status, got.headers["Retry-After"]) == (503, "10")
    error = {"message": "the server is being stopped", "type": "server_error", "param": None, "code": None}
    assert json.loads(got.read()) == {"error": error}
    connection.close()
    served.ended()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert list(served.fake.folders.files.iterdir()) == []


def test_a_signal_that_came_before_it_looked_for_any_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(tmp_path / "data", 1, monkeypatch, stopped_before=True)
    served.ended()
    assert served.said == ["begun"] and not served.server.stopped_twice


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """Those that the HTTP server hears while it serves."""
    heard: list[int] = []
    numbers = (signal.SIGHUP, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_terminal_that_closes_stops_it_once(signals: list[int]) -> None:
    """The kernel and the shell both tell of it."""
    with module._draining() as told:
        signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert signals == [signal.SIGTERM] and told.count == 0


def test_a_terminal_that_closes_while_it_stops_is_nothing(signals: list[int]) -> None:
    with module._draining() as told:
        signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
        told.begin()
        signal.raise_signal(signal.SIGHUP)
    assert signals == [] and told.count == 0
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    with module._draining():
        signal.raise_signal(signal.SIGHUP)


class Closing:
    """A service whose rows end when they are told to, at once."""

    def __init__(self, told: Callable[[], None]) -> None:
        self.closed: list[bool] = []
        self.runner = self
        self._told = told
        self._over = threading.Event()

    def close(self, at_once: bool) -> None:
        self.closed.append(at_once)
        if at_once:
            self._over.set()
        else:
            self._told()
            assert self._over.wait(10)


@pytest.mark.parametrize(("before", "closed"), [(1, [False, True]), (2, [True])])
def test_the_second_signal_stops_at_once_whenever_it_comes(before: int, closed: list[bool]) -> None:
    told = module._StopRequests(before)

    def tell() -> None:
        told.count += 1

    service = Closing(tell)
    module._close(service, told)  # type: ignore[arg-type]
    assert service.closed == closed


def test_a_start_on_a_full_disk_is_refused_by_a_sentence(tmp_path: Path) -> None:
    """Batches that ran have their rows counted anew."""
    before = FakeServer(tmp_path, at_once=False)
    with before.client() as client:
        file = client.files.create(file=line("a").encode(), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress", "batch that runs")
    fake = FakeServer(tmp_path)
    with mock.patch.object(fake.store, "change", side_effect=NoSpaceError("serve.db cannot be used: disk is full")):
        with pytest.raises(NoSpaceError, match="disk is full"):
            module._start(fake.service)
        assert fake.runner.closed
    again = FakeServer(tmp_path)
    with again.client() as client:
        until(lambda: client.batches.retrieve(batch.id).status == "completed", "batch that goes on")


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store._db.execute("PRAGMA user_version = 9")
    store.close()
    with pytest.raises(JobError, match="has format 9, this outrider reads 1"):
        Store(tmp_path)
    (tmp_path / STORE).write_bytes(b"no database" * 1000)
    with pytest.raises(JobError, match="cannot be used"):
        Store(tmp_path)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_it_says_where_it_is_and_warns_where_others_listen(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        module._print_addresses(ServeSpec(host=host), ["a", "b"], listening, Path("data/api-key"), ["sk-secret"])
        port = listening.getsockname()[1]
    said, warned = capfd.readouterr()
    assert said.splitlines()[:2] == [f"serving a, b at http://127.0.0.1:{port}/v1", "key:  data/api-key"]
    assert f"page: http://127.0.0.1:{port}/#" in said
    assert "sk-secret" not in said
    assert ("put TLS in front of it" in warned) == (host != "127.0.0.1")
