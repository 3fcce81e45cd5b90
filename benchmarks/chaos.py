"""A job on this machine of which some process is killed every few seconds: a target, a draft, a server of Ray, an agent.

    python benchmarks/chaos.py --rows 2000 --seed 1

Only the driver is spared, since nobody would start it again, and nothing is killed before a row has ended since the last
time. Says what was killed, and whether the results equal those of an undisturbed plain run, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from churn import write_rows
from command_line import described, outrider, rows_done

POLL_SECONDS = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shortest", type=float, default=4.0, help="seconds from one death to the next")
    parser.add_argument("--longest", type=float, default=12.0)
    asked = parser.parse_args()
    dice = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_rows(folder / "rows.jsonl", asked.rows, 120, dice)
        plain = outrider("run", rows, "-o", folder / "plain", "--draft", "none")
        assert plain.returncode == 0, plain.stderr
        words = ["run", str(rows), "-o", str(folder / "job"), "--draft-tokens", "4", "--batch", "2"]
        started = time.monotonic()
        job = subprocess.Popen([sys.executable, "-c", "from outrider.runner.cli import main; main()", *words])
        killed = torment(job, folder / "job", dice, asked.shortest, asked.longest)
        seconds = time.monotonic() - started
        same = (folder / "plain/results.jsonl").read_bytes() == (folder / "job/results.jsonl").read_bytes()
        summary = described(folder / "job")["summary"]
    counted = {name: summary[name] for name in ("failed", "target_deaths", "draft_deaths", "ray_deaths")}
    print(
        f"{summary['done']:,} of {asked.rows:,} rows in {seconds:.0f} s, {sum(killed.values())} processes killed; "
        f"results are {'the same bytes' if same else 'NOT the same'} as undisturbed; exit code {job.returncode}"
    )
    print(json.dumps({"killed": killed, "counted": counted}))
    sys.exit(0 if same and job.returncode == 0 else 1)


def torment(
    job: subprocess.Popen[bytes], directory: Path, dice: random.Random, shortest: float, longest: float
) -> Counter[str]:
    """Until the job has ended: how many processes were killed, by their names."""
    killed: Counter[str] = Counter()
    ended, due = 0, time.monotonic() + longest
    while job.poll() is None:
        time.sleep(POLL_SECONDS)
        if time.monotonic() < due or rows_done(directory) == ended:
            continue
        ended = rows_done(directory)
        due = time.monotonic() + dice.uniform(shortest, longest)
        with suppress(psutil.NoSuchProcess):
            living = [
                child
                for child in psutil.Process(job.pid).children(recursive=True)
                if child.status() != psutil.STATUS_ZOMBIE
            ]
            if living:
                victim = dice.choice(living)
                name = victim.name()
                victim.kill()
                killed[name] += 1
                print(f"{name} is killed after {ended:,} rows", flush=True)
    return killed


if __name__ == "__main__":
    main()
