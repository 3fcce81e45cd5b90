"""Fixtures of all tests: a plugin of tests/conftest.py."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import outrider
from sysfs_trees import sapphire_rapids

from outrider.runner import process_exit

OURS = logging.getLogger("outrider")
# At threads that a file of tests has left. One that has an end to come to is done by the last look.
LOOKS, SECONDS_BETWEEN_LOOKS = 50, 0.02
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"


@pytest.fixture(scope="session")
def xeon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The /sys tree of a Sapphire Rapids host. It has thousands of files, so all tests share it and must not change it."""
    return sapphire_rapids(tmp_path_factory.mktemp("xeon"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example job, run without interruption and without candidates; every other run must have the same results."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    done = outrider("run", EXAMPLES, "-o", "job", "--draft", "none", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "job"


# One fixture for both: it runs six thousand times.
@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was() -> Iterator[None]:
    """Resets a flag of the process: a command that gives up its Ray sets it, and the next command would end all tests.

    Fails a test that leaves the log level changed: later tests in this process may read the log.
    """
    flag, level = process_exit._at_once, OURS.level
    process_exit._at_once = False
    yield
    process_exit._at_once = flag
    assert level == OURS.level, "this test leaves the level of outrider's logger changed: use caplog.set_level"


def nanoseconds_with_work(threads: Iterable[threading.Thread]) -> dict[threading.Thread, int]:
    """For how long each thread has had a core, or waited for one."""
    found = {}
    for thread in threads:
        # A thread may end at any time: before its file is opened, or before it is read.
        with suppress(FileNotFoundError, ProcessLookupError):
            ran, waited, _ = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
            found[thread] = int(ran) + int(waited)
    return found


@pytest.fixture(scope="module", autouse=True)
def leaves_no_busy_thread() -> Iterator[None]:
    """Fails a file of tests that leaves a thread at work: all tests behind it in this process would take longer."""
    before = set(threading.enumerate())
    yield
    for _ in range(LOOKS):
        if not (left := set(threading.enumerate()) - before):
            return
        began = nanoseconds_with_work(left)
        time.sleep(SECONDS_BETWEEN_LOOKS)
        # Without those that have ended meanwhile, which would make up for those at work.
        worked = sum(spent - began[thread] for thread, spent in nanoseconds_with_work(began).items())
        if worked < SECONDS_BETWEEN_LOOKS * 1e9 / 2:
            return
    pytest.fail(f"threads of this file are at work after its last test: {sorted(thread.name for thread in left)}")
