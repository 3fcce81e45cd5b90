"""Processes of pytest that share the files of tests: each file has one of them, and a failure of any is one of all."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from imports import imported, reached
from shared_files import files_of_nobody
from shared_fixtures import nanoseconds_with_work

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import parallel_tests

# Our own settings remove the folders of tests that pass.
KEPT = ("-o", "tmp_path_retention_policy=all")


def test_each_file_is_taken_once(tmp_path: Path) -> None:
    order = ["unit/a.py", "unit/b.py", "other/a.py", "unit/c.py"]
    here, there = files_of_nobody(order, tmp_path), files_of_nobody(order[::-1], tmp_path)
    assert [next(here), next(there), next(there)] == ["unit/a.py", "unit/c.py", "other/a.py"]
    assert list(here) == ["unit/b.py"] and list(there) == []


def test_a_thread_with_work_is_told_from_one_that_waits() -> None:
    """However little of a core the machine has for either. What a file of tests has left is judged by it."""
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        while not over.is_set():
            pass

    def wait() -> None:
        begun.set()
        over.wait()

    busy, idle = threading.Thread(target=work), threading.Thread(target=wait)
    busy.start()
    idle.start()
    try:
        assert begun.wait(60)
        before = nanoseconds_with_work([idle, busy])
        until = time.monotonic() + 60
        while nanoseconds_with_work([busy])[busy] < before[busy] + 50_000_000:
            assert time.monotonic() < until, "no work is seen"
        assert nanoseconds_with_work([idle])[idle] < before[idle] + 25_000_000
    finally:
        over.set()
        busy.join()
        idle.join()


def test_what_reaches_torch_comes_first() -> None:
    files = parallel_tests.ordered(["tests/unit", "tests/kernels/test_kernels_simd.py"])
    assert len(files) == len(set(files)) > 100
    places = {name: files.index(f"tests/unit/test_{name}.py") for name in ("heads", "mixtures", "journal", "schedule")}
    assert max(places["heads"], places["mixtures"]) < min(places["journal"], places["schedule"])


def test_what_takes_long_is_begun_first_however_short_the_file() -> None:
    files = parallel_tests.ordered(["tests/unit"])
    assert files.index("tests/unit/test_edited_configs.py") < files.index("tests/unit/test_quantise.py")
    assert files[-3:].count("tests/unit/test_million.py") == 1


def test_what_a_file_imports(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "import os, json\nfrom outrider.kernels import (\n    library,  # a comment\n    reference as definition,\n)\n"
        "def f():\n    import torch\n"
    )
    names = {"os", "json", "outrider.kernels", "outrider.kernels.library", "outrider.kernels.reference"}
    assert imported(file, at_once=True) == names
    assert imported(file) == names | {"torch"}
    assert "numpy" in reached(file, at_once=True) and "torch" not in reached(file, at_once=True)


@pytest.mark.parametrize(("free", "available", "memory"), [(8, 8, True), (1, 8, False), (8, 1, False)])
def test_temporary_files_lie_in_memory_where_that_has_room(
    free: int, available: int, memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_tests, "MEMORY", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free << 30))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available << 30))
    assert parallel_tests.place_in_memory() == (tmp_path if memory else None)


@pytest.mark.slow
def test_a_process_of_tests_puts_its_temporary_files_there(tmp_path: Path) -> None:
    (claims := tmp_path / "claims").mkdir()
    (own := tmp_path / "own").mkdir()
    (file := tmp_path / "test_it.py").write_text("def test_it(tmp_path):\n    (tmp_path / 'written').touch()\n")
    with parallel_tests.started(
        [str(file)], claims, tmp_path / "log", tmp_path / "cache", own, ["--rootdir", str(tmp_path), *KEPT]
    ) as it:
        assert it.wait() == 0, (tmp_path / "log").read_text()
    assert list(own.rglob("written"))


class Ended:
    def __init__(self, code: int) -> None:
        self._code = code

    def poll(self) -> int:
        return self._code

    wait = poll


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((0, 1), 1), ((2, 0), 2), ((-9, 0), 3), ((1, -9), 3), ((0, 5), 0), ((5, 5), 5)]
)
def test_one_that_fails_is_the_failure_of_all(
    codes: tuple[int, int], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = iter(codes)

    def started(
        files: list[str], claims: Path, log: Path, cache: Path, temporary: Path | None, more: Any, gives_way: bool
    ) -> Ended:
        assert more == ["-x"] and temporary is None and not gives_way
        ended = next(left)
        log.write_text("....\n=== short test summary info ===\nwhat it says\n=== 4 passed ===\n")
        (cache / "v" / "cache").mkdir(parents=True)
        (cache / "v" / "cache" / "lastfailed").write_text(json.dumps({f"a test that ended {ended}": True}))
        return Ended(ended)

    monkeypatch.setattr(parallel_tests, "started", started)
    monkeypatch.setattr(
        sys, "argv", ["parallel_tests", "--processes", "2", "--cache", str(tmp_path), "tests/cluster", "--", "-x"]
    )
    assert parallel_tests.main() == code
    printed = capsys.readouterr().out
    assert printed.count("what it says") == 2 and printed.endswith(" s: 4 passed; 4 passed\n")
    assert set(json.loads((tmp_path / "v/cache/lastfailed").read_text())) == {f"a test that ended {each}" for each in codes}
