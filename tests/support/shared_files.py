"""Several processes of pytest share a list of files: each collects the next one that nobody has when it has run the last.

tools/parallel_tests.py starts them. A plugin of tests/conftest.py; without a list it does nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# The files in the order of this process, and the folder where a file is claimed.
SHARED = "OUTRIDER_SHARED_TEST_FILES"


def files_of_nobody(order: list[str], claims: Path) -> Iterator[str]:
    for file in order:
        try:
            (claims / file.replace("/", "--")).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield file


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> bool | None:
    """Nothing yet."""
    return True if SHARED in os.environ else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if SHARED not in os.environ:
        return None
    # Not for the processes that tests start.
    order, claims = json.loads(os.environ.pop(SHARED))
    tests = (
        test
        for file in files_of_nobody(order, Path(claims))
        if not session.config.hook.pytest_ignore_collect(
            collection_path=session.config.rootpath / file, config=session.config
        )
        for test in session.perform_collect([file])
    )
    count = 0
    # The next test is looked for before one runs: a fixture goes when no next test wants it.
    test = next(tests, None)
    while test is not None:
        following = next(tests, None)
        test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        test = following
        count += 1
    session.testscollected = count
    return True
