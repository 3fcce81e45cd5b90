"""Leases between real processes, some of which are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.workers.errors import WorkerError
from outrider.workers.machine import leases
from outrider.workers.machine.leases import Holder, Leases, claim, holders, try_claim

HOLDER = """
import sys
from pathlib import Path
from outrider.workers.machine.leases import claim
held = claim(sys.argv[2:], folder=Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(folder: Path, *names: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(folder), *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_all_or_none(tmp_path: Path) -> None:
    with another_process(tmp_path, "1") as other:
        assert try_claim(["0", "1", "2"], tmp_path) == [Holder("1", other.pid)]
        assert holders(None, tmp_path) == {"1": Holder("1", other.pid)}
        with claim(["0", "2"], folder=tmp_path):
            assert holders(None, tmp_path).keys() == {"0", "1", "2"}
        assert holders(None, tmp_path).keys() == {"1"}


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    with another_process(tmp_path, "0", "cuda-0") as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        with claim(["0", "cuda-0"], folder=tmp_path) as mine:
            assert mine.names == ("0", "cuda-0")
            assert holders(["0"], tmp_path) == {"0": Holder("0", os.getpid())}


def test_waiting_ends_when_the_holder_does(tmp_path: Path) -> None:
    with another_process(tmp_path, "3") as first:
        command = [sys.executable, "-c", HOLDER.replace("folder=", "seconds=60, folder="), str(tmp_path), "3"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            first.kill()
            assert second.stdout.readline() == "held\n"
            assert holders(["3"], tmp_path) == {"3": Holder("3", second.pid)}
            second.kill()


def test_a_deadline_names_the_holder(tmp_path: Path) -> None:
    with (
        another_process(tmp_path, "7") as other,
        pytest.raises(WorkerError, match=f"core 7 is held by process {other.pid} after 0.01 s"),
    ):
        claim(["7"], 0.01, tmp_path)


def test_within_one_process_a_lease_is_held_once(tmp_path: Path) -> None:
    with claim(["0"], folder=tmp_path):
        assert isinstance(try_claim(["0"], tmp_path), list)
    mine = try_claim(["0"], tmp_path)
    assert isinstance(mine, Leases)
    mine.release()
    mine.release()


def test_a_forked_child_does_not_keep_its_parents_lease(tmp_path: Path) -> None:
    command = """
import os, signal, sys
from pathlib import Path
from outrider.workers.machine.leases import claim
held = claim(["5"], folder=Path(sys.argv[1]))
child = os.fork()
if child == 0:
    print("forked", os.getpid(), flush=True)
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", command, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        word, child = parent.stdout.readline().split()
        assert word == "forked"
        try:
            parent.wait()
            with claim(["5"], folder=tmp_path):
                pass
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_files_and_folder_serve_all_users(tmp_path: Path) -> None:
    folder = tmp_path / "cores"
    umask = os.umask(0o077)
    try:
        with claim(["0"], folder=folder):
            assert folder.stat().st_mode & 0o7777 == 0o1777
            assert (folder / "0").stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(umask)


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "cores"
    folder.mkdir()
    (folder / "0").symlink_to(victim)
    with pytest.raises(WorkerError, match="cannot be opened"):
        claim(["0"], folder=folder)
    assert victim.read_text() == "precious"
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(WorkerError, match="must be a folder"):
        claim(["1"], folder=tmp_path / "link")


@pytest.mark.parametrize("name", ["../x", "a", "", "cuda-", "123456"])
def test_odd_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkerError, match="a lease is named by"):
        claim([name], folder=tmp_path)


def test_an_unreadable_pid_is_no_traceback(tmp_path: Path) -> None:
    with claim(["0"], folder=tmp_path):
        (tmp_path / "0").write_text("nonsense")
        assert holders(["0"], tmp_path)["0"].sentence == "core 0 is held by another process"


def test_nothing_is_held_where_there_is_no_folder(tmp_path: Path) -> None:
    assert holders(None, tmp_path / "none") == {}


def test_the_usual_folder_is_shared_by_the_host() -> None:
    assert leases.default_folder().name == "outrider-cores"


def test_those_who_share_share_with_each_other_only(tmp_path: Path) -> None:
    with claim(["0"], folder=tmp_path, shared=True), claim(["0", "1"], folder=tmp_path, shared=True):
        # Two descriptors of one process are two claims to the kernel.
        assert holders(None, tmp_path, shared=True) == {}
        assert holders(None, tmp_path).keys() == {"0", "1"}
        assert isinstance(try_claim(["1"], tmp_path), list)
    with another_process(tmp_path, "0") as other:
        assert holders(None, tmp_path, shared=True) == {"0": Holder("0", other.pid)}
        assert try_claim(["0"], tmp_path, shared=True) == [Holder("0", other.pid)]
    with claim(["0"], 30.0, folder=tmp_path):
        pass
