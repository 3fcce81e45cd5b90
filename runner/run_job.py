"""``outrider run``: prepare or resume the job, start Ray, drive, and write down what came of it."""

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import outrider
from outrider.runner.hosts.auth import bring_token
from outrider.runner.hosts.ray_start import joined_ray
from outrider.runner.hosts.ray_watch import check_worth_another, start_anew
from outrider.runner.hosts.submit import ACCEPTED, absolute_model
from outrider.runner.hosts.this_machine import Fleet, one_host
from outrider.runner.job.admission import admit
from outrider.runner.job.directory import (
    DESCRIPTION,
    JOURNAL,
    check_apart,
    check_same,
    default_directory,
    describe,
    held,
    identity,
    read_description,
    there,
)
from outrider.runner.job.input import KEY as INPUT
from outrider.runner.job.input import digest_again, open_input, told_of
from outrider.runner.job.journal import Journal
from outrider.runner.job.piped_input import is_piped
from outrider.runner.job.prompts import check_input
from outrider.runner.job.results import write_results
from outrider.runner.job.tokenizer_process import Office
from outrider.runner.options import JobSpec, Options
from outrider.runner.planning.placement_request import Sizes, Wishes, on_accelerator
from outrider.runner.planning.replica_plan import Blueprint, ReplicaPlan, loaded_bytes
from outrider.runner.printable import printable
from outrider.runner.report import statistics as account
from outrider.runner.report.display import Display, console, summary_table
from outrider.runner.report.report import drop_damaged_statistics, write_report
from outrider.runner.report.totals import Totals
from outrider.runner.report.trace import TraceFile
from outrider.runner.streams import lost_output
from outrider.workers.errors import JobChangedError, RayLostError, UsageError
from outrider.workers.messages import ModelSpec, ServeSpec
from outrider.workers.models.cards import ModelCard

ALL_DONE, SOME_FAILED, INTERRUPTED = 0, 3, 130
LOOKUP = "lookup"
FEWEST_CORES_TO_SPLIT = 4
# What a checkpoint calls its own number format.
OWN_PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def run(spec: JobSpec, as_json: bool = False) -> int:
    directory = spec.out or default_directory(spec.input)
    check_apart("INPUT", spec.input, directory)
    if spec.trace is not None:
        check_apart("--trace", spec.trace, directory)
        if there(spec.trace) and there(spec.input) and spec.trace.samefile(spec.input):
            raise UsageError(f"--trace: {spec.trace} is the input; name another file")
    # A job that has its rows does not need the file any more; a pipe can be read only once.
    if not there(directory / JOURNAL) and not is_piped(spec.input):
        check_input(spec.input)
    if spec.address is not None:
        bring_token(lambda note: console().print(printable(note), markup=False))
    try:
        with held(directory), Display(console()) as display:
            outcome = _run_held(spec, directory, display)
    except RayLostError as lost:
        console().print(
            f"{printable(lost)}: it is started anew, and the job goes on", markup=False, highlight=False, soft_wrap=True
        )
        start_anew()
    summary = outcome["summary"]
    if as_json:
        print(json.dumps({"job": str(directory), **summary}))
        if (error := lost_output()) is not None:
            said = f"the summary cannot be printed ({error.strerror}); it stands in {directory / DESCRIPTION}, too"
            console().print(printable(said), markup=False, highlight=False, soft_wrap=True)
    else:
        console().print(summary_table(summary, outcome["over_time"], str(directory)))
    if outcome["interrupted"]:
        console().print(f"stopped with {summary['pending']:,} rows to go; the same command goes on with them", markup=False)
        return INTERRUPTED
    return SOME_FAILED if summary["failed"] else ALL_DONE


def _run_held(spec: JobSpec, directory: Path, display: Display) -> dict[str, Any]:
    with Office() as office:
        target, draft, draft_name, notes = office.prepare_pair(spec.model, spec.draft, display.say)
        for note in notes:
            display.say(f"note: {note}")
        target_model, draft_model = choose_models(spec, target, draft, office, display.say)
        asked_with = partial(identity, spec, target, engine=target_model.engine, precision=target_model.precision)
        journal = Journal(directory / JOURNAL)
        if journal.filled:
            _check_goes_on(spec, directory, journal, asked_with, display)
        else:
            _admit(spec, target, office, journal, asked_with, display)
    if spec.address is not None:
        display.say(f"{journal.counts().rows:,} {ACCEPTED}; results will be in {directory.resolve()}")
    describe(directory, journal, _description(spec, target, draft, draft_name, journal.meta("identity")))
    sizes = Sizes(loaded_bytes(target, target_model.precision))
    if draft is not None and draft_model is not None:
        sizes = replace(sizes, draft=loaded_bytes(draft, draft_model.precision))
    serve = replace(serve_spec(spec, draft_model, draft_name), trace=spec.trace is not None)
    movable = is_movable(spec, target_model, draft_model)
    blueprint = Blueprint(target_model, draft_model, serve, movable, spec.share_cores, journal.counts().pending)
    cards = [target] if draft is None or draft_model is None else [target, draft]
    outcome = _drive(spec, directory, journal, _fleet(spec, blueprint, sizes, cards, journal, display), display)
    write_results(journal, directory)
    describe(directory, journal, outcome)
    write_report(journal, directory, running=False)
    journal.close()
    return outcome


