"""Before a job runs: a new job gets its rows and identity; an existing one is checked against what is asked for."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import outrider
from outrider.runner.counted import counted
from outrider.runner.hosts.ray_restart import ANEW
from outrider.runner.hosts.submit import ACCEPTED, absolute_model
from outrider.runner.job.admission import admit
from outrider.runner.job.directory import JOURNAL, describe, path_exists, read_description
from outrider.runner.job.identity import check_same, identity, kept_identity
from outrider.runner.job.input import KEY as INPUT
from outrider.runner.job.input import describe_input, digest_of_resumed_input, open_input
from outrider.runner.job.journal import Journal
from outrider.runner.job.journal_reading import BESIDE
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
from outrider.runner.options.job import JobSpec
from outrider.runner.planning.allowance import available_bytes
from outrider.runner.planning.placement import Plan, plan
from outrider.runner.planning.placement_request import ModelSizes
from outrider.runner.planning.replica_memory import ReplicaMemory
from outrider.runner.planning.replica_plan import ReplicaTemplate
from outrider.runner.planning.topology import read_topology
from outrider.runner.report.display import Watcher
from outrider.runner.report.report import drop_damaged_statistics
from outrider.workers.errors import JobChangedError, OldAnswersError, PlacementError, UsageError
from outrider.workers.messages import ModelSpec
from outrider.workers.models.model_info import ModelInfo

MOST_NAMES = 20
# Key of the journal's meta table: the model's name in the results, the same however often the job is resumed.
MODEL_NAME = "model_name"
# Key of the journal's meta table: how answers are decoded. BEHIND_PROMPTS: as the continuation of the prompt. A job of an
# older outrider lacks the key; its answers may have been decoded alone, without the space before their first word.
TEXTS, BEHIND_PROMPTS = "texts", 2


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job whose rows are in its journal, and the plan of its replicas."""

    journal: Journal
    replica_template: ReplicaTemplate
    sizes: ModelSizes
    model_infos: Sequence[ModelInfo]


@dataclass(frozen=True, slots=True)
class ShownNames:
    """What messages about rows call the input and the target, instead of their paths (the batch server's names)."""

    input: str
    model: str


@dataclass(frozen=True, slots=True)
class PreparedModels:
    """A target with its draft: what their checkpoints say, how they are loaded, and the memory that they take."""

    target: ModelInfo
    draft: ModelInfo | None
    draft_name: str
    target_model: ModelSpec
    draft_model: ModelSpec | None
    memory: ReplicaMemory

    @property
    def model_infos(self) -> list[ModelInfo]:
        return [self.target] if self.draft is None or self.draft_model is None else [self.target, self.draft]

    def replica_template(self, spec: JobSpec, rows: int) -> ReplicaTemplate:
        """``rows``: how many all replicas together have to do; 0 if unknown."""
        replica_spec = replace(replica_spec_of(spec, self.draft_model, self.draft_name), trace=spec.trace is not None)
        movable = is_movable(spec, self.target_model, self.draft_model)
        return ReplicaTemplate(self.target_model, self.draft_model, replica_spec, movable, spec.share_cores, rows)


def prepare_models(spec: JobSpec, tokenizer_process: TokenizerProcess, say: Callable[[str], None]) -> PreparedModels:
    target, draft, draft_name, notes = tokenizer_process.prepare_pair(spec.model, spec.draft, say, may_be_native(spec))
    for note in notes:
        say(f"note: {note}")
    target_model, draft_model = choose_models(spec, target, draft, tokenizer_process, say)
    draft, draft_name = without_unusable(spec, draft, draft_model, draft_name)
    memory = memory_of_pair((target, target_model), (draft, draft_model), spec, draft_name, tokenizer_process)
    return PreparedModels(target, draft, draft_name, target_model, draft_model, memory)


def prepare(
    spec: JobSpec,
    directory: Path,
    display: Watcher,
    retry_failed: bool = False,
    running_tokenizer: TokenizerProcess | None = None,
    shown_names: ShownNames | None = None,
) -> PreparedJob:
    """Resume the job in the directory, or make a new one there. ``retry_failed``: its failed rows become pending again.

    ``running_tokenizer``: the batch server's tokenizer process, used instead of a new one and left running.
    """
    with nullcontext(running_tokenizer) if running_tokenizer is not None else TokenizerProcess() as tokenizer_process:
        models = prepare_models(spec, tokenizer_process, display.say)
        target, chosen = models.target, models.target_model
        if shown_names is not None:
            target = replace(target, name=shown_names.model)
        asked_with = partial(identity, spec, target, engine=chosen.engine, precision=chosen.precision)
        # A running tokenizer belongs to a batch server, whose replicas are placed already.
        here, new = running_tokenizer is None and spec.address is None, not path_exists(directory / JOURNAL)
        if here and new:
            # Planned for one row, since the number of rows is not known yet.
            _plan_here(spec, models, models.memory.sizes(1, written=0))
        journal = Journal(directory / JOURNAL)
        if journal.filled:
            _check_goes_on(spec, directory, journal, asked_with, display, retry_failed)
            _check_texts(directory, journal, target, tokenizer_process, retry_failed)
            if retry_failed and ANEW not in os.environ:
                _put_back(journal, display)
        elif retry_failed:
            raise UsageError(f"{directory} holds no job yet: its input has not been accepted")
        else:
            _admit(spec, target, tokenizer_process, journal, asked_with, display, shown_names)
    try:
        sizes = _sizes_of_rows(spec, models, journal, display.say if here else None)
    except PlacementError:
        if new:
            _remove(journal)
        raise
    if spec.address is not None:
        display.say(f"{counted(journal.counts().rows, 'row')} {ACCEPTED} in {directory.resolve()}")
    describe(directory, journal, _description(spec, target, models.draft, models.draft_name, journal.meta("identity")))
    # A row with n samples is n rows to a replica.
    template = models.replica_template(spec, journal.pending_answers()[0])
    return PreparedJob(journal, template, sizes, models.model_infos)


