"""Process limits that are too low for Ray are refused by name before Ray starts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outrider.runner.hosts import limits
from outrider.runner.hosts.limits import check_limits
from outrider.runner.job_child import EventWriter
from outrider.runner.options.job import JobSpec
from outrider.runner.run_job import run_job
from outrider.workers.errors import JobError

PROGRAM = "from outrider.runner.cli.main import main; main()"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("-n 64", "ulimit -n allows 64 open files, and a job here needs 128 at least; raise it"),
        (
            "-v 1500000",
            "ulimit -v allows 1,500,000 KiB of address space, and a job here needs 2,097,152 at least; raise it",
        ),
        ("-f 100", "ulimit -f allows 100 KiB a file, and a job here needs 262,144 at least; raise it"),
    ],
)
def test_a_limit_that_is_too_small_for_any_job_is_named_before_anything_is_made(
    limit: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    begin = f"cd {tmp_path} && ulimit {limit} && exec {sys.executable} -P -c '{PROGRAM}' run in.jsonl -o job"
    done = subprocess.run(["bash", "-c", begin], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, f"outrider: {said}\n")
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("allowed", "of_user"),
    [(100, "ulimit -u: 100"), (resource.RLIM_INFINITY, "ulimit -u: no limit")],
    ids=["user", "container"],
)
def test_too_few_threads_are_named_whoever_limits_them(allowed: int, of_user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, who may run this, has no limit of its own."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == 97:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    known = resource.getrlimit
    monkeypatch.setattr(
        resource, "getrlimit", lambda limit: (allowed, allowed) if limit == resource.RLIMIT_NPROC else known(limit)
    )
    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(JobError, match=rf"^only 97 more threads can be started here, .* \({of_user}\)"):
        check_limits()
    assert not any(thread.is_alive() for thread in started)


def test_each_actor_needs_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 165 let a job begin whose draft, and then its target, died again and again as they started."""
    monkeypatch.setattr(limits, "_startable", lambda count: min(count, 163))
    check_limits()
    with pytest.raises(JobError, match=r"^only 163 more threads can be started here, and a job needs 166 at least; "):
        check_limits(actors=2)


def test_a_job_is_told_at_once_how_many_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever raised the limit to the 138 that were asked for first was then asked for 166."""
    (tmp_path / "in.txt").write_text("a prompt\n")
    monkeypatch.setattr(limits, "_startable", lambda count: min(count, 60))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    asked = {
        ("auto", 0): "138, or 166 with a draft model,",
        ("none", 0): "138, or 166 with a draft model,",
        ("some/draft+suffix", 0): "166",
        ("some/draft", 2): "222",
        ("lookup", 2): "166",
        ("none", 4096): "194",
    }
    for (draft, replicas), needed in asked.items():
        spec = JobSpec(input=tmp_path / "in.txt", out=tmp_path / "job", draft=draft, replicas=replicas or None)
        with pytest.raises(JobError) as refused:
            run_job(spec, EventWriter(2))
        assert f"can be started here, and a job needs {needed} at least; " in str(refused.value)
    assert not (tmp_path / "job").exists()


def test_the_threads_that_were_tried_are_gone() -> None:
    before = threading.active_count(), threading.stack_size()
    assert limits._startable(150) == 150
    assert (threading.active_count(), threading.stack_size()) == before
