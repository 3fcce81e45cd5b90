"""The names of Ray's semaphores: taken away once both ends have them open, and found by a note where one was killed."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from outrider.workers.machine import semaphores


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(semaphores, "SHARED_MEMORY", folder)
    return folder


def test_the_names_of_what_is_open_here_go_and_no_others(shared_memory: Path) -> None:
    opened, made, strange, foreign = (
        shared_memory / name for name in ("sem.hdr7-1", "sem.obj7-2", "sem.mine", "sem.hdr7-3")
    )
    kept = []
    for path in (opened, made, strange, foreign):
        path.write_bytes(bytes(32))
        if path != foreign:
            with path.open("r+b") as file:
                kept.append(mmap.mmap(file.fileno(), 32))
    # As the C library makes one: under another name, which is gone by now.
    made.rename(shared_memory / "sem.obj7-4")
    assert semaphores.remove_names() == 2
    assert sorted(path.name for path in shared_memory.iterdir()) == ["sem.hdr7-3", "sem.mine"]
    assert len(kept) == 3


def test_what_a_killed_process_opened_is_found_by_its_note(shared_memory: Path, tmp_path: Path) -> None:
    dead, living, other = (tmp_path / name for name in ("dead", "living", "other"))
    for folder in (dead, living, other):
        folder.mkdir()
    before = time.time_ns() - 1
    semaphores.note_opening(dead)
    raylet, now = os.getppid(), time.time_ns()
    its = [f"sem.hdr{raylet}-{now}", f"sem.obj{raylet}-{now}"]
    others = [
        f"sem.hdr{raylet}-{before}",
        f"sem.hdr{raylet}-{now + semaphores.OPENING_NANOSECONDS + 10**9}",
        f"sem.hdr{raylet}1-{now}",
        f"sem.hdr9{raylet}-{now}",
        f"sem.mine{raylet}-{now}",
    ]
    for name in (*its, *others):
        (shared_memory / name).touch()
    semaphores.note_opening(living)
    assert not semaphores.removed_those_of(dead, [living, other]), "one that lives may be opening its own just now"
    assert len(list(shared_memory.iterdir())) == len(its) + len(others)
    assert semaphores.removed_those_of(dead, [other])
    assert sorted(path.name for path in shared_memory.iterdir()) == sorted(others)


@pytest.mark.parametrize("note", [None, "", "{", "[]", '{"pid": "x", "since": 1}'])
def test_a_folder_without_a_note_has_left_none(shared_memory: Path, tmp_path: Path, note: str | None) -> None:
    (shared_memory / "sem.hdr1-1").touch()
    if note is not None:
        (tmp_path / semaphores.NOTE).write_text(note)
    assert semaphores.removed_those_of(tmp_path, [])
    assert (shared_memory / "sem.hdr1-1").exists()
