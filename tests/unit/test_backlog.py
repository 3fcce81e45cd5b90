"""Messages that nobody reads keep no command waiting until its end, and come in order once they are read."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.runner import backlog
from outrider.runner.backlog import Backlog

LINES = [f"line {number}\n" for number in range(50)]
WAITS = 60


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "PATIENCE_SECONDS", 0.01)


@pytest.fixture
def full() -> Iterator[tuple[io.FileIO, io.FileIO, int]]:
    """A pipe that is full: reader, writer, and the bytes in it."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1)
    size = os.write(writing, b"-" * fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ))
    with io.FileIO(reading, "r") as reader, io.FileIO(writing, "w") as writer:
        yield reader, writer, size


def in_time(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAITS)
    assert not thread.is_alive(), "waits for a reader"


def printed_to(raw: Backlog) -> None:
    for line in LINES:
        raw.write(memoryview(line.encode()))


def test_whoever_prints_goes_on_and_all_of_it_comes_in_order(full: tuple[io.FileIO, io.FileIO, int]) -> None:
    reader, writer, size = full
    raw, told = Backlog(writer.fileno()), list[str]()
    in_time(lambda: printed_to(raw))
    ending = threading.Thread(target=lambda: raw.finish(lambda: told.append("waits")), daemon=True)
    ending.start()
    text = b""
    while len(text) < size + len("".join(LINES)):
        text += os.read(reader.fileno(), 1 << 16)
    ending.join(WAITS)
    assert text[size:].decode() == "".join(LINES)
    assert (told, ending.is_alive()) == (["waits"], False)
    raw.write(memoryview(b"last"))
    assert os.read(reader.fileno(), 100) == b"last"


def test_what_is_too_much_to_keep_is_counted(
    full: tuple[io.FileIO, io.FileIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer, size = full
    monkeypatch.setattr(backlog, "MOST_BYTES", 10 * len(LINES[0]))
    raw = Backlog(writer.fileno())
    in_time(lambda: printed_to(raw))
    in_time(lambda: raw.finish(lambda: None, 0.01))
    text = b""
    while not text.endswith(b"read them)\n"):
        text += os.read(reader.fileno(), 1 << 16)
    left_out = len("".join(LINES[10:]))
    assert text[size:].decode() == "".join(LINES[:10]) + f"({left_out} bytes of messages were left out: nobody read them)\n"


def test_a_reader_that_goes_away_ends_the_waiting(full: tuple[io.FileIO, io.FileIO, int]) -> None:
    reader, writer, _ = full
    raw = Backlog(writer.fileno())
    in_time(lambda: printed_to(raw))
    reader.close()
    in_time(lambda: raw.finish(lambda: None))
    in_time(lambda: printed_to(raw))


def test_a_fork_writes_itself(tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as out:
        raw = Backlog(out.fileno())
        printed_to(raw)
        if (child := os.fork()) == 0:
            printed_to(raw)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        raw.finish(lambda: None)
    assert (tmp_path / "said").read_text() == "".join(LINES) * 2


ENDING = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
from outrider.runner import backlog, streams
backlog.PATIENCE_SECONDS = 0.01
streams.prepare()
print("unread", file=sys.stderr)
print("has ended", flush=True)
"""


@pytest.mark.parametrize("read", [True, False])
def test_a_command_that_has_ended_waits_for_its_reader_or_a_signal(
    full: tuple[io.FileIO, io.FileIO, int], read: bool
) -> None:
    reader, writer, size = full
    with subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, stderr=writer) as ended:
        assert ended.stdout is not None and ended.stdout.readline() == b"has ended\n"
        if not read:
            # The handler of its own is in force until it begins to wait.
            while ended.poll() is None:
                ended.send_signal(signal.SIGTERM)
            assert ended.returncode == -signal.SIGTERM
            return
        text = b""
        while len(text) < size + len("unread\n"):
            text += os.read(reader.fileno(), 1 << 16)
        assert text[size:] == b"unread\n"
        assert ended.wait(WAITS) == 0
