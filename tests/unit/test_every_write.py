"""A small job broken at each of its writes: by errors, by its end, by a power cut. ``stress/writes.py`` does the same."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import storage
from storage import (
    CREATE,
    FAULTS,
    RENAME,
    SYNC,
    WRITE,
    Disk,
    Operation,
    RetriedJob,
    SmallJob,
    Violation,
    after_failed_sync,
    break_at,
    cut_power,
    in_turn,
    places,
    power_cuts,
    syncs,
)

pytestmark = pytest.mark.skipif(storage.compiler() is None, reason="needs a C compiler, for faults.c")
# Enough to see in the fast set that the harness works and that nothing is grossly wrong. The slow set breaks each kind of
# operation on each file once, and one of these of all others; after a power cut one of as many states.
SAMPLES = 2
TIMES_RETRIED = 3
ONE_OF = {False: 60, True: 240}
VARIANTS = 4
CUTS_AFTER_A_SYNC, SYNCS_THAT_FAIL = 10, 2


# The journal of network file systems has its turn in the slow set.
@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["log", "network"])
def job(request: pytest.FixtureRequest) -> Iterator[SmallJob]:
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    with SmallJob(folder, request.param) as made:
        yield made
    shutil.rmtree(folder)


@pytest.mark.slow
def test_rows_are_run_again_whatever_is_broken() -> None:
    """Their errors stay until something takes their place."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        RetriedJob(Path(folder), network=False) as job,
    ):
        assert job.failed == {4, 6}
        assert storage.describe(job.operations)["sync"] > 10
        for fault in FAULTS:
            for at in spread(places(job, fault), TIMES_RETRIED):
                break_at(job, fault, at)


def spread(places: list[Any], count: int) -> list[Any]:
    return places[:: max(1, len(places) // count)]


def test_the_job_writes_all_there_is_to_write(job: SmallJob) -> None:
    """Its journal, its results and its report, rows that fail and a target that dies: else little would be proven."""
    results, errors = job.expected
    assert (results.count("\n"), errors.count("\n")) == (10, 2)
    assert "replica_died" in errors
    counted = storage.describe(job.operations)
    assert counted["sync"] > 40
    assert counted["write"] > 100
    assert counted["rename"] > 5


@pytest.mark.one_in(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_few_faults(job: SmallJob, fault: str) -> None:
    # Each fault somewhere else.
    possible = places(job, fault)
    break_at(job, fault, possible[list(FAULTS).index(fault) * len(possible) // len(FAULTS)])


def test_a_few_power_cuts(job: SmallJob) -> None:
    cuts = list(power_cuts(job.operations, 1))
    for cut in spread(cuts, SAMPLES):
        cut_power(job, job.operations, cut)


def test_each_kind_of_operation_on_each_file_is_broken_by_a_fault(job: SmallJob) -> None:
    """Else what follows would leave out what is done once, as most is."""
    chosen = [at for places in in_turn(job).values() for at in places]
    counted = [operation for operation in job.operations if operation.what != storage.MARK]
    broken = {(counted[at].what, counted[at].path.rpartition(".")[0]) for at in chosen}
    assert broken == {(each.what, each.path.rpartition(".")[0]) for each in counted}
    assert all(at in places(job, fault) for fault, several in in_turn(job).items() for at in several)
    assert len(chosen) > 25


# stress/writes.py tries all of them.


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_many_faults(job: SmallJob, fault: str) -> None:
    possible, step = places(job, fault), ONE_OF[job.network]
    others = possible[list(FAULTS).index(fault) * step // len(FAULTS) :: step]
    for at in sorted({*in_turn(job)[fault], *others}):
        break_at(job, fault, at)


@pytest.mark.slow
def test_many_power_cuts(job: SmallJob) -> None:
    for cut in list(power_cuts(job.operations, VARIANTS))[:: min(ONE_OF.values())]:
        cut_power(job, job.operations, cut)


@pytest.mark.slow
def test_many_power_cuts_after_a_failed_sync(job: SmallJob) -> None:
    for at in spread(syncs(job), SYNCS_THAT_FAIL):
        operations = after_failed_sync(job, at)
        for cut in list(power_cuts(operations, 0))[-CUTS_AFTER_A_SYNC:]:
            cut_power(job, operations, cut)


# The model of the disk, and that the harness can fail


def did(what: int, path: str, other: str = "", data: bytes = b"", offset: int = 0, succeeded: bool = True) -> Operation:
    return Operation(what, succeeded, path, other, data, offset)


def test_what_was_synced_outlasts_a_power_cut_and_nothing_else_has_to() -> None:
    disk = Disk()
    for operation in (
        did(CREATE, "a"),
        did(WRITE, "a", data=b"one"),
        did(SYNC, "a"),
        did(WRITE, "a", data=b"two", offset=3),
    ):
        disk.do(operation)
    assert disk.after_a_power_cut(None) == {}, "its name was not synced"
    assert disk.after_a_power_cut(None, names_last=True) == {"a": b"one"}
    disk.do(did(SYNC, ""))
    assert disk.after_a_power_cut(None) == {"a": b"one"}
    disk.do(did(SYNC, "a"))
    assert disk.after_a_power_cut(None) == {"a": b"onetwo"}


def test_a_name_is_the_old_one_until_its_folder_is_synced() -> None:
    disk = Disk()
    for operation in (
        did(CREATE, "a"), did(SYNC, ""), did(CREATE, "b"), did(WRITE, "b", data=b"new"), did(SYNC, "b"),
        did(RENAME, "b", "a"),
    ):  # fmt: skip
        disk.do(operation)
    assert disk.after_a_power_cut(None) == {"a": b""}
    disk.do(did(SYNC, ""))
    assert disk.after_a_power_cut(None) == {"a": b"new"}


def test_what_a_failed_sync_was_to_write_is_gone() -> None:
    disk = Disk()
    for operation in (
        did(CREATE, "a"), did(SYNC, ""), did(WRITE, "a", data=b"x"), did(SYNC, "a", succeeded=False), did(SYNC, "a"),
    ):  # fmt: skip
        disk.do(operation)
    assert disk.after_a_power_cut(None) == {"a": b""}


def test_results_that_are_not_synced_are_found(job: SmallJob) -> None:
    """As if the command had forgotten to: the log of an undisturbed run without the syncs of its results."""
    operations = [each for each in job.operations if not (each.what == SYNC and "results" in each.path)]
    with pytest.raises(Violation, match=r"results.jsonl is not what was written"):
        for cut in list(power_cuts(operations, 0))[-12:]:
            cut_power(job, operations, cut)


def test_rows_that_are_not_synced_are_found(job: SmallJob) -> None:
    """And what is said to be recorded before it is."""
    operations = [each for each in job.operations if not (each.what == SYNC and each.path.startswith("job/job.db"))]
    with pytest.raises(Violation, match=r"had been recorded, and is not there|the job is gone|the job was accepted"):
        for cut in power_cuts(operations, 0):
            if cut.marks > 10:
                cut_power(job, operations, cut)
