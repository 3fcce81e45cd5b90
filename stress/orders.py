"""The real driver on thousands of jobs with random failures (tests/support/orders.py), by seed, on a virtual clock.

python stress/orders.py --seeds 0:10000      # this many of them; stops at the first that breaks a rule, with its log
python stress/orders.py --seeds 260          # one of them again, with all that happened in it
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from orders import FailingJob, Outcome, Violation


def live(seed: int) -> tuple[Outcome | None, str]:
    """What became of one job, or which rule was broken there."""
    try:
        return FailingJob(seed).run(), ""
    except Violation as violation:
        return None, str(violation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:10000", help="FIRST:BEHIND_THE_LAST, or one seed")
    parser.add_argument("--processes", type=int, default=None, help="[default: one a CPU]")
    asked = parser.parse_args()
    first, _, behind = asked.seeds.partition(":")
    if not behind:
        job = FailingJob(int(first))
        try:
            print(job.run())
        finally:
            print("\n".join(job.ray.log))
        return
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with Pool(asked.processes) as pool:
        for outcome, broken in pool.imap_unordered(live, range(int(first), int(behind)), chunksize=20):
            if outcome is None:
                sys.exit(broken)
            outcomes.append(outcome)
    told = {
        "jobs": len(outcomes),
        "drivers begun": sum(outcome.runs for outcome in outcomes),
        "targets that died": sum(outcome.deaths for outcome in outcomes),
        "rows blamed": sum(outcome.blamed for outcome in outcomes),
        "hours of their clocks": round(sum(outcome.seconds for outcome in outcomes) / 3600, 1),
        "seconds of ours": round(time.monotonic() - began, 1),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
