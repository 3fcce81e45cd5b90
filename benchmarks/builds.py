"""Passes of several builds of the kernels, in lockstep: which is faster, on a machine whose speed changes by the minute?

    cmake -S . -B build/new -DCMAKE_BUILD_TYPE=Release && cmake --build build/new
    python benchmarks/builds.py --shape 1b installed build/new/kernels/liboutrider_kernels.so

Every build gets a process of its own, and they take turns of a few passes each, so that all of them meet the same
minutes. Shown are medians over the turns, and those of the ratios to the first build, and whether cores were near to each
other or far meanwhile (cores.py); where that changed, the medians of either too. Last comes a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cores import Cores
from inflate import SHAPES, model_directory

from outrider.workers.engines.engine import Feed
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.opening import open_model

INSTALLED = "installed"
# Passes in a turn; fewer for passes of at least MANY tokens, which take long.
PASSES, PASSES_OF_MANY, MANY = 7, 2, 32
# Nanoseconds of a round trip between cores; less if they share a cache.
NEAR = 150


def serve(model: str, precision: str, cache_precision: str, context: int, rows: int) -> None:
    """Answers each line "tokens passes" (tokens of all rows together) with the seconds of a pass: the lower tercile."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    spec = ModelSpec(model, "native", precision, threads=len(cores), cores=cores, cache_precision=cache_precision)
    engine = open_model(spec).engine
    for row in range(rows):
        engine.open(row, Sampling(), context)
        engine.feed([Feed(row, [3 + (7 * row + token) % 97 for token in range(context)], 0)])
    print("ready", flush=True)
    for line in sys.stdin:
        tokens, passes = map(int, line.split())
        each = tokens // rows
        feeds = [Feed(row, [5 + (7 * row + token) % 97 for token in range(each)], min(each, 16)) for row in range(rows)]
        times = []
        for _ in range(passes):
            started = time.perf_counter()
            engine.feed(feeds)
            times.append(time.perf_counter() - started)
            for row in range(rows):
                engine.truncate(row, context)
        print(sorted(times)[len(times) // 3], flush=True)


class Build:
    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        environment = {key: value for key, value in os.environ.items() if key != "OUTRIDER_LIBRARY"}
        if name != INSTALLED:
            environment["OUTRIDER_LIBRARY"] = str(Path(name).resolve())
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        if self._answer() != "ready":
            raise SystemExit(f"{name}: it did not start; its error stands above")

    def seconds(self, tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{tokens} {PASSES if tokens < MANY else PASSES_OF_MANY}\n")
        answer = self._answer()
        if not answer:
            raise SystemExit(f"{self.name}: it ended in the middle; its error stands above")
        return float(answer)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def stop(self) -> None:
        self._process.communicate()


@dataclass(frozen=True)
class Turn:
    """Each build's seconds for one size, and the nanoseconds of a round trip between cores before and after them."""

    seconds: tuple[float, ...]
    nanoseconds: tuple[float, float]

    @property
    def place(self) -> str:
        near = [each < NEAR for each in self.nanoseconds]
        return "near" if all(near) else "moved" if any(near) else "far"


def measure(builds: list[Build], sizes: list[int], turns: int) -> dict[int, list[Turn]]:
    cores = Cores(sorted(os.sched_getaffinity(0)))
    found: dict[int, list[Turn]] = {tokens: [] for tokens in sizes}
    for turn in range(turns + 1):
        for tokens in sizes:
            before = cores.farthest()
            order = range(len(builds)) if turn % 2 else reversed(range(len(builds)))
            seconds = {index: builds[index].seconds(tokens) for index in order}
            if turn:  # the first one warms up
                of_each = tuple(seconds[index] for index in range(len(builds)))
                found[tokens].append(Turn(of_each, (before, cores.farthest())))
    return found


Figures = list[dict[int, tuple[float, float]]]


def figures_of(found: dict[int, list[Turn]], builds: int) -> Figures:
    """For each build and size (median milliseconds, median over turns of the ratio to the first build)."""
    return [
        {
            tokens: (
                round(statistics.median(turn.seconds[build] for turn in turns) * 1e3, 3),
                round(statistics.median(turn.seconds[build] / turn.seconds[0] for turn in turns), 3),
            )
            for tokens, turns in found.items()
            if turns
        }
        for build in range(builds)
    ]


def show(title: str, figures: Figures) -> None:
    print(f"{title:>8}" + "".join(f"{tokens:>16}" for tokens in figures[0]))
    for index, row in enumerate(figures):
        print(f"{index:>8}" + "".join(f"{ms:9.2f} ({times:.2f})" for ms, times in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", default=[INSTALLED], help=f"built kernels, or '{INSTALLED}'")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--model", help="a model directory instead of the shape's inflated one")
    parser.add_argument("--precision", default="w4a8")
    parser.add_argument("--cache-precision", choices=("auto", "int8"), default="auto")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rows", type=int, default=1, help="that share the tokens of a pass, evenly")
    parser.add_argument("--tokens", default="1,2,3,4,5,6,7,8,12,16,64")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    for library in asked.libraries:
        if library != INSTALLED and not Path(library).is_file():
            parser.error(f"{library}: no such file; give a built library, or '{INSTALLED}'")
    sizes = [int(tokens) for tokens in asked.tokens.split(",")] if not asked.serve else []
    if uneven := [tokens for tokens in sizes if tokens % asked.rows]:
        parser.error(f"--tokens {uneven[0]}: {asked.rows} rows cannot share them evenly; give other numbers")
    model = asked.model or str(model_directory(asked.shape))
    if asked.serve:
        serve(model, asked.precision, asked.cache_precision, asked.context, asked.rows)
        return
    command = [sys.executable, __file__, "--serve", "--model", model, "--precision", asked.precision]
    command += ["--cache-precision", asked.cache_precision, "--context", str(asked.context), "--rows", str(asked.rows)]
    builds = [Build(name, command) for name in asked.libraries]
    found = measure(builds, sizes, asked.turns)
    for build in builds:
        build.stop()
    places = sorted({turn.place for turns in found.values() for turn in turns})
    figures = {"all" if len(places) > 1 else places[0]: figures_of(found, len(builds))}
    for place in places if len(places) > 1 else []:
        there = {tokens: [turn for turn in turns if turn.place == place] for tokens, turns in found.items()}
        figures[place] = figures_of(there, len(builds))
    for title, rows in figures.items():
        show(title, rows)
    print("\n".join(f"{index:>8} {build.name}" for index, build in enumerate(builds)))
    told = {"model": model, "precision": asked.precision, "cache_precision": asked.cache_precision}
    told |= {"context": asked.context, "rows": asked.rows}
    print(json.dumps({**told, "libraries": asked.libraries, "ms and ratio": figures}))


if __name__ == "__main__":
    main()
