"""One family tried in process: does the hf engine write what transformers writes, or say in a sentence why not?"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.families.settings import configuration, features
from outrider.workers.engines.costs import CostCurve
from outrider.workers.engines.hf import HfEngine
from outrider.workers.errors import ModelError
from outrider.workers.messages import ModelSpec, Row, RowResult
from outrider.workers.models.hf_loading import load_hf
from outrider.workers.models.probe import said, written_by_transformers
from outrider.workers.models.twins import VOCABULARY, Limits, build_twin, twin_config
from outrider.workers.target.proposers import LookupProposer
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier

# Others than those of the trial at load, so that this is no repetition of it.
LIMITS = Limits(window=11, chunk=16, switch=52)
LENGTHS = (3, 17, 49, 60, 85, 110)
WRITTEN, CANDIDATES = 16, 3
# Two scores (relative to the largest) of which it is chance which one is the larger in float32.
TIE = 1e-5


class Verdict(Enum):
    BATCHED = "right"
    ALONE = "right, one row at a time"
    REFUSED = "refused"
    WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    verdict: Verdict
    said: str
    features: tuple[str, ...]
    proposed: int = 0
    accepted: int = 0
    seconds: float = 0.0


def check(name: str, folder: Path, seed: int = 0) -> Outcome:
    """Lay a tiny checkpoint of the family into the folder, and hold the engine's texts against transformers' own."""
    started = time.perf_counter()
    try:
        config = configuration(name)
        found = tuple(features(config))
        build_twin(twin_config(config, LIMITS), seed).save_pretrained(folder)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:  # configurations and models fail in ways of their own
        return Outcome(name, Verdict.REFUSED, f"transformers cannot make a small one: {said(error)}", ())
    try:
        engine, _, notes = load_hf(ModelSpec(str(folder), "hf", "fp32"))
    except ModelError as error:
        return Outcome(name, Verdict.REFUSED, _short(str(error), folder), found)
    prompts = [prompt(length, seed) for length in LENGTHS]
    texts, counted = write(engine, prompts)
    wrong = [_difference(reference, each, text) for each, text in zip(prompts, texts, strict=True)]
    verdict = Verdict.BATCHED if isinstance(engine, HfEngine) else Verdict.ALONE
    sentence = _short(notes[0], folder) if notes else ""
    if any(wrong):
        verdict, sentence = Verdict.WRONG, "; ".join(filter(None, wrong))
    return Outcome(name, verdict, sentence, found, *counted, time.perf_counter() - started)


def prompt(length: int, seed: int) -> list[int]:
    """A part that comes again and again, so that lookup proposes, with something else in between."""
    ids = [7 + (seed * 13 + length + index * 37) % (VOCABULARY - 8) for index in range(7)]
    return [ids[index % 7] if index % 11 else 7 + (index * 5) % (VOCABULARY - 8) for index in range(length)]


def write(
    engine: object, prompts: list[list[int]], candidates: int = CANDIDATES
) -> tuple[list[list[int]], tuple[int, int]]:
    """All prompts in one batch, with candidates from each row's own text; how many were proposed and how many held."""
    verifier = Verifier(
        engine=engine,  # type: ignore[arg-type]
        new_writer=lambda row: TextWriter(lambda tokens: "", row.stop, ()),
        proposer=LookupProposer(),
        batch=len(prompts),
        draft_tokens=candidates,
        verify_seconds=CostCurve({1: 1.0}),
        end_tokens=(),
    )
    verifier.add(Row(key, tuple(each), WRITTEN) for key, each in enumerate(prompts))
    written: dict[int, list[int]] = {}
    while not verifier.idle:
        for result in verifier.round():
            assert isinstance(result, RowResult), result
            written[result.key] = list(result.tokens)
    counters = verifier.counters
    return [written[key] for key in range(len(prompts))], (counters.proposed, counters.accepted)


def _difference(reference: PreTrainedModel, given: list[int], written: list[int]) -> str:
    """Where a text leaves transformers' own, unless that is where two scores of the reference tie."""
    expected = written_by_transformers(reference, given, WRITTEN)
    for place, (ours, theirs) in enumerate(zip(written, expected.written, strict=True)):
        if ours != theirs:
            scores = expected.scores[place]
            if float(scores[theirs] - scores[ours]) < TIE * float(scores.abs().max()):
                return ""
            return f"the text of {len(given)} tokens differs from its token {place} on"
    return ""


def _short(sentence: str, folder: Path) -> str:
    """Without the folder that only this run knows."""
    return re.sub(rf"^{re.escape(str(folder))} ?(\([^)]*\))?:? ?", "", sentence).replace(str(folder), "the checkpoint")
