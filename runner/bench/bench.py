"""``outrider bench``: the classic tables, measured on the same processes, engines and cores that a job uses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import outrider
from outrider.runner import continued
from outrider.runner.bench.plot import check_plot, plot
from outrider.runner.bench.table import (
    Measured,
    comparison,
    comparison_table,
    measured,
    table,
    totals,
    totals_line,
    typical,
)
from outrider.runner.bench.tasks import Example, check_measuring, examples
from outrider.runner.hosts.ray_start import local_ray
from outrider.runner.hosts.ray_watch import Lost
from outrider.runner.job.row_seed import derived_seed
from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.model_choice import (
    choose_models,
    is_movable,
    may_be_native,
    memory_of_pair,
    placement_request_of,
    replica_spec_of,
    without_unusable,
)
from outrider.runner.options.bench import BenchSpec
from outrider.runner.planning.free_cores import plan_on_free_cores
from outrider.runner.planning.replica_memory import ReplicaMemory
from outrider.runner.planning.replica_plan import ReplicaPlan, ReplicaTemplate, probed_here
from outrider.runner.planning.topology import Topology, ray_resources, read_topology
from outrider.runner.printable import printable
from outrider.runner.report.display import console
from outrider.runner.writable import check_file
from outrider.workers.errors import LeaseError, OutriderError, UsageError
from outrider.workers.messages import LayoutRecord, ModelSpec, Row, Sampling, WorkerReport
from outrider.workers.models.model_info import ModelInfo

if TYPE_CHECKING:
    from outrider.runner.bench.pair import Pair

PLAIN, ASSISTED = "plain", "assisted"
NONE, AUTO = "none", "auto"
# --draft auto is the usual draft model without suffixes, since a pair of models is measured.
USUAL_DRAFT = "model"
# New tokens of the warm-up, so that rounds of every size have run before anything is measured.
WARM_UP_TOKENS = 24
# Warm-up answers within which the layout tuner should have chosen a layout.
MOST_WARM_UPS = 40


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """The models that are measured, how each is loaded, and the examples."""

    target: ModelInfo
    draft: ModelInfo | None
    draft_name: str
    target_model: ModelSpec
    draft_model: ModelSpec | None
    examples: list[Example]
    memory: ReplicaMemory

    @property
    def modes(self) -> tuple[str, ...]:
        return (PLAIN,) if self.draft_name == NONE else (ASSISTED,)

    def title(self) -> str:
        beside = self.draft_name if self.draft_model is None else f"{self.draft_name} ({self.draft_model.precision})"
        return f"{self.target.name} ({self.target_model.precision}), draft {beside}"


Results = dict[str, list[Measured]]
# One answer to an example in each mode.
Run = dict[str, Measured]


class _StoppedInTrial(Exception):
    """The benchmark was stopped (Ctrl-Z) while the layout was being chosen by the seconds of rounds."""


def bench(spec: BenchSpec) -> None:
    check_measuring(spec)
    for option, path in (("--json", spec.json_file), ("--plot", spec.plot)):
        if path is not None:
            check_file(option, path)
    if spec.plot is not None:
        check_plot(spec.plot)
        if spec.json_file is not None and os.path.realpath(spec.json_file) == os.path.realpath(spec.plot):
            raise UsageError(f"--json and --plot both name {spec.plot}: give each a file of its own")
    say = _sayer()
    setup = _prepare(spec, say)
    modes = (PLAIN, ASSISTED) if spec.compare else setup.modes
    machine = read_topology()
    actors = 1 if setup.draft_model is None else 2
    with continued.counted(), local_ray(len(machine.usable_cores), ray_resources(machine), actors=actors) as lost:
        while True:
            try:
                plan = _plan_pair(spec, setup, machine, say)
                results, reports, layout = _measure_all(spec, setup, plan, modes, say, lost)
                break
            except LeaseError as error:  # another run has leased the same cores first
                say(f"waiting for cores: {error}")
            except _StoppedInTrial:
                say("the benchmark was stopped for a while as a layout was being chosen: the models are started again")
        # Before Ray is ended, which takes a while in which Ctrl-C may come.
        compared = comparison(results[PLAIN], results[ASSISTED]) if spec.compare else []
        _print(setup, results, compared)
    if spec.json_file is not None:
        _write_json(spec, setup, results, compared, reports, layout)
    if spec.plot is not None:
        plot(spec.plot, setup.title(), results, compared)


def _plan_pair(spec: BenchSpec, setup: BenchSetup, machine: Topology, say: Callable[[str], None]) -> ReplicaPlan:
    """A plan of the pair on free cores; waits for cores that other runs hold."""
    movable = is_movable(spec, setup.target_model, setup.draft_model)
    request = replace(placement_request_of(spec, movable, len(machine.usable_cores)), replicas=1)
    made = plan_on_free_cores(setup.memory.sizes(spec.batch), request, spec.wait_for_cores, say)
    for note in made.notes:
        say(f"note: {note}")
    replica_spec = replica_spec_of(spec, setup.draft_model, setup.draft_name)
    replica_template = ReplicaTemplate(setup.target_model, setup.draft_model, replica_spec, movable)
    plan = replica_template.replicas(made, probed_here())[0]
    # The layout is measured anew: a remembered one may come from a disturbed machine.
    return replace(plan, replica_spec=replace(plan.replica_spec, memory_key=""))


def _prepare(spec: BenchSpec, say: Callable[[str], None]) -> BenchSetup:
    """Choose models and examples; what can be refused is refused here, before weights are loaded."""
    if spec.compare and (spec.draft == NONE or spec.draft_tokens == 0):
        raise UsageError(
            "--compare measures plain and assisted generation, and there is no draft: name one, or leave it out"
        )
    if spec.replicas not in (None, 1):
        raise UsageError("--replicas: the benchmark measures one pair of target and draft")
    with TokenizerProcess() as tokenizer_process:
        wanted = USUAL_DRAFT if spec.draft == AUTO else spec.draft
        target, draft, draft_name, notes = tokenizer_process.prepare_pair(spec.model, wanted, say, may_be_native(spec))
        made = examples(spec.task, spec.lengths, spec.new_tokens, target, tokenizer_process)
        for note in notes:
            say(f"note: {note}")
        target_model, draft_model = choose_models(spec, target, draft, tokenizer_process, say)
        draft, draft_name = without_unusable(spec, draft, draft_model, draft_name)
        memory = memory_of_pair((target, target_model), (draft, draft_model), spec, draft_name, tokenizer_process)
    longest = max(len(example.prompt) + example.new_tokens for example in made)
    if draft is not None and draft.context < longest:
        say(f"note: {draft.name} holds {draft.context:,} tokens; beyond that it proposes nothing")
    return BenchSetup(target, draft, draft_name, target_model, draft_model, made, memory)


def _measure_all(
    spec: BenchSpec, setup: BenchSetup, plan: ReplicaPlan, modes: Sequence[str], say: Callable[[str], None], lost: Lost
) -> tuple[Results, dict[str, WorkerReport], LayoutRecord | None]:
    # Ray reads its settings when it is first imported, so nothing that imports it may come before it starts.
    from outrider.runner.bench.pair import Pair

    say("loading the models")
    with Pair(plan, spec.start_deadline, lost) as pair:
        for role, report in pair.reports.items():
            for note in (*report.notes, *report.pinned["warnings"], *report.differences):
                say(f"{role}: {note}")
        ask = _Asker(spec, pair, say)
        shortest = min(setup.examples, key=lambda example: len(example.prompt))
        room = setup.target.context - len(shortest.prompt)
        warm_up = replace(shortest, new_tokens=min(WARM_UP_TOKENS, room))
        for mode in modes:
            ask(warm_up, 0, mode)
        if modes != (PLAIN,):
            _choose_layout(ask, pair, warm_up, say)
        runs: list[Run] = []
        try:
            for number, example in enumerate(setup.examples, start=1):
                say(f"example {number} of {len(setup.examples)}")
                for _ in range(spec.repeat):
                    # Plain and assisted alternate, so that a change of the machine's speed affects both.
                    runs.append({mode: ask(example, number, mode) for mode in modes})
        except (KeyboardInterrupt, OutriderError):
            if runs:
                _print_unfinished(spec, setup, _results(runs, modes, spec.repeat), len(runs))
            raise
        return _results(runs, modes, spec.repeat), pair.reports, pair.layout


def _results(runs: Sequence[Run], modes: Sequence[str], repeat: int) -> Results:
    """The typical run of each example, of which the last may have been run fewer times."""
    by_example = [runs[first : first + repeat] for first in range(0, len(runs), repeat)]
    return {mode: [typical([run[mode] for run in some]) for some in by_example] for mode in modes}


def _choose_layout(ask: _Asker, pair: Pair, example: Example, say: Callable[[str], None]) -> None:
    """Let the layout tuner choose before anything is measured."""
    before = continued.times()
    for number in range(MOST_WARM_UPS):
        if pair.layout is not None or not pair.chooses_layout:
            break
        ask(example, -number, ASSISTED)
    if continued.times() != before:
        raise _StoppedInTrial
    if pair.layout is not None:
        say(f"note: {pair.layout.sentence}")


class _Asker:
    def __init__(self, spec: BenchSpec, pair: Pair, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._pair = pair
        self._say = say
        self._key = 0

    def __call__(self, example: Example, number: int, mode: str) -> Measured:
        """An answer, from a time in which nobody stopped the benchmark: the pair may have been stopped with it."""
        while True:
            before = continued.times()
            made = self._measured(example, number, mode)
            if continued.times() == before:
                return made
            self._say("the benchmark was stopped for a while: what was measured just then is measured again")

    def _measured(self, example: Example, number: int, mode: str) -> Measured:
        self._key += 1
        spec = self._spec
        sampling = Sampling(
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            min_p=spec.min_p,
            seed=derived_seed(spec.seed, str(number)),
            # None: the model's own end tokens.
            end_tokens=None if spec.stop_at_end else (),
        )
        self._pair.set_layout(PLAIN if mode == PLAIN else None)
        row = Row(self._key, example.prompt, example.new_tokens, sampling, assisted=mode == ASSISTED)
        result = self._pair.answer(row)
        return measured(result, len(example.prompt), self._pair.peak_bytes())


def _print_unfinished(spec: BenchSpec, setup: BenchSetup, results: Results, runs: int) -> None:
    """The tables of what was measured before the benchmark was interrupted, or one of its processes died."""
    whole, more = divmod(runs, spec.repeat)
    said = f"{whole} of {len(setup.examples)} examples"
    if more:
        said = f"{said} and {more} of {spec.repeat} runs of the next"
    print(f"**Incomplete: {said}.**\n")
    compared = comparison(results[PLAIN], results[ASSISTED]) if spec.compare else []
    _print(setup, results, compared, f"{len(next(iter(results.values())))} of {len(setup.examples)} examples")


def _print(setup: BenchSetup, results: Results, compared: Sequence[dict[str, Any]], of: str = "All examples") -> None:
    for mode, rows in results.items():
        if compared:
            title = setup.title() if mode == ASSISTED else setup.target.name
            print(f"### {mode.capitalize()}: {printable(title)}\n")
        print(f"{table(rows)}\n\n{totals_line(totals(rows), of)}\n")
    if compared:
        print(f"### Assisted against plain\n\n{comparison_table(compared)}")
    # Flushed before files are written, which may fail.
    sys.stdout.flush()


def _write_json(
    spec: BenchSpec,
    setup: BenchSetup,
    results: Results,
    compared: Sequence[dict[str, Any]],
    reports: dict[str, WorkerReport],
    layout: LayoutRecord | None,
) -> None:
    assert spec.json_file is not None
    content = {
        "outrider": outrider.__version__,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "spec": spec.model_dump(mode="json"),
        "target": asdict(setup.target) | {"engine": setup.target_model.engine, "precision": setup.target_model.precision},
        "cache_precision": setup.target_model.cache_precision,
        "draft": None if setup.draft is None else asdict(setup.draft),
        "draft_name": setup.draft_name,
        "draft_precision": None if setup.draft_model is None else setup.draft_model.precision,
        "processes": {role: asdict(report) for role, report in reports.items()},
        "layout": None if layout is None else asdict(layout),
        "modes": {mode: {"rows": [row.record() for row in rows], "all": totals(rows)} for mode, rows in results.items()},
        "comparison": list(compared),
    }
    try:
        spec.json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json: {spec.json_file} cannot be written: {error.strerror}") from None


def _sayer() -> Callable[[str], None]:
    """Prints notes to standard error, so that standard output has the tables only."""
    out = console()
    return lambda text: out.print(printable(text), highlight=False, soft_wrap=True, markup=False)
