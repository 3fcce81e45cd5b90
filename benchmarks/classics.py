"""The command lines of docs/older-tools.md, run as they are written there, on models of their real shapes.

    python benchmarks/classics.py --work /tmp/classics [--lines 1,3]

Each line's models are laid into a Hugging Face cache under ``--work`` and deleted when no later line asks for them (a 13b
and a 15b are 26 and 31 GB for a while). What a line prints is read back as its user sees it: the columns by their names,
Tokens/Sec = 1000 / Time/Token, Total = Prefill + (n - 1) x Time/Token. A line that fails is shown with its last words.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shapes.catalogue import System, find_system
from outrider.runner.bench.table import COLUMNS
from outrider.workers.models.draft_names import LOOKUP
from outrider.workers.models.preparation import choose_draft

ROOT = Path(__file__).resolve().parents[1]
TABLE = "| then | now |"
AND_SO_ON = "… "
TARGET_OPTIONS = ("-m", "--model", "--model_name")
DRAFT_OPTIONS = ("--draft", "--assistant-model")


def lines_of(readme: str) -> list[str]:
    """The second column of the table. A line that begins with "…" continues the one before."""
    commands: list[str] = []
    table = readme.split(TABLE, 1)[1].split("\n\n", 1)[0]
    for line in table.splitlines()[2:]:
        command = line.rstrip(" |").rsplit(" | ", 1)[1].strip("` ")
        commands.append(f"{commands[-1]} {command.removeprefix(AND_SO_ON)}" if command.startswith(AND_SO_ON) else command)
    return commands


def systems_of(command: str) -> list[System]:
    """The target, and the draft if the line uses a draft model."""
    words = shlex.split(command)
    words = words[words.index("outrider") :]  # words before it are another program's
    target = find_system(_value(words, TARGET_OPTIONS) or "")
    if "--no-assisted" in words:
        return [target]
    facts = SimpleNamespace(name=target.name, family=target.family, vocabulary=target.config["vocab_size"])
    draft = _value(words, DRAFT_OPTIONS) or choose_draft(cast(Any, facts))
    return [target] if draft == LOOKUP else [target, find_system(draft)]


def _value(words: Sequence[str], options: Sequence[str]) -> str | None:
    return next((words[at + 1] for at, word in enumerate(words) if word in options), None)


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a printed table, to the digits that it shows."""

    tokens: int
    total: Decimal
    prefill_ms: Decimal
    step_ms: Decimal
    rate: Decimal
    accepted: str
    a_round: str
    peak_gb: float

    def check(self) -> None:
        """Check the row against the table's formulas, within the rounding of its digits."""
        if abs(self.rate * self.step_ms - 1000) > _half(self.step_ms) * self.rate + _half(self.rate) * self.step_ms:
            raise ValueError(f"{self.rate} tokens/s are not 1000 / {self.step_ms} ms")
        steps = self.tokens - 1
        summed = self.prefill_ms + steps * self.step_ms
        allowed = _half(self.prefill_ms) + steps * _half(self.step_ms) + 1000 * _half(self.total)
        if abs(summed - 1000 * self.total) > allowed:
            raise ValueError(f"{self.total} s are not {self.prefill_ms} ms + {steps} x {self.step_ms} ms")


def _half(printed: Decimal) -> Decimal:
    """Half a unit of the last digit: the greatest rounding error of a printed number."""
    return Decimal((0, (5,), int(printed.as_tuple().exponent) - 1))


def examples_in(printed: str) -> list[Example]:
    """The rows of the table that a line printed; a ValueError if there is no table, or if it contradicts its formulas."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in printed.splitlines() if line.startswith("|")]
    if not rows or tuple(rows[0]) != COLUMNS:
        raise ValueError(f"no table with the columns {', '.join(COLUMNS)}")
    found = []
    for _, _, tokens, total, prefill, step, rate, accepted, a_round, peak in rows[2:]:
        numbers = map(Decimal, (total, prefill, step, rate))
        example = Example(int(tokens), *numbers, accepted, a_round, float(peak))
        example.check()
        found.append(example)
    return found


def median_row(command: str, examples: Sequence[Example], minutes: float) -> str:
    rates, prefills = [each.rate for each in examples], [each.prefill_ms for each in examples]
    shares = [float(each.accepted) for each in examples if re.fullmatch(r"[\d.]+", each.accepted)]
    rounds = [float(each.a_round) for each in examples if re.fullmatch(r"[\d.]+", each.a_round)]
    cells = (
        f"`{command}`",
        str(len(examples)),
        f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})",
        f"{min(prefills):.0f} to {max(prefills):.0f}",
        f"{statistics.mean(shares):.1f}" if shares else "none asked for",
        f"{statistics.median(rounds) if rounds else 1.0:.2f}",
        f"{max(each.peak_gb for each in examples):.2f}",
        f"{minutes:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def lay(names: Sequence[str], hub: Path, log: Path) -> None:
    with log.open("w") as out:
        laying = [sys.executable, "-m", "benchmarks.shapes", *names, "--hub", str(hub)]
        code = subprocess.run(laying, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise ValueError(f"its models could not be laid: {last_words(log)}")


def run(command: str, environment: dict[str, str], log: Path) -> str:
    """Runs the command line; returns its standard output and logs its standard error."""
    with log.with_suffix(".out").open("w") as out, log.with_suffix(".err").open("w") as err:
        code = subprocess.run(shlex.split(command), env=environment, stdout=out, stderr=err, check=False).returncode
    if code:
        raise ValueError(f"exit {code}: {last_words(log.with_suffix('.err'))}")
    return log.with_suffix(".out").read_text()


def last_words(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split()[-60:])


HEAD = (
    "| command | examples | tokens/s, median (range) | prefill, ms | accepted, % | tokens a round | peak, GB | minutes |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="weights, packed weights and logs go here")
    parser.add_argument("--lines", default="", help="only these of the table, such as 1,3 [default: all]")
    arguments = parser.parse_args()
    hub, cache, logs = (arguments.work / name for name in ("hub", "cache", "logs"))
    logs.mkdir(parents=True, exist_ok=True)
    commands = lines_of((ROOT / "docs" / "older-tools.md").read_text(encoding="utf-8"))
    every = range(1, len(commands) + 1)
    asked = arguments.lines.split(",") if arguments.lines else list(map(str, every))
    if not set(asked) <= set(map(str, every)):
        parser.error(f"--lines: the table has the lines 1 to {len(commands)}; {arguments.lines} asks for others")
    chosen = [int(number) for number in asked]
    environment = os.environ | {
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
        "OUTRIDER_CACHE": str(cache),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    failed = False
    print(HEAD, flush=True)
    for turn, number in enumerate(chosen):
        command = commands[number - 1]
        later = {system.name for each in chosen[turn + 1 :] for system in systems_of(commands[each - 1])}
        systems = systems_of(command)
        names = [system.name for system in systems]
        started = time.perf_counter()
        try:
            lay(names, hub, logs / f"{number}.shapes.log")
            started = time.perf_counter()
            printed = run(command, environment, logs / str(number))
            print(median_row(command, examples_in(printed), (time.perf_counter() - started) / 60), flush=True)
        except (ValueError, ArithmeticError, OSError) as error:
            failed = True
            minutes = (time.perf_counter() - started) / 60
            print(f"| `{command}` | {error} | | | | | | {minutes:.1f} |", flush=True)
        for system in systems:
            if system.name not in later:
                shutil.rmtree(hub / system.folder, ignore_errors=True)
        if names[0] not in later:
            shutil.rmtree(cache, ignore_errors=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
