"""The local Ray: its folders, its listeners, and that nothing of it is left after a job."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from command_line import (
    DEADLINE,
    children_titled,
    described,
    finish,
    known,
    outrider,
    rows_done,
    start,
    wait_for,
    wait_for_rows,
)

from outrider.workers.machine.private_folder import SOCKET_PATH_BYTES
from outrider.workers.ray_compat import longest_below_folder

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"
OWN = f"outrider-{os.getuid()}"
SPECULATING = ("--draft-tokens", "4", "--batch", "2")


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for temporary files that no other job on this machine uses, with a short path."""
    folder = Path("/tmp") / f"o{os.getpid()}"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    yield folder
    shutil.rmtree(folder)


def left() -> set[str]:
    """What lies in places that all users share, and where this test's jobs have their folders."""
    root = Path(os.environ["TMPDIR"])
    return {
        str(path) for folder in (Path("/dev/shm"), root / OWN, root / "ray") if folder.is_dir() for path in folder.iterdir()
    }


def assert_nothing_more_than(before: set[str]) -> None:
    """Soon: another job on this machine may be opening semaphores of its own at this moment."""
    deadline = time.monotonic() + 10
    while more := left() - before - {f"/dev/shm/outrider-cores-{os.getuid()}"}:
        assert time.monotonic() < deadline, more
        time.sleep(0.1)


IN_ONE_PROCESS = """
import os, sys, stat, psutil
from pathlib import Path
from outrider.runner.hosts.ray_start import local_ray
from outrider.workers import ray_compat
with local_ray(1, {}) as lost:
    import ray  # it reads its settings when it is imported
    node = ray_compat.own_node()
    folder = node.session.parent
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o700 for each in (folder, folder.parent)), folder
    assert max(len(str(path)) for path in node.sockets) <= len(str(folder)) + 1 + ray_compat.longest_below_folder()
    assert all(path.is_socket() for path in node.sockets)
    assert ray_compat.session_folder() == node.session
    raylet = psutil.Process(node.processes["raylet"][0].pid)
    assert ray_compat.session_folder_of(raylet.cmdline()) == node.session
    assert ray.get(ray.remote(num_cpus=0)(lambda: 7).remote()) == 7
    assert lost() is None
    print(folder)
assert not folder.exists()
assert psutil.Process().children(recursive=True) == []
"""


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
        env={**os.environ, **environment},
    )


@pytest.mark.oldest_ray
@pytest.mark.parametrize("tmpdir", ["", "x" * 200], ids=["usual", "long TMPDIR"])
def test_it_starts_in_a_folder_of_its_own_and_leaves_nothing(tmpdir: str, tmp_path: Path) -> None:
    before = left()
    (tmp_path / tmpdir).mkdir(exist_ok=True)
    done = python(IN_ONE_PROCESS, **({"TMPDIR": str(tmp_path / tmpdir)} if tmpdir else {}))
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.parent.name == OWN and len(str(folder)) + 1 + longest_below_folder() <= SOCKET_PATH_BYTES
    assert_nothing_more_than(before)


UNBOUNDED = """
import time
from outrider.runner.hosts.ray_start import local_ray
from outrider.workers import ray_compat
with local_ray(1, {}) as lost:
    import ray
    actor = ray.remote(num_cpus=0)(type("Actor", (), {"answer": lambda self: 7})).remote()
    # Ray would send its account each second.
    until = time.monotonic() + 4
    while time.monotonic() < until:
        assert ray.get(actor.answer.remote()) == 7
    assert ray.timeline() == []
    raylet = ray_compat.own_node().processes["raylet"][0].pid
    said = open(f"/proc/{raylet}/cmdline").read()
    assert f"--logging-rotate-bytes={4 << 20} --logging-rotate-backup-count=1" in said, said
"""


@pytest.mark.oldest_ray
def test_what_ray_keeps_of_a_long_job_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_task_events_report_interval_ms", "RAY_ROTATION_MAX_BYTES", "RAY_ROTATION_BACKUP_COUNT"):
        monkeypatch.delenv(name, raising=False)
    done = python(UNBOUNDED)
    assert done.returncode == 0, done.stderr


AS_INSTALLED = "from outrider.runner.cli.main import main\nif __name__ == '__main__':\n    main()\n"


