"""Builds whole targets and drafts in this process, as the actors hold them, without Ray."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llguidance import LLTokenizer

from outrider.workers.build import Draft, Target, TextTokenizer, build_draft, build_target
from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines.costs import CostCurve
from outrider.workers.messages import DraftReply, DraftRequest, ModelSpec, ReplicaSpec, Row, RowResult
from outrider.workers.models.opening import OpenModel, open_model
from outrider.workers.target.verifier import Verifier

END = 0
# The number of candidates is fixed here, so the cost of passes decides nothing and is not measured.
CURVE = CostCurve({1: 1.0})


class Numbers:
    """A tokenizer whose tokens are numbers, for models without a tokenizer."""

    silent_tokens: frozenset[int] = frozenset()

    def special_among(self, marks: Collection[str]) -> tuple[int, ...]:
        return ()

    def decode(self, tokens: Sequence[int], shown: Collection[int] = ()) -> str:
        return "".join(f"{token} " for token in tokens)

    @property
    def token_bytes(self) -> Numbers:
        return self

    def bytes_of(self, token: int) -> bytes:
        return f"{token} ".encode()

    def silent(self, token: int) -> bool:
        return False

    def for_grammars(self, vocabulary: int, end: int) -> LLTokenizer:
        raise AssertionError("numbers are under no constraint: tests/support/constrained.py has a pair for that")


@dataclass(frozen=True)
class Answered:
    reply: DraftReply

    def ready(self, timeout: float) -> bool:
        return True

    def take(self) -> DraftReply:
        return self.reply


class InProcess:
    """A transport to a draft in this process: ``ask`` computes the reply at once."""

    name = "in process"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def ask(self, request: DraftRequest) -> Answered:
        return Answered(self._drafter.propose(request))

    def reconfigure(self, cores: Sequence[int], draft_ahead: bool, timeout: float) -> None:
        pass


def opened(
    path: Path, engine: str, precision: str, threads: int = 1, device: str = "cpu", cache_precision: str = "auto"
) -> OpenModel:
    """Opens a model with an end token of the test's own, since tiny models have none.

    One thread by default: more threads change no bit (tests/kernels), and would wait for each other beside other tests.
    """
    spec = ModelSpec(
        str(path), engine, precision, device, 0 if engine == "hf" else threads, cache_precision=cache_precision
    )
    return replace(open_model(spec), end_tokens=(END,))


def draft_of(model: OpenModel, prefix_tokens: int = 0, mask_token: int | None = None) -> Draft:
    """Builds a draft; with a mask token it is a parallel one, which makes all candidates in one pass."""
    spec = ModelSpec("", model.kind, "", prefix_tokens=prefix_tokens, mask_token=mask_token)
    return build_draft(spec, ReplicaSpec(1, None), model, pass_seconds=CURVE)


def target_of(
    model: OpenModel,
    batch: int,
    count: int,
    draft: Draft | None = None,
    lookup: bool = False,
    prefix_tokens: int = 0,
    tokenizer: TextTokenizer | None = None,
    answer_tokens: int | None = None,
) -> Target:
    """Builds a target; with ``answer_tokens`` it also proposes by suffixes, over that many tokens of earlier answers."""
    suffix = answer_tokens is not None
    replica_spec = ReplicaSpec(batch, count, draft is not None, lookup, suffix, answer_tokens or 0)
    spec = ModelSpec("", model.kind, "", prefix_tokens=prefix_tokens)
    target = build_target(spec, replica_spec, model, tokenizer or Numbers(), CURVE)
    if draft is not None:
        target.link.attach(InProcess(draft.drafter))
    return target


def write(target: Target, rows: Sequence[Row]) -> tuple[dict[int, RowResult], Verifier]:
    """Runs the rows to their ends: their results, and the verifier with its counters."""
    target.verifier.add(rows)
    ended: dict[int, RowResult] = {}
    while not target.verifier.idle:
        ended.update({result.key: result for result in target.verifier.round() if isinstance(result, RowResult)})
    return ended, target.verifier
