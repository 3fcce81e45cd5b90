"""Lets several pytest processes share a list of files: each claims, collects and runs one unclaimed file after the other.

tools/parallel_tests.py starts the processes. A plugin of tests/conftest.py; without a list it does nothing.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# The environment variable with the files in the order of this process, and the folder of the claims.
SHARED = "OUTRIDER_SHARED_TEST_FILES"
# The file that is being collected; others are ignored, since pytest would visit all files of its folder (some two hundred).
_collected: Path | None = None


def files_of_nobody(order: list[str], claims: Path) -> Iterator[str]:
    for file in order:
        try:
            (claims / file.replace("/", "--")).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield file


def collect(session: pytest.Session, file: str) -> Sequence[pytest.Item]:
    global _collected
    _collected = session.config.rootpath / file
    # What the tests before have left is collected before anything is imported: what an import makes stays anyway.
    gc.collect()
    gc.disable()
    try:
        return session.perform_collect([file])
    finally:
        gc.enable()
        _collected = None


@pytest.hookimpl(tryfirst=True)
def pytest_ignore_collect(collection_path: Path) -> bool | None:
    others = _collected is not None and collection_path.suffix == ".py" and collection_path != _collected
    return True if others else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> bool | None:
    """Skips the initial collection if there is a list: files are collected in the run loop."""
    return True if SHARED in os.environ else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if SHARED not in os.environ:
        return None
    # Removed, so that processes started by tests do not inherit it.
    order, claims = json.loads(os.environ.pop(SHARED))
    tests = (
        test
        for file in files_of_nobody(order, Path(claims))
        if not session.config.hook.pytest_ignore_collect(
            collection_path=session.config.rootpath / file, config=session.config
        )
        for test in collect(session, file)
    )
    count = 0
    # The next test must be known before a test runs: fixtures are torn down if the next test does not use them.
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


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    # The interpreter's last collections walk all that is not frozen: more than a second where torch is imported.
    gc.freeze()
