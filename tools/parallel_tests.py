"""pytest in several processes, where each takes the next file of tests when it has done one.

    python tools/parallel_tests.py [--processes N] [--in-memory] [--cache DIR] [FILE | FOLDER ...] [-- arguments of pytest]

pytest-xdist has every process collect every file, and so import all that any test needs. Here less than half of the
processes begin with the files that reach torch, the others with the rest, so that most modules are imported by some only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from imports import reached  # noqa: E402
from shared_files import SHARED  # noqa: E402

# Modules that take seconds to import, or whose use imports such (our tokenizers).
HEAVY = re.compile(r"(torch|transformers|outrider\.workers\.models\.tokenizer)\b")
# The marks of tests that take a minute or more: they compile, or run large jobs.
LONG = re.compile(r"pytest\.mark\.(build|long)\b")
MOST_PROCESSES = 8
# A folder in memory, where syncs cost nothing, and the bytes that must be free there. The fast set takes some 2 GB.
MEMORY, ENOUGH_MEMORY = Path("/dev/shm"), 6 << 30
# pytest's exit code where no test was run, and where a run came to no end.
NO_TESTS, INTERNAL_ERROR = 5, 3
INTERRUPTED = 130
PR_SET_THP_DISABLE = 41
# Processes that begin with the light files are more than half and give way to the others, whose files are half of the work.
GIVE_WAY = 10


def ordered(places: Sequence[str]) -> list[str]:
    """The files, those with heavy imports first. Most of the processes begin at the end; large files are at both ends, so
    that processes meet at small files and end at the same time."""
    paths = [ROOT / place for place in places]
    files = {file for path in paths for file in ([path] if path.suffix == ".py" else path.rglob("test_*.py"))}

    def order(file: Path) -> tuple[bool, int, Path]:
        light = not any(map(HEAVY.match, reached(file, at_once=True)))
        # Long tests come early even in a short file, since all processes wait for the one that is started last.
        size = file.stat().st_size << (10 if LONG.search(file.read_text(encoding="utf-8")) else 0)
        return light, size if light else -size, file

    return [str(file.relative_to(ROOT)) for file in sorted(files, key=order)]


def summary(log: Path, code: int) -> str:
    """The whole log if a test failed, else its sections with headings (skipped tests, slowest tests)."""
    text = log.read_text(errors="replace")
    if code not in (0, NO_TESTS):
        return text
    headed = re.search(r"^=+ ", text, re.M)
    return text[headed.start() :] if headed else ""


def last_line(log: Path) -> str:
    return log.read_text(errors="replace").rstrip().rpartition("\n")[2].strip("= ")


def place_in_memory() -> Path | None:
    """The folder in memory for files of tests if it has room; None for the default folder."""
    with suppress(OSError):
        if shutil.disk_usage(MEMORY).free >= ENOUGH_MEMORY <= psutil.virtual_memory().available:
            return MEMORY
    return None


def do_without_huge_pages() -> None:
    """For this process and all that it starts. The kernels ask for them, and each is 2 MB that the system fills with zeros:
    for tiny models, thousands of times, half of the time in the system. Tests that start a Ray run elsewhere, with them."""
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def started(
    files: list[str],
    claims: Path,
    log: Path,
    cache: Path,
    temporary: Path | None,
    more: Sequence[str],
    gives_way: bool = False,
) -> subprocess.Popen[bytes]:
    # Without percentages, which would be those of a file. Each process has one thread for torch: more would wait for each
    # other.
    options = ["-q", "-o", "console_output_style=classic", "-o", f"cache_dir={cache}", *more]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, SHARED: json.dumps([files, str(claims)])}
    if temporary is not None:
        environment["TMPDIR"] = str(temporary)
    command = [*(("nice", "-n", str(GIVE_WAY)) if gives_way else ()), sys.executable, "-m", "pytest", *options]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def wait(processes: Sequence[subprocess.Popen[bytes]], claims: Path, files: int) -> None:
    while any(process.poll() is None for process in processes):
        if sys.stdout.isatty():
            print(f"\r{len(list(claims.iterdir()))} of {files} files", end="\r", flush=True)
        time.sleep(0.1)


def keep_what_failed(caches: Sequence[Path], cache: Path) -> None:
    """Merges the failed tests of all processes into one cache for pytest --last-failed."""
    failed: dict[str, bool] = {}
    for each in caches:
        file = each / "v" / "cache" / "lastfailed"
        failed |= json.loads(file.read_text()) if file.exists() else {}
    (cache / "v" / "cache").mkdir(parents=True, exist_ok=True)
    (cache / "v" / "cache" / "lastfailed").write_text(json.dumps(failed))


def main() -> int:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    # More processes than cores, since tests spend a fifth of their time waiting.
    parser.add_argument("--processes", type=int, default=min(cores + cores // 2, MOST_PROCESSES))
    parser.add_argument("--in-memory", action="store_true", help="temporary files lie in /dev/shm, if that has room")
    parser.add_argument("--cache", type=Path, default=ROOT / ".pytest_cache")
    parser.add_argument("places", nargs="*", default=["tests"])
    arguments = parser.parse_args(words[:end])
    if missing := [place for place in arguments.places if not (ROOT / place).exists()]:
        parser.error(f"{', '.join(missing)}: no such file or folder")
    began = time.monotonic()
    do_without_huge_pages()
    files = ordered(arguments.places)
    memory = place_in_memory() if arguments.in_memory else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        temporary = Path(folder) / "t" if memory else None
        if temporary is not None:
            temporary.mkdir()
        claims = Path(folder) / "claims"
        claims.mkdir()
        logs = [Path(folder) / f"{number}.log" for number in range(min(arguments.processes, len(files)))]
        caches = [log.with_suffix("") for log in logs]
        # Those with light files, of which an odd number has one more, would take more than half of the cores.
        one_more = len(logs) % 2 == 1 < len(logs)
        processes = [
            started(
                files[:: 1 if number % 2 else -1],
                claims,
                log,
                cache,
                temporary,
                words[end + 1 :],
                gives_way=one_more and number % 2 == 0,
            )
            for number, (log, cache) in enumerate(zip(logs, caches, strict=True))
        ]
        interrupted = False
        try:
            wait(processes, claims, len(files))
        except KeyboardInterrupt:
            interrupted = True  # the processes get the signal too
        codes = [process.wait() for process in processes]
        for log, code in zip(logs, codes, strict=True):
            print(summary(log, code), end="", flush=True)
        keep_what_failed(caches, arguments.cache)
        print(f"{len(files)} files in {time.monotonic() - began:.0f} s:", "; ".join(map(last_line, logs)), flush=True)
    if interrupted:
        return INTERRUPTED
    # A process that a signal ended (its code is negative) left out tests, and did not say which ones failed.
    return max((INTERNAL_ERROR if code < 0 else code for code in codes if code != NO_TESTS), default=NO_TESTS)


if __name__ == "__main__":
    sys.exit(main())
