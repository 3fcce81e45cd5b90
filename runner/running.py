"""``outrider run``: prepare or resume the job, start Ray, drive, and write down what came of it."""

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import outrider
from outrider.runner.admission import admit
from outrider.runner.cluster import local_ray
from outrider.runner.config import JobSpec
from outrider.runner.display import Display, console, summary_table
from outrider.runner.job import JOURNAL, check_same, default_directory, describe, held, identity, read_description
from outrider.runner.journal import Journal
from outrider.runner.office import Office
from outrider.runner.placement import Plan
from outrider.runner.plan import ActorPlan, ReplicaPlan
from outrider.runner.prompts import check_input, file_digest
from outrider.runner.results import write_results
from outrider.runner.seating import Seats, loaded_bytes, place
from outrider.runner.topology import ray_resources
from outrider.runner.totals import Totals
from outrider.runner.wishes import Sizes
from outrider.workers.messages import ModelSpec, ServeSpec
from outrider.workers.models.cards import ModelCard

ALL_DONE, SOME_FAILED, INTERRUPTED = 0, 3, 130
# What a checkpoint calls its own number format.
LOOKUP = "lookup"
OWN_PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def run(spec: JobSpec, as_json: bool = False) -> int:
    check_input(spec.input)
    directory = spec.out or default_directory(spec.input)
    with held(directory), Display(console()) as display:
        outcome = _run_held(spec, directory, display)
    summary = outcome["summary"]
    if as_json:
        print(json.dumps({"job": str(directory), **summary}))
    else:
        console().print(summary_table(summary, str(directory)))
    if outcome["interrupted"]:
        console().print(f"stopped with {summary['pending']:,} rows to go; the same command goes on with them", markup=False)
        return INTERRUPTED
    return SOME_FAILED if summary["failed"] else ALL_DONE


def _run_held(spec: JobSpec, directory: Path, display: Display) -> dict[str, Any]:
    with Office() as office:
        target, draft, draft_name, notes = office.prepare_pair(spec.model, spec.draft)
        for note in notes:
            display.say(f"note: {note}")
        engine, precision = _engine(spec, target, display), _precision(spec.precision, target)
        asked = identity(spec, target, file_digest(spec.input), engine, precision)
        journal = Journal(directory / JOURNAL)
        if journal.filled:
            check_same(journal.meta("identity"), asked, "an input, model or parameter", directory)
        else:
            admit(spec, target, office, journal, {"identity": asked})
    describe(directory, _description(spec, target, draft, draft_name, asked))
    models = {"target": ModelSpec(target.path, engine, precision, allow_pickle=spec.allow_pickle)}
    sizes = Sizes(loaded_bytes(target, precision))
    if draft is not None and spec.draft_tokens != 0:
        draft_precision = _precision(spec.draft_precision, draft)
        models["draft"] = ModelSpec(draft.path, engine, draft_precision, allow_pickle=spec.allow_pickle)
        sizes = replace(sizes, draft=loaded_bytes(draft, draft_precision))
    serve = ServeSpec(
        batch=spec.batch,
        draft_tokens=None if spec.draft_tokens == "auto" else spec.draft_tokens,
        lookup=draft_name == LOOKUP,
        draft_deadline=spec.draft_deadline,
    )
    outcome = _drive(spec, directory, journal, models, sizes, serve, display)
    write_results(journal, directory)
    describe(directory, outcome)
    journal.close()
    return outcome


def _drive(
    spec: JobSpec,
    directory: Path,
    journal: Journal,
    models: dict[str, ModelSpec],
    sizes: Sizes,
    serve: ServeSpec,
    display: Display,
) -> dict[str, Any]:
    def agree_on_path(path: dict[str, str]) -> None:
        kept = journal.meta("numeric_path")
        if kept is None:
            journal.set_meta("numeric_path", path)
        else:
            check_same(kept, path, "a numeric path", directory)

    counts = journal.counts()
    totals = Totals(rows=counts.rows, done=counts.done, failed=counts.failed)
    interrupted = False
    if counts.pending:
        if counts.done or counts.failed:
            display.say(f"resuming {directory}: {counts.done + counts.failed:,} of {counts.rows:,} rows have ended")
        machine, seats = place(spec, sizes, display.say)
        plans = _plans(spec, models, serve, seats)
        with local_ray(len(machine.usable_cores), ray_resources(machine)):
            # Ray reads its settings when it is first imported, so nothing that imports it may come before it starts.
            from outrider.runner.driver import Driver

            driver = Driver(journal, plans, spec.model, spec.start_deadline, agree_on_path, display.show)
            with _draining_on_signals(driver, display):
                driver.run()
            totals = driver.totals
            describe(directory, {"pinning": list(driver.pinned.values())})
            interrupted = driver.draining and journal.counts().pending > 0
    counts = journal.counts()
    earlier = read_description(directory).get("summary", {})
    summed = ("tokens", "seconds", "rounds", "proposed", "accepted", "near_ties", "target_deaths", "draft_deaths")
    summary = {"rows": counts.rows, "done": counts.done, "failed": counts.failed, "pending": counts.pending}
    summary |= {key: round(getattr(totals, key) + earlier.get(key, 0), 3) for key in summed}
    return {"summary": summary, "interrupted": interrupted, "numeric_path": journal.meta("numeric_path")}


@contextmanager
def _draining_on_signals(driver: Any, display: Display) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) drains, the second stops at once."""

    def handle(number: int, frame: Any) -> None:
        if driver.draining:
            raise KeyboardInterrupt
        driver.drain()
        display.say("finishing the rows under way; Ctrl-C again stops at once (either way the job can be resumed)")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _engine(spec: JobSpec, card: ModelCard, display: Display) -> str:
    return "hf"


def _precision(asked: str, card: ModelCard) -> str:
    return OWN_PRECISION.get(card.dtype, "fp32") if asked == "auto" else asked


def _plans(spec: JobSpec, models: dict[str, ModelSpec], serve: ServeSpec, seats: Plan) -> list[ReplicaPlan]:
    """Each replica's actors with their models and their places."""
    tried = Seats(seats)

    def actor(replica: int, role: str) -> ActorPlan | None:
        if role not in models:
            return None
        seat, resources = tried.seat(replica, role)
        pin = seat.launch.pin
        return ActorPlan(replace(models[role], device=pin.local_device, threads=pin.threads), seat, resources)

    plans = []
    for replica in range(seats.replicas):
        target = actor(replica, "target")
        assert target is not None
        plans.append(ReplicaPlan(target, actor(replica, "draft"), serve))
    return plans


def _description(
    spec: JobSpec, target: ModelCard, draft: ModelCard | None, draft_name: str, asked: dict[str, Any]
) -> dict[str, Any]:
    return {
        "outrider": outrider.__version__,
        "python": platform.python_version(),
        "updated": datetime.now(UTC).isoformat(timespec="seconds"),
        "spec": spec.model_dump(mode="json"),
        "identity": asked,
        "target": asdict(target),
        "draft": asdict(draft) if draft is not None else draft_name,
    }
