"""Jobs on this machine of which every process there is gets killed, again and again, until this many have died.

    nice -n 19 python stress/kills.py --until 200            # this many more deaths; adds to stress/killed.json

A job is ``outrider run`` on the pocket pair, in several configurations. Its driver, the helper that knows tokenizers, Ray's
servers and agents, targets and drafts are killed (SIGKILL) one at a time, a few at a time or all at once, while they load
and while they work; some are stopped for seconds, and the driver is also asked to end (SIGTERM). A driver that has ended is
started again with the same command. When a job is done, each row must be there once, in the bytes of an undisturbed run
without a draft, and none of its processes may be left. The first job of which that is not so ends it all: its folder stays.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

COUNT_FILE = Path(__file__).parent / "killed.json"
OUTRIDER = [sys.executable, "-c", "from outrider.runner.cli.main import main; main()"]
POLL_SECONDS = 0.1
# How often the next death waits until the job has brought another row to its end.
PATIENT = 0.5
# How often all processes die at once, and which single ones die more often than others: what is up again soonest.
EVERYTHING = 0.25
OFTEN = {"target": 4, "draft": 4}
# A job that brings no row to its end for so long stands still.
STANDSTILL_SECONDS = 240.0
# What a killed driver leaves ends by itself: Ray's agents, whose raylet was killed too, first ask it in vain for a while.
GONE_SECONDS = 240.0
# One that is stopped for longer counts as dead in places (a draft's answer, a lease), which is slow and not wrong.
LONGEST_STOP = 5.0
# This many runs of a job may end with an error and without a row in between; after each, some process of theirs was killed.
MOST_IDLE_ERRORS = 6
# A row that has seen two targets die is tried alone, and a third death would be held against it: that would be no bug.
MOST_ATTEMPTS_TO_KILL = 1
# Of this program; Python's own resource tracker shows one when it was killed itself.
TRACEBACK = re.compile(r'File "[^"]*/(outrider|runner|workers)/')
ALL_DONE, JOB_ERROR, INTERRUPTED = 0, 1, 130


class Violation(Exception):
    """A row lost, doubled or changed, or a job that does not come to its end."""


# What is run


def _plain(number: int, dice: random.Random) -> dict[str, Any]:
    return {"prompt": f"def f{number}(x):", "max_tokens": dice.randint(1, 90)}


def _sampled(number: int, dice: random.Random) -> dict[str, Any]:
    return {**_plain(number, dice), "temperature": 0.8, "top_p": 0.95, "n": dice.choice((1, 2, 3)), "seed": number}


def _logprobs(number: int, dice: random.Random) -> dict[str, Any]:
    return {**_plain(number, dice), "logprobs": 2, "temperature": dice.choice((0.0, 0.7))}


def _chat(number: int, dice: random.Random) -> dict[str, Any]:
    body = {
        "model": "pocket",
        "messages": [{"role": "user", "content": f"Write a function that adds {number}."}],
        "max_tokens": dice.randint(1, 90),
    }
    return {"custom_id": f"chat {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


@dataclass(frozen=True, slots=True)
class Configuration:
    name: str
    make: Callable[[int, random.Random], dict[str, Any]]
    options: tuple[str, ...]


TWO_REPLICAS = ("--replicas", "2", "--share-cores")
CONFIGURATIONS = (
    Configuration("draft", _plain, ("--draft-tokens", "4", "--batch", "4")),
    Configuration("two replicas", _plain, ("--draft-tokens", "3", "--batch", "2", *TWO_REPLICAS)),
    Configuration("several samples, sampled", _sampled, ("--draft-tokens", "4", "--batch", "4")),
    Configuration("lookup", _plain, ("--draft", "lookup", "--batch", "2")),
    Configuration("chat", _chat, ("--batch", "4")),
    Configuration("log-probabilities", _logprobs, ("--draft-tokens", "2", "--batch", "4")),
    Configuration("two replicas, sampled", _sampled, ("--draft-tokens", "4", "--batch", "2", *TWO_REPLICAS)),
    Configuration("parallel draft", _plain, ("--draft", "pocket-parallel", "--draft-tokens", "6", "--batch", "4")),
    Configuration("head", _sampled, ("--draft", "pocket-head", "--draft-tokens", "3", "--batch", "4")),
    Configuration("suffixes, two replicas", _plain, ("--draft", "suffix", "--batch", "2", *TWO_REPLICAS)),
    Configuration(
        "parallel draft and suffixes",
        _sampled,
        ("--draft", "pocket-parallel+suffix", "--draft-tokens", "12", "--batch", "4"),
    ),
)


# What is killed


def kind_of(process: psutil.Process) -> str:
    """What a process below the driver is to the job."""
    title = " ".join(process.cmdline())
    for sign, kind in (
        ("ray::TargetActor", "target"),
        ("ray::DraftActor", "draft"),
        ("gcs_server", "control server"),
        ("raylet/raylet", "raylet"),
        ("agent", "agent"),
        ("ray::", "idle worker"),
        ("default_worker.py", "starting worker"),
        ("resource_tracker", "resource tracker"),
        ("multiprocessing", "helper"),
    ):
        if sign in title:
            return kind
    return "other"


@dataclass(slots=True)
class KillCounts:
    """What has happened, and what the count file adds up."""

    killed: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    runs: int = 0
    seconds: float = 0.0

    def add(self, other: KillCounts) -> None:
        self.killed += other.killed
        self.stopped += other.stopped
        self.jobs += other.jobs
        self.rows += other.rows
        self.runs += other.runs
        self.seconds += other.seconds

    @property
    def deaths(self) -> int:
        return sum(self.killed.values())

    @classmethod
    def read(cls, path: Path) -> KillCounts:
        if not path.exists():
            return cls()
        kept = json.loads(path.read_text())
        killed, stopped, jobs = (Counter(kept[name]) for name in ("killed", "stopped", "jobs"))
        return cls(killed, stopped, jobs, kept["rows"], kept["runs"], kept["seconds"])

    def write(self, path: Path) -> None:
        content = {
            "deaths": self.deaths,
            "rows lost, doubled or changed": 0,
            "killed": dict(self.killed.most_common()),
            "stopped": dict(self.stopped.most_common()),
            "jobs": dict(self.jobs.most_common()),
            "rows": self.rows,
            "runs": self.runs,
            "seconds": round(self.seconds, 1),
        }
        new = path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=2) + "\n")
        new.replace(path)


class KilledJob:
    """One job, from its first run to the one that ends it."""

    def __init__(self, folder: Path, rows: Path, options: tuple[str, ...], dice: random.Random, most_deaths: int) -> None:
        self.folder, self.dice, self.most_deaths = folder, dice, most_deaths
        self.job = folder / "job"
        self._said = folder / "said.txt"
        self._command = [*OUTRIDER, "run", str(rows), "-o", str(self.job), *options]
        self.counts = KillCounts()
        self._driver: subprocess.Popen[bytes] | None = None
        # Every process that this job has had, by id and start: ids are given again.
        self._seen: dict[tuple[int, float], tuple[psutil.Process, str]] = {}
        self._stopped: dict[psutil.Process, float] = {}
        self._last_ended = 0
        self._idle_errors = 0
        self._done = 0.0

    def run(self) -> KillCounts:
        began = moved = time.monotonic()
        due, ended_before = began + self._pause(), 0
        struck_at, patient = 0, False
        self._start()
        while True:
            time.sleep(POLL_SECONDS)
            self._note_processes()
            self._go_on()
            ended = self._ended()
            if ended != ended_before:
                ended_before, moved = ended, time.monotonic()
            if time.monotonic() - moved > STANDSTILL_SECONDS:
                raise Violation(f"no row has ended for {STANDSTILL_SECONDS:g} s")
            assert self._driver is not None
            if (code := self._driver.poll()) is not None:
                if self._is_over(code, ended):
                    break
                self._start()
                due = time.monotonic() + self._pause()
            elif time.monotonic() >= due and self.counts.deaths < self.most_deaths:
                if (patient and ended == struck_at) or not self._strike(ended):
                    continue
                due = time.monotonic() + self._pause()
                # Mostly it is to get to work again first; else it dies while it starts.
                struck_at, patient = ended, self.dice.random() < PATIENT
        self._done = time.monotonic()
        self.counts.seconds = self._done - began
        return self.counts

    def _pause(self) -> float:
        return self.dice.choice((0.1, 0.5, 2.0)) * self.dice.uniform(0.5, 1.5)

    def _start(self) -> None:
        self.counts.runs += 1
        with self._said.open("ab") as said:
            self._driver = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )

    def _is_over(self, code: int, ended: int) -> bool:
        """Whether the job is done; an error where its last run ended as none may."""
        said = self._said.read_text(errors="replace")
        if TRACEBACK.search(said):
            raise Violation(f"a traceback, see {self._said}")
        if code == ALL_DONE:
            return True
        if code not in (JOB_ERROR, INTERRUPTED, -signal.SIGKILL, -signal.SIGTERM):
            raise Violation(f"a run ended with {code}, see {self._said}")
        self._idle_errors = self._idle_errors + 1 if code == JOB_ERROR and ended == self._last_ended else 0
        if self._idle_errors > MOST_IDLE_ERRORS:
            raise Violation(f"{MOST_IDLE_ERRORS} runs have ended with an error and without a row, see {self._said}")
        self._last_ended = ended
        return False

    def _query(self, question: str) -> Any:
        """Of the job's journal; None while there is none."""
        with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{self.job}/job.db?mode=ro", uri=True)) as journal:
            return journal.execute(question).fetchone()[0]
        return None

    def _ended(self) -> int:
        return int(self._query("SELECT count(*) FROM rows WHERE state > 0") or 0)

    def _living(self) -> Iterator[tuple[psutil.Process, str]]:
        assert self._driver is not None
        with suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self._driver.pid)
            yield driver, "driver"
            for child in driver.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if child.status() != psutil.STATUS_ZOMBIE:
                        yield child, kind_of(child)

    def _note_processes(self) -> None:
        for process, kind in self._living():
            with suppress(psutil.NoSuchProcess):
                self._seen[process.pid, process.create_time()] = process, kind

    def _go_on(self) -> None:
        """Those that were stopped, when it is time."""
        for process, until in list(self._stopped.items()):
            if time.monotonic() >= until:
                del self._stopped[process]
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    # What is done to it

    def _strike(self, ended: int) -> bool:
        """Whether something was done. What would be held against a row waits."""
        by_kind: dict[str, list[psutil.Process]] = {}
        for process, kind in self._living():
            by_kind.setdefault(kind, []).append(process)
        how = self.dice.random()
        if how < EVERYTHING:
            everything = [(process, kind) for kind, some in by_kind.items() for process in some]
            self.dice.shuffle(everything)
            self._kill(everything, ended)
            return True
        kinds = sorted(by_kind)
        kind = self.dice.choices(kinds, [OFTEN.get(each, 1) for each in kinds])[0]
        process = self.dice.choice(by_kind[kind])
        if how < 0.35:
            self._stop(process, kind)
        elif how < 0.45 and kind == "driver":
            self._kill([(process, kind)], ended, signal.SIGTERM)
        elif kind == "target" and self._suspected():
            return False
        elif how < 0.6:
            # A neighbour dies at the same moment.
            other_kind = self.dice.choice([each for each in sorted(by_kind) if each != "target"])
            other = self.dice.choice(by_kind[other_kind])
            self._kill(list({process: kind, other: other_kind}.items()), ended)
        else:
            self._kill([(process, kind)], ended)
        return True

    def _suspected(self) -> bool:
        """Whether one more death of a target could be blamed on a row."""
        return int(self._query("SELECT max(attempts) FROM rows WHERE state = 0") or 0) > MOST_ATTEMPTS_TO_KILL

    def _kill(self, victims: list[tuple[psutil.Process, str]], ended: int, how: int = signal.SIGKILL) -> None:
        for process, kind in victims:
            with suppress(psutil.NoSuchProcess):
                # One that has ended meanwhile is none of ours; one that is stopped dies as well.
                process.send_signal(how)
                self.counts.killed[kind if how == signal.SIGKILL else f"{kind}, SIGTERM"] += 1
        names = ", ".join(kind for _, kind in victims)
        self._tell(f"{signal.Signals(how).name} after {ended} rows: {names}")

    def _stop(self, process: psutil.Process, kind: str) -> None:
        seconds = self.dice.uniform(0.5, LONGEST_STOP)
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            self._stopped[process] = time.monotonic() + seconds
            self.counts.stopped[kind] += 1
            self._tell(f"SIGSTOP for {seconds:.1f} s: {kind}")

    def _tell(self, what: str) -> None:
        with (self.folder / "strikes.txt").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {what}\n")

    def check_nothing_is_left(self) -> bool:
        """Whether all processes of the job that is done have ended; some may take their time, and others may begin."""
        left = [kind for process, kind in self._seen.values() if _lives(process)]
        if left and time.monotonic() - self._done > GONE_SECONDS:
            raise Violation(f"still there {GONE_SECONDS:g} s after the job's end: {left}")
        return not left

    def end(self) -> None:
        """Whatever happened, nothing goes on running."""
        for process, _ in list(self._living()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process, _ in self._seen.values():
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _lives(process: psutil.Process) -> bool:
    """The same process, not another one with its number."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def check_rows(job: Path, undisturbed: Path, rows: int) -> None:
    """Each row once, as it is undisturbed."""
    records = (job / "results.jsonl").read_bytes()
    ids = [json.loads(line)["custom_id"] for line in records.splitlines()]
    if len(ids) != len(set(ids)):
        raise Violation(f"doubled: {[name for name, count in Counter(ids).items() if count > 1][:5]}")
    if len(ids) != rows or (job / "errors.jsonl").read_bytes():
        raise Violation(f"{len(ids)} of {rows} rows are in the results")
    if records != (undisturbed / "results.jsonl").read_bytes():
        raise Violation("the results are not the bytes of an undisturbed run")
    with closing(sqlite3.connect(f"file:{job}/job.db?mode=ro", uri=True)) as journal:
        (totals,) = journal.execute("SELECT value FROM meta WHERE key = 'totals'").fetchone()
    tokens = sum(json.loads(line)["response"]["body"]["usage"]["completion_tokens"] for line in records.splitlines())
    if (counted := json.loads(totals)["tokens"]) != tokens:
        raise Violation(f"{counted} tokens are counted, {tokens} were written")


class Undisturbed:
    """What each input comes to when nothing dies and nothing is proposed; made once."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._folder, self._rows = folder, rows

    def of(self, configuration: Configuration) -> tuple[Path, Path]:
        """The input, and the folder of its job."""
        folder = self._folder / configuration.make.__name__.strip("_")
        rows, job = folder / "rows.jsonl", folder / "job"
        if not folder.exists():
            folder.mkdir(parents=True)
            dice = random.Random(1)
            lines = [json.dumps(configuration.make(number, dice)) + "\n" for number in range(self._rows)]
            rows.write_text("".join(lines))
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            subprocess.run(
                [*OUTRIDER, "run", str(rows), "-o", str(job), "--draft", "none"],
                check=True,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return rows, job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--until", type=int, default=200, help="end when this many more processes have died")
    parser.add_argument("--count-file", type=Path, default=COUNT_FILE)
    parser.add_argument("--rows", type=int, default=2500, help="rows of a job")
    parser.add_argument("--deaths-a-job", type=int, default=60, help="a job is left in peace after this many")
    parser.add_argument("--seed", type=int, default=None, help="[default: the count so far]")
    names = [each.name for each in CONFIGURATIONS]
    parser.add_argument("--only", choices=names, nargs="+", default=names, metavar="CONFIGURATION", help="[all, in turn]")
    asked = parser.parse_args()
    chosen = [each for each in CONFIGURATIONS if each.name in asked.only]
    total = KillCounts.read(asked.count_file)
    first = sum(total.jobs.values())
    seed = total.deaths if asked.seed is None else asked.seed
    dice = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="outrider-kills-"))
    undisturbed = Undisturbed(folder / "undisturbed", asked.rows)
    new, number = KillCounts(), first
    lingering: list[KilledJob] = []
    print(f"seed {seed}, in {folder}; {total.deaths} had died before", flush=True)
    while new.deaths < asked.until:
        configuration = chosen[number % len(chosen)]
        number += 1
        rows, truth = undisturbed.of(configuration)
        here = folder / f"{number} {configuration.name}".replace(",", "").replace(" ", "-")
        here.mkdir()
        tormented = KilledJob(here, rows, configuration.options, dice, asked.deaths_a_job)
        try:
            counts = tormented.run()
            check_rows(tormented.job, truth, asked.rows)
            lingering = [other for other in (*lingering, tormented) if not other.check_nothing_is_left()]
        except Violation as violation:
            tormented.end()
            sys.exit(f"{configuration.name}: {violation}\nseed {seed}; what it left is in {here}")
        except BaseException:
            tormented.end()
            raise
        counts.jobs[configuration.name] += 1
        counts.rows += asked.rows
        new.add(counts)
        total.add(counts)
        total.write(asked.count_file)
        shutil.rmtree(here)
        print(
            f"{configuration.name}: {asked.rows} rows whole after {counts.deaths} deaths, {counts.runs} runs, "
            f"{counts.seconds:.0f} s; {60 * new.deaths / new.seconds:.0f} deaths a minute; {total.deaths} in all",
            flush=True,
        )
    try:
        while lingering := [other for other in lingering if not other.check_nothing_is_left()]:
            time.sleep(1.0)
    except Violation as violation:
        sys.exit(str(violation))
    shutil.rmtree(folder)
    print(json.dumps({"killed": dict(new.killed.most_common()), "stopped": dict(new.stopped), "rows": new.rows}))


if __name__ == "__main__":
    main()
