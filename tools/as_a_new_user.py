"""Tries README.md as a new user would, on a fresh clone of what is committed, and says what each step took.

    python tools/as_a_new_user.py [--work DIR] [--wheel]

It runs the blocks marked ``sh`` of README.md in one shell, one after the other, with the file that the first block marked
``json`` shows, and compares what comes out with the second. With --wheel the package is installed from a wheel that
``make wheel`` has made, in an environment without a compiler on its PATH, and ``make run`` has a turn. A package index has
to be reachable; models do not.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALL = "pip install ."
FROM_WHEEL = "pip install dist/outrider-*.whl"
# The programs that count as compilers.
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja")


def blocks(text: str, mark: str) -> list[str]:
    return re.findall(rf"^```{mark}\n(.*?)\n```$", text, re.M | re.S)


def step(command: str, folder: Path, path: str) -> None:
    print(f"$ {command}", flush=True)
    started = time.monotonic()
    # -e: stops at the first error, as a user would. The blocks run in one shell, so an activated environment stays active.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("VIRTUAL_ENV", "PYTHON"))}
    subprocess.run(["bash", "-e", "-c", command], cwd=folder, check=True, env={**environment, "PATH": path})
    print(f"  {time.monotonic() - started:.0f} s", flush=True)


def without_compilers(folder: Path) -> str:
    """A folder for PATH with links to all programs except compilers."""
    folder.mkdir()
    for name in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(name).glob("*"):
            if program.name.split("-")[0] not in COMPILERS and not any(f"-{each}" in program.name for each in COMPILERS):
                link = folder / program.name
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="an empty folder for the clone [default: a temporary one]")
    parser.add_argument("--wheel", action="store_true", help="install from a wheel, without a compiler; then make run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        clone = (arguments.work or Path(scratch)) / "outrider"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        readme = (clone / "README.md").read_text()
        given, expected = blocks(readme, "json")
        (clone / "prompts.jsonl").write_text(given + "\n")
        path = os.environ["PATH"]
        install, *rest = blocks(readme, "sh")
        assert INSTALL in install, "README.md installs in another way: say here how"
        if arguments.wheel:
            step("make wheel", clone, path)
            # A new environment, in which `make wheel` installed nothing, and a PATH without a compiler.
            install = install.replace(".venv", ".venv-of-the-wheel").replace(INSTALL, FROM_WHEEL)
            path = without_compilers(Path(scratch) / "bin")
        step("\n".join([install, "outrider --version", *rest]), clone, path)
        written = (clone / "job" / "results.jsonl").read_text()
        if written != expected + "\n":
            sys.exit(f"README.md shows\n{expected}\nbut the job wrote\n{written}")
        print("the job wrote what README.md shows")
        if arguments.wheel:
            step("make run", clone, os.environ["PATH"])


if __name__ == "__main__":
    main()
