"""What all tests share. Hypothesis draws the same examples on every run: a test which passes here passes there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from sysfs_trees import sapphire_rapids

from outrider.runner import process_exit as ending

settings.register_profile("outrider", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("outrider")


@pytest.fixture(scope="session")
def xeon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of a Sapphire Rapids host, which nobody changes: it has thousands of files."""
    return sapphire_rapids(tmp_path_factory.mktemp("xeon"))


@pytest.fixture(autouse=True)
def ends_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is tried in this process and gives up its Ray would else end the next one, and with it all tests."""
    monkeypatch.setattr(ending, "_at_once", False)
