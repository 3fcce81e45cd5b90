"""Builds a whole target and a whole draft from a ``ModelSpec`` and a ``ReplicaSpec``, without Ray and in this process.

The actors put them into processes of their own (``actors.py``); tests and benchmarks use them directly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from llguidance import LLTokenizer

from outrider.workers.constraints.matching import Grammars
from outrider.workers.draft.constraints import Constraints, LoadedInBackground
from outrider.workers.draft.drafter import Drafter
from outrider.workers.draft.head import HeadDrafter
from outrider.workers.draft.parallel import OnePass
from outrider.workers.engines.costs import CostCurve, measure
from outrider.workers.engines.engine import CanLearn, CanShorten
from outrider.workers.engines.head import HeadEngine
from outrider.workers.machine.pin_check import move_threads
from outrider.workers.messages import ModelSpec, ReplicaSpec, Row
from outrider.workers.models.hide_torch import go_without_torch
from outrider.workers.models.model_info import check_unchanged
from outrider.workers.models.opening import OpenModel, open_model
from outrider.workers.target.draft_link import DraftLink
from outrider.workers.target.layout_tuner import LayoutTuner
from outrider.workers.target.logprobs import TokenBytes
from outrider.workers.target.proposers import EitherProposer, LookupProposer, NoProposer, Proposer
from outrider.workers.target.statistics import TargetStatistics
from outrider.workers.target.suffix_finder import SuffixFinder
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier
from outrider.workers.timeline import Timeline


class TextTokenizer(Protocol):
    """What a target asks of a tokenizer."""

    @property
    def token_bytes(self) -> TokenBytes | None: ...

    def decode(self, tokens: Sequence[int], shown: Collection[int] = ()) -> str: ...

    def special_among(self, marks: Collection[str]) -> tuple[int, ...]: ...

    def for_grammars(self, vocabulary: int, end: int) -> LLTokenizer: ...


@dataclass(frozen=True, slots=True)
class Target:
    """``verifier`` leads the rounds, ``tuner`` is told of each, and ``link`` is where a draft is attached."""

    model: OpenModel
    verifier: Verifier
    tuner: LayoutTuner
    link: DraftLink


@dataclass(frozen=True, slots=True)
class Draft:
    """``notes`` are sentences for the user, beside those of the model."""

    model: OpenModel
    drafter: Drafter
    notes: tuple[str, ...] = ()


def open_unchanged(spec: ModelSpec, rows: int) -> OpenModel:
    """The model, with memory for this many rows. Refused where the digest of its files differs from that of the spec."""
    check_unchanged(spec.path, spec.digest)
    model = open_model(spec)
    if model.reserve is not None:
        model.reserve(rows)
    return model


def build_target(
    spec: ModelSpec,
    replica_spec: ReplicaSpec,
    model: OpenModel | None = None,
    tokenizer: TextTokenizer | None = None,
    verify_seconds: CostCurve | None = None,
) -> Target:
    """An open model, a tokenizer and the cost of passes are used where they are given; else loaded and measured."""
    if model is None:
        model = open_unchanged(spec, replica_spec.rows_at_once)
    if tokenizer is None:
        tokenizer = tokenizer_of(spec)
    if verify_seconds is None:
        verify_seconds = _pass_seconds(model)
    statistics = TargetStatistics(Timeline() if replica_spec.trace else None)
    link = DraftLink(replica_spec.draft_deadline, replica_spec.draft_confidence, statistics)
    verifier = Verifier(
        engine=model.engine,
        new_writer=partial(_writer, model, tokenizer),
        proposer=_proposer(replica_spec, link, lambda tokens: verifier.policy.verify_seconds(tokens)),
        batch=replica_spec.batch,
        draft_tokens=replica_spec.draft_tokens,
        verify_seconds=verify_seconds,
        end_tokens=model.end_tokens,
        prefix_tokens=spec.prefix_tokens,
        statistics=statistics,
        runners_up=replica_spec.runners_up,
        grammars=_grammars(model, lambda: tokenizer) if model.end_tokens else None,
        finder=SuffixFinder(replica_spec.answer_tokens) if replica_spec.suffix else None,
        with_states=bool(spec.states),
    )
    tuner = LayoutTuner(
        verifier,
        link,
        replica_spec.layouts,
        partial(move, model),
        lambda only: measure(model.engine, only=only),
        replica_spec.memory_key,
        replica_spec.rows,
    )
    return Target(model, verifier, tuner, link)


def build_draft(
    spec: ModelSpec,
    replica_spec: ReplicaSpec,
    model: OpenModel | None = None,
    constraints: Constraints | None = None,
    pass_seconds: CostCurve | None = None,
) -> Draft:
    """What is given is used instead of loading it. ``pass_seconds`` is only of use to a parallel draft."""
    if model is None:
        model = open_unchanged(spec, replica_spec.rows_at_once)
    if constraints is None and spec.path and model.end_tokens:
        constraints = LoadedInBackground(_grammars(model, lambda: _tokenizer_aside(model, spec)))
    notes = _shortened(model, replica_spec.draft_shortlist)
    if replica_spec.draft_learns and isinstance(model.engine, CanLearn):
        model.engine.correct_choices()
    if model.head:
        assert isinstance(model.engine, HeadEngine)
        return Draft(model, HeadDrafter(model.engine, model.end_tokens, spec.prefix_tokens, constraints), notes)
    one_pass = None if spec.mask_token is None else OnePass(spec.mask_token, pass_seconds or _pass_seconds(model))
    return Draft(model, Drafter(model.engine, model.end_tokens, spec.prefix_tokens, constraints, one_pass), notes)


def _shortened(model: OpenModel, tokens: int | None) -> tuple[str, ...]:
    scored, every = model.engine.vocabulary, model.engine.vocabulary
    if isinstance(model.engine, CanShorten):
        scored = model.engine.shorten(tokens)
    return (f"the draft scores {scored:,} of {every:,} tokens",) if scored < every else ()


def move(model: OpenModel, cores: Sequence[int]) -> None:
    """Pin the engine and every other thread of the process to these cores."""
    if cores and model.use_cores is not None:
        move_threads(cores)
        model.use_cores(cores)


def tokenizer_of(spec: ModelSpec) -> TextTokenizer:
    # The hf engine has imported transformers with torch by now; a native target's process does well without both.
    from outrider.workers.models.tokenizer import Tokenizer

    tokenizer = Tokenizer(spec.path)
    tokenizer.keep()
    # Checked again after everything was read: files that were replaced meanwhile must not write rows.
    check_unchanged(spec.path, spec.digest)
    return tokenizer


def _tokenizer_aside(model: OpenModel, spec: ModelSpec) -> TextTokenizer:
    if model.kind == "native":
        go_without_torch()
    # A head uses the tokenizer of its target.
    return tokenizer_of(replace(spec, path=spec.target) if spec.target else spec)


def _grammars(model: OpenModel, tokenizer: Callable[[], TextTokenizer]) -> Grammars:
    vocabulary = model.engine.vocabulary
    return Grammars(lambda: tokenizer().for_grammars(vocabulary, model.end_tokens[0]), vocabulary)


def _pass_seconds(model: OpenModel) -> CostCurve:
    # The engine pins the thread that asks for a pass to its first core. This thread answers calls later, so another asks.
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(measure, model.engine).result()


def _writer(model: OpenModel, tokenizer: TextTokenizer, row: Row) -> TextWriter:
    pieces = tokenizer.token_bytes
    silent = pieces.silent_tokens.difference(row.shown) if pieces is not None else ()
    ends = {*model.end_tokens, *(row.sampling.end_tokens or ()), *silent}
    decode = partial(tokenizer.decode, shown=frozenset(row.shown)) if row.shown else tokenizer.decode
    stop_tokens = tokenizer.special_among(row.stop)
    return TextWriter(decode, row.stop, ends, row.sampling.min_tokens, pieces, row.prompt, stop_tokens)


def _proposer(replica_spec: ReplicaSpec, link: DraftLink, verify_seconds: Callable[[int], float]) -> Proposer:
    if replica_spec.model:
        return EitherProposer(link, verify_seconds) if replica_spec.lookup else link
    return LookupProposer() if replica_spec.lookup else NoProposer()
