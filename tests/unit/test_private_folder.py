"""Private folders for sockets: where they are made, which places are refused, and that a dead process's is removed."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import pytest

from outrider.workers.errors import JobError
from outrider.workers.machine import private_folder
from outrider.workers.machine.private_folder import (
    Unfit,
    base_folder,
    check_private,
    held_folder,
    lasting_folder,
    open_to_others,
)

OWN = f"outrider-{os.getuid()}"
BENEATH = 64


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A root with a short path, and no other."""
    root = Path(os.path.realpath("/tmp")) / f"o{os.getpid()}"
    root.mkdir(mode=0o700)
    monkeypatch.setattr(private_folder, "roots", lambda: [root])
    yield root
    subprocess.run(["rm", "-rf", root], check=True)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_folder_is_for_its_user_alone_while_it_is_held_and_gone_afterwards(short: Path) -> None:
    before = os.umask(0)
    try:
        with held_folder(BENEATH) as folder:
            assert folder.parent == short / OWN
            assert (mode(folder), mode(folder.parent)) == (0o700, 0o700)
            (folder / "deep").mkdir()
            (folder / "deep/file").write_text("x")
            path = f"{folder}/{'x' * BENEATH}"
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path)
            private_folder.sweep()
            assert Path(path).exists(), "its owner lives"
    finally:
        os.umask(before)
    assert list((short / OWN).iterdir()) == []


@pytest.mark.parametrize(
    ("lay", "why"),
    [
        (lambda base, elsewhere: base.symlink_to(elsewhere), "is not a folder"),
        (lambda base, elsewhere: base.write_text("x"), "is not a folder"),
        (
            lambda base, elsewhere: (base.mkdir(), base.chmod(0o755)),
            r"is open to other users \(chmod 700",
        ),
        (lambda base, elsewhere: (base.mkdir(), base.chmod(0o710)), "is open to other users"),
    ],
    ids=["link", "file", "open to all", "open to the group"],
)
def test_what_somebody_else_laid_there_is_not_used(short: Path, tmp_path: Path, lay, why: str) -> None:
    tmp_path.chmod(0o700)
    lay(short / OWN, tmp_path)
    with pytest.raises(JobError, match=f"only you can enter: {short / OWN} {why}.*; set TMPDIR"), held_folder(BENEATH):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_not_used(short: Path) -> None:
    (short / OWN).mkdir(mode=0o700)
    os.chown(short / OWN, 12345, 12345)
    with pytest.raises(Unfit, match="belongs to user 12345"):
        check_private(short / OWN)
    os.chown(short / OWN, 0, 0)
    os.chown(short, 12345, 12345)
    with pytest.raises(Unfit, match=f"{short} belongs to user 12345"):
        base_folder(short)
    os.chown(short, 0, 0)


def test_a_root_in_which_others_may_rename_is_not_used(short: Path) -> None:
    short.chmod(0o777)
    with pytest.raises(Unfit, match="no sticky bit"):
        base_folder(short)
    short.chmod(0o1777)
    assert base_folder(short) == short / OWN
    short.chmod(0o700)


@pytest.mark.parametrize("length", [30, 90, 250])
def test_a_long_tmpdir_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    long = tmp_path / ("x" * length)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    with held_folder(BENEATH) as folder:
        assert not folder.is_relative_to(long)
        assert len(str(folder)) + 1 + BENEATH <= private_folder.SOCKET_PATH_BYTES


def test_a_short_tmpdir_is_used(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(short))
    with held_folder(BENEATH) as folder:
        assert folder.parent == short / OWN


