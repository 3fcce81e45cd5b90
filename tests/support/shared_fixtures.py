"""Fixtures of all tests: a plugin of tests/conftest.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import outrider
from sysfs_trees import sapphire_rapids

from outrider.runner import process_exit

OURS = logging.getLogger("outrider")
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


@pytest.fixture(autouse=True)
def ends_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resets a flag of the process: a command that gives up its Ray sets it, and the next command would end all tests."""
    monkeypatch.setattr(process_exit, "_at_once", False)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Fails a test that leaves the log level changed: later tests in this process may read the log."""
    before = OURS.level
    yield
    assert before == OURS.level, "this test leaves the level of outrider's logger changed: use caplog.set_level"
