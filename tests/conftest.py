"""What all tests share. Hypothesis draws the same examples on every run: a test which passes here passes there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from sysfs_trees import sapphire_rapids

settings.register_profile("outrider", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("outrider")


@pytest.fixture(scope="session")
def xeon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of a Sapphire Rapids host, which nobody changes: it has thousands of files."""
    return sapphire_rapids(tmp_path_factory.mktemp("xeon"))
