"""Files of the working directory that are called like libraries: no process that is started takes them for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.runner.safe_path import VARIABLE, safe_path

# As the command that pip installs: a file in a folder of its own, so that this program itself finds its libraries.
PROGRAM = """
import multiprocessing, os
from outrider.runner.cli import main as cli
from outrider.runner.safe_path import environment_as_given
def app():
    process = multiprocessing.get_context("spawn").Process(target=print, args=("it came up",))
    process.start()
    process.join()
    print(process.exitcode, environment_as_given().get("PYTHONSAFEPATH"), flush=True)
cli.app = app
if __name__ == "__main__":
    cli.main()
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("own", [None, "1"], ids=["not asked for", "asked for"])
def test_a_process_comes_up_and_the_users_own_command_gets_the_users_environment(own: str | None, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for name in ("types", "signal", "select", "numpy"):
        (tmp_path / f"here/{name}.py").write_text("x = 1\n")
    (tmp_path / "outrider").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, tmp_path / "outrider"],
        cwd=tmp_path / "here",
        env=environment if own is None else {**environment, VARIABLE: own},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == f"it came up\n0 {own}\n", done.stderr


def test_it_ends_with_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with safe_path():
        assert os.environ[VARIABLE] == "1"
    assert VARIABLE not in os.environ
