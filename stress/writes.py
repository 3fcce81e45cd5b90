"""A small job broken at each of its writes and syncs, one after the other (tests/support/storage.py), with both journals.

    python stress/writes.py                 # every operation, every fault, every state after a power cut: minutes
    python stress/writes.py --one-of 10     # every tenth

Stops at the first that leaves the job other than whole. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from storage import (
    FAULTS,
    RetriedJob,
    SmallJob,
    after_failed_sync,
    break_at,
    compiler,
    cut_power,
    describe,
    places,
    power_cuts,
    syncs,
)

# Where every sync costs nothing.
MEMORY = Path("/dev/shm")
# Whether it is the one for network file systems.
JOURNALS = {"write-ahead-log": False, "rollback": True}
# Of the retried job only the operations of the retry are broken.
JOBS = {"first": SmallJob, "retried": RetriedJob}


def every_fault(job: SmallJob, one_of: int) -> int:
    chosen = [(fault, at) for fault in FAULTS for at in places(job, fault)][::one_of]
    for fault, at in chosen:
        break_at(job, fault, at)
    return len(chosen)


def every_power_cut(job: SmallJob, one_of: int, variants: int) -> int:
    chosen = list(power_cuts(job.operations, variants))[::one_of]
    for cut in chosen:
        cut_power(job, job.operations, cut)
    return len(chosen)


def every_failed_sync(job: SmallJob, one_of: int, cuts_each: int = 10) -> int:
    """A sync fails, the job ends, and then the power does: what was to be synced may be gone for good."""
    count = 0
    for at in syncs(job)[::one_of]:
        operations = after_failed_sync(job, at)
        for cut in list(power_cuts(operations, 0))[-cuts_each:]:
            cut_power(job, operations, cut)
            count += 1
    return count


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-of", type=int, default=1, help="try only each so many'th")
    parser.add_argument("--variants", type=int, default=4, help="states of chance after a power cut, a moment")
    parser.add_argument("--journal", choices=JOURNALS, action="append", help="not both")
    parser.add_argument("--job", choices=JOBS, action="append", help="not both")
    asked = parser.parse_args(given)
    if compiler() is None:
        sys.exit("this needs a C compiler: gcc or cc")
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        for journal in asked.journal or JOURNALS:
            for kind in asked.job or JOBS:
                began = time.monotonic()
                # No space in the name: a list of libraries to preload would end there.
                with JOBS[kind](Path(folder) / f"{journal}-{kind}", JOURNALS[journal]) as job:
                    told = {
                        "journal": journal,
                        "job": kind,
                        "operations of the job": describe(job.operations),
                        "faults": every_fault(job, asked.one_of),
                    }
                    if kind == "first":
                        told |= {
                            "power cuts": every_power_cut(job, asked.one_of, asked.variants),
                            "power cuts after a failed sync": every_failed_sync(job, asked.one_of),
                        }
                    told |= {"runs of the job": job.runs, "seconds": round(time.monotonic() - began, 1)}
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
