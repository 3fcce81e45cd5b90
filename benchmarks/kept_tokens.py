"""What it costs the driver to keep the tokens of rows under way, as a share of the time between two writes.

python benchmarks/kept_tokens.py --folder /on/the/disk/of/the/jobs
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from driver_fakes import fill

from outrider.runner.driving.partial_tokens import SECONDS_BETWEEN_WRITES, PartialTokenStore
from outrider.runner.job.journal import Journal
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.workers.messages import PartialTokens, Row

WRITES = 50


def seconds_a_write(folder: Path, rows: int, tokens: int) -> tuple[float, float]:
    """(CPU seconds, elapsed seconds) of a write for ``rows`` rows with this many new tokens each."""
    with tempfile.TemporaryDirectory(dir=folder) as job:
        journal = Journal(Path(job) / "job.db")
        fill(journal, rows)
        written = PartialTokenStore()
        for row in range(rows):
            written.resumed(Row(row * MOST_SAMPLES, (1,), 10**6), 0)
        used, passed = [], []
        for number in range(WRITES):
            told = [PartialTokens(row * MOST_SAMPLES, number * tokens, tuple(range(tokens))) for row in range(rows)]
            cpu, clock = time.process_time(), time.perf_counter()
            written.add_reported(0, told)
            journal.keep_tokens(written.to_keep())
            used.append(time.process_time() - cpu)
            passed.append(time.perf_counter() - clock)
        journal.close()
    return statistics.median(used), statistics.median(passed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path())
    folder = parser.parse_args().folder
    print("| rows under way | tokens of each a write | CPU, ms | clock, ms | share of a core | share of the time |")
    print("|---:|---:|---:|---:|---:|---:|")
    for rows, tokens in ((8, 100), (64, 40), (512, 20)):
        cpu, clock = seconds_a_write(folder, rows, tokens)
        shares = f"{cpu / SECONDS_BETWEEN_WRITES:.3%} | {clock / SECONDS_BETWEEN_WRITES:.3%}"
        print(f"| {rows} | {tokens} | {1e3 * cpu:.2f} | {1e3 * clock:.2f} | {shares} |")


if __name__ == "__main__":
    main()
