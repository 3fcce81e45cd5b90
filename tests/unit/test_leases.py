"""Leases of cores between real processes, some of which are killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from second_user import GUEST, as_guest, only_root

from outrider.workers.errors import WorkerError
from outrider.workers.machine import core_leases as leases
from outrider.workers.machine.core_leases import Holder, Leases, claim, describe, holders, try_claim

HOLDER = """
import sys
from pathlib import Path
from outrider.workers.machine.core_leases import claim
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
        another_process(tmp_path, "7", "8") as other,
        pytest.raises(WorkerError, match=rf"^cores 7-8 are held by process {other.pid} \(waited 0.01 s\)$"),
    ):
        claim(["7", "8"], 0.01, tmp_path)


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
from outrider.workers.machine.core_leases import claim
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


def own(root: Path) -> Path:
    return root / f"outrider-cores-{os.getuid()}"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_others_may_read_files_and_folder_and_write_neither(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        with claim(["0"], folder=tmp_path):
            assert (mode(own(tmp_path)), mode(own(tmp_path) / "0")) == (0o755, 0o644)
        own(tmp_path).chmod(0o777)
        (own(tmp_path) / "0").chmod(0o666)
        with claim(["0"], folder=tmp_path):
            assert (mode(own(tmp_path)), mode(own(tmp_path) / "0")) == (0o755, 0o644), "made safe again"
    finally:
        os.umask(umask)


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    own(tmp_path).mkdir()
    (own(tmp_path) / "0").symlink_to(victim)
    with pytest.raises(WorkerError, match="cannot be opened"):
        claim(["0"], folder=tmp_path)
    assert victim.read_text() == "precious"


def test_what_others_lay_out_neither_hangs_nor_leads_astray(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "0").write_text("1")
    with (elsewhere / "0").open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        (tmp_path / "outrider-cores-link").symlink_to(elsewhere)
        (tmp_path / "outrider-cores-file").write_text("")
        odd = tmp_path / "outrider-cores-odd"
        odd.mkdir()
        os.mkfifo(odd / "0")
        (odd / "1").symlink_to(elsewhere / "0")
        (odd / "2").mkdir()
        with claim(["0", "1", "2"], folder=tmp_path):
            assert holders(None, tmp_path).keys() == {"0", "1", "2"}
        assert holders(None, tmp_path) == holders(["0", "1", "2"], tmp_path) == {}


def test_a_folder_that_others_can_remove_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loose, sticky = tmp_path / "loose", tmp_path / "sticky"
    for each, bits in ((loose, 0o777), (sticky, 0o1777)):
        each.mkdir()
        each.chmod(bits)
    monkeypatch.setattr(leases, "ROOTS", (loose, sticky))
    assert leases.default_folder() == sticky
    monkeypatch.setattr(leases, "ROOTS", (loose, tmp_path / "none"))
    with pytest.raises(
        WorkerError, match=r"loose is a folder in which other users can rename .* sticky bit.*none cannot be"
    ):
        claim(["0"])


@pytest.mark.parametrize("name", ["../x", "a", "", "cuda-", "123456"])
def test_odd_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkerError, match="a lease is named by"):
        claim([name], folder=tmp_path)


def test_an_unreadable_pid_is_no_traceback(tmp_path: Path) -> None:
    with claim(["0"], folder=tmp_path):
        (own(tmp_path) / "0").write_text("nonsense")
        assert describe(holders(["0"], tmp_path).values()) == "core 0 is held by another process"


def test_nothing_is_held_where_there_is_no_folder(tmp_path: Path) -> None:
    assert holders(None, tmp_path / "none") == {}


def test_the_usual_folder_is_shared_by_the_host() -> None:
    assert leases.default_folder() in leases.ROOTS


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


@pytest.fixture
def common(tmp_path: Path) -> Iterator[Path]:
    """A folder as /dev/shm is one, which other users can reach."""
    folder = Path("/dev/shm") / f"leases-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@only_root
def test_a_second_user_can_change_nothing_of_a_claim(common: Path) -> None:
    with claim(["0", "cuda-0"], folder=common):
        folder, file = own(common), own(common) / "0"
        attacks: list[Callable[[], object]] = [
            file.unlink,
            lambda: file.rename(common / "mine"),
            lambda: file.write_text("1"),
            lambda: os.truncate(file, 0),
            lambda: file.chmod(0o666),
            lambda: (folder / "1").write_text(""),
            lambda: (common / "other").symlink_to("/") or (common / "other").rename(file),
            lambda: folder.rename(common / "theirs"),
            folder.rmdir,
            lambda: folder.chmod(0o777),
        ]
        for attack in attacks:
            assert as_guest(attack).startswith("PermissionError"), attack
        assert as_guest(lambda: try_claim(["0"], common)) == repr([Holder("0", os.getpid())])
        assert as_guest(lambda: try_claim(["0"], common, shared=True)) == repr([Holder("0", os.getpid())])
        assert as_guest(lambda: holders(None, common)) == repr(holders(None, common))
        assert as_guest(lambda: try_claim(["1"], common)).startswith("<")


@only_root
def test_users_keep_each_other_out_whoever_came_first(common: Path) -> None:
    assert as_guest(lambda: try_claim(["0", "1"], common)).startswith("<"), "his files and folder stay"
    with claim(["0"], folder=common):
        assert as_guest(lambda: try_claim(["0", "1"], common)) == repr([Holder("0", os.getpid())])
        as_guest(lambda: shutil.rmtree(common / f"outrider-cores-{GUEST}"))
        assert as_guest(lambda: try_claim(["0"], common)) == repr([Holder("0", os.getpid())]), "whatever he does to his own"
    with claim(["0"], folder=common, shared=True):
        assert as_guest(lambda: try_claim(["0"], common, shared=True)).startswith("<")
        assert as_guest(lambda: try_claim(["0"], common)) == repr([Holder("0", os.getpid())])


@only_root
def test_a_second_user_who_takes_the_name_of_the_folder_changes_nothing(common: Path) -> None:
    usual = own(common)
    assert as_guest(usual.mkdir) == "None"
    with claim(["0"], folder=common):
        assert as_guest(lambda: try_claim(["0"], common)) == repr([Holder("0", os.getpid())])
        assert usual.stat().st_uid == GUEST and not list(usual.iterdir())
    with claim(["0"], folder=common):
        assert len(list(common.glob(f"{usual.name}-*"))) == 1, "the longer name is found again"


RACER = """
import os, sys, time
from pathlib import Path
from outrider.workers.machine.core_leases import Leases, try_claim
common, user = Path(sys.argv[1]), int(sys.argv[2])
os.setgid(user); os.setuid(user)
mark = common / "held"
print("ready", flush=True)
sys.stdin.readline()
got = 0
while got < 40:
    held = try_claim(["0"], common)
    if isinstance(held, Leases):
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        time.sleep(0.0002)
        os.unlink(mark)
        held.release()
        got += 1
        time.sleep(0.0002 * (user % 7))
"""


@pytest.mark.slow
@only_root
def test_two_users_never_hold_a_lease_at_once(common: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(common), str(user)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for user in (0, GUEST, GUEST + 1)
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.close()
    assert [racer.wait(timeout=60) for racer in racers] == [0, 0, 0]
