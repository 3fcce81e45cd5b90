"""``outrider run`` on a job so small that it can be broken at each of its writes, in a process that is ready for it.

    LD_PRELOAD=faults.so python tests/support/small_job.py

reads requests (one line of JSON each), runs the job for each in a fork of this process, and answers with exit code and
output. The command, the journal, the admission, the driver and the results are the real ones; models and Ray are fakes
(``virtual_ray.py``).
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

from virtual_ray import Fate, Future, TargetActor, VirtualRay, in_place_of_ray

from outrider.runner import drive_job, prepare_job
from outrider.runner.cli import machine as cli_machine
from outrider.runner.cli import main as cli
from outrider.runner.driving import driver
from outrider.runner.exit_codes import SOME_FAILED
from outrider.runner.hosts.this_machine import LocalHost
from outrider.runner.job import admission, journal, results
from outrider.runner.job import directory as job
from outrider.runner.job.directory import open_job
from outrider.runner.job.journal import Journal
from outrider.runner.job.requests import MOST_SAMPLES
from outrider.runner.options import job as config
from outrider.runner.planning.placement import PlannedActor
from outrider.runner.planning.replica_plan import ActorPlan, ReplicaPlan
from outrider.runner.report import page as report_page
from outrider.runner.report import render, report
from outrider.workers.machine.pinning import Launch
from outrider.workers.messages import ActorPlacement, ModelSpec, ReplicaSpec, Row
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.model_memory import ModelMemory

# Imported before the first fork, so that no fork imports them.
READY = (admission, cli_machine, config, driver, report_page)
MODEL_INFO = ModelInfo("tiny", "/models/tiny", "llama", 20, 100, "float32", (0,), 5, "d")
POISON = 4
INPUT = [
    *({"id": f"row {n}", "prompt": "x" * (n + 1), "seed": n, "max_tokens": 2 + n % 4, "label": n} for n in range(POISON)),
    {"id": "poison", "prompt": "x", "max_tokens": 3},
    {"id": "several", "prompt": "xyz", "n": 2, "max_tokens": 4, "label": "several"},
    {"id": "bad", "prompt": ""},
    *({"id": f"row {n}", "prompt": "x", "seed": n, "max_tokens": 3} for n in range(7, 12)),
]
EXIT_CODE = SOME_FAILED


class FakeTokenizerProcess:
    """A tokenizer process with one token for each letter."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare_pair(
        self, target: str, draft: str, say: Callable[[str], None], native: bool = True
    ) -> tuple[ModelInfo, None, str, list[str]]:
        return MODEL_INFO, None, "none", []

    def check_unchanged(self, model_info: ModelInfo) -> None:
        pass

    def check_weights(self, path: str, engine: str, allow_pickle: bool, precision: str, on_accelerator: bool) -> None:
        pass

    def check_hf_runs(self, model_info: ModelInfo, fast_attention: bool) -> None:
        pass

    def native_refuses(self, path: str) -> str | None:
        return None

    def memory_of(self, model: ModelSpec, rows: int, shortlist: int | None = 0) -> ModelMemory | None:
        return None

    def reasoning_tags(self, path: str) -> None:
        return None

    def tool_form(self, path: str) -> None:
        return None

    def begin_to_encode(self, path: str, prompts: list[str], context: int) -> Callable[[], list[tuple[int, ...] | str]]:
        return lambda: [tuple(ord(letter) % 100 for letter in one) or "it is empty" for one in prompts]


class OnePoison(Fate):
    """Row POISON kills its target, so that attempts and errors are written as well."""

    def __init__(self, ray: VirtualRay) -> None:
        self._ray = ray

    def seconds_a_token(self) -> float:
        return 0.6

    def fatal(self, target: TargetActor, row: Row) -> float | None:
        return 0.1 if row.key // MOST_SAMPLES == POISON else None


