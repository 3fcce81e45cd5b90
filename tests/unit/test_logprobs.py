"""Log-probabilities in results: the tokens' bytes, their offsets in the text, and OpenAI's two formats."""

from __future__ import annotations

import json
import math

import pytest
from fakes import END, PIECES, FakePieces, decode
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from outrider.runner.job.journal import StoredRow
from outrider.runner.job.results import result_record
from outrider.workers.messages import Logprobs, RowResult
from outrider.workers.models.fast_tokenizer import AnyTokenizer
from outrider.workers.models.model_info import find
from outrider.workers.models.token_bytes import TokenizerBytes
from outrider.workers.models.tokenizer import Tokenizer
from outrider.workers.target.logprobs import describe
from outrider.workers.target.text_and_stop_strings import TextWriter


@given(st.lists(st.integers(0, END), max_size=30))
def test_offsets_are_lengths_of_the_text_before(row: list[int]) -> None:
    told = describe(row, [[(token, -1.0)] for token in row], decode(row), FakePieces(), ())
    assert list(told.offsets) == [len(decode(row[:index])) for index in range(len(row))]
    assert told.token_bytes == {token: PIECES[token].encode() for token in row}


def test_tokens_behind_the_end_of_the_text_stand_at_its_end() -> None:
    writer = TextWriter(decode, ("ab",), {END}, token_bytes=FakePieces())
    row = [2, 0, 4]  # "c", "a", "bc": the stop string begins after the first and ends amid the third
    assert [writer.stopped_by(token) for token in row] == [False, False, True]
    told = writer.logprobs([[(token, -0.5), (9, -0.1)] for token in row])
    assert writer.text() == "c"
    assert told.offsets == (0, 1, 1)
    assert told.likeliest == (((9, -0.1),),) * 3
    assert set(told.token_bytes) == {2, 0, 4, 9}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(find("pocket"))


@pytest.mark.parametrize("text", ["def main(x):\n    return 'ünï→🚀'", "\t\x00 zwölf", "a"])
def test_the_pieces_of_a_byte_level_tokenizer_are_the_texts_bytes(tokenizer: Tokenizer, text: str) -> None:
    row = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes.bytes_of, row)) == text.encode()
    told = describe(row, [[(token, -1.0)] for token in row], text, tokenizer.token_bytes, ())
    for index, offset in enumerate(told.offsets):
        before = b"".join(map(tokenizer.token_bytes.bytes_of, row[:index]))
        assert offset == len(before.decode(errors="ignore")), f"token {index}"


def test_special_tokens_have_a_name_and_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes.bytes_of(0) == b"<|endoftext|>"
    assert tokenizer.token_bytes.silent(0)
    assert not tokenizer.token_bytes.silent(5)
    assert tokenizer.token_bytes.bytes_of(1 << 30) == b""
    told = describe([0, 5, 0], [[(0, -1.0)], [(5, -1.0)], [(0, -1.0)]], "%", tokenizer.token_bytes, ())
    assert told.offsets == (0, 0, 1)


def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2 has it: words begin with a mark, what is no token falls back to bytes."""
    vocabulary = {"<s>": 0, "▁the": 1, "▁cat": 2, "s": 3, "<0xE2>": 4, "<0x86>": 5, "<0x92>": 6, "▁": 7}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def test_the_pieces_of_a_sentencepiece_tokenizer() -> None:
    fast = sentencepiece()
    token_bytes, row = TokenizerBytes(AnyTokenizer(fast)), [0, 1, 2, 3, 4, 5, 6, 7]
    assert [token_bytes.bytes_of(token) for token in row] == [
        b"<s>", b" the", b" cat", b"s", b"\xe2", b"\x86", b"\x92", b" ",
    ]  # fmt: skip
    text = fast.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert text == "the cats→ "
    told = describe(row, [[(token, -1.0)] for token in row], text, token_bytes, ())
    assert told.offsets == (0, 0, 3, 7, 8, 8, 8, 9), "the space before the first word is no text"


def test_a_metaspace_tokenizer() -> None:
    backend = Backend(models.BPE({"▁the": 0, "s": 1}, []))
    backend.decoder = decoders.Metaspace()
    token_bytes = TokenizerBytes(AnyTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)))
    assert [token_bytes.bytes_of(token) for token in (0, 1)] == [b" the", b"s"]


TOLD = Logprobs(
    chosen=(-0.25, -3.0),
    likeliest=(((5, -0.25), (6, -2.0)), ((5, -0.5), (8, -1.0))),
    token_bytes={5: b" a", 6: "ü".encode(), 7: b"\xe2\x86", 8: b"b"},
    offsets=(0, 2),
)


def choice(kind: str, told: Logprobs | None) -> dict:
    row = StoredRow(0, "r", 1, kind, {"n": 1}, (1,))
    result = RowResult(0, (5, 7), " a", "length", 1, 0, 0, 1.0, told)
    found: dict = json.loads(result_record(row, [result], "m"))["response"]["body"]["choices"][0]
    return found


def test_a_completions_logprobs() -> None:
    assert choice("completion", None)["logprobs"] is None
    assert choice("completion", TOLD)["logprobs"] == {
        "text_offset": [0, 2],
        "tokens": [" a", "bytes:\\xe2\\x86"],
        "token_logprobs": [-0.25, -3.0],
        "top_logprobs": [{" a": -0.25, "ü": -2.0}, {" a": -0.5, "b": -1.0, "bytes:\\xe2\\x86": -3.0}],
    }


def test_a_chats_logprobs() -> None:
    assert choice("chat", None)["logprobs"] is None
    first, second = choice("chat", TOLD)["logprobs"]["content"]
    assert first == {
        "token": " a",
        "logprob": -0.25,
        "bytes": [32, 97],
        "top_logprobs": [
            {"token": " a", "logprob": -0.25, "bytes": [32, 97]},
            {"token": "ü", "logprob": -2.0, "bytes": [195, 188]},
        ],
    }
    assert (second["token"], second["bytes"], second["logprob"]) == ("\\xe2\\x86", [226, 134], -3.0)


def test_a_log_probability_keeps_every_bit_in_the_record() -> None:
    value = -math.pi / 3
    told = Logprobs((value, value), ((), ()), TOLD.token_bytes, (0, 2))
    assert choice("completion", told)["logprobs"]["token_logprobs"] == [value, value]


def test_of_tokens_that_read_alike_the_likelier_has_the_name() -> None:
    told = Logprobs(
        chosen=(-3.0,), likeliest=(((5, -0.5), (6, -1.0), (7, -2.0)),), token_bytes={5: b"a", 6: b"", 7: b""}, offsets=(0,)
    )
    row = StoredRow(0, "r", 1, "completion", {"n": 1}, (1,))
    result = RowResult(0, (7,), "", "length", 1, 0, 0, 1.0, told)
    body = json.loads(result_record(row, [result], "m"))["response"]["body"]
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "": -1.0}]


def test_offsets_where_one_of_two_spaces_is_dropped() -> None:
    token_bytes = TokenizerBytes(AnyTokenizer(sentencepiece()))
    told = describe([7, 1, 2], [[(token, -1.0)] for token in (7, 1, 2)], " the cat", token_bytes, ())
    assert told.offsets == (0, 0, 4)
