"""Commands whose output nobody takes: no traceback, and an exit code that says it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.runner.job.journal import Journal, StoredRow

OUTRIDER = f"{sys.executable} -c 'from outrider.runner.cli.main import main; main()'"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("job")
    journal = Journal(directory / "job.db")
    journal.fill([StoredRow(0, "a", 1, "completion", {}, (1,))], [], {})
    journal.close()
    return directory


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        pytest.param(">&-", 0, "", marks=pytest.mark.slow),
        ("> /dev/full", 1, "outrider: standard output cannot be written: No space left on device\n"),
        pytest.param("| true; exit ${PIPESTATUS[0]}", 0, "", marks=pytest.mark.slow),
        pytest.param("<&- >&- 2>&-", 0, "", marks=pytest.mark.slow),
        pytest.param("> /dev/full 2> /dev/full", 1, "", marks=pytest.mark.slow),
    ],
)
def test_an_answer_that_nobody_takes(job: Path, how: str, code: int, said: str) -> None:
    done = shell(f"{OUTRIDER} status {job} --json {how}")
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(
    "how",
    [
        "2>&-",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("2> /dev/full", "2>&1 >&- | true; exit ${PIPESTATUS[0]}")),
    ],
)
def test_a_sentence_that_nobody_takes(tmp_path: Path, how: str) -> None:
    done = shell(f"{OUTRIDER} status {tmp_path} {how}")
    assert (done.returncode, done.stderr) == (2, "")


CLOSED = """
import os
from outrider.runner import streams
streams.prepare()
lock = os.open({path!r}, os.O_RDWR | os.O_CREAT)
assert lock > 2, lock
print("said"); os.write(1, b"written"); print("error", file=__import__("sys").stderr)
import subprocess
subprocess.run(["sh", "-c", "echo from a child; echo error >&2"], check=True)
assert os.read(0, 1) == b""
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_descriptor_is_not_given_to_a_file(tmp_path: Path, closed: str) -> None:
    path = tmp_path / "file"
    script = tmp_path / "script.py"
    script.write_text(CLOSED.format(path=str(path)))
    given = closed if "<&-" in closed else f"{closed} < /dev/null"
    done = shell(f"{sys.executable} {script} {given}")
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == b""


@pytest.mark.slow
def test_a_name_that_is_no_utf8_is_shown(job: Path, tmp_path: Path) -> None:
    done = shell(f"cd {tmp_path} && cp -r {job} $'j\\xff\\x1b' && LC_ALL=C {OUTRIDER} status $'j\\xff\\x1b'")
    assert done.stderr == ""
    assert done.stdout == "j\\udcff\\x1b: 1 row, 0 done, 0 failed, not running\n"
