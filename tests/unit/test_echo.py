"""`echo`: the prompt is returned before the answer, and with `logprobs` also the log-probabilities of its tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import END, FakeEngine, FakePieces, Fixed, decode
from native_models import open_native, save_tiny
from transformers import AutoModelForCausalLM

from outrider.runner.job.journal import StoredRow
from outrider.runner.job.requests import RowError, parse_openai, parse_simple
from outrider.runner.job.resolved_request import samples_of
from outrider.runner.job.results import result_record
from outrider.workers.engines.engine import Feed
from outrider.workers.messages import Row, RowResult, Sampling
from outrider.workers.models.model_info import find
from outrider.workers.models.tokenizer import Tokenizer
from outrider.workers.target.prompt_scores import prompt_scores
from outrider.workers.target.proposers import NoProposer
from outrider.workers.target.text_and_stop_strings import TextWriter
from outrider.workers.target.verifier import Verifier

CURVE = Fixed({1: 1.0})
TEXT = "def main(x):\n    return 'ünï→🚀' + str(x)"


def completion(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", **body}}


def test_how_it_is_asked_for() -> None:
    asked = parse_openai(completion(echo=True, max_tokens=0, logprobs=1), 1).parameters
    assert (asked.echo, asked.max_tokens, asked.logprobs) == (True, 0, 1)
    assert parse_openai(completion(echo=True), 1).parameters.max_tokens is None
    assert not parse_simple({"prompt": "x", "echo": False}, 1).parameters.echo
    for body in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}, {"max_tokens": -1, "echo": True}):
        with pytest.raises(RowError, match='"max_tokens" must be'):
            parse_openai(completion(**body), 1)
    with pytest.raises(RowError, match='"echo" must be'):
        parse_openai(completion(echo=1), 1)
    with pytest.raises(RowError, match='"echo" belongs to completions'):
        parse_simple({"messages": [{"role": "user", "content": "x"}], "echo": True}, 1)
    parse_simple({"messages": [{"role": "user", "content": "x"}], "echo": False}, 1)


def test_the_scores_of_a_prompt_are_transformers_own() -> None:
    path = find("pocket")
    engine = open_native(path, "fp32")
    prompt = Tokenizer(path).encode(TEXT)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1).numpy()
    entries = prompt_scores(engine, -1, prompt, 3)
    assert [entry[0][0] for entry in entries] == prompt[1:]
    for position, entry in enumerate(entries):
        np.testing.assert_allclose(
            [value for _, value in entry], wanted[position][[token for token, _ in entry]], atol=2e-4
        )
        assert [token for token, _ in entry[1:]] == np.argsort(-wanted[position])[:3].tolist()
    assert prompt_scores(engine, -1, prompt[:1], 3) == []


def test_scores_do_not_depend_on_how_a_prompt_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_native(find("pocket"), "w4a8")
    prompt = Tokenizer(find("pocket")).encode(TEXT)
    whole = prompt_scores(engine, -1, prompt, 2)
    monkeypatch.setattr("outrider.workers.target.prompt_scores.MOST_TOKENS", 7)
    assert prompt_scores(engine, -1, prompt, 2) == whole


@pytest.mark.parametrize("most", [512, 32])
def test_the_scores_of_a_prompt_that_takes_long_rope_are_transformers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A token more than the short factors are for, and all of its scores are by the long ones."""
    monkeypatch.setattr("outrider.workers.target.prompt_scores.MOST_TOKENS", most)
    engine = open_native(save_tiny("phi3-long", tmp_path), "fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    switch = model.config.original_max_position_embeddings
    text = np.random.default_rng(3).integers(0, engine.vocabulary, switch + 20).tolist()
    for row, length in ((None, switch + 1), (None, switch), (0, switch + 1), (1, switch + 20), (2, switch)):
        if row is not None:
            engine.open(row, Sampling(), switch)
            engine.feed([Feed(row, text[: switch - row], 1)])
        with torch.inference_mode():
            wanted = model(torch.tensor([text[:length]]), use_cache=False).logits[0].log_softmax(-1).numpy()
        for position, entry in enumerate(prompt_scores(engine, -1, text[:length], 2)):
            tokens = [token for token, _ in entry]
            assert tokens[0] == text[position + 1]
            np.testing.assert_allclose([value for _, value in entry], wanted[position][tokens], atol=1e-4)


def written(row: Row, tokenizer: Tokenizer) -> RowResult:
    engine = open_native(find("pocket"), "w4a8")

    def new_writer(row: Row) -> TextWriter:
        return TextWriter(tokenizer.decode, row.stop, (0,), token_bytes=tokenizer.token_bytes)

    verifier = Verifier(engine, new_writer, NoProposer(), 2, 0, CURVE, (0,))
    verifier.add([row])
    ended: list[Any] = []
    while not verifier.idle:
        ended += verifier.round()
    [result] = ended
    assert isinstance(result, RowResult)
    return result


def test_passes_that_score_a_prompt_are_rounds_and_their_time_is_that_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.workers.target.prompt_scores.MOST_TOKENS", 7)
    tokenizer = Tokenizer(find("pocket"))

    def new_writer(row: Row) -> TextWriter:
        return TextWriter(tokenizer.decode, row.stop, (0,), token_bytes=tokenizer.token_bytes)

    verifier = Verifier(open_native(find("pocket"), "w4a8"), new_writer, NoProposer(), 2, 0, CURVE, (0,))
    verifier.add([Row(1, tuple(tokenizer.encode(TEXT)[:16]), 0, logprobs=1, echo="")])
    while not verifier.idle:
        verifier.round()
    counters = verifier.statistics.snapshot()
    assert (counters.rounds, counters.plain_rounds, counters.row_rounds) == (3, 3, 0), "of 15 tokens, 7 at a time"
    assert 0.0 < counters.verify_seconds < counters.seconds


def record(stored: StoredRow, result: RowResult) -> dict[str, Any]:
    body = json.loads(result_record(stored, [result], "m"))["response"]["body"]
    return {**body["choices"][0], "usage": body["usage"]}


@pytest.mark.parametrize("as_text", [True, False])
def test_a_row_from_end_to_end(as_text: bool) -> None:
    tokenizer = Tokenizer(find("pocket"))
    prompt = tuple(tokenizer.encode(TEXT))
    request = {"n": 1, "max_tokens": 5, "stop": [], "logprobs": 2, "echo": TEXT if as_text else "", "temperature": 0.0}
    request |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    stored = StoredRow(0, "r", 1, "completion", request | {"frequency_penalty": 0.0, "logit_bias": []}, prompt)
    [row] = samples_of(stored)
    found = record(stored, written(row, tokenizer))
    plain = record(stored, written(replace(row, echo=None), tokenizer))
    assert found["text"] == TEXT + plain["text"]
    told, own = found["logprobs"], plain["logprobs"]
    assert "".join(told["tokens"][-5:]) == plain["text"]
    assert len({len(values) for values in told.values()}) == 1
    assert len(told["tokens"]) == len(prompt) + 5
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert all(value <= 0 for value in told["token_logprobs"][1:])
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert told[key][-5:] == own[key]
    assert told["text_offset"][-5:] == [len(TEXT) + offset for offset in own["text_offset"]]
    assert told["text_offset"][0] == 0
    alone = record(stored, written(replace(row, max_tokens=0), tokenizer))
    assert alone["text"] == TEXT
    assert alone["finish_reason"] == "length"
    assert alone["logprobs"] == {key: values[:-5] for key, values in told.items()}
    assert alone["usage"]["completion_tokens"] == 0


def test_special_tokens_that_are_written_out_take_their_place() -> None:
    tokenizer = Tokenizer(find("pocket"))
    text = "def a():<|endoftext|>x = 1"
    prompt = tuple(tokenizer.encode(text))
    echo = written(Row(1, prompt, 0, logprobs=0, echo=text), tokenizer).echo
    assert echo is not None and echo.logprobs is not None
    pieces = [tokenizer.token_bytes.bytes_of(token).decode() for token in prompt]
    assert "<|endoftext|>" in pieces and "".join(pieces) == text
    assert list(echo.logprobs.offsets) == [len("".join(pieces[:count])) for count in range(len(pieces))]
    begun = written(Row(1, (0, *prompt), 0, logprobs=0, echo=text), tokenizer).echo
    assert begun is not None and begun.logprobs is not None
    assert begun.logprobs.offsets == (0, *echo.logprobs.offsets), "the tokenizer's own token is no text"


@pytest.mark.slow
def test_many_samples_of_a_prompt_do_not_take_what_is_kept_of_others() -> None:
    """Rows of high numbers, whose prompts are kept: what scores theirs is a row of the engine as well."""
    engine, tokenizer = open_native(find("pocket"), "w4a8"), Tokenizer(find("pocket"))

    def new_writer(row: Row) -> TextWriter:
        return TextWriter(tokenizer.decode, row.stop, (0,), token_bytes=tokenizer.token_bytes)

    def ended(first: int) -> list[Any]:
        verifier = Verifier(engine, new_writer, NoProposer(), 4, 0, CURVE, (0,), prefix_tokens=4096)
        texts = [
            f"# file {each}\ndef function(argument, other):\n    return argument * {each} + other\n" for each in (1, 2)
        ]
        prompts = [tuple(tokenizer.encode(text)) for text in texts]
        verifier.add([Row(first + index, prompts[index // 32], 2, logprobs=1, echo="") for index in range(64)])
        found: list[Any] = []
        while not verifier.idle:
            found += verifier.round()
        return [
            replace(each, key=each.key - first, seconds=0.0, prefill_seconds=0.0)
            for each in sorted(found, key=lambda each: each.key)
        ]

    assert ended(980) == ended(0)


def test_without_logprobs_the_text_alone_comes_back() -> None:
    engine = FakeEngine()
    verifier = Verifier(
        engine, lambda row: TextWriter(decode, row.stop, {END}, token_bytes=FakePieces()), NoProposer(), 1, 0, CURVE, {END}
    )
    verifier.add([Row(1, (0, 1, 2), 4, echo=""), Row(2, (0, 1), 0, echo="")])
    ended: list[Any] = []
    while not verifier.idle:
        ended += verifier.round()
    first, second = sorted(ended, key=lambda result: result.key)
    assert (first.echo.text, first.echo.logprobs) == ("abc", None)
    assert (second.echo.text, second.tokens, second.finish_reason) == ("ab", (), "length")
    assert not engine.rows