def _check_goes_on(
    spec: JobSpec, directory: Path, journal: Journal, asked_with: Callable[[str], dict[str, Any]], display: Display
) -> None:
    """Whether the job that the directory holds is the one that is asked for, and its files can be gone on with."""
    for note in journal.check():
        display.say(f"note: {note}")
    kept = journal.meta("identity") or {}
    digest = digest_again(spec.input, directory, journal, display.say)
    check_same(kept, asked_with(digest or str(kept.get("input"))), "an input, model or parameter", directory)
    _, broken = read_description(directory, journal)
    for found in (broken, drop_damaged_statistics(journal, directory)):
        if found is not None:
            display.say(f"note: {found}")


def _admit(
    spec: JobSpec,
    target: ModelCard,
    office: Office,
    journal: Journal,
    asked_with: Callable[[str], dict[str, Any]],
    display: Display,
) -> None:
    """Fill the journal of a new job; a refused input leaves no half of one behind."""
    source = open_input(spec.input, journal.path.parent, display.say)

    def meta_of(digest: str) -> dict[str, Any]:
        return {"identity": asked_with(digest), INPUT: told_of(spec.input, source)}

    try:
        admitted = admit(spec, source, target, office, journal, meta_of)
        # The tokenizer was read after the digest was taken.
        office.check_unchanged(target)
    except (UsageError, JobChangedError):
        journal.close()
        for file in journal.path.parent.glob(f"{JOURNAL}*"):
            file.unlink()
        raise
    for model in sorted(admitted.models - {spec.model}):
        display.say(f'note: rows ask for the model "{model}"; all are answered by -m {spec.model}')


@contextmanager
def _fleet(
    spec: JobSpec,
    blueprint: Blueprint,
    sizes: Sizes,
    cards: Sequence[ModelCard],
    journal: Journal,
    display: Display,
) -> Iterator[tuple[Fleet, list[ReplicaPlan]]]:
    """Where the job is to run, and its first places there."""
    wishes = partial(wishes_of, spec, blueprint.movable)
    if spec.address is None:
        options = (spec.wait_for_cores, display.say, spec.metrics_port, spec.start_deadline)
        with one_host(blueprint, sizes, wishes, *options) as here:
            yield here
        return
    if spec.metrics_port is not None:
        raise UsageError("--metrics-port is for a Ray of the job's own; a cluster has its metrics where it was started")
    # Other hosts have other working directories.
    models = {absolute_model(card.name): (card.path, card.digest) for card in cards}
    kept = (journal.meta("numeric_path") or {}).get("instruction_set")
    with joined_ray(spec.address) as head:
        # Ray reads its settings when it is first imported, so nothing that imports it may come before it starts.
        from outrider.runner.hosts.cluster import ClusterFleet, cluster

        fleet = ClusterFleet(blueprint, sizes, spec.replicas, wishes, models, kept, display.say, head)
        with cluster(fleet, spec.wait_for_cores) as there:
            yield there


def _drive(
    spec: JobSpec,
    directory: Path,
    journal: Journal,
    fleet: AbstractContextManager[tuple[Fleet, list[ReplicaPlan]]],
    display: Display,
) -> dict[str, Any]:
    def agree_on_path(path: dict[str, str]) -> None:
        kept = journal.meta("numeric_path")
        if kept is None:
            journal.set_meta("numeric_path", path)
        else:
            check_same(kept, path, "a numeric path", directory)

    counts = journal.counts()
    interrupted = False
    if counts.pending:
        if counts.done or counts.failed:
            display.say(f"resuming {directory}: {counts.done + counts.failed:,} of {counts.rows:,} rows have ended")
        trace = TraceFile(spec.trace)
        with fleet as (where, plans):
            from outrider.runner.driving.driver import Driver

            driver = Driver(
                journal,
                plans,
                spec.model,
                spec.start_deadline,
                agree_on_path,
                where,
                display.show,
                trace,
                spec.wait_for_cores,
            )
            try:
                with _draining_on_signals(driver, display):
                    driver.run()
            except RayLostError as lost:
                if driver.draining:
                    display.say(str(lost))
                else:
                    check_worth_another(journal, lost, ours=spec.address is None)
                    if said := trace.set_aside():
                        display.say(f"trace: {said}")
                    raise
            finally:
                if said := trace.close():
                    display.say(f"trace: {said}")
                # Whatever stops the job, what is done can be read.
                write_results(journal, directory)
                told = {"pinning": list(driver.pinned.values()), "layouts": driver.layouts, "costs": driver.costs}
                describe(directory, journal, told | {"rows_by_host": dict(driver.rows_by_host)})
                write_report(journal, directory, running=False)
            interrupted = driver.draining and journal.counts().pending > 0
    elif spec.trace is not None:
        display.say("note: --trace: nothing was left to do, so there is nothing to trace")
    counts = journal.counts()
    summary: dict[str, Any] = {
        "rows": counts.rows,
        "done": counts.done,
        "failed": counts.failed,
        "pending": counts.pending,
    }
    summary |= journal.meta("totals") or Totals().summed({})
    kept = journal.meta(account.KEY)
    summary |= account.summary_of(kept)
    return {
        "summary": summary,
        "over_time": account.over_time(kept),
        "interrupted": interrupted,
        "numeric_path": journal.meta("numeric_path"),
    }


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


