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
    """The tree of a Sapphire Rapids host, which nobody changes: it has thousands of files."""
    return sapphire_rapids(tmp_path_factory.mktemp("xeon"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example job run in one go, with nothing proposed: what every other run of it must equal."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    done = outrider("run", EXAMPLES, "-o", "job", "--draft", "none", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "job"


@pytest.fixture(autouse=True)
def ends_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is tried in this process and gives up its Ray would else end the next one, and with it all tests."""
    monkeypatch.setattr(process_exit, "_at_once", False)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Whatever test comes next in this process may read what is logged."""
    before = OURS.level
    yield
    assert before == OURS.level, "this test leaves the level of outrider's logger changed: use caplog.set_level"
