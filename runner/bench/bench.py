"""``outrider bench``: the classic tables, measured on the same processes, engines and places that a job uses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

import outrider
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
from outrider.runner.bench.tasks import Example, examples
from outrider.runner.hosts.ray_start import local_ray
from outrider.runner.hosts.ray_watch import Lost
from outrider.runner.job.admission import derived_seed
from outrider.runner.job.tokenizer_process import Office
from outrider.runner.options import Options
from outrider.runner.planning.free_cores import seat
from outrider.runner.planning.placement_request import Sizes
from outrider.runner.planning.replica_plan import Blueprint, ReplicaPlan, loaded_bytes, probed_here
from outrider.runner.planning.topology import Topology, ray_resources, read_topology
from outrider.runner.printable import printable
from outrider.runner.report.display import console
from outrider.runner.run_job import choose_models, is_movable, serve_spec, wishes_of
from outrider.workers.errors import LeaseError, UsageError
from outrider.workers.messages import LayoutRecord, ModelSpec, Row, Sampling, WorkerReport
from outrider.workers.models.cards import ModelCard

if TYPE_CHECKING:
    from outrider.runner.bench.pair import Pair

PLAIN, ASSISTED = "plain", "assisted"
NONE = "none"
# Rounds of every size have been seen once before anything counts.
WARM_UP_TOKENS = 24
# Answers within which a pair should have found out how to share its cores.
MOST_WARM_UPS = 40


class BenchSpec(Options):
    """A benchmark. The names are those of the command line's options, with underscores."""

    task: Literal["decode", "benchmark", "benchmark_code"] = "decode"
    lengths: tuple[int, ...] = ()
    new_tokens: tuple[int, ...] = ()
    compare: bool = False
    # An answer ends at an end token of the model, as the older tables' did, and may have fewer tokens than were asked for.
    stop_at_end: bool = False
    repeat: int = Field(1, ge=1, le=1000)
    json_file: Path | None = None
    plot: Path | None = None
    # Prompts come more than once here, and each time at their full cost.
    prefix_tokens: Literal[0] = 0
    # Packing a large model for the first time takes minutes.
    start_deadline: float = Field(3600.0, gt=0.0)

    @field_validator("lengths", "new_tokens")
    @classmethod
    def _counts(cls, counts: tuple[int, ...]) -> tuple[int, ...]:
        if any(count < 1 for count in counts):
            raise ValueError("must be whole numbers from 1 on")
        return counts


@dataclass(frozen=True, slots=True)
class System:
    """What is measured: the two models, how each is run, and the examples."""

    target: ModelCard
    draft: ModelCard | None
    draft_name: str
    target_model: ModelSpec
    draft_model: ModelSpec | None
    examples: list[Example]

    @property
    def modes(self) -> tuple[str, ...]:
        return (PLAIN,) if self.draft_name == NONE else (ASSISTED,)

    def title(self) -> str:
        beside = self.draft_name if self.draft_model is None else f"{self.draft_name} ({self.draft_model.precision})"
        return f"{self.target.name} ({self.target_model.precision}), draft {beside}"


Results = dict[str, list[Measured]]


def bench(spec: BenchSpec) -> None:
    for option, path in (("--json", spec.json_file), ("--plot", spec.plot)):
        if path is not None:
            _check_writable(option, path)
    if spec.plot is not None:
        check_plot(spec.plot)
    say = _sayer()
    system = _prepare(spec, say)
    modes = (PLAIN, ASSISTED) if spec.compare else system.modes
    machine = read_topology()
    with local_ray(len(machine.usable_cores), ray_resources(machine)) as lost:
        while True:
            try:
                plan = _seated(spec, system, machine, say)
                results, reports, layout = _measure_all(spec, system, plan, modes, say, lost)
                break
            except LeaseError as error:  # another run was quicker to the same cores
                say(f"waiting for cores: {error}")
    compared = comparison(results[PLAIN], results[ASSISTED]) if spec.compare else []
    _print(system, results, compared)
    if spec.json_file is not None:
        _write_json(spec, system, results, compared, reports, layout)
    if spec.plot is not None:
        plot(spec.plot, system.title(), results, compared)


def _seated(spec: BenchSpec, system: System, machine: Topology, say: Callable[[str], None]) -> ReplicaPlan:
    """The pair on cores that are free, waited for where others hold them."""
    sizes = Sizes(loaded_bytes(system.target, system.target_model.precision))
    if system.draft is not None and system.draft_model is not None:
        sizes = replace(sizes, draft=loaded_bytes(system.draft, system.draft_model.precision))
    movable = is_movable(spec, system.target_model, system.draft_model)
    wishes = replace(wishes_of(spec, movable, len(machine.usable_cores)), replicas=1)
    made = seat(sizes, wishes, spec.wait_for_cores, say)
    for note in made.notes:
        say(f"note: {note}")
    serve = replace(serve_spec(spec, system.draft_model, system.draft_name), batch=1)
    blueprint = Blueprint(system.target_model, system.draft_model, serve, movable)
    plan = blueprint.replicas(made, probed_here())[0]
    # How the two share their cores is found out anew: what an earlier run kept may be of a disturbed minute.
    return replace(plan, serve=replace(plan.serve, memory_key=""))


