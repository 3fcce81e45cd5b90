"""Memory that runs out anywhere within a call (tests/support/no_memory.py): an error, and rows as they were."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import no_memory
import pytest

pytestmark = [pytest.mark.build, pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")]

HERE = Path(no_memory.__file__).parent


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("no_memory") / "no_memory.so"
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", str(HERE / "no_memory.cpp"), "-o", str(library), "-ldl"], check=True)
    return library


# A row is forked, and a pass goes through it: half a second where a case alone takes one to two.
FAST = "fork"


@pytest.mark.parametrize("name", [n if n == FAST else pytest.param(n, marks=pytest.mark.slow) for n in no_memory.CASES])
def test_rows_are_as_they_were(name: str, shim: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    every = ["--all"] if "OUTRIDER_EVERY_ALLOCATION" in os.environ else []
    command = [sys.executable, no_memory.__file__, *every, name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.rpartition(": ")[2]) > 2, "nothing failed"
