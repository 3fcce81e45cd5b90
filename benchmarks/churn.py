"""A job over four raylets on this machine, of which one is killed and replaced every few seconds.

    python benchmarks/churn.py --rows 5000 --every 15

Says how long it took, how many raylets died, and whether the results equal those of an undisturbed run, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from raylets import Raylets

OUTRIDER = [sys.executable, "-c", "from outrider.runner.cli.main import main; main()"]


def write_rows(path: Path, rows: int, most_tokens: int, dice: random.Random) -> Path:
    """Rows of many lengths, so that places of a batch become free at all times."""
    with path.open("w") as file:
        for number in range(rows):
            line = {"prompt": f"def f{number}(x):", "max_tokens": dice.randint(1, most_tokens), "seed": number}
            file.write(json.dumps(line) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--raylets", type=int, default=4)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two deaths")
    parser.add_argument("--most-tokens", type=int, default=60)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dice = random.Random(1)
        rows = write_rows(folder / "rows.jsonl", asked.rows, asked.most_tokens, dice)
        alone, churned = folder / "alone", folder / "churned"
        common = ["run", str(rows), "--draft", "lookup", "--json"]
        here = {**os.environ, "HF_HUB_OFFLINE": "1"}
        subprocess.run([*OUTRIDER, *common, "-o", str(alone)], check=True, env=here, stderr=subprocess.DEVNULL)
        with Raylets(asked.raylets, cores=2) as raylets:
            joined = ["--address", raylets.address, "--share-cores", "--replicas", str(asked.raylets)]
            started = time.monotonic()
            job = subprocess.Popen([*OUTRIDER, *common, *joined, "-o", str(churned)], env=raylets.environment)
            deaths = 0
            while job.poll() is None:
                try:
                    job.wait(asked.every)
                except subprocess.TimeoutExpired:
                    victim = dice.choice(raylets.nodes)
                    raylets.kill(victim)
                    raylets.add(2)
                    deaths += 1
                    print(f"{time.monotonic() - started:6.0f} s: {victim[:6]} killed and replaced", flush=True)
            seconds = time.monotonic() - started
        same = (alone / "results.jsonl").read_bytes() == (churned / "results.jsonl").read_bytes()
        told = json.loads((churned / "job.json").read_text())
        hosts = Counter(told["rows_by_host"])
        print(
            f"{told['summary']['done']:,} of {asked.rows:,} rows in {seconds:.0f} s on {len(hosts)} raylets in all; "
            f"{deaths} died; {told['summary']['target_deaths']} deaths blamed on replicas; "
            f"results are {'the same bytes' if same else 'NOT the same'} as undisturbed; exit code {job.returncode}"
        )
        sys.exit(0 if same and job.returncode == 0 else 1)


if __name__ == "__main__":
    main()