def choose_models(
    spec: Options, target: ModelCard, draft: ModelCard | None, office: Office, say: Callable[[str], None]
) -> tuple[ModelSpec, ModelSpec | None]:
    """What each actor loads, and on which engine."""
    devices = tuple(device.strip() for device in spec.devices.split(",") if device.strip())
    target_on_accelerator, draft_on_accelerator = on_accelerator(devices)
    target_model = _model(spec, target, spec.precision, target_on_accelerator, office, say)
    if draft is None or spec.draft_tokens == 0:
        return target_model, None
    precision = spec.draft_precision
    if precision == "auto" and draft.dtype in ("float16", "float32") and not draft_on_accelerator and spec.engine != "hf":
        # Drafts are hints: rounding one costs no text. The native engine has no fp16, and half the bytes are half the time.
        precision = "bf16"
    draft_model = _model(spec, draft, precision, draft_on_accelerator, office, say)
    # A draft may change: no text depends on it.
    return target_model, replace(draft_model, small_cache=spec.small_draft_cache, digest="")


def _model(
    spec: Options, card: ModelCard, precision: str, on_accelerator: bool, office: Office, say: Callable[[str], None]
) -> ModelSpec:
    chosen = OWN_PRECISION.get(card.dtype, "fp32") if precision == "auto" else precision
    engine = spec.engine
    if engine == "native" and not spec.fast_attention:
        raise UsageError("--no-fast-attention: the native engine has fused attention only; --engine hf has both")
    if engine == "auto" and (on_accelerator or chosen == "fp16" or not spec.fast_attention):
        engine = "hf"
    if engine != "hf":
        refusal = office.native_refuses(card.path)
        if refusal is not None and engine == "native":
            raise UsageError(f"--engine native: {refusal}")
        if refusal is not None:
            say(f"note: {card.name} runs on the hf engine, more slowly and not bit for bit: {refusal}")
        engine = "hf" if refusal is not None else "native"
    if engine == "hf" and chosen not in ("fp32", "bf16", "fp16"):
        why = "" if spec.fast_attention else "--no-fast-attention needs the hf engine, and "
        raise UsageError(
            f'--precision: {why}the hf engine does not know "{chosen}"; choose fp32, bf16 or fp16 for {card.name}'
        )
    if engine == "native" and chosen == "fp16":
        raise UsageError(f"--precision: the native engine does not know fp16; choose another for {card.name}")
    office.check_weights(card.path, engine, spec.allow_pickle)
    return ModelSpec(
        card.path,
        engine,
        chosen,
        allow_pickle=spec.allow_pickle,
        prefix_tokens=spec.prefix_tokens,
        fast_attention=spec.fast_attention,
        digest=card.digest,
    )


def serve_spec(spec: Options, draft: ModelSpec | None, draft_name: str) -> ServeSpec:
    return ServeSpec(
        batch=spec.batch,
        draft_tokens=None if spec.draft_tokens == "auto" else spec.draft_tokens,
        model=draft is not None,
        lookup=draft_name.endswith(LOOKUP),
        draft_confidence=spec.draft_confidence,
        runners_up=spec.runners_up,
        draft_deadline=spec.draft_deadline,
    )


def is_movable(spec: Options, target: ModelSpec, draft: ModelSpec | None) -> bool:
    """Whether how the two share their cores is left open; only the native engine can be moved while it works."""
    return _left_open(spec) and draft is not None and {target.engine, draft.engine} == {"native"}


def _left_open(spec: Options) -> bool:
    return spec.layout == "auto" and spec.draft_cores is None and not spec.devices


def wishes_of(spec: Options, movable: bool, cores: int) -> Wishes:
    """What is wished for on a host, or several, of so many cores."""
    devices = tuple(device.strip() for device in spec.devices.split(",") if device.strip())
    layout = spec.layout
    if movable:
        # Both get all cores of their seat, and how they share them is found out on the job's own rows.
        layout = "shared"
    elif _left_open(spec):
        # A target loses 1/n of its speed with one of n cores, and a draft that takes turns costs less than a quarter.
        layout = "shared" if cores // (spec.replicas or 1) < FEWEST_CORES_TO_SPLIT else "split"
    return Wishes(spec.per, spec.replicas, spec.draft_cores, layout, devices)


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
