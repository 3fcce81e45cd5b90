"""Tokenizers made to mislead, exhaust or hang whoever reads them: a sentence each, from a process that has limits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import WORDS, build

from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.workers.errors import ModelError
from outrider.workers.models.limits import MOST_BYTES, limited
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.preparation import encode, prepare_pair
from outrider.workers.models.templates import MOST_CHARACTERS

TOKENIZER, SETTINGS, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"
Spoil = Callable[[Path], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(build(tmp_path_factory.mktemp("whole") / "model", WORDS).path)


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def holds(content: str | bytes, name: str = TOKENIZER) -> Spoil:
    return lambda model: (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def says(name: str = TOKENIZER, **changes: Any) -> Spoil:
    def spoil(model: Path) -> None:
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | changes))

    return spoil


def cut(model: Path) -> None:
    (model / TOKENIZER).write_bytes((model / TOKENIZER).read_bytes()[:-100])


def long(size: int, name: str = TOKENIZER) -> Spoil:
    def spoil(model: Path) -> None:
        (model / name).touch()
        os.truncate(model / name, size)

    return spoil


def regex(pattern: str) -> Spoil:
    return says(pre_tokenizer={"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})


def replacing(times: int) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * times}


def added(id_: Any, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": content, "special": True, **flags}


BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}}
REFUSED: dict[str, tuple[Spoil, str]] = {
    "none": (lambda model: (model / TOKENIZER).unlink(), "holds no tokenizer: neither tokenizer.json"),
    "empty": (holds(""), "does not hold a JSON object"),
    "a list": (holds("[]"), "does not hold a JSON object"),
    "nested deeply": (holds('{"model":' * 100_000), "cannot be loaded: maximum recursion depth"),
    "cut": (cut, "cannot be loaded"),
    "no text": (holds(b"{\xff\xfe"), "cannot be loaded"),
    "vast": (long(1 << 30), "larger than 256 MB"),
    "endless": (long(1 << 40), "of which only [0-9,]+ were ever written"),
    "another version": (says(version=7), "cannot be loaded: invalid type"),
    "a number for a model": (says(model=7), "cannot be loaded"),
    "ids that are texts": (says(model=BPE | {"vocab": {"a": "b"}, "merges": []}), "cannot be loaded"),
    "negative ids": (says(model=BPE | {"vocab": {"a": -1}, "merges": []}), "cannot be loaded"),
    "endless merges": (says(model=BPE | {"merges": ["a" * 1_000_000 + " b"]}), "cannot be loaded: Token `a"),
    "merges that are numbers": (says(model=BPE | {"merges": [1]}), "cannot be loaded"),
    "a broken pattern": (regex("((("), "cannot be loaded: Oniguruma"),
    "negative added ids": (says(added_tokens=[added(-1, "x")]), "cannot be loaded"),
    "a number for a decoder": (says(decoder=3), "cannot be loaded"),
    "a decoder that multiplies": (
        says(decoder={"type": "Sequence", "decoders": [replacing(100)] * 6}),
        r"its decoder makes a token up to 1e\+12 times as long",
    ),
    "broken settings": (holds("{", SETTINGS), f"{SETTINGS} cannot be read"),
    "a list of settings": (holds("[]", SETTINGS), f"{SETTINGS} does not hold a JSON object"),
    "vast settings": (long(1 << 30, SETTINGS), f"{SETTINGS} is larger than 16 MB"),
    "a number for a class": (says(SETTINGS, tokenizer_class=7), "cannot be loaded"),
    "a number for a token": (says(SETTINGS, eos_token=7), "cannot be loaded: Special token eos_token"),
    "a list of added tokens": (says(SETTINGS, added_tokens_decoder=[1]), "cannot be loaded"),
    "a broken map": (holds("garbage", SPECIAL), f"{SPECIAL} cannot be read"),
    "a list for a map": (holds("[1]", SPECIAL), f"{SPECIAL} does not hold a JSON object"),
    "a vast template": (long(1 << 30, "chat_template.jinja"), "chat_template.jinja is larger than 16 MB"),
    "an end that is a letter": (holds('{"eos_token_id": "a"}', GENERATION), '"eos_token_id" must be a token id'),
    "ends that are lists": (holds('{"eos_token_id": [[1], [2]]}', GENERATION), '"eos_token_id" must be a token id'),
    "an end without end": (holds('{"eos_token_id": 1' + "0" * 5000 + "}", GENERATION), "cannot be read"),
    "vast generation settings": (long(1 << 30, GENERATION), "larger than 16 MB"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_hostile_tokenizer_is_refused(kind: str, model: Path) -> None:
    spoil, sentence = REFUSED[kind]
    spoil(model)
    with pytest.raises(ModelError, match=sentence) as caught:
        prepare_pair(str(model), "none")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


ROWS: dict[str, tuple[Spoil, str]] = {
    # The library behind the pattern gives up, by itself and soon.
    "a pattern that tries every way": (regex("^(([a-z])+.)+[A-Z]([a-z])+$"), "refuses the prompt: Onig"),
    "no word for unknown words": (says(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}), "refuses the"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_prompt_that_a_tokenizer_gives_up_on_fails_alone(kind: str, model: Path) -> None:
    spoil, sentence = ROWS[kind]
    spoil(model)
    bad, empty = encode(str(model), ["a" * 40 + "!", ""])
    assert isinstance(bad, str) and sentence in bad
    assert empty == "the prompt has no tokens"


def test_a_text_that_no_context_holds_is_not_even_begun(model: Path) -> None:
    """It took three tokenizer processes and three minutes to say that one of 50 MB was too much."""
    texts = ["abc", "a" * (MOST_CHARACTERS + 1), "de"]
    for continued in (False, True):
        first, refused, last = encode(str(model), texts, continued)
        assert refused == "the prompt has 10,000,001 characters; at most 10,000,000 are taken"
        assert [first, last] == encode(str(model), ["abc", "de"], continued)


def explodes(letter: str) -> Spoil:
    """A tokenizer that makes 10^12 of the letter."""
    times = {"type": "Replace", "pattern": {"String": letter}, "content": letter * 1000}
    return says(normalizer={"type": "Sequence", "normalizers": [times] * 4})


@pytest.mark.slow  # every process that is started loads transformers
def test_a_tokenizer_without_bounds_ends_its_process_alone(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    explodes("a")(model)
    with TokenizerProcess() as tokenizer_process:
        assert tokenizer_process.prepare_pair(str(model), "none")[0].path == str(model)
        with pytest.raises(ModelError, match=r"asked for more time or memory for a prompt of one letter than .*\(3 GB\)"):
            tokenizer_process.encode(str(model), ["a" * 100])
    assert "memory allocation" not in capfd.readouterr().err, "what the library prints about itself"


@pytest.mark.slow
def test_a_prompt_that_ends_the_process_fails_alone(whole: Path, model: Path) -> None:
    explodes("#")(model)
    with TokenizerProcess() as tokenizer_process:
        plain = tokenizer_process.encode(str(whole), ["abc", "de", "fgh"])
        first = tokenizer_process.begin_to_encode(str(model), ["abc", "#", "de"])
        second = tokenizer_process.begin_to_encode(str(model), ["fgh"])
        abc, bad, de = first()
        assert [abc, de, *second()] == plain and "memory for this prompt" in str(bad)
        assert tokenizer_process.encode(str(model), ["abc"]) == [abc]


@pytest.mark.slow
def test_a_process_that_was_killed_loses_no_prompt(whole: Path) -> None:
    with TokenizerProcess() as tokenizer_process:
        plain = tokenizer_process.encode(str(whole), ["abc", "de"])
        os.kill(tokenizer_process._ask(os.getpid), signal.SIGKILL)
        assert tokenizer_process.encode(str(whole), ["abc", "de"]) == plain
        os.kill(tokenizer_process._ask(os.getpid), signal.SIGKILL)
        assert tokenizer_process.prepare_pair(str(whole), "none")[0].path == str(whole)
        os.kill(tokenizer_process._ask(os.getpid), signal.SIGKILL)
        assert "has no" in str(tokenizer_process.native_refuses(str(whole)))


def in_a_fork(work: Callable[[], Any], seconds: float) -> int:
    child = os.fork()
    if child == 0:
        try:
            with limited(seconds):
                work()
        except MemoryError:
            os._exit(7)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def spin() -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        pass


def test_the_limits_hold() -> None:
    assert in_a_fork(spin, 0.2) == -signal.SIGPROF
    assert in_a_fork(lambda: bytearray(MOST_BYTES + (1 << 28)), 10) == 7
    assert in_a_fork(lambda: bytearray(1 << 20), 10) == 0


def test_the_limits_end_with_the_work() -> None:
    with limited(0.05):
        pass
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass


def test_the_whole_model_is_taken(model: Path) -> None:
    assert read_model_info(str(model)) == prepare_pair(str(model), "none")[0]
    assert encode(str(model), ["the cat"]) == [(1, 2)]
