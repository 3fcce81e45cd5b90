"""Everything a row may ask for, in random mixes: the same result assisted or not, in whatever batch, shared or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from local_draft import LocalDraft
from native_models import open_native, save_tiny

from outrider.workers.draft.drafter import Drafter
from outrider.workers.engines.costs import CostCurve
from outrider.workers.engines.engine import Engine, Feed
from outrider.workers.engines.hf import HfEngine
from outrider.workers.messages import ModelSpec, Row, RowResult, Sampling, TokenLogprobs
from outrider.workers.models.cards import find
from outrider.workers.models.loading import load_hf
from outrider.workers.models.opening import open_model
from outrider.workers.models.tokenizer import Tokenizer
from outrider.workers.speculation import Overlap
from outrider.workers.target.proposers import EitherProposer, LookupProposer, NoProposer
from outrider.workers.target.text import TextWriter
from outrider.workers.target.verifier import Proposer, Verifier

VOCABULARY = 203
END = 0
CURVE = CostCurve({1: 1.0})


class Numbers:
    """A tokenizer whose tokens are numbers."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    def bytes_of(self, token: int) -> bytes:
        return f"{token} ".encode()

    def silent(self, token: int) -> bool:
        return False


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    save_tiny("llama", path / "llama")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def rows_of_all_kinds(count: int, vocabulary: int = VOCABULARY, tokens: int = 24, seed: int = 5) -> list[Row]:
    """Parameters at random; some rows begin alike, some are several answers to one prompt, some repeat themselves."""
    random = np.random.default_rng(seed)
    heads = [tuple(random.integers(1, vocabulary, size=size).tolist()) for size in (30, 45)]
    rows: list[Row] = []
    while len(rows) < count:
        tail = np.tile(random.integers(1, vocabulary, size=random.integers(2, 8)), 2).tolist()
        head = (*heads, (), ())[random.integers(4)]
        favoured = tuple((int(token), 2.5) for token in random.integers(0, vocabulary, size=3))
        ends = tuple(random.integers(1, vocabulary, size=random.integers(0, vocabulary // 8)).tolist())
        sampling = Sampling(
            temperature=float(random.choice([0.0, 0.0, 0.5, 1.0, 1.3])),
            top_k=int(random.choice([0, 0, 1, 20])),
            top_p=float(random.choice([1.0, 1.0, 0.9, 0.3])),
            min_p=float(random.choice([0.0, 0.0, 0.05])),
            seed=int(random.integers(1 << 62)),
            repetition_penalty=float(random.choice([1.0, 1.0, 1.2, 0.9])),
            presence_penalty=float(random.choice([0.0, 0.0, 0.7])),
            frequency_penalty=float(random.choice([0.0, 0.0, -0.4, 0.5])),
            logit_bias=favoured if random.random() < 0.3 else (),
            min_tokens=int(random.choice([0, 0, 4, 20])),
            end_tokens=None if random.random() < 0.3 else (*ends, END),
        )
        stop = (str(random.integers(vocabulary)), "11 1") if random.random() < 0.5 else ()
        logprobs = None if random.random() < 0.4 else int(random.integers(0, 6))
        for sample in range(3 if random.random() < 0.2 else 1):
            rows.append(Row(len(rows), (*head, *tail), tokens, replace(sampling, sample=sample), stop, logprobs))
    return rows


def write(
    engine: Engine,
    proposer: Proposer,
    rows: Sequence[Row],
    batch: int,
    count: int,
    prefix_tokens: int = 0,
    text: object = None,
    overlap: Overlap | None = None,
) -> tuple[dict[int, RowResult], Verifier]:
    tokenizer = text or Numbers()
    pieces = getattr(tokenizer, "pieces", tokenizer)
    verifier = Verifier(
        engine=engine,
        new_writer=lambda row: TextWriter(
            tokenizer.decode,  # type: ignore[attr-defined]
            row.stop,
            {END, *(row.sampling.end_tokens or ())},
            row.sampling.min_tokens,
            pieces,
        ),
        proposer=proposer,
        batch=batch,
        draft_tokens=count,
        verify_seconds=CURVE,
        end_tokens=(END,),
        prefix_tokens=prefix_tokens,
    )
    if overlap is not None:
        verifier.arrange(overlap, count)
    verifier.add(rows)
    ended: dict[int, RowResult] = {}
    while not verifier.idle:
        ended.update({result.key: result for result in verifier.round() if isinstance(result, RowResult)})
    return ended, verifier


def what_counts(results: dict[int, RowResult]) -> dict[int, tuple[object, ...]]:
    return {
        key: (result.tokens, result.text, result.finish_reason, result.logprobs) for key, result in sorted(results.items())
    }


def assert_obeyed(rows: Sequence[Row], results: dict[int, RowResult]) -> None:
    """The rules that can be seen in a result, without a second opinion on any token."""
    for row in rows:
        result, least = results[row.key], row.sampling.min_tokens
        ends = {END} if row.sampling.end_tokens is None else set(row.sampling.end_tokens)
        if row.sampling.end_tokens is not None:
            assert not ends & set(result.tokens[:least]), f"row {row.key}: an end before min_tokens"
        assert not ends & set(result.tokens[:-1]), f"row {row.key} went on behind its end"
        if result.finish_reason == "length":
            assert len(result.tokens) == row.max_tokens
            assert result.tokens[-1] not in ends
        else:
            assert result.tokens[-1] in ends or row.stop
        assert (result.logprobs is None) == (row.logprobs is None)
        if result.logprobs is not None:
            assert all(value <= 0.0 for value in result.logprobs.chosen)
            assert all(len(each) == row.logprobs for each in result.logprobs.likeliest)


@pytest.mark.parametrize("precision", ["bf16", "w4a8"])
def test_on_the_native_engine_every_bit_is_the_same(models: Path, precision: str) -> None:
    target, draft = open_native(models / "llama", precision), open_native(models / "llama", "w8a8")
    rows = rows_of_all_kinds(24, tokens=20)
    plain, _ = write(target, NoProposer(), rows, 1, 0)
    assert_obeyed(rows, plain)
    assert {result.finish_reason for result in plain.values()} == {"stop", "length"}
    model = LocalDraft(Drafter(draft, (END,), 500))
    for batch, count, prefix_tokens, overlap, proposer in [
        (5, 0, 500, None, NoProposer()),
        (1, 3, 0, None, LocalDraft(Drafter(draft, (END,)))),
        (6, 5, 100, Overlap.GROUPS, model),
        (4, 4, 4000, None, LookupProposer()),
        (7, 2, 60, None, EitherProposer(LocalDraft(Drafter(draft, (), 60)), CURVE)),
    ]:
        assisted, verifier = write(target, proposer, rows, batch, count, prefix_tokens, overlap=overlap)
        assert what_counts(assisted) == what_counts(plain)
        assert not count or 0 < verifier.progress.accepted < verifier.progress.proposed, "only hits or only misses"
        assert (verifier.progress.prompt_tokens_reused > 0) == (prefix_tokens > 0)


@pytest.mark.parametrize("precision", ["fp32", "w4a8"])
def test_on_the_native_engine_a_row_that_goes_on_is_bit_for_bit_the_same(models: Path, precision: str) -> None:
    target, draft = open_native(models / "llama", precision), open_native(models / "llama", "w8a8")
    rows = rows_of_all_kinds(20, tokens=20, seed=6)
    plain, _ = write(target, NoProposer(), rows, 1, 0)
    random = np.random.default_rng(3)
    begun = []
    for row in rows:
        result = plain[row.key]
        cut = int(random.integers(0, len(result.tokens) + 1))
        told: tuple[TokenLogprobs, ...] = ()
        if result.logprobs is not None:
            own = zip(result.tokens, result.logprobs.chosen, result.logprobs.likeliest, strict=True)
            told = tuple(((token, chosen), *likeliest) for token, chosen, likeliest in own)[:cut]
        begun.append(replace(row, begun=result.tokens[:cut], begun_logprobs=told))
    for batch, count, proposer in [(1, 0, NoProposer()), (6, 4, LocalDraft(Drafter(draft, (END,), 300)))]:
        resumed, verifier = write(target, proposer, begun, batch, count, prefix_tokens=300)
        assert what_counts(resumed) == what_counts(plain)
        assert verifier.progress.resumed_tokens == sum(len(row.begun) for row in begun) > 50


def test_on_the_hf_engine_tokens_are_the_same_and_probabilities_nearly(models: Path) -> None:
    target, draft = (load_hf(ModelSpec(str(models / "llama"), "hf", "fp32"))[0] for _ in range(2))
    rows = rows_of_all_kinds(14, tokens=12)
    plain, _ = write(target, NoProposer(), rows, 1, 0)
    assert_obeyed(rows, plain)
    assisted, verifier = write(target, LocalDraft(Drafter(draft, (END,), 500)), rows, 5, 3, 500)
    assert verifier.progress.accepted > 0
    assert verifier.progress.prompt_tokens_reused > 0
    turned = [key for key in plain if plain[key].tokens != assisted[key].tokens]
    assert len(turned) <= verifier.progress.near_ties, f"rows {turned} turned without a tie"
    for key in plain.keys() - set(turned):
        ours, theirs = plain[key].logprobs, assisted[key].logprobs
        if ours is not None and theirs is not None:
            np.testing.assert_allclose(ours.chosen, theirs.chosen, rtol=0, atol=1e-4)


def test_a_forked_row_is_bit_for_bit_the_row_that_read_everything_itself(models: Path) -> None:
    engine = open_native(models / "llama", "bf16")
    text = np.random.default_rng(1).integers(1, VOCABULARY, size=100).tolist()
    for length in (1, 16, 31, 32, 33, 64, 99):
        engine.open(1, Sampling(), 100)
        engine.feed([Feed(1, text, 0)])
        engine.fork(2, 1, length, Sampling(), 100)
        engine.open(3, Sampling(), 100)
        engine.feed([Feed(3, text[:length], 0)])
        [alone] = engine.feed([Feed(3, text[length:], 1, 5)])
        [forked] = engine.feed([Feed(2, text[length:], 1, 5)])
        assert (forked.tokens, forked.logprobs) == (alone.tokens, alone.logprobs)
        # Whatever a fork writes does not reach its source.
        engine.feed([Feed(2, [9] * 20, 0)])
        [after] = engine.feed([Feed(1, [7], 1, 5)])
        [wanted] = engine.feed([Feed(3, [7], 1, 5)])
        assert (after.tokens, after.logprobs) == (wanted.tokens, wanted.logprobs)
        for row in (1, 2, 3):
            engine.close(row)
    assert engine.model.cache_use()[1] == 0, "every block has come back"


def test_a_fork_on_the_hf_engine_is_a_copy(models: Path) -> None:
    engine, _, _ = load_hf(ModelSpec(str(models / "llama"), "hf", "fp32"))
    assert isinstance(engine, HfEngine)
    text = np.random.default_rng(1).integers(1, VOCABULARY, size=50).tolist()
    engine.open(1, Sampling(), 50)
    engine.feed([Feed(1, text[:40], 0)])
    engine.fork(2, 1, 40, Sampling(), 50)
    engine.fork(3, 1, 33, Sampling(), 50)
    assert [engine.length(row) for row in (2, 3)] == [40, 33]
    engine.feed([Feed(2, [5] * 10, 0)])
    engine.close(2)
    whole = engine.logits([Feed(1, text[40:], 1)])
    again = engine.logits([Feed(3, text[33:], 1)])
    np.testing.assert_allclose(whole.numpy(), again.numpy(), atol=1e-4)


def test_a_draft_with_fewer_tokens_is_handed_the_targets_sampling(models: Path) -> None:
    """Its vocabulary may be the smaller one: what it does not have cannot be banned or favoured there."""
    draft = open_native(models / "llama", "bf16")
    sampling = Sampling(min_tokens=2, end_tokens=(0, VOCABULARY + 5), logit_bias=((3, 1.0), (VOCABULARY, 50.0)))
    known = Sampling(min_tokens=2, end_tokens=(0,), logit_bias=((3, 1.0),))
    answers = []
    for row, each in enumerate((sampling, known)):
        draft.open(row, each, 3)
        answers.append(draft.feed([Feed(row, [5, 6, 7], 1)])[0].tokens)
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_the_pocket_pair_in_all_mixes() -> None:
    target = open_model(ModelSpec(str(find("pocket")), "native", "w4a8", threads=2)).engine
    draft = open_model(ModelSpec(str(find("pocket-draft")), "native", "w4a8", threads=2)).engine
    tokenizer = Tokenizer(find("pocket"))
    words = json.dumps({"system": "You write Python.", "style": "short lines, clear names"}, indent=4)
    head = tuple(tokenizer.encode(words))
    rows = rows_of_all_kinds(40, vocabulary=4096, tokens=24, seed=8)
    rows = [
        Row(row.key, (*head, *row.prompt), row.max_tokens, row.sampling, ("\n\n", "self"), row.logprobs) for row in rows
    ]
    plain, _ = write(target, NoProposer(), rows, 1, 0, text=tokenizer)
    assert_obeyed(rows, plain)
    for batch, count, prefix_tokens in [(1, 1, 0), (8, 6, 4096), (16, 16, 300)]:
        proposer = LocalDraft(Drafter(draft, (END,), prefix_tokens))
        assisted, verifier = write(target, proposer, rows, batch, count, prefix_tokens, text=tokenizer)
        assert what_counts(assisted) == what_counts(plain)
        assert verifier.progress.accepted > 0
