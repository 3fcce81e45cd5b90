"""What all tests share.

Hypothesis draws the same examples on every run: a test which passes here passes there. The fast set takes a third of them
(tests/support/examples.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings
from of_ray import of_ray
from sysfs_trees import sapphire_rapids

from examples import ALL as ALL_EXAMPLES
from examples import examples
from outrider.runner import process_exit

# Tests that run side by side take a core each: torch's threads, waiting for one another, would cost a fifth of the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("outrider", max_examples=examples(100), derandomize=True, deadline=None, print_blob=True)
settings.load_profile("outrider")


SLOW_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.M)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast set does not even import what is slow as a whole, with all that it needs."""
    fast = config.option.markexpr == "not slow" and collection_path.suffix == ".py"
    return True if fast and SLOW_FILE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts a Ray or several hosts lies in a folder of its own, and is marked by it.

    Where the oldest Ray is tried, so is each fast test that another Ray could change: by what its file imports.

    Of a test that is tried on all of several things, and marked one_in(n), the fast set has each nth: every value of every
    parameter, but not every combination of them. The slow set has the others, and tries properties with all their examples.
    """
    values: dict[str, list[str]] = {}
    tries_oldest_ray = "oldest_ray" in config.option.markexpr
    for item in items:
        folder = item.path.parent.name
        if folder in ("ray", "cluster"):
            item.add_marker(folder)
        elif tries_oldest_ray and of_ray(item.path):
            item.add_marker("oldest_ray")
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
        if ALL_EXAMPLES and isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            item.add_marker("slow")


@pytest.fixture(scope="session")
def xeon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of a Sapphire Rapids host, which nobody changes: it has thousands of files."""
    return sapphire_rapids(tmp_path_factory.mktemp("xeon"))


@pytest.fixture(autouse=True)
def ends_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is tried in this process and gives up its Ray would else end the next one, and with it all tests."""
    monkeypatch.setattr(process_exit, "_at_once", False)
