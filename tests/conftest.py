"""What all tests share. Hypothesis draws the same examples on every run: a test which passes here passes there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from sysfs_trees import sapphire_rapids

from outrider.runner import process_exit

# Tests that run side by side take a core each: torch's threads, waiting for one another, would cost a fifth of the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("outrider", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("outrider")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts a Ray or several hosts lies in a folder of its own, and is marked by it.

    Of a test that is tried on all of several things, and marked one_in(n), the fast set has each nth: every value of every
    parameter, but not every combination of them. The slow set has the others.
    """
    values: dict[str, list[str]] = {}
    for item in items:
        folder = item.path.parent.name
        if folder in ("ray", "cluster"):
            item.add_marker(folder)
        for mark in item.iter_markers("one_in"):
            assert isinstance(item, pytest.Function)
            diagonal = 0
            for name, value in item.callspec.params.items():
                seen = values.setdefault(f"{item.path}::{item.originalname} {name}", [])
                if repr(value) not in seen:
                    seen.append(repr(value))
                diagonal += seen.index(repr(value))
            if diagonal % mark.args[0]:
                item.add_marker("slow")


@pytest.fixture(scope="session")
def xeon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of a Sapphire Rapids host, which nobody changes: it has thousands of files."""
    return sapphire_rapids(tmp_path_factory.mktemp("xeon"))


@pytest.fixture(autouse=True)
def ends_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is tried in this process and gives up its Ray would else end the next one, and with it all tests."""
    monkeypatch.setattr(process_exit, "_at_once", False)
