"""The native engine: the same bits in any batch, any pieces and any number of threads; assisted text equals plain text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from built import draft_of, opened, target_of, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_models import PRECISIONS, TOKENS, logits, open_native, save_tiny
from safetensors.torch import load_file, save_file

from examples import examples
from outrider.kernels import library
from outrider.kernels.library import KernelError
from outrider.kernels.native import NativeFeed
from outrider.kernels.packer import packed_bytes
from outrider.kernels.program import Cache
from outrider.workers.engines import native
from outrider.workers.engines.costs import measure
from outrider.workers.engines.engine import Chosen, DecodeFeed, DecodeResult, Feed, StopRule
from outrider.workers.engines.native import NativeEngine
from outrider.workers.engines.stepwise import decode_in_steps
from outrider.workers.errors import ModelError, UsageError, WorkerError
from outrider.workers.messages import ModelSpec, ReplicaSpec, Row, Sampling
from outrider.workers.models.opening import native_supports, open_model

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name in ("llama", "opt-350m", "qwen3", "mistral", "bigcode"):
        save_tiny(name, path / name)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def test_a_token_of_context_is_read_like_weights(models: Path) -> None:
    """Keys and values of all heads and layers, over the bytes of the matrices that every pass reads."""
    path = models / "llama"
    config = json.loads((path / "config.json").read_text())
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    engine, small = (
        cast(NativeEngine, open_model(replace(spec, cache_precision=kept)).engine)
        for spec, kept in zip([ModelSpec(str(path), "native", "w8a8")] * 2, ("auto", "int8"), strict=True)
    )
    program = engine.model.program
    read = sum(packed_bytes(weight) for weight in program.weights if not weight.table)
    assert read >= sum(weight.rows * weight.columns for weight in program.weights if not weight.table)
    assert engine.context_share == pytest.approx(program.cache.element_bytes * 2 * heads * size * layers / read)
    assert small.context_share == pytest.approx(engine.context_share / program.cache.element_bytes)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "mistral", "opt-350m"])
def test_pieces_and_threads_and_neighbours_change_no_bit(models: Path, name: str, precision: str) -> None:
    engine = open_native(models / name, precision)
    whole = logits(engine)
    assert np.isfinite(whole).all()
    for pieces in ([1] * len(TOKENS), [7, 1, 3], [16]):
        np.testing.assert_array_equal(logits(engine, pieces=pieces), whole, err_msg=f"in pieces of {pieces}")
    np.testing.assert_array_equal(logits(open_native(models / name, precision, threads=2)), whole, err_msg="two threads")


# Leads of the tiny models are of this size.
BOUNDS, USUAL = (0.05, 0.2, 0.5, 1.0), (0.3, 0.6, 0.8, 0.9, 1.0)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 12), st.floats(0.2, 1.0), st.floats(0.0, 3.0), st.integers(0, 1)),
        min_size=1,
        max_size=4,
    ),
    least_reach=st.sampled_from([0.0, 0.1, 0.5]),
    least_sum=st.sampled_from([0.0, 0.3, 1.2]),
    ends=st.integers(0, 60),
    guess_room=st.sampled_from([0, 3, 8]),
)
def test_several_steps_in_one_call_are_those_steps(
    models: Path,
    rows: list[tuple[int, int, float, float, int]],
    least_reach: float,
    least_sum: float,
    ends: int,
    guess_room: int,
) -> None:
    """The law of ``Engine.decode``: choices, margins, the rows in each pass and what the cache holds are those of steps.

    With guesses there may be fewer passes, and since rows stop together behind a pass, more choices or fewer where that is
    asked for.
    """
    engine = open_native(models / "llama", "w4a8", threads=1)
    engine.guess_room = guess_room
    stop_rule = StopRule(BOUNDS, USUAL, 0.02, least_reach, least_sum)

    def after(run_all: Callable[[Sequence[DecodeFeed]], DecodeResult]) -> tuple[DecodeResult, list[int]]:
        runs = []
        for key, (fed, most, reach, miss_factor, temperature) in enumerate(rows):
            engine.open(key, Sampling(temperature=float(temperature), seed=key), fed)
            runs.append(DecodeFeed(key, TOKENS[key : key + fed], most, range(ends), reach, miss_factor))
        ran, lengths = run_all(runs), [engine.length(key) for key in range(len(rows))]
        for key in range(len(rows)):
            engine.close(key)
        return ran, lengths

    (ran, lengths), (singly, wanted) = (
        after(lambda runs: engine.decode(runs, stop_rule)),
        after(lambda runs: decode_in_steps(engine, runs, stop_rule)),
    )
    assert all(len(chosen.runners_up) == len(chosen.tokens) for chosen in ran.chosen)
    assert all(seconds > 0.0 for _, seconds in ran.steps)
    assert lengths == [fed + len(chosen.tokens) - 1 for (fed, *_), chosen in zip(rows, ran.chosen, strict=True)]
    if guess_room and least_sum:
        for chosen, alone in zip(ran.chosen, singly.chosen, strict=True):
            both = min(len(chosen.tokens), len(alone.tokens))
            assert (chosen.tokens[:both], chosen.margins[:both]) == (alone.tokens[:both], alone.margins[:both])
        return
    assert [replace(chosen, runners_up=[]) for chosen in ran.chosen] == singly.chosen
    assert lengths == wanted
    if guess_room:
        assert len(ran.steps) <= len(singly.steps)
    else:
        assert [going for going, _ in ran.steps] == [going for going, _ in singly.steps]


def test_a_run_that_cannot_be_made_is_refused_in_a_sentence(models: Path) -> None:
    engine = open_native(models / "llama", "w4a8", threads=1)
    engine.open(1, Sampling(), 1)
    with pytest.raises(WorkerError, match=r"go on with 1 rows: row \d+: 0 choices wanted, there is room for 1 to 0"):
        engine.decode([DecodeFeed(1, [3], 0, ())], StopRule((), (1.0,), 0.0))
    with pytest.raises(WorkerError, match="token 70000 is not in the vocabulary"):
        engine.decode([DecodeFeed(1, [70000], 2, ())], StopRule((), (1.0,), 0.0))
    assert engine.decode([DecodeFeed(1, [3], 2, ())], StopRule((), (1.0,), 0.0)).steps[0][0] == 1
    with pytest.raises(WorkerError, match="would hold"):
        engine.decode([DecodeFeed(1, [3], engine.context + 5, ())], StopRule((), (1.0,), 0.0))


def choices(engine: NativeEngine, batches: Sequence[Sequence[Feed]], row: int) -> list[int]:
    """What is chosen for one row over several passes."""
    found: list[int] = []
    for feeds in batches:
        for feed, chosen in zip(feeds, engine.feed(feeds), strict=True):
            assert len(chosen.margins) == len(chosen.tokens)
            found += chosen.tokens if feed.row == row else []
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_is_the_same_alone_and_in_a_ragged_batch(models: Path, temperature: float) -> None:
    engine = open_native(models / "llama", "w4a8")
    sampling = Sampling(temperature=temperature, seed=7, top_p=0.9, repetition_penalty=1.2)
    engine.open(5, sampling, 4)
    alone = choices(engine, [[Feed(5, TOKENS[:9], 9)], [Feed(5, TOKENS[9:], 11)]], 5)
    engine.close(5)
    engine.open(5, sampling, 4)
    for other in (-1, 1 << 40):
        engine.open(other, Sampling(), 3)
    crowded = [
        [Feed(-1, TOKENS[:1], 1), Feed(5, TOKENS[:9], 9), Feed(1 << 40, TOKENS[3:17], 0)],
        [Feed(5, TOKENS[9:], 11), Feed(-1, TOKENS[1:8], 2)],
    ]
    assert choices(engine, crowded, 5) == alone
    assert [engine.length(row) for row in (-1, 5, 1 << 40)] == [8, 20, 14]


def test_truncated_tokens_leave_no_trace(models: Path) -> None:
    engine = open_native(models / "llama", "bf16")
    engine.open(0, Sampling(), 4)
    straight = engine.feed([Feed(0, TOKENS, 12)])[0].tokens
    engine.truncate(0, 8)
    assert engine.length(0) == 8
    engine.feed([Feed(0, [9] * 30, 1)])
    engine.truncate(0, 100)
    assert engine.length(0) == 38, "a truncation to more than there is changes nothing"
    engine.truncate(0, 8)
    assert engine.feed([Feed(0, TOKENS[8:], 12)])[0].tokens == straight
    engine.open(0, Sampling(), 4)
    assert engine.length(0) == 0, "a row opened again starts empty"


def test_the_cost_of_a_pass_can_be_measured(models: Path) -> None:
    engine = open_native(models / "llama", "w8a8")
    assert measure(engine)(4) > 0
    with pytest.raises(KeyError):
        engine.length(-1)


def some_rows(count: int, temperature: float, tokens: int = 24) -> list[Row]:
    random = np.random.default_rng(11)
    return [
        Row(
            key=key,
            # Prompts that repeat themselves give the lookup something to find.
            prompt=tuple(np.tile(random.integers(1, 203, size=random.integers(2, 13)), 2).tolist()),
            max_tokens=tokens,
            sampling=Sampling(temperature=temperature, seed=int(random.integers(1 << 62)), frequency_penalty=-0.3),
        )
        for key in range(count)
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("precision", ["bf16", "w4a8"])
def test_assisted_text_is_plain_text(models: Path, precision: str, temperature: float) -> None:
    target = opened(models / "llama", "native", precision)
    # The same weights rounded otherwise: often right, sometimes not.
    draft = opened(models / "llama", "native", "w8a8")
    rows = some_rows(12, temperature)
    plain, _ = write(target_of(target, 1, 0), rows)
    for batch, count, drafted in [(1, 3, True), (5, 6, True), (4, 4, False)]:
        by_draft = draft_of(draft) if drafted else None
        assisted, verifier = write(target_of(target, batch, count, by_draft, lookup=not drafted), rows)
        assert {key: row.tokens for key, row in assisted.items()} == {key: row.tokens for key, row in plain.items()}
        assert verifier.counters.accepted < verifier.counters.proposed, "only hits: nothing was tested"
        # What such a model writes at random hardly ever repeats itself, so lookup may never hit then.
        if drafted or not temperature:
            assert verifier.counters.accepted > 0, "only misses: nothing was tested"
        if drafted:
            assert 0 < verifier.counters.runners_up_accepted < verifier.counters.runners_up


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    # Each in three of the five, each of the five in two or more.
    [
        (name, PRECISIONS[(2 * at + more) % len(PRECISIONS)])
        for at, name in enumerate(("opt-350m", "qwen3", "mistral", "bigcode"))
        for more in range(3)
    ],
)
def test_assisted_text_is_plain_text_in_every_family(models: Path, name: str, precision: str) -> None:
    target, draft = opened(models / name, "native", precision), opened(models / name, "native", "w4a8", threads=1)
    for temperature in (0.0, 1.0):
        rows = some_rows(16, temperature, tokens=48)
        plain, _ = write(target_of(target, 3, 0), rows)
        for batch, count in [(1, 1), (7, 6)]:
            assisted, verifier = write(target_of(target, batch, count, draft_of(draft)), rows)
            assert {key: row.tokens for key, row in assisted.items()} == {key: row.tokens for key, row in plain.items()}
            assert verifier.counters.accepted > 0


def test_logprobs_without_a_choice_are_nothing_to_write_and_no_error(models: Path) -> None:
    model = open_native(models / "llama", "w4a8").model
    row = model.open(Sampling(), 3)
    [answer] = model.forward([NativeFeed(row, TOKENS[:3], choose=0, logprobs=2)])
    assert (answer.tokens, answer.margins, answer.logprobs) == ([], [], [])
    [answer] = model.forward([NativeFeed(row, cast(Sequence[int], np.array(TOKENS[3:5])), choose=1, logprobs=2)])
    assert len(answer.tokens) == len(answer.logprobs) == 1
    assert answer.logprobs[0][0][0] == answer.tokens[0]


def test_whoever_asks_for_a_pass_is_kept_to_the_first_core_and_follows_when_that_changes(models: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core only")
    model = open_native(models / "llama", "w4a8").model

    def caller_after(order: Sequence[int]) -> set[int]:
        """Where a thread may run that has asked for a pass."""
        model.use_cores(order)
        row = model.open(Sampling(), 3)
        model.forward([NativeFeed(row, TOKENS[:3])])
        model.close_row(row)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as aside:
        assert aside.submit(caller_after, cores).result() == {cores[0]}
        assert aside.submit(caller_after, cores[::-1]).result() == {cores[1]}
    assert os.sched_getaffinity(0) >= set(cores), "whoever asks for nothing stays where it was"


def test_memory_for_the_first_rows_can_be_taken_beforehand_and_need_not_be(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_native(models / "llama", "w4a8")
    engine.reserve(4)
    held, used, _ = engine.model.cache_use()
    assert held > 0 and used == 0

    def refuse(*asked: int) -> None:
        raise KernelError("no memory", "no memory")

    monkeypatch.setattr(engine.model, "reserve", refuse)
    with caplog.at_level("INFO"):
        engine.reserve(1000)
    assert "memory for 1000 rows was not allocated in advance: no memory" in caplog.text


def test_more_tokens_than_a_pass_takes_are_fed_in_several(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counts = open_native(models / "llama", "w4a8"), (7, 1, 4, 11, 3, 2)
    forward, passes = engine.model.forward, list[int]()

    def counted(feeds: Sequence[NativeFeed], *rest: object) -> object:
        passes.append(sum(len(feed.tokens) + len(feed.branches) for feed in feeds))
        return forward(feeds, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.model, "forward", counted)

    def fed() -> list[Chosen]:
        for row in range(len(counts)):
            engine.open(row, Sampling(), len(TOKENS))
        feeds = [Feed(row, TOKENS[:count], 1, 2, [(1, 5)] * (count == 7)) for row, count in enumerate(counts)]
        return engine.feed(feeds)

    together = fed()
    monkeypatch.setattr(native, "PASS_TOKENS", 9)
    assert fed() == together
    assert passes == [29, 9, 4, 11, 5]


def test_a_row_that_skips_a_beginning_goes_on_as_if_it_began_behind_that(models: Path) -> None:
    engine = open_native(models / "llama", "fp32")
    assert engine.skipper is engine
    for row in (0, 1):
        engine.open(row, Sampling(), len(TOKENS))
    engine.skip(0, TOKENS[:9])
    skipped, begun = (engine.feed([Feed(row, TOKENS[9:], 5, 3)])[0] for row in (0, 1))
    assert (engine.length(0), engine.length(1)) == (len(TOKENS), len(TOKENS) - 9)
    for left, right in zip(skipped.logprobs, begun.logprobs, strict=True):
        # Rotations by other places differ in rounding.
        assert [token for token, _ in left] == [token for token, _ in right]
        assert [value for _, value in left] == pytest.approx([value for _, value in right], abs=1e-4)
    with pytest.raises(WorkerError, match=f"could not skip {engine.context} tokens"):
        engine.skip(0, [1] * engine.context)


@pytest.mark.parametrize("name", ["lfm2", "phi3-long"])
def test_what_goes_on_from_the_first_token_is_never_begun_later(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    assert open_native(tmp_path, "fp32").skipper is None


def test_a_target_has_no_more_rows_at_once_than_there_are() -> None:
    rows_at_once = [ReplicaSpec(8, None, rows=rows).rows_at_once for rows in (0, 3, 100)]
    assert rows_at_once == [8, 3, 8]


def test_what_is_opened_says_how_it_computes(models: Path) -> None:
    spec = ModelSpec(str(models / "llama"), "native", "w4a8", threads=1)
    opened = open_model(spec)
    assert "rtn" in opened.notes[0]
    assert (opened.numeric_path["engine"], opened.numeric_path["precision"]) == ("native", "w4a8")
    searched = "rounded to nearest on load (rtn), scales searched for, 4 bits, groups of 32"
    assert opened.numeric_path["weights"] == searched
    by_range = open_model(replace(spec, precision="w4a8:g128"))
    assert by_range.numeric_path["weights"] == "rounded to nearest on load (rtn), 4 bits, groups of 128"
    assert "instruction_set" not in opened.numeric_path, "integer models are the same on every instruction set"
    floating = open_model(ModelSpec(str(models / "llama"), "native", "bf16", threads=1))
    assert floating.numeric_path["instruction_set"]
    assert "weights" not in floating.numeric_path
    assert "120" in opened.numeric_path["activations"], "jobs begun when these reached 127 have other bits"
    assert "activations" not in floating.numeric_path


def test_a_draft_of_integers_keeps_keys_and_values_in_8_bits_over_the_same_packed_weights(models: Path) -> None:
    def opened(precision: str, small: bool) -> tuple[Cache, str]:
        model = open_model(ModelSpec(str(models / "llama"), "native", precision, threads=1, small_cache=small))
        assert isinstance(model.engine, NativeEngine)
        return model.engine.model.program.cache, model.notes[0]

    assert opened("w8a8", small=False)[0] is Cache.BF16
    cache, note = opened("w8a8", small=True)
    assert cache is Cache.INT8
    assert "from the cache, keys and values in 8 bits" in note
    assert opened("w4a8", small=True)[0] is Cache.INT8
    assert opened("bf16", small=True)[0] is Cache.BF16
    assert opened("fp32", small=True)[0] is Cache.FP32


@pytest.mark.parametrize("precision", ["w4a8", "bf16", "fp32"])
def test_a_targets_cache_of_8_bits_is_another_numeric_path_over_the_same_packed_weights(
    models: Path, precision: str
) -> None:
    spec = ModelSpec(str(models / "llama"), "native", precision, threads=1)
    usual, small = open_model(spec), open_model(replace(spec, cache_precision="int8"))
    assert isinstance(usual.engine, NativeEngine) and isinstance(small.engine, NativeEngine)
    assert small.engine.model.program.cache is Cache.INT8
    assert "from the cache, keys and values in 8 bits" in small.notes[0]
    assert small.numeric_path == usual.numeric_path | {"cache": "int8, weighed in whole numbers"}
    assert not np.array_equal(logits(usual.engine), logits(small.engine))


def test_the_hf_engine_has_no_cache_of_8_bits(models: Path) -> None:
    with pytest.raises(UsageError, match="--cache-precision: the hf engine keeps no keys and values in int8; leave it out"):
        open_model(ModelSpec(str(models / "llama"), "hf", "fp32", cache_precision="int8"))


def test_a_head_that_is_there_is_used_whatever_the_configuration_says(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")
    own_head = logits(open_native(model, "fp32"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    np.testing.assert_array_equal(logits(open_native(model, "fp32")), own_head)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors")
    assert not np.array_equal(logits(open_native(model, "fp32")), own_head)


def test_an_instruction_set_that_is_not_here_sends_no_model_to_another_engine(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def instruction_set() -> str:
        raise KernelError("unsupported", "OUTRIDER_ISA=foo is not an instruction set of this machine")

    monkeypatch.setattr(library, "instruction_set", instruction_set)
    with pytest.raises(UsageError, match=r"^OUTRIDER_ISA=foo is not an instruction set of this machine$"):
        native_supports(str(models / "llama"))


def test_what_cannot_be_opened_is_said_in_one_sentence(models: Path, tmp_path: Path) -> None:
    assert native_supports(str(models / "llama")) is None
    assert "config.json" in str(native_supports(str(tmp_path)))
    with pytest.raises(UsageError, match='does not know "int3"; choose one of fp32, bf16, w8a8, w8af32, w4a8, w4abf16'):
        open_model(ModelSpec(str(models / "llama"), "native", "int3"))
    with pytest.raises(UsageError, match="runs on the cpu"):
        open_model(ModelSpec(str(models / "llama"), "native", "bf16", device="cuda"))
    with pytest.raises(ModelError, match="does not exist"):
        open_model(ModelSpec(str(tmp_path / "nothing"), "native", "bf16"))


def test_a_draft_that_learns_corrects_as_many_tokens_as_its_own_products_allow(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_native(models / "llama", "w4a8")
    assert engine.learner is None
    asked: list[int] = []
    monkeypatch.setattr(engine.model, "correct", asked.append)
    for share in (0.0, 0.05, 1e9):
        monkeypatch.setattr(native, "CORRECTING_SHARE", share)
        engine.correct_choices()
    assert asked[0] == native.LEAST_CORRECTED < asked[1] < asked[2] == native.MOST_CORRECTED
    assert engine.learner is engine


def test_a_draft_scores_a_quarter_of_a_large_vocabulary_whose_scores_take_much_of_a_pass(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_native(models / "llama", "w4a8")
    every = engine.vocabulary
    asked: list[int] = []
    monkeypatch.setattr(engine.model, "shorten", asked.append)
    assert engine.shorten(None) == every
    monkeypatch.setattr(native, "LARGE_VOCABULARY", every)
    for share, scored in ((0.0, round(every / 4)), (1.0, every)):
        monkeypatch.setattr(native, "LARGE_SHARE", share)
        assert engine.shorten(None) == scored
    assert [engine.shorten(count) for count in (0, 7, every, every + 1)] == [every, 7, every, every]
    assert asked == [0, round(every / 4), 0, 0, 7, 0, 0]