def local_host(ray: VirtualRay) -> Callable[..., Any]:
    def sign_of_life() -> Future:
        future = Future()
        future.resolve(None)
        return future

    @contextmanager
    def here(*_: object) -> Iterator[tuple[LocalHost, list[ReplicaPlan]]]:
        planned = PlannedActor("target", 0, "here", (0,), (), 1, "cpu", "", {}, (), {})
        placement = ActorPlacement(Launch(planned.pin, "affinity", (), "python3"))
        target = ActorPlan(ModelSpec(MODEL_INFO.path, "hf", "fp32"), planned, placement)
        plan = ReplicaPlan(target, None, ReplicaSpec(batch=2, draft_tokens=3))
        yield LocalHost(lambda unplaced: [], lambda: None, sign_of_life), [plan, plan]

    return here


def run(folder: Path, network: bool, again: bool, mark: Callable[[str], None]) -> None:
    """Runs the command to its end; ``mark`` is told what must be durable from then on.

    ``again``: runs the failed rows of an ended job once more (`outrider retry`).
    """
    ray = VirtualRay(1)
    directory = folder / "job"
    record, fill, write = Journal.record, Journal.fill, results.write_atomically

    def recorded(self: Journal, done: Any, failed: Any, *kept: Any) -> None:
        record(self, done, failed, *kept)
        for row, text in (*done, *failed):
            mark(f"row {row} {digest(text)}")

    def filled(self: Journal, *arguments: Any, **options: Any) -> None:
        fill(self, *arguments, **options)
        mark("filled")

    def written(path: Path, lines: Iterable[str]) -> None:
        lines = list(lines)
        mark(f"begins {path.name} {digest(''.join(line + chr(10) for line in lines))}")
        write(path, lines)
        mark(f"file {path.name}")

    def look() -> None:
        """Writes the results while the job runs, like `outrider results`."""
        reader = open_job(directory)
        results.write_results(reader, directory)
        reader.close()

    ray.later(4.0, look)
    words = [str(folder.parent / "input.jsonl"), "-o", str(directory), "--skip-bad", "--json", "--engine", "hf"]
    words = ["retry", str(directory), "--json"] if again else ["run", *words, "--carry", "all"]
    patches = [
        mock.patch.multiple(prepare_job, TokenizerProcess=FakeTokenizerProcess),
        mock.patch.multiple(drive_job, local_host=local_host(ray)),
        mock.patch.multiple(Journal, record=recorded, fill=filled),
        mock.patch.object(journal, "on_network_file_system", lambda path, mounts: network),
        mock.patch.object(sys, "argv", ["outrider", *words]),
        *(mock.patch.object(module, "write_atomically", written) for module in (results, job, report)),
        in_place_of_ray(ray, lambda: OnePoison(ray)),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        cli.main()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_in_fork(asked: dict[str, Any], faults: ctypes.CDLL) -> dict[str, Any]:
    """Runs the job in a fork. ``asked`` has the folder, the log, and the fault with its operation, as faults.c takes
    them."""
    said = Path(asked["log"]).with_suffix(".said")
    if (child := os.fork()) == 0:
        with said.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = 1
        try:
            folder, log = str(asked["folder"]).encode(), str(asked["log"]).encode()
            faults.faults_arm(folder, log, ctypes.c_long(asked["at"]), asked["fault"], asked["error"])
            run(Path(asked["folder"]), asked["network"], asked["again"], lambda text: faults.faults_mark(text.encode()))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    return {"code": os.waitstatus_to_exitcode(status), "said": said.read_text(errors="replace")}


def main() -> None:
    faults = ctypes.CDLL(None)
    # What each fork would do again: compile the report's templates, and copy the pages of all that is imported, since its
    # garbage collector writes to them.
    environment = render.environment()
    for template in environment.list_templates():
        environment.get_template(template)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run_in_fork(json.loads(line), faults)), flush=True)


if __name__ == "__main__":
    main()
