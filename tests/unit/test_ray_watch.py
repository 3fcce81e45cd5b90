"""A Ray that is killed: it is noticed, nothing of it is left, and the command begins anew where that has a chance."""

from __future__ import annotations

import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_fakes import fill

from outrider.runner.hosts import head_watch, port_check, ray_watch
from outrider.runner.hosts.head_watch import SILENCE_SECONDS, Head
from outrider.runner.hosts.port_check import GREETING
from outrider.runner.hosts.ray_restart import MOST_IDLE_LOSSES, check_worth_another
from outrider.runner.hosts.ray_watch import OwnRay, server_end
from outrider.runner.job.journal import Journal
from outrider.workers.errors import JobError, RayLostError
from outrider.workers.ray_compat import Node

NOBODY = ("127.0.0.1", 0)
LOST = RayLostError("Ray's raylet on this machine was killed by SIGKILL")


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(("action", "how"), [("kill", "was killed by SIGKILL"), ("wait", "ended with exit code 5")])
def test_a_server_that_has_ended_is_named(action: str, how: str) -> None:
    program = "import sys; sys.exit(5)" if action == "wait" else "input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as server:
        servers = {"gcs_server": [], "raylet": [server]}
        if action == "kill":
            assert server_end(servers) is None
            server.kill()
        server.wait()
        assert server_end(servers) == f"Ray's raylet on this machine {how}"


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def own_ray(process: subprocess.Popen[bytes], socket_file: Path, port: int, **options: Any) -> OwnRay:
    node = Node({"gcs_server": [], "raylet": [process]}, socket_file.parent, (socket_file,))
    return OwnRay(node, {"raylet": ("127.0.0.1", port)}, **{"look": lambda: None, "poll": 0.001, **options})