@pytest.mark.oldest_ray
def test_files_that_are_called_like_libraries_are_none_to_a_job(tmp_path: Path) -> None:
    """The command lies elsewhere, as pip puts it, so that its own process is not led astray."""
    for name in ("numpy", "types", "signal", "tokenizers", "outrider", "ray", "psutil"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/command"
    command.write_text(AS_INSTALLED)
    (tmp_path / "in.txt").write_text("a prompt\n")
    done = subprocess.run(
        [sys.executable, command, "run", "in.txt", "-o", "job", "--max-tokens", "4", *SPECULATING],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert rows_done(tmp_path / "job") == 1


UNSAFE = """
import sys, psutil
from outrider.runner.hosts.ray_start import local_ray
from outrider.runner.hosts.ray_processes import Descendants
from outrider.workers import ray_compat
from outrider.workers.errors import JobError
if sys.argv[1] == "renamed":
    from ray._private import services
    services.resolve_ip = services.resolve_ip_for_localhost
    del services.resolve_ip_for_localhost
else:
    # A Ray that has the part, and takes no notice of it.
    ray_compat.LOOPBACK = ray_compat.LOOPBACK._replace(make=lambda before: lambda host: "0.0.0.0")
    from outrider.runner.hosts import ray_start as cluster
    cluster.LOOPBACK = "0.0.0.0"
try:
    with local_ray(1, {}):
        print("taken for safe")
except JobError as error:
    print(error)
wide = [each.laddr for child in psutil.Process().children(recursive=True) for each in child.net_connections("tcp")]
print(wide)
"""


@pytest.mark.oldest_ray
def test_a_ray_that_would_listen_everywhere_is_refused_and_ended() -> None:
    renamed = subprocess.run(
        [sys.executable, "-c", UNSAFE, "renamed"], capture_output=True, text=True, check=False, timeout=DEADLINE
    )
    assert "has no ray._private.services.resolve_ip_for_localhost, which outrider needs to keep" in renamed.stdout, renamed
    assert renamed.stdout.endswith("\n[]\n")
    deaf = subprocess.run(
        [sys.executable, "-c", UNSAFE, "deaf"], capture_output=True, text=True, check=False, timeout=DEADLINE
    )
    # An older one listens on all of IPv6.
    assert re.search(
        r"listens beyond the loopback address although it was told not to \(at (0\.0\.0\.0|::):\d", deaf.stdout
    ), deaf
    assert deaf.stdout.endswith(": Ray was stopped again\n[]\n")


@pytest.mark.oldest_ray
def test_a_job_speculates_through_shared_memory_and_leaves_nothing(tmp_path: Path) -> None:
    before = left()
    job = tmp_path / "job"
    done = outrider("run", EXAMPLES, "-o", job, "--draft-tokens", "4")
    assert done.returncode == 0, done.stderr
    told = described(job)
    assert told["summary"]["failed"] == 0 and told["summary"]["accepted"] > 0
    assert [costs["transport"] for costs in told["costs"].values()] == ["shared memory"]
    assert_nothing_more_than(before)
    assert stat.S_IMODE(job.stat().st_mode) == 0o700


def test_what_a_run_leaves_of_which_everything_was_killed_the_next_removes(tmp_path: Path) -> None:
    before = left()
    job = tmp_path / "job"
    process = start("run", EXAMPLES, "-o", job, *SPECULATING)
    wait_for_rows(process, job, 1)
    everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in everything:
        each.kill()
    process.wait()
    psutil.wait_procs(everything, timeout=10)
    assert len(left() - before) >= 1, "its folder"
    done = outrider("run", EXAMPLES, "-o", job, *SPECULATING)
    assert done.returncode == 0, done.stderr
    assert_nothing_more_than(before)


def raylet_of(process: subprocess.Popen[str]) -> psutil.Process | None:
    return next((each for each in psutil.Process(process.pid).children() if each.name() == "raylet"), None)


@pytest.mark.parametrize("how", ["stopped", pytest.param("socket", marks=pytest.mark.oldest_ray)])
def test_a_raylet_that_cannot_be_used_is_noticed_and_the_job_goes_on(how: str, tmp_path: Path) -> None:
    job = tmp_path / "job"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"id": "r{n}", "prompt": "def f{n}(x):", "max_tokens": 400}}\n' for n in range(300)))
    process = start("run", rows, "-o", job, "--draft", "none", "--batch", "1", "--start-deadline", "15")
    wait_for_rows(process, job, 1)
    raylet = raylet_of(process)
    assert raylet is not None
    if how == "stopped":
        raylet.send_signal(signal.SIGSTOP)
    else:
        [word] = [word for word in raylet.cmdline() if word.startswith("--raylet_socket_name=")]
        Path(word.partition("=")[2]).unlink()
    [target] = children_titled(process.pid, "ray::TargetActor")
    target.kill()
    at = time.monotonic()
    wait_for(process, lambda: (known(job, "ray_losses") or []) != [], "word of it")
    assert time.monotonic() - at < 60
    wait_for_rows(process, job, rows_done(job) + 2)
    process.terminate()
    output = finish(process, 130)
    said = "has not answered for" if how == "stopped" else "has been removed or replaced"
    assert said in output and "it is started anew, and the job goes on" in output, output
    assert not raylet.is_running()


def test_a_raylet_that_stops_before_it_is_up_is_replaced(tmp_path: Path) -> None:
    process = start("run", EXAMPLES, "-o", tmp_path / "job", "--draft", "none")
    wait_for(process, lambda: raylet_of(process) is not None, "raylet")
    raylet = raylet_of(process)
    assert raylet is not None
    raylet.send_signal(signal.SIGSTOP)
    output = finish(process, 0)
    assert re.search(r"Ray could not be started on this machine: .*: it is started anew, and the job goes on\n", output)
    assert not raylet.is_running()
