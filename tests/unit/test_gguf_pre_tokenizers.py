"""Tokenizers of GGUF files against llama.cpp's, and against the models' own where that approximates these."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
from llama_cpp_tokens import (
    APPROXIMATED,
    CASES,
    answers,
    byte_level,
    sentence_pieces,
    texts,
    texts_with_special_tokens,
    write_tokens,
)
from llguidance import LLTokenizer

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from outrider.workers.models.formats.gguf.tokenizer import gguf_tokenizer
from outrider.workers.models.tokenizer import Tokenizer

ANSWERS = answers()
WORDS = {name: group["words"] for group in ANSWERS["words"] for name in group["names"]}


def words_of(name: str, text: str) -> list[str]:
    return [text[start:stop] for _, (start, stop) in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]


def test_llama_cpp_was_asked_about_each_way_of_cutting_text() -> None:
    assert WORDS.keys() == PRE_TOKENIZERS.keys() - {"gpt2"}
    unanswered = {name for name, found in WORDS.items() if None in found}
    assert unanswered <= APPROXIMATED
    assert all(sum(each is not None for each in found) > len(found) // 3 for found in WORDS.values())


@pytest.mark.parametrize("name", WORDS)
def test_words_are_llama_cpps(name: str) -> None:
    cut = PRE_TOKENIZERS[name].build()
    for text, lengths in zip(texts(), WORDS[name], strict=True):
        found = [stop - start for _, (start, stop) in cut.pre_tokenize_str(text)]
        assert lengths is None or found == lengths, text


# By the models' own patterns; of each, llama.cpp makes something else.
OWN: dict[str, dict[str, list[str]]] = {
    "tekken": {"q\u093fЖжЖ": ["q\u093f", "Жж", "Ж"], "ÉCOLEété": ["ÉCOLEété"]},
    "gpt-4o": {"e\u0301's ǅx": ["e\u0301's", " ǅx"]},
    "minimax-m2": {"жЖ's": ["ж", "Ж's"]},
    # Digits in threes from the last: before a letter no word ends, and of other scripts, too.
    "tiny_aya": {"  40683": ["  ", "40", "683"], "aB 1234x": ["a", "B", " ", "123", "4", "x"]},
    "kimi-k2": {"aB中文's e\u0301": ["a", "B", "中文", "'s", " e\u0301"]},
    "youtu": {"aB한국어12": ["a", "B", "한국어", "1", "2"]},
    "superbpe": {"\u0967\u0968\u0969\u096a 1234567": ["\u0967", "\u0968\u0969\u096a", " ", "1", "234", "567"]},
    # Each script by itself, Hangul by syllables; only decimal digits, and what is before them is a word of its own.
    "afmoe": {"中한ก": ["中", "한", "ก"], "  1234567Ⅷ": ["  ", "1", "234", "567", "Ⅷ"]},
    "laguna": {"a\r\n\r\nb?\n": ["a", "\r\n\r\n", "b", "?", "\n"]},
    # Bytes are letters when digits are sought: that of "²" is one, wherever it stands.
    "falcon": {" 12 ò": [" ", "12", " ò", "ò"]},
    "deepseek-coder": {"€\u3000": ["€\u3000"]},
    "deepseek-llm": {"a12": ["a", "1", "2"]},
}


@pytest.mark.parametrize("name", OWN)
def test_words_are_those_of_the_models_own_pattern(name: str) -> None:
    assert {text: words_of(name, text) for text in OWN[name]} == OWN[name]


def test_trinitys_digits_are_in_threes_from_the_last_up_to_510() -> None:
    assert [len(word) for word in words_of("afmoe", "7" * 512)] == [2, *[3] * 170]
    assert [len(word) for word in words_of("afmoe", "7" * 1021)] == [1, *[3] * 340]


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_llama_cpps(name: str, tmp_path: Path) -> None:
    """With special tokens in the texts, and what frames these."""
    tokenizer = gguf_tokenizer(write_tokens(tmp_path / "t.gguf", *CASES[name]))
    for text, ids in zip(texts_with_special_tokens(), ANSWERS["ids"][name], strict=True):
        assert tokenizer(text)["input_ids"] == ids, text


@pytest.mark.slow
def test_grammars_read_the_same_tokens(tmp_path: Path) -> None:
    """Their library has another engine for patterns, and forces tokens by what it makes of a text."""
    for cut in {cut.steps: name for name, cut in PRE_TOKENIZERS.items()}.values():
        fast = gguf_tokenizer(write_tokens(tmp_path / "t.gguf", byte_level(), {"pre": cut})).backend_tokenizer
        library = LLTokenizer(fast.to_str(), n_vocab=len(byte_level().types), eos_token=2)
        for text in texts():
            assert library.tokenize_str(text) == fast.encode(text, add_special_tokens=False).ids, (cut, text)


@pytest.mark.parametrize("key", ["add_sep_token", "remove_extra_whitespaces", "normalizer.lowercase"])
def test_what_would_change_a_text_and_is_not_done_is_refused(key: str, tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t.gguf", sentence_pieces(), {key: True})
    with pytest.raises(ModelError, match=rf"asks for 'tokenizer\.ggml\.{key}', which is not done here; run the model from"):
        gguf_tokenizer(path)
    assert gguf_tokenizer(write_tokens(tmp_path / "t.gguf", sentence_pieces(), {key: False}))("a")["input_ids"]


def file_of(path: Path, kind: str, tokens: dict[str, int], **extra: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    if kind == "llama":
        writer.add_token_scores([0.0] * len(tokens))
    else:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(extra.pop("merges", ["a b"]))
    for key, value in extra.items():
        writer.add_key_value(f"tokenizer.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


LETTERS = {"a": 1, "b": 1, "ab": 1}


def test_sentencepieces_first_token_is_known_without_a_name(tmp_path: Path) -> None:
    tokens = {"<unk>": 2, "<s>": 3, "</s>": 3, "▁": 1} | LETTERS
    assert gguf_tokenizer(file_of(tmp_path / "t.gguf", "llama", tokens))("a")["input_ids"][0] == 1
    # An ordinary token in its place is none.
    tokens["<s>"] = 1
    found = gguf_tokenizer(file_of(tmp_path / "t.gguf", "llama", tokens))
    assert found.bos_token is None and 1 not in found("a")["input_ids"]


def test_texts_of_gemma_4_begin_with_the_first_token_whatever_the_file_says(tmp_path: Path) -> None:
    extra = {"ggml.add_bos_token": False, "ggml.bos_token_id": 3}
    path = file_of(tmp_path / "t.gguf", "gemma4", LETTERS | {"<bos>": 3}, **extra)
    assert gguf_tokenizer(path)("ab")["input_ids"] == [3, 2]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            {"ggml.add_bos_token": True},
            "'tokenizer.ggml.add_bos_token' and names no bos_token_id; take another file",
        ),
        (
            {"ggml.add_eos_token": True},
            "'tokenizer.ggml.add_eos_token' and names no eos_token_id; take another file",
        ),
        ({"merges": ["a c"]}, "has the merge 'a c', of which a part or the whole is no token"),
        ({"chat_template.tool_use": 3}, "has a chat template that is no text"),
    ],
)
def test_files_that_contradict_themselves_are_refused(extra: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        gguf_tokenizer(file_of(tmp_path / "t.gguf", "gpt2", LETTERS, **extra))


def test_a_file_may_have_a_chat_template_for_rows_with_tools(tmp_path: Path) -> None:
    extra = {"chat_template": "{{ messages[0].content }}", "chat_template.tool_use": "{{ tools[0].function.name }}"}
    found = Tokenizer(file_of(tmp_path / "t.gguf", "gpt2", LETTERS, **extra))
    messages = [{"role": "user", "content": "ab"}]
    tool = {"type": "function", "function": {"name": "ba", "parameters": {"type": "object", "properties": {}}}}
    assert found.render(messages) == "ab"
    assert found.render(messages, tools=[tool]) == "ba"