def _prepare(spec: BenchSpec, say: Callable[[str], None]) -> System:
    """Everything that can be refused is refused here, before any weights load."""
    if spec.compare and (spec.draft == NONE or spec.draft_tokens == 0):
        raise UsageError(
            "--compare measures plain and assisted, and there is nothing to assist: name a draft, or leave it out"
        )
    if spec.replicas not in (None, 1):
        raise UsageError("--replicas: the benchmark measures one pair of target and draft")
    with Office() as office:
        target, draft, draft_name, notes = office.prepare_pair(spec.model, spec.draft, say)
        made = examples(spec.task, spec.lengths, spec.new_tokens, target, office)
        for note in notes:
            say(f"note: {note}")
        target_model, draft_model = choose_models(spec, target, draft, office, say)
    longest = max(len(example.prompt) + example.new_tokens for example in made)
    if draft is not None and draft.context < longest:
        say(f"note: {draft.name} holds {draft.context:,} tokens; beyond that it proposes nothing")
    return System(target, draft, draft_name, target_model, draft_model, made)


def _measure_all(
    spec: BenchSpec, system: System, plan: ReplicaPlan, modes: Sequence[str], say: Callable[[str], None], lost: Lost
) -> tuple[Results, dict[str, WorkerReport], LayoutRecord | None]:
    # Ray reads its settings when it is first imported, so nothing that imports it may come before it starts.
    from outrider.runner.bench.pair import Pair

    say("loading the models")
    with Pair(plan, spec.start_deadline, lost) as pair:
        for role, report in pair.reports.items():
            for note in (*report.notes, *report.pinned["warnings"], *report.differences):
                say(f"{role}: {note}")
        ask = _Asker(spec, pair)
        shortest = min(system.examples, key=lambda example: len(example.prompt))
        room = system.target.context - len(shortest.prompt)
        warm_up = replace(shortest, new_tokens=min(WARM_UP_TOKENS, room))
        for mode in modes:
            ask(warm_up, 0, mode)
        if modes != (PLAIN,):
            _settle_layout(ask, pair, warm_up, say)
        results: Results = {mode: [] for mode in modes}
        for number, example in enumerate(system.examples, start=1):
            say(f"example {number} of {len(system.examples)}")
            # Plain and assisted in turn, so that a machine that slows down slows both.
            runs = [{mode: ask(example, number, mode) for mode in modes} for _ in range(spec.repeat)]
            for mode in modes:
                results[mode].append(typical([run[mode] for run in runs]))
        return results, pair.reports, pair.layout


def _settle_layout(ask: _Asker, pair: Pair, example: Example, say: Callable[[str], None]) -> None:
    """Let the pair find out how to share its cores before anything counts."""
    for number in range(MOST_WARM_UPS):
        if pair.layout is not None or not pair.chooses_layout:
            break
        ask(example, -number, ASSISTED)
    if pair.layout is not None:
        say(f"note: {pair.layout.sentence}")


class _Asker:
    def __init__(self, spec: BenchSpec, pair: Pair) -> None:
        self._spec = spec
        self._pair = pair
        self._key = 0

    def __call__(self, example: Example, number: int, mode: str) -> Measured:
        self._key += 1
        spec = self._spec
        sampling = Sampling(
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            min_p=spec.min_p,
            seed=derived_seed(spec.seed, str(number)),
            # None stands for the model's own.
            end_tokens=None if spec.stop_at_end else (),
        )
        self._pair.arrange(PLAIN if mode == PLAIN else None)
        row = Row(self._key, example.prompt, example.new_tokens, sampling, assisted=mode == ASSISTED)
        result = self._pair.answer(row)
        return measured(result, len(example.prompt), self._pair.peak_bytes())


def _print(system: System, results: Results, compared: Sequence[dict[str, Any]]) -> None:
    for mode, rows in results.items():
        if compared:
            title = system.title() if mode == ASSISTED else system.target.name
            print(f"### {mode.capitalize()}: {printable(title)}\n")
        print(f"{table(rows)}\n\n{totals_line(totals(rows))}\n")
    if compared:
        print(f"### Assisted against plain\n\n{comparison_table(compared)}")


def _write_json(
    spec: BenchSpec,
    system: System,
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
        "target": asdict(system.target)
        | {"engine": system.target_model.engine, "precision": system.target_model.precision},
        "draft": None if system.draft is None else asdict(system.draft),
        "draft_name": system.draft_name,
        "draft_precision": None if system.draft_model is None else system.draft_model.precision,
        "processes": {role: asdict(report) for role, report in reports.items()},
        "layout": None if layout is None else asdict(layout),
        "modes": {mode: {"rows": [row.record() for row in rows], "all": totals(rows)} for mode, rows in results.items()},
        "comparison": list(compared),
    }
    try:
        spec.json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json: {spec.json_file} cannot be written: {error.strerror}") from None


def _check_writable(option: str, path: Path) -> None:
    """Found out before minutes of measuring, not after; a file that is there keeps its content until then."""
    there = path.exists()
    try:
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be written: {error.strerror}") from None


def _sayer() -> Callable[[str], None]:
    """Notes go to standard error, so that the tables alone can be piped."""
    out = console()
    return lambda text: out.print(printable(text), highlight=False, soft_wrap=True, markup=False)
