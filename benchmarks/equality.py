"""Does a row's text depend on how it was made? The same rows through plain decoding and through every way of speculating.

    python benchmarks/equality.py [--rows 10000] [--cases shared,lookup] [--prompts FILE ...]

Each case is a job of its own (`outrider run`), half of the rows greedy and half at temperature 0.8. Its results.jsonl has
to be that of `--draft none`, byte for byte, and candidates have to have been accepted, or nothing was tested. The exit
code is 1 where either is not so. Last comes one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from job_runs import EXAMPLES, TEMPERATURES, Ran, descendants, prompts_of, rows_done, rows_of, run, write_rows

DRAFTS, TARGETS = "draft", "target"
PROCESS = {DRAFTS: "ray::DraftActor", TARGETS: "ray::TargetActor"}


@dataclass(frozen=True, slots=True)
class Case:
    """One way to speculate. ``killed``: the role whose processes get SIGKILL repeatedly."""

    name: str
    options: tuple[str, ...]
    killed: str | None = None


# The tiny pocket target is faster than any hop, so `auto` would soon ask for almost no candidates. Most cases therefore fix
# the number of candidates and the layout.
PARALLEL = ("--draft", "pocket-parallel", "--draft-tokens", "6", "--layout", "shared")
PARALLEL_SUFFIX = ("--draft", "pocket-parallel+suffix", "--draft-tokens", "12", "--layout", "shared")
HEAD = ("--draft", "pocket-head", "--draft-tokens", "3", "--layout", "shared")
CASES = (
    Case("auto", ()),
    Case("shared", ("--draft-tokens", "3", "--layout", "shared")),
    Case("split", ("--draft-tokens", "3", "--layout", "split")),
    Case("two replicas", ("--draft-tokens", "3", "--replicas", "2")),
    Case("lookup", ("--draft", "lookup")),
    Case("auto+lookup", ("--draft", "auto+lookup", "--draft-tokens", "3", "--layout", "shared")),
    Case("suffix", ("--draft", "suffix")),
    Case("suffix on two replicas", ("--draft", "suffix", "--replicas", "2")),
    Case("auto+suffix", ("--draft", "auto+suffix", "--draft-tokens", "3", "--layout", "shared")),
    Case("parallel", PARALLEL),
    Case("parallel+suffix", PARALLEL_SUFFIX),
    Case("head", HEAD),
    Case("shortlist", ("--draft-tokens", "3", "--draft-shortlist", "1024", "--layout", "shared")),
    Case("parallel by shortlist", (*PARALLEL, "--draft-shortlist", "1024")),
    Case("k=1", ("--draft-tokens", "1")),
    Case("k=16", ("--draft-tokens", "16")),
    Case("drafts killed", ("--draft-tokens", "3", "--layout", "shared"), DRAFTS),
    Case("targets killed", ("--draft-tokens", "3", "--layout", "shared"), TARGETS),
    Case("parallel drafts killed", PARALLEL, DRAFTS),
    Case("parallel+suffix with targets killed", PARALLEL_SUFFIX, TARGETS),
    Case("heads killed", HEAD, DRAFTS),
    Case("suffix with targets killed", ("--draft", "suffix"), TARGETS),
)


@dataclass(slots=True)
class Killer:
    """Kills all drafts of a job, or all targets, each time that ``every`` further rows have ended, except the last time."""

    every: int
    rows: int
    kind: str = DRAFTS
    list_processes: Callable[[int], Any] = descendants
    done: Callable[[Path], int] = rows_done
    kill: Callable[[int, int], None] = os.kill
    killed: int = 0
    _next: int = field(init=False)

    def __post_init__(self) -> None:
        self._next = self.every

    def watch(self, process: subprocess.Popen[bytes], job: Path) -> None:
        if not self._next <= self.done(job) < self.rows:
            return
        title = PROCESS[self.kind]
        victims = [number for number, command in self.list_processes(process.pid) if title in command]
        if not victims:
            return  # the process killed before is not up again yet
        self._next += self.every
        for victim in victims:
            self.kill(victim, signal.SIGKILL)
            self.killed += 1


def line_of(case: Case, ran: Ran, plain: Ran, killed: int, resumed: bool = False) -> dict[str, Any]:
    summary = ran.summary
    return {
        "case": case.name,
        "options": " ".join(case.options),
        "same bytes": ran.same_as(plain),
        "proposed": summary["proposed"],
        "accepted": summary["accepted"],
        "killed": killed,
        "resumed": resumed,
        "deaths counted": summary[f"{case.killed or DRAFTS}_deaths"],
        "layout": [each["took"] for each in ran.told.get("layouts", {}).values()],
        "seconds": round(summary["seconds"], 1),
    }


def is_good(case: Case, line: dict[str, Any]) -> bool:
    speculated = line["accepted"] > 0
    # Of a job that went on, some processes were killed before.
    before = line["deaths counted"] - line["killed"]
    counted = line["deaths counted"] > 0 and (before >= 0 if line["resumed"] else before == 0)
    return bool(line["same bytes"]) and speculated and (case.killed is None or counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--draft", help="for the cases that name none: a draft for another model")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[EXAMPLES], help="JSON lines with a prompt each")
    parser.add_argument("--pieces", type=int, help="cut prompts into pieces of this many characters: more texts")
    parser.add_argument("--cases", default=",".join(names), help=f"some of: {', '.join(names)}")
    parser.add_argument("--killed-every", type=int, default=2000, help="rows between two deaths")
    parser.add_argument("--work", type=Path, help="keep the jobs here, and go on with those that are there")
    asked = parser.parse_args()
    unknown = set(asked.cases.split(",")) - set(names)
    if unknown:
        parser.error(f"--cases: unknown {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    with tempfile.TemporaryDirectory() as temporary:
        lines, good = compare(asked, asked.work or Path(temporary))
    print(json.dumps({"rows": asked.rows, "tokens": asked.tokens, "batch": asked.batch, "cases": lines}))
    sys.exit(0 if good else 1)


def pieces_of(prompts: Sequence[str], length: int) -> list[str]:
    cut = (prompt[at : at + length] for prompt in prompts for at in range(0, len(prompt), length))
    # Distinct pieces in their order.
    return list(dict.fromkeys(piece for piece in cut if piece.strip()))


def compare(asked: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], bool]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    prompts = prompts_of(asked.prompts)
    if asked.pieces is not None:
        prompts = pieces_of(prompts, asked.pieces)
    write_rows(rows, rows_of(prompts, asked.rows, TEMPERATURES))
    print(f"{min(asked.rows, len(prompts)):,} different prompts", flush=True)
    common = ["-m", asked.model, "--engine", "native", "--precision", asked.precision]
    common += ["--batch", str(asked.batch), "--max-tokens", str(asked.tokens)]
    plain = run(rows, folder / "plain", [*common, "--draft", "none"])
    print(f"plain: {plain.summary['tokens']:,} tokens in {plain.summary['seconds']:.1f} s", flush=True)
    lines, good = [], True
    for case in CASES:
        if case.name not in asked.cases.split(","):
            continue
        killer = Killer(asked.killed_every, asked.rows, case.killed) if case.killed is not None else None
        job = folder / case.name.replace(" ", "-")
        resumed = job.exists()
        names_none = asked.draft is not None and "--draft" not in case.options
        options = ("--draft", asked.draft, *case.options) if names_none else case.options
        if not {"lookup", "suffix"}.intersection(options):
            options = ("--draft-precision", asked.precision, *options)
        ran = run(rows, job, [*common, *options], killer.watch if killer is not None else None)
        line = line_of(case, ran, plain, killer.killed if killer is not None else 0, resumed)
        lines.append(line)
        good &= is_good(case, line)
        verdict = "the bytes of plain" if line["same bytes"] else "NOT the bytes of plain"
        share = f"{line['accepted']:,} of {line['proposed']:,} candidates accepted"
        deaths = f", {line['killed']} {case.killed}s killed" if killer is not None else ""
        print(f"{case.name}: {verdict}, {share}{deaths}, layout {line['layout']}, {line['seconds']} s", flush=True)
    return lines, good


if __name__ == "__main__":
    main()
