"""Random mixes of all parameters of a row: the same results with a draft or without, in any batch, with shared prefixes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from built import CURVE, END, draft_of, opened, target_of, write
from constrained import CONSTRAINTS, AtOnce, tokenizer
from native_models import open_native, save_tiny
from tiny_models import tiny_model

from outrider.kernels import library
from outrider.workers.build import build_draft
from outrider.workers.constraints.grammars import grammar_of
from outrider.workers.constraints.tool_forms import ToolForm
from outrider.workers.engines.engine import Feed
from outrider.workers.engines.hf import HfEngine
from outrider.workers.messages import ModelSpec, ReplicaSpec, Row, RowResult, Sampling, TokenLogprobs
from outrider.workers.models.hf_loading import load_hf
from outrider.workers.models.model_info import find
from outrider.workers.models.tokenizer import Tokenizer

VOCABULARY = 203
# Any token does where nobody was trained on it.
MASK = 202


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name in ("llama", "lfm2", "qwen3-5", "granite-mamba", "mamba"):
        save_tiny(name, path / name)
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


@pytest.mark.parametrize(
    ("name", "precision", "ways"),
    [
        pytest.param("llama", "bf16", "all", marks=pytest.mark.slow),
        ("llama", "w4a8", "some"),
        pytest.param("llama", "w4a8", "all", marks=pytest.mark.slow),
        pytest.param("lfm2", "w4a8", "some others", marks=pytest.mark.slow),
        pytest.param("lfm2", "w4a8", "all", marks=pytest.mark.slow),
        pytest.param("qwen3-5", "w4a8", "all", marks=pytest.mark.slow),
    ],
)
def test_on_the_native_engine_every_bit_is_the_same(models: Path, name: str, precision: str, ways: str) -> None:
    target, draft = (opened(models / name, "native", each) for each in (precision, "w8a8"))
    rows = rows_of_all_kinds(24, tokens=20)
    plain, _ = write(target_of(target, 1, 0), rows)
    assert_obeyed(rows, plain)
    assert {result.finish_reason for result in plain.values()} == {"stop", "length"}
    for batch, count, prefix_tokens, by_draft, lookup, answer_tokens in [
        (5, 0, 500, None, False, None),
        (1, 3, 0, draft_of(draft), False, None),
        (6, 5, 100, draft_of(draft, 500), False, None),
        (4, 4, 4000, None, True, None),
        (7, 2, 60, draft_of(draft, 60), True, None),
        (4, 4, 4000, None, False, 0),
        (6, 30, 0, None, False, 200),
        (3, 5, 60, None, False, 100_000),
        (7, 4, 60, draft_of(draft, 60), False, 100_000),
        (1, 6, 0, draft_of(draft, 0, MASK), False, None),
        (6, 5, 100, draft_of(draft, 500, MASK), False, None),
        (5, 12, 60, draft_of(draft, 60, MASK), True, None),
        (7, 3, 60, draft_of(draft, 60, MASK), False, 100_000),
    ][ways == "some others" :: 1 if ways == "all" else 4]:
        built = target_of(target, batch, count, by_draft, lookup, prefix_tokens, answer_tokens=answer_tokens)
        assisted, verifier = write(built, rows)
        assert what_counts(assisted) == what_counts(plain)
        assert not count or 0 < verifier.counters.accepted < verifier.counters.proposed, "only hits or only misses"
        assert (verifier.counters.prompt_tokens_reused > 0) == (prefix_tokens > 0)


@pytest.mark.slow
def test_with_keys_and_values_in_8_bits_every_bit_is_the_same_on_every_instruction_set(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assisted or plain, in whatever batch, with shared prompts, taken up in the middle."""
    rows = rows_of_all_kinds(16, tokens=16, seed=8)
    draft = opened(models / "llama", "native", "w8a8")
    usual, _ = write(target_of(opened(models / "llama", "native", "w4a8"), 4, 0), rows)
    plain, _ = write(target_of(opened(models / "llama", "native", "w4a8", cache_precision="int8"), 1, 0), rows)
    assert_obeyed(rows, plain)
    assert what_counts(plain) != what_counts(usual), "it is another rounding"
    written = {key: result.tokens for key, result in plain.items()}
    halves = [replace(row, resumed=written[row.key][: len(written[row.key]) // 2], logprobs=None) for row in rows]
    for isa in library.available_instruction_sets():
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        target = opened(models / "llama", "native", "w4a8", cache_precision="int8")
        assisted, verifier = write(target_of(target, 6, 5, draft_of(draft, 500), prefix_tokens=100), rows)
        assert what_counts(assisted) == what_counts(plain), isa
        assert 0 < verifier.counters.accepted < verifier.counters.proposed
        together, _ = write(target_of(target, 7, 0, prefix_tokens=60), halves)
        assert {key: result.tokens for key, result in together.items()} == written, isa


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CALLS = {
    "kind": "tools",
    "form": ToolForm("hermes", "", '<tool_call>{"name": ', ', "arguments": ', "}</tool_call>", " ", "", (", ", ": ")),
    "tools": [("weather", {**CITY, "additionalProperties": False}), ("time", None)],
    "required": True,
    "one": False,
    "thoughts": None,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["granite-mamba", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lfm2", "qwen3-5", "gpt-oss", "mamba"))],
)
def test_under_constraints_every_bit_is_the_same_where_states_are_kept(name: str, tmp_path: Path) -> None:
    """Tokens that are forced and candidates that a grammar refuses come and go in states that cannot be cut; of models that
    know no JSON. Half of the rows go on in the middle of their answers."""
    tiny_model(name, vocab_size=4096).save_pretrained(tmp_path)
    target, small = (opened(tmp_path, "native", precision) for precision in ("w4a8", "w8a8"))
    grammars = ["", *map(grammar_of, (*CONSTRAINTS.values(), CALLS))]
    rows = [
        replace(row, sampling=replace(row.sampling, grammar=grammars[at % len(grammars)], min_tokens=0, end_tokens=(END,)))
        for at, row in enumerate(rows_of_all_kinds(10, vocabulary=4096, tokens=32, seed=9))
    ]
    plain, _ = write(target_of(target, 1, 0, tokenizer=tokenizer()), rows)
    halves = []
    for row in rows:
        told = plain[row.key].logprobs
        cut = len(plain[row.key].tokens) // 2 if row.key % 2 and told is None else 0
        halves.append(replace(row, resumed=plain[row.key].tokens[:cut]))
    spec = ModelSpec("", "native", "", prefix_tokens=300)
    for batch, count, learns, lookup, answer_tokens in [
        (5, 4, True, False, None),
        (1, 6, False, True, None),
        (9, 3, True, False, 500),
    ]:
        draft = build_draft(spec, ReplicaSpec(batch, None, draft_learns=learns), small, AtOnce(small), CURVE)
        built = target_of(target, batch, count, draft, lookup, 300, tokenizer(), answer_tokens)
        assisted, verifier = write(built, halves if batch == 9 else rows)
        assert what_counts(assisted) == what_counts(plain)
        assert verifier.counters.accepted > 0 and verifier.counters.forced_tokens > 0


def test_what_a_grammar_forces_ends_where_the_drafts_context_does(tmp_path: Path) -> None:
    """With logprobs the target appends no forced tokens itself, so the draft guesses them, more than it has room for."""
    for name, positions in (("target", 256), ("draft", 64)):
        tiny_model("llama", vocab_size=4096, max_position_embeddings=positions).save_pretrained(tmp_path / name)
    target, small = opened(tmp_path / "target", "native", "w4a8"), opened(tmp_path / "draft", "native", "w8a8")
    grammar = grammar_of({"kind": "regex", "value": "(def [ab] main\\(argv\\): return parser.exit\\(\\)){3}"})
    rows = [
        Row(at, (5, 9) * (at // 2 + 20), 40, Sampling(grammar=grammar, temperature=1.0, seed=at), logprobs=0)
        for at in range(8, 20, 2)
    ]
    plain, _ = write(target_of(target, 1, 0, tokenizer=tokenizer()), rows)
    draft = build_draft(ModelSpec("", "native", ""), ReplicaSpec(3, None), small, AtOnce(small), CURVE)
    assisted, verifier = write(target_of(target, 3, 3, draft, tokenizer=tokenizer()), rows)
    assert what_counts(assisted) == what_counts(plain)
    assert verifier.counters.accepted > 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "precision"), [("llama", "fp32"), pytest.param("llama", "w4a8", marks=pytest.mark.slow), ("qwen3-5", "w4a8")]
)
def test_on_the_native_engine_a_row_that_goes_on_is_bit_for_bit_the_same(models: Path, name: str, precision: str) -> None:
    target, draft = (opened(models / name, "native", each) for each in (precision, "w8a8"))
    rows = rows_of_all_kinds(20, tokens=20, seed=6)
    plain, _ = write(target_of(target, 1, 0), rows)
    random = np.random.default_rng(3)
    half_written = []
    for row in rows:
        result = plain[row.key]
        cut = int(random.integers(0, len(result.tokens) + 1))
        told: tuple[TokenLogprobs, ...] = ()
        if result.logprobs is not None:
            own = zip(result.tokens, result.logprobs.chosen, result.logprobs.likeliest, strict=True)
            told = tuple(((token, chosen), *likeliest) for token, chosen, likeliest in own)[:cut]
        half_written.append(replace(row, resumed=result.tokens[:cut], resumed_logprobs=told))
    for batch, count, by_draft in [(1, 0, None), (6, 4, draft_of(draft, 300))]:
        resumed, verifier = write(target_of(target, batch, count, by_draft, prefix_tokens=300), half_written)
        assert what_counts(resumed) == what_counts(plain)
        assert verifier.counters.resumed_tokens == sum(len(row.resumed) for row in half_written) > 50


@pytest.mark.slow
def test_on_the_hf_engine_tokens_are_the_same_and_probabilities_nearly(models: Path) -> None:
    target, draft = (opened(models / "llama", "hf", "fp32") for _ in range(2))
    rows = rows_of_all_kinds(14, tokens=12)
    plain, _ = write(target_of(target, 1, 0), rows)
    assert_obeyed(rows, plain)
    for mask_token in (None, MASK):
        built = target_of(target, 5, 3, draft_of(draft, 500, mask_token), prefix_tokens=500)
        assisted, verifier = write(built, rows)
        assert verifier.counters.accepted > 0
        assert verifier.counters.prompt_tokens_reused > 0
        turned = [key for key in plain if plain[key].tokens != assisted[key].tokens]
        assert len(turned) <= verifier.counters.near_ties, f"rows {turned} turned without a tie"
        for key in plain.keys() - set(turned):
            ours, theirs = plain[key].logprobs, assisted[key].logprobs
            if ours is not None and theirs is not None:
                np.testing.assert_allclose(ours.chosen, theirs.chosen, rtol=0, atol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["llama", "lfm2", "qwen3-5", "granite-mamba", "mamba"])
def test_a_forked_row_is_bit_for_bit_the_row_that_read_everything_itself(models: Path, name: str) -> None:
    engine = open_native(models / name, "bf16")
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
    target, draft = (opened(find(name), "native", "w4a8") for name in ("pocket", "pocket-draft"))
    tokenizer = Tokenizer(find("pocket"))
    words = json.dumps({"system": "You write Python.", "style": "short lines, clear names"}, indent=4)
    head = tuple(tokenizer.encode(words))
    rows = rows_of_all_kinds(40, vocabulary=4096, tokens=24, seed=8)
    rows = [
        Row(row.key, (*head, *row.prompt), row.max_tokens, row.sampling, ("\n\n", "self"), row.logprobs) for row in rows
    ]
    plain, _ = write(target_of(target, 1, 0, tokenizer=tokenizer), rows)
    assert_obeyed(rows, plain)
    for batch, count, prefix_tokens in [(1, 1, 0), (8, 6, 4096), (16, 16, 300)]:
        by_draft = draft_of(draft, prefix_tokens)
        built = target_of(target, batch, count, by_draft, prefix_tokens=prefix_tokens, tokenizer=tokenizer)
        assisted, verifier = write(built, rows)
        assert what_counts(assisted) == what_counts(plain)
        assert verifier.counters.accepted > 0