def lost_within(own: OwnRay, seconds: float = 10.0) -> str:
    deadline = time.monotonic() + seconds
    while (why := own.lost()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return why


def test_a_raylet_that_does_not_answer_is_lost_and_killed(
    tmp_path: Path, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_check, "ANSWER_SECONDS", 0.01)
    (tmp_path / "raylet").touch()
    # The kernel takes connections for one that was stopped.
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        with own_ray(raylet, tmp_path / "raylet", stopped.getsockname()[1], patience=0.05) as own:
            why = lost_within(own)
        assert why == "Ray's raylet on this machine has not answered for 0 s"
        assert raylet.wait(10) == -9, "who waits for it in Ray's own code would wait for ever"
        assert own.lost() == why, "not that it was killed, which we did"


def test_a_raylet_that_answers_is_not_lost(tmp_path: Path, raylet: subprocess.Popen[bytes]) -> None:
    (tmp_path / "raylet").touch()
    with server() as port, own_ray(raylet, tmp_path / "raylet", port, patience=0.0) as own:
        time.sleep(0.05)
        assert own.lost() is None
    assert raylet.poll() is None and not own._thread.is_alive()


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_raylet_whose_socket_is_gone_is_lost(tmp_path: Path, raylet: subprocess.Popen[bytes], replaced: bool) -> None:
    (tmp_path / "raylet").touch()
    with server() as port, own_ray(raylet, tmp_path / "raylet", port) as own:
        if replaced:
            (tmp_path / "other").touch()
            (tmp_path / "other").replace(tmp_path / "raylet")
        else:
            (tmp_path / "raylet").unlink()
        assert lost_within(own).endswith(f"{tmp_path / 'raylet'}, has been removed or replaced")


def test_a_ray_that_comes_to_listen_elsewhere_is_lost(
    tmp_path: Path, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_watch, "POLLS_A_LOOK", 2)
    (tmp_path / "raylet").touch()
    with server() as port, own_ray(raylet, tmp_path / "raylet", port, look=lambda: "it listens") as own:
        assert lost_within(own) == "it listens"


LEFT_BEHIND = """
import os, subprocess, sys
import psutil
from outrider.runner.hosts.ray_processes import Descendants
other = psutil.Popen(["sleep", "30"])
with Descendants() as descendants:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    shell = subprocess.Popen(["sh", "-c", "sleep 30 >&2 & echo $!; read line"], **pipes)
    orphan = psutil.Process(int(shell.stdout.readline()))
    shell.kill()
    shell.wait()
    assert orphan.ppid() == psutil.Process().pid, "an orphan comes to us"
    subprocess.Popen(["sh", "-c", "sleep 30; true"])
    os.set_inheritable(log := os.open("/dev/null", os.O_RDONLY), True)
    descendants.end()
    assert not os.get_inheritable(log), "a command that begins anew must not have it"
    assert not orphan.is_running()
    assert psutil.Process().children(recursive=True) == [other], "what was there before is nobody's"
    other.kill()
"""


def test_nothing_outlives_a_lost_ray_and_nothing_else_ends_with_it() -> None:
    done = python(LEFT_BEHIND)
    assert done.returncode == 0, done.stderr


ANEW = """
import os, sys
from outrider.runner.hosts.ray_restart import restart
if "BEGUN" not in os.environ:
    os.environ["BEGUN"] = str(os.getpid())
    print("first")
    restart()
print(os.environ["BEGUN"] == str(os.getpid()), *sys.argv[1:])
"""


def test_the_command_begins_anew_in_the_same_process_with_the_same_words() -> None:
    done = python(ANEW, "run", "a file", "--json")
    assert done.stdout == "first\nTrue run a file --json\n", done.stderr


CRASHING = """
import ctypes, sys
from outrider.runner.cli import main as cli
from outrider.runner.process_exit import end_at_once
from outrider.workers.errors import JobError
class Library:
    def __del__(self):
        ctypes.string_at(0)
library = Library()
library.itself = cli.kept = library
def app():
    end_at_once()
    print("said")
    {how}
cli.app = app
cli.main()
"""


@pytest.mark.parametrize(("how", "code"), [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("raise JobError('why')", 1)])
def test_a_process_that_has_to_end_at_once_keeps_its_words_and_its_code(how: str, code: int) -> None:
    done = python(CRASHING.format(how=how))
    assert (done.returncode, done.stdout) == (code, "said\n")
    assert done.stderr == ("outrider: why\n" if code == 1 else "")


@contextmanager
def server(port: int = 0, word: bytes = b"settings") -> Iterator[int]:
    """A server that answers, or hangs up without a reply; its port."""

    class Porter(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            assert self.request.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
            self.request.sendall(word)

    class Gate(socketserver.ThreadingTCPServer):
        allow_reuse_address = True

    with Gate(("127.0.0.1", port), Porter) as porter:
        thread = threading.Thread(target=porter.serve_forever, kwargs={"poll_interval": 0.001})
        thread.start()
        try:
            yield porter.server_address[1]
        finally:
            porter.shutdown()
            thread.join()


def test_a_head_is_lost_when_it_has_been_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(head_watch, "time", SimpleNamespace(monotonic=lambda: now))
    with server() as port:
        head = Head(f"127.0.0.1:{port}", own=NOBODY)
        # While this process is stopped no port is checked.
        now += 10 * SILENCE_SECONDS
        assert head.lost() is None and head.answers() and not head.silent
    assert (head.answers(), head.silent, head.lost()) == (False, True, None)
    now += SILENCE_SECONDS - 1
    assert not head.answers() and head.lost() is None
    now += 1
    assert head.lost() == f"the head of the cluster at 127.0.0.1:{port} has not answered for 30 s"
    # One that is started again on its port is no loss, unless it has forgotten us.
    with server(port):
        assert head.answers() and not head.silent and head.lost() is None
        head.cut_off()
        assert head.answers() and "Ray on this host has died" in str(head.lost())


def test_a_head_that_only_takes_connections_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    # As the kernel does for one that was stopped.
    with socket.create_server(("127.0.0.1", 0)) as listener, monkeypatch.context() as hasty:
        hasty.setattr(port_check, "ANSWER_SECONDS", 0.01)
        assert not Head(f"127.0.0.1:{listener.getsockname()[1]}", own=NOBODY).answers()
    with server(word=b"") as port:
        assert Head(f"127.0.0.1:{port}", own=NOBODY).answers(), "one that wants another protocol is there"


def test_a_head_and_the_own_raylet_are_watched_until_the_job_ends() -> None:
    with server() as head_port, ExitStack() as raylet:
        own = ("127.0.0.1", raylet.enter_context(server()))
        with Head(f"127.0.0.1:{head_port}", own, poll=0.001) as head:
            assert head.answers() and head.lost() is None
            raylet.close()
            deadline = time.monotonic() + 10
            while head.lost() is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
    assert "Ray on this host has died" in str(head.lost()) and not head.silent
    assert not head._thread.is_alive()


def test_another_ray_is_tried_until_none_of_them_gets_anything_done(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job.db")
    fill(journal, 4)
    for _ in range(2):
        for _ in range(MOST_IDLE_LOSSES - 1):
            check_worth_another(journal, LOST, ours=True)
        journal.record([(journal.counts().done, "{}")], [])
    for _ in range(MOST_IDLE_LOSSES - 1):
        check_worth_another(journal, LOST, ours=True)
    with pytest.raises(JobError, match="SIGKILL, 3 times without a row ending in between; the rows already done are kept"):
        check_worth_another(journal, LOST, ours=True)
    # Whoever runs the command again gets all tries again.
    check_worth_another(journal, LOST, ours=True)


def test_a_cluster_is_not_ours_to_start(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the same command goes on with them once it is there again"):
        check_worth_another(Journal(tmp_path / "job.db"), LOST, ours=False)
