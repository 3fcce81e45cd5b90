"""What all tests share.

Hypothesis draws the same examples on every run: a test which passes here passes there. The fast set takes a tenth of them
(tests/support/examples.py).
"""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers
from of_ray import of_ray

from examples import ALL as ALL_EXAMPLES
from examples import diagonal, examples

# Fixtures, too: what this file has itself is unknown to a folder that is collected again for the next file.
pytest_plugins = ["shared_files", "shared_fixtures"]

# Tests that run side by side take a core each: torch's threads, waiting for one another, would cost a fifth of the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A full collection of garbage walks all that torch and transformers hold, half a second, and by Python's own numbers comes
# every few tests: a fifth of the time. Here it comes before each file instead (tests/support/shared_files.py), and what the
# file's imports hold is not looked at again.
gc.set_threshold(7000, 10, 1000)

settings.register_profile("outrider", max_examples=examples(100), derandomize=True, deadline=None, print_blob=True)
settings.load_profile("outrider")
# Newer ones also draw constants from whatever files of ours are imported by then: other examples in each process, and
# seconds to read them.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants


SLOW_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.M)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What no test of is wanted is not even imported, with all that it needs.

    That is, by the fast set, what is slow as a whole; where the oldest Ray is tried, what none could change; and what a
    folder's mark leaves out.
    """
    wanted, folder = config.option.markexpr, collection_path.parent
    if collection_path.suffix != ".py":
        return None
    unwanted = (
        ("not slow" in wanted and SLOW_FILE.search(collection_path.read_text(encoding="utf-8")))
        or (folder.name == "unit" and "oldest_ray" in wanted and not of_ray(collection_path))
        or any(folder.name == name and f"not {name}" in wanted for name in ("ray", "cluster"))
    )
    return True if unwanted else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts a Ray or several hosts lies in a folder of its own, and is marked by it.

    Where the oldest Ray is tried, so is each fast test that another Ray could change: by what its file imports.

    Of a test that is tried on all of several things, and marked one_in(n), the fast set has each nth: every value of every
    parameter, but not every combination of them. The slow set has the others, and tries properties with all their examples.
    """
    tries_oldest_ray = "oldest_ray" in config.option.markexpr
    for item in items:
        folder = item.path.parent.name
        if folder in ("ray", "cluster"):
            item.add_marker(folder)
        elif tries_oldest_ray and of_ray(item.path):
            item.add_marker("oldest_ray")
        for mark in item.iter_markers("one_in"):
            assert isinstance(item, pytest.Function)
            if diagonal(item) % mark.args[0]:
                item.add_marker("slow")
        if ALL_EXAMPLES and isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    gc.freeze()
