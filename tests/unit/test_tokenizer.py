"""Tokenizers built here, a few tokens each: pairs that fit and pairs that do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers

from outrider.kernels import library
from outrider.workers.errors import ModelError, PairError, UsageError
from outrider.workers.models import preparation
from outrider.workers.models.model_info import ModelInfo, find, read_model_info
from outrider.workers.models.tokenizer import Tokenizer, check_pair

WORDS = ["<unk>", "the", "cat", "sat", "on", "a", "mat"]


def build(directory: Path, words: list[str], vocabulary: int = 0, template: str | None = None) -> ModelInfo:
    directory.mkdir(exist_ok=True)
    fast = Fast(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": words[-1]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    config = {"model_type": "llama", "vocab_size": vocabulary or len(words), "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.ones(1, np.float32)}, directory / "model.safetensors")
    return read_model_info(str(directory))


def test_text_to_ids_and_back(tmp_path: Path) -> None:
    tokenizer = Tokenizer(build(tmp_path / "t", WORDS).path)
    assert tokenizer.encode("the cat sat") == [1, 2, 3]
    assert tokenizer.decode([1, 2, 3]).split() == ["the", "cat", "sat"]
    assert tokenizer.decode([1, 6]) == "the", "end tokens are no text"


def test_a_tokenizer_pairs_with_itself_and_with_a_padded_vocabulary(tmp_path: Path) -> None:
    target = build(tmp_path / "target", WORDS)
    check_pair(target, build(tmp_path / "same", WORDS))
    check_pair(target, build(tmp_path / "padded", WORDS, vocabulary=64))
    check_pair(target, build(tmp_path / "longer", [*WORDS, "extra", "more"]))
    check_pair(build(tmp_path / "longer-target", [*WORDS, "extra"]), target)


def test_ids_that_the_draft_cannot_propose_may_differ(tmp_path: Path) -> None:
    """The draft's tokenizer may list more than its model scores."""
    target = build(tmp_path / "target", WORDS)
    check_pair(target, build(tmp_path / "draft", [*WORDS[:5], "dog", "house"], vocabulary=5))


def test_a_draft_with_other_meanings_is_refused_with_the_first(tmp_path: Path) -> None:
    target = build(tmp_path / "target", WORDS)
    draft = build(tmp_path / "draft", ["<unk>", "the", "cat", "on", "sat", "a", "mat"])
    with pytest.raises(PairError) as caught:
        check_pair(target, draft)
    assert "2 of 7 token ids mean something else, first id 3: 'on' in the draft, 'sat' in the target" in str(caught.value)
    assert "--draft lookup" in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "{}", "[]"])
def test_a_broken_tokenizer_is_a_sentence(tmp_path: Path, content: str | None) -> None:
    model_info = build(tmp_path / "t", WORDS)
    path = tmp_path / "t" / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ModelError, match=r"the tokenizer of .* cannot be loaded: |holds no tokenizer|no JSON object"):
        Tokenizer(model_info.path)


TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}on{% endif %}"


def test_chats_go_through_the_models_template(tmp_path: Path) -> None:
    model_info = build(tmp_path / "t", WORDS, template=TEMPLATE)
    messages = [{"role": "user", "content": "the cat"}]
    assert preparation.encode(model_info.path, [messages, "a mat"]) == [(1, 2, 4), (5, 6)]


def test_chats_without_a_template_are_refused(tmp_path: Path) -> None:
    model_info = build(tmp_path / "t", WORDS)
    found = preparation.encode(model_info.path, [[{"role": "user", "content": "x"}]])
    assert found == ["the model has no chat template, so /v1/chat/completions cannot be answered; use /v1/completions"]


@pytest.mark.parametrize("words", ["roles must alternate", ""])
def test_a_template_may_refuse_in_its_own_words_or_in_none(tmp_path: Path, words: str) -> None:
    model_info = build(tmp_path / "t", WORDS, template="{{ raise_exception('" + words + "') }}")
    found = preparation.encode(model_info.path, [[{"role": "user", "content": "x"}]])
    assert found == [f"the model's chat template refuses the messages: {words or 'TemplateError'}"]


SAYS_NAMES = (
    "{% for m in messages %}{{ m.role }} {% if m.name %}({{ m.name|upper }}) {% endif %}{{ m.content }} {% endfor %}"
)
OF_USERS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% endif %}{% endfor %}"


def test_a_name_is_given_to_the_template_or_refused(tmp_path: Path) -> None:
    said = {"role": "user", "content": "the cat", "name": "a"}
    knowing = build(tmp_path / "knowing", [*WORDS, "user", "(A)"], template=SAYS_NAMES)
    named, nameless = preparation.encode(knowing.path, [[said], [{"role": "user", "content": "the cat"}]])
    assert len(named) == len(nameless) + 1
    ignorant = build(tmp_path / "ignorant", WORDS, template=TEMPLATE)
    found = preparation.encode(ignorant.path, [[{"role": "user", "content": "a"}, said]])
    assert found == ['the model\'s chat template knows no "name" for the role "user" of messages[1]; remove it']


def test_a_message_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    model_info = build(tmp_path / "t", WORDS, template=OF_USERS)
    told = [{"role": "user", "content": "the cat"}, {"role": "tool", "content": "a"}]
    assert preparation.encode(model_info.path, [told, told[:1]]) == [
        'the model\'s chat template leaves out what the role "tool" of messages[1] says; remove it',
        (1, 2),
    ]