def _plan_here(spec: JobSpec, models: PreparedModels, sizes: ModelSizes) -> Plan:
    """Plan as if all of this machine were free, so that a model that cannot fit is refused before a directory is made."""
    machine = read_topology()
    movable = models.replica_template(spec, 0).movable
    return plan([machine], sizes, placement_request_of(spec, movable, len(machine.usable_cores)))


def _sizes_of_rows(
    spec: JobSpec, models: PreparedModels, journal: Journal, say: Callable[[str], None] | None
) -> ModelSizes:
    """The memory that a replica is planned with: the most that the pending rows may need, if this machine has room for it.

    Otherwise the least that they need, with a note that memory may run short. ``say`` is None where the replicas are not
    placed by this process on this machine: then the least, without a check.
    """
    memory = models.memory
    pending, written = journal.pending_answers()
    rows = min(spec.batch, max(1, -(-pending // (spec.replicas or 1))))
    lengths = journal.longest(rows)
    longest = max((prompt for prompt, _, _ in lengths), default=0)
    least = memory.sizes(rows, longest, written=0)
    if say is None or not lengths:
        return least
    try:
        made = _plan_here(spec, models, least)
    except PlacementError as refusal:
        at_once = counted(rows, "row")
        raise PlacementError(f"the longest prompt has {longest:,} tokens, with {at_once} at once: {refusal}") from None
    needed = sum(sum(actor.memory.values()) for actor in made.actors)
    if (free := available_bytes()) is not None and needed > free:
        say(
            f"note: other programs use so much memory that {free / 1e9:.2f} GB are left, and this job takes at least "
            f"{needed / 1e9:.2f} GB: the kernel may end one of them or of its processes"
        )
    # The prefix cache keeps prompts of rows that have ended.
    kept = min(spec.prefix_tokens, (pending - 1) * longest)
    samples, tokens = _most_at_once(lengths, rows, shared=memory.native and spec.prefix_tokens > 0)
    tokens += kept
    most = memory.sizes(rows, tokens, tokens, written)
    try:
        if _plan_here(spec, models, most).replicas == made.replicas:
            return most
        why = f"with so much memory fewer than {made.replicas} replicas fit"
    except PlacementError as refusal:
        why = str(refusal).partition(";")[0]
    less = ["a smaller --batch", "a smaller --max-tokens in a new job", "fewer --replicas"]
    if memory.native and spec.cache_precision != "int8":
        less.append("--cache-precision int8")
    say(
        f"note: memory may run short: {counted(samples, 'row')} at once may have {tokens:,} tokens, with their "
        f"answers and {kept:,} kept of earlier prompts; {why}. A target that runs out of it goes on with half as many "
        f"rows; {', '.join(less[:-1])} or {less[-1]} needs less"
    )
    return least


def _most_at_once(lengths: Sequence[tuple[int, int, int]], most: int, shared: bool) -> tuple[int, int]:
    """Samples of the longest rows that fill a batch of ``most``, and their tokens.

    ``lengths``: prompt tokens, answer tokens and samples of the longest rows. ``shared``: a row's samples share its prompt.
    """
    left, tokens = most, 0
    for prompt, answer, samples in lengths:
        taken = min(samples, left)
        left -= taken
        tokens += prompt * (1 if shared else taken) + answer * taken
    return most - left, tokens


def _check_goes_on(
    spec: JobSpec,
    directory: Path,
    journal: Journal,
    asked_with: Callable[[str], dict[str, Any]],
    display: Watcher,
    retry_failed: bool,
) -> None:
    """Refuse to resume a job that is not the one asked for, or whose files are damaged beyond what can be repaired."""
    for note in journal.check():
        display.say(f"note: {note}")
    kept = kept_identity(journal)
    # The input's digest is not compared for a retry, which names no input, nor where this process resumes its own job on
    # a new Ray: it checked the file when it began, and the file may have been replaced since.
    digest = None
    if not retry_failed and ANEW not in os.environ:
        digest = digest_of_resumed_input(spec.input, directory, journal, display.say, spec.split)
    check_same(kept, asked_with(digest or str(kept.get("input"))), "an input, model or parameter", directory, retry_failed)
    _, broken = read_description(directory, journal)
    for found in (broken, drop_damaged_statistics(journal, directory)):
        if found is not None:
            display.say(f"note: {found}")


def _check_texts(
    directory: Path, journal: Journal, target: ModelInfo, tokenizer_process: TokenizerProcess, retry_failed: bool
) -> None:
    """Refuse to mix answers with and without the space before their first word in one job."""
    counts = journal.counts()
    if not (counts.pending or (retry_failed and counts.failed)):
        return
    if texts_differ(journal, lambda: drops_first_space(tokenizer_process, target.path)):
        raise OldAnswersError(
            f"{directory} holds a job that was begun by an older outrider, whose answers lacked the space before their "
            "first word: finish it with that version, or give another directory with --out"
        )


def texts_differ(journal: Journal, dropped: Callable[[], bool]) -> bool:
    """Whether finished answers lack the leading space that this version's answers have.

    If not, the job is marked as decoded by this version (``TEXTS``), so that it need not be asked again when it is resumed.
    """
    if (known := journal.meta(TEXTS)) not in (None, BEHIND_PROMPTS):
        raise JobChangedError(
            f"{journal.path} has answers of another outrider, which makes texts of tokens otherwise: finish the job "
            "with that version, or give another directory with --out"
        )
    if known is not None:
        return False
    if journal.counts().done and dropped():
        return True
    journal.set_meta(TEXTS, BEHIND_PROMPTS)
    return False


def drops_first_space(tokenizer_process: TokenizerProcess, path: str) -> bool:
    """Whether the tokenizer drops a leading space when it decodes tokens without the prompt, as Llama 2's does."""
    [words] = tokenizer_process.encode(path, ["a a a"])
    if isinstance(words, str):
        return False
    last = words[-1:]
    return tokenizer_process.decode(path, last) != tokenizer_process.decode(path, last, prompt=words[:-1])


def _put_back(journal: Journal, display: Watcher) -> None:
    count, stay = journal.put_back_failed(), journal.counts().failed
    display.say(f"{counted(count, 'failed row')} to be run again" if count else "no failed row can be run again")
    if stay:
        wrong = f"note: wrong in the input, and failed for good: {counted(stay, 'row')}"
        display.say(f"{wrong}; mend that there and run it as another job")


def _admit(
    spec: JobSpec,
    target: ModelInfo,
    tokenizer_process: TokenizerProcess,
    journal: Journal,
    asked_with: Callable[[str], dict[str, Any]],
    display: Watcher,
    shown_names: ShownNames | None,
) -> None:
    """Fill the journal of a new job; if the input is refused, the journal is removed."""
    input_called = None if shown_names is None else shown_names.input

    def meta_of(digest: str) -> dict[str, Any]:
        kept = {MODEL_NAME: spec.model if shown_names is None else shown_names.model, TEXTS: BEHIND_PROMPTS}
        return {"identity": asked_with(digest), INPUT: describe_input(spec.input, source), **kept}

    try:
        spec.check_new()
        source = open_input(spec.input, journal.path.parent, display.say, spec.format, spec.split, input_called)
        admitted = admit(spec, source, target, tokenizer_process, journal, meta_of)
        # The tokenizer's files were hashed before they were loaded, and may have changed in between.
        tokenizer_process.check_unchanged(target)
    except (UsageError, JobChangedError):
        _remove(journal)
        raise
    if admitted.carried:
        display.say(f"note: columns that go through to the results as they are: {_listed(admitted.carried)}")
    if admitted.left_out:
        display.say(f"note: columns that are neither read nor carried: {_listed(admitted.left_out)}")
    for model in sorted(admitted.models - {spec.model if shown_names is None else shown_names.model}):
        display.say(f'note: rows ask for the model "{model}"; all are answered by -m {spec.model}')


def _remove(journal: Journal) -> None:
    journal.close()
    for ending in ("", "-shm", *BESIDE):
        journal.path.with_name(journal.path.name + ending).unlink(missing_ok=True)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")


def _description(
    spec: JobSpec, target: ModelInfo, draft: ModelInfo | None, draft_name: str, asked: dict[str, Any]
) -> dict[str, Any]:
    return {
        "outrider": outrider.__version__,
        "python": platform.python_version(),
        "updated": datetime.now(UTC).isoformat(timespec="seconds"),
        "spec": spec.model_dump(mode="json"),
        "models": {"model": absolute_model(spec.model), "draft": absolute_model(spec.draft)},
        "identity": asked,
        "target": asdict(target),
        "draft": asdict(draft) if draft is not None else draft_name,
    }