def test_a_root_that_is_full_is_passed_over(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes died there, one after the other."""
    full, roomy = short / "full", short / "roomy"
    for each in (full, roomy):
        each.mkdir(mode=0o700)
    usage = shutil.disk_usage(short)

    def of(path: Path) -> Any:
        return usage._replace(free=100 << 10 if path.is_relative_to(full) else 1 << 30)

    monkeypatch.setattr(private_folder.shutil, "disk_usage", of)
    monkeypatch.setattr(private_folder, "roots", lambda: [full, roomy])
    with held_folder(BENEATH) as folder:
        assert folder.parent == roomy / OWN
    monkeypatch.setattr(private_folder, "roots", lambda: [full])
    with pytest.raises(JobError, match=r"full/outrider-\d+ has only 100 KiB free; set TMPDIR to"), held_folder(BENEATH):
        pass


def test_a_root_that_does_not_tell_its_size_is_used(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ramfs."""
    silent = shutil.disk_usage(short)._replace(total=0, used=0, free=0)
    monkeypatch.setattr(private_folder.shutil, "disk_usage", lambda _: silent)
    monkeypatch.setattr(private_folder, "roots", lambda: [short])
    with held_folder(BENEATH) as folder:
        assert folder.parent == short / OWN


@pytest.mark.parametrize("name", ["Bob's", "a\\b", os.fsdecode(b"m\xe4")])
def test_a_root_whose_path_ray_misreads_is_passed_over(name: str, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's servers did not come up there, three times over half a minute."""
    odd, plain = short / name, short / "a b"
    for each in (odd, plain):
        each.mkdir(mode=0o700)
    monkeypatch.setattr(private_folder, "roots", lambda: [odd, plain])
    with held_folder(BENEATH) as folder:
        assert folder.parent == plain / OWN
    monkeypatch.setattr(private_folder, "roots", lambda: [odd])
    with pytest.raises(JobError, match=r"in its path, which Ray misreads; set TMPDIR to a folder"), held_folder(BENEATH):
        pass


def test_a_file_system_that_is_read_only_is_said_to_be(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no socket, and lets no file be removed either, also where there is none: that was a traceback."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    class Closed(socket.socket):
        bind = refuse

    with monkeypatch.context() as patched:
        patched.setattr(private_folder.socket, "socket", Closed)
        patched.setattr(Path, "unlink", refuse)
        with (
            pytest.raises(JobError, match=r"cannot hold a socket: Read-only file system.*; set TMPDIR to"),
            held_folder(BENEATH),
        ):
            pass
    monkeypatch.setattr(private_folder.tempfile, "mkdtemp", refuse)
    with (
        pytest.raises(JobError, match=r"no folder can be made in .*: Read-only file system; set TMPDIR to"),
        held_folder(BENEATH),
    ):
        pass


def test_where_no_root_is_fit_the_sentence_names_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    monkeypatch.setattr(private_folder, "roots", lambda: [long, Path("/nowhere")])
    sentence = rf"{long} is longer than \d+ bytes.*; /nowhere cannot be read: No such file.*; set TMPDIR to a folder"
    with pytest.raises(JobError, match=sentence), held_folder(BENEATH):
        pass


HOLDER = """
import sys, time
from pathlib import Path
from outrider.workers.machine import private_folder
private_folder.roots = lambda: [Path(sys.argv[1])]
with private_folder.held_folder(64) as folder:
    (folder / "log").write_text("x")
    print(folder, flush=True)
    input()
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(short: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(short)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as killed, subprocess.Popen(command, **pipes) as living:
        left, kept = (Path(cast(IO[str], process.stdout).readline().strip()) for process in (killed, living))
        lasting = lasting_folder("ray", BENEATH)
        killed.kill()
        killed.wait()
        assert (left / "log").exists()
        private_folder.sweep()
        assert not left.exists() and (kept / "log").exists() and lasting.exists()
        cast(IO[str], living.stdin).close()
        living.wait()
        assert not kept.exists()


def test_a_folder_behind_a_closed_one_is_not_open_to_others(short: Path) -> None:
    inner = short / "a/b"
    inner.mkdir(parents=True)
    inner.chmod(0o777)
    assert not open_to_others(inner)
    short.chmod(0o711)
    assert open_to_others(inner)
    (short / "a").chmod(0o700)
    assert not open_to_others(inner)
