"""A helper process that cannot start since /dev/shm is full or read-only gives one error sentence."""

from __future__ import annotations

import errno
import multiprocessing.synchronize
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.planning.placement import PlannedActor
from outrider.runner.pool_of_one import pool_of_one
from outrider.runner.quality.model_process import ModelProcess
from outrider.workers.errors import JobError, NoSpaceError

SAID = r"^the process that reads models cannot be started: {}; it needs /dev/shm, writable and with room in it \("


def refuse_semaphores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", refused)


@pytest.mark.parametrize(("number", "kind"), [(errno.EROFS, JobError), (errno.ENOSPC, NoSpaceError)])
def test_why_a_process_cannot_start_is_said(monkeypatch: pytest.MonkeyPatch, number: int, kind: type[JobError]) -> None:
    refuse_semaphores(monkeypatch, number)
    with pytest.raises(kind, match=SAID.format(os.strerror(number))) as caught:
        pool_of_one(print)
    assert type(caught.value) is kind


def test_an_interrupt_waits_until_the_process_knows_what_to_do_about_it() -> None:
    """Else one that comes while it imports what it needs is told with a traceback."""
    with pool_of_one(print) as pool:
        waiting = pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ())
        [process] = pool._processes.values()
        status = Path(f"/proc/{process.pid}/status").read_text()
        [blocked] = (line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
        assert int(blocked, 16) & 1 << signal.SIGINT - 1, "as it starts"
        assert waiting.result() == set(), "once it works"
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_DFL
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), "the caller is what it was"


def test_both_helpers_are_such_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_semaphores(monkeypatch, errno.EROFS)
    actor = PlannedActor("target", 0, "here", (0,), (0,), 1, "cpu", "", {}, (), {})
    for start in (TokenizerProcess, lambda: ModelProcess(actor)):
        with pytest.raises(JobError, match=SAID.format("Read-only file system")):
            start()
