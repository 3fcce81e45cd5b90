"""Fixtures of all tests: a plugin of tests/conftest.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from sysfs_trees import sapphire_rapids

from outrider.runner import process_exit


@pytest.fixture(scope="session")
def xeon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of a Sapphire Rapids host, which nobody changes: it has thousands of files."""
    return sapphire_rapids(tmp_path_factory.mktemp("xeon"))


@pytest.fixture(autouse=True)
def ends_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is tried in this process and gives up its Ray would else end the next one, and with it all tests."""
    monkeypatch.setattr(process_exit, "_at_once", False)