def test_one_prompt_that_the_tokenizer_refuses_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_info = build(tmp_path / "t", WORDS)
    real = Tokenizer.encode

    def encode(self: Tokenizer, text: str) -> list[int]:
        if text == "mat":
            raise RuntimeError("no mats\nhere")
        return real(self, text)

    def encode_all(self: Tokenizer, texts: list[str]) -> list[list[int]]:
        return [encode(self, text) for text in texts]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(Tokenizer, "encode_all", encode_all)
    found = preparation.encode(model_info.path, ["the", "mat", " ", "cat"])
    assert found == [(1,), "the model's tokenizer refuses the prompt: no mats", "the prompt has no tokens", (2,)]


def test_a_template_that_fails_over_one_row_fails_that_row_alone(tmp_path: Path) -> None:
    template = TEMPLATE + "{{ 1 // (messages|length - 2) }}"
    model_info = build(tmp_path / "t", WORDS, template=template)
    one = [{"role": "user", "content": "cat"}]
    found = preparation.encode(model_info.path, [one, one * 2, one * 3])
    assert isinstance(found[1], str) and found[1].startswith("the model's chat template refuses the messages: ")
    assert isinstance(found[0], tuple)
    assert isinstance(found[2], tuple)


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    model_info = build(tmp_path / "t", WORDS)
    assert preparation.encode(model_info.path, ["   ", "the"]) == ["the prompt has no tokens", (1,)]


def test_an_unfit_draft_is_refused_when_named_and_replaced_when_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build(tmp_path / "target", WORDS)
    draft = build(tmp_path / "draft", ["<unk>", "cat", "the"])
    with pytest.raises(PairError):
        preparation.prepare_pair(target.path, draft.path)
    monkeypatch.setattr(preparation, "choose_draft", lambda model_info: draft.path)
    _, found, name, notes = preparation.prepare_pair(target.path, "auto")
    assert (found, name) == (None, "suffix")
    assert notes[0].startswith("the usual draft cannot be used, proposing by suffix instead: the draft")
    assert preparation.prepare_pair(target.path, "none")[1:] == (None, "none", [])
    assert preparation.prepare_pair(target.path, "auto+lookup")[2] == "lookup"
    assert preparation.prepare_pair(target.path, "suffix")[1:] == (None, "suffix", [])
    assert preparation.prepare_pair(target.path, f"{target.path}+suffix")[1:] == (target, f"{target.path}+suffix", [])
    with pytest.raises(UsageError, match=r"for none alone write --draft none"):
        preparation.prepare_pair(target.path, "none+suffix")


@pytest.mark.parametrize("why", ["are not installed", "has kernel interface 21, this outrider needs 22"])
def test_without_kernels_that_can_be_used_nothing_is_found_in_other_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def refuse() -> None:
        raise library.KernelsUnavailable(why)

    target = build(tmp_path / "target", WORDS)
    monkeypatch.setattr(library, "load", refuse)
    for asked in ("suffix", "model+suffix", f"{target.path}+suffix"):
        with pytest.raises(ModelError) as caught:
            preparation.prepare_pair(target.path, asked)
        assert str(caught.value) == f"--draft suffix cannot be used: {why}; --draft lookup can"
    note = f"proposing without suffix, which cannot be used: {why}"
    monkeypatch.setattr(preparation, "choose_draft", lambda model_info: "lookup")
    assert preparation.prepare_pair(target.path, "auto")[1:] == (None, "lookup", [note])
    monkeypatch.setattr(preparation, "choose_draft", lambda model_info: target.path)
    assert preparation.prepare_pair(target.path, "auto")[1:] == (target, target.path, [note])
    assert preparation.prepare_pair(target.path, target.path)[1:] == (target, target.path, [])


def test_a_family_without_a_usual_draft_is_told_where_that_draft_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``auto`` texts are half of what is asked for."""
    target = build(tmp_path / "target", WORDS)
    monkeypatch.setattr(preparation, "choose_draft", lambda model_info: "lookup")
    for asked, kind in (("model", "lookup"), ("model+suffix", "suffix")):
        said = f"no usual draft is known for {target.name}, proposing by {kind} instead"
        assert preparation.prepare_pair(target.path, asked)[1:] == (None, kind, [said])
    assert preparation.prepare_pair(target.path, "auto")[1:] == (None, "suffix", [])
    assert preparation.prepare_pair(target.path, "lookup")[1:] == (None, "lookup", [])


WITHOUT_TORCH = """
import sys
from outrider.workers.models.hide_torch import go_without_torch
go_without_torch()
from outrider.workers.models.model_info import find
from outrider.workers.models.tokenizer import Tokenizer
tokenizer = Tokenizer(find("pocket"))
tokens = tokenizer.encode("import os") + tokenizer.encode_rendered(tokenizer.render([{"role": "user", "content": "a"}]))
print(tokens, repr(tokenizer.decode(tokens)), "torch" in sys.modules)
import torch
torch.zeros(1)
"""


@pytest.mark.slow  # torch is loaded
def test_tokenizers_need_no_torch_and_say_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    tokenizer = Tokenizer(find("pocket"))
    tokens = tokenizer.encode("import os") + tokenizer.encode_rendered(tokenizer.render([{"role": "user", "content": "a"}]))
    assert done.stdout.strip() == f"{tokens} {tokenizer.decode(tokens)!r} False"
    assert done.stderr == "", "nobody is to be told that torch is not there"
