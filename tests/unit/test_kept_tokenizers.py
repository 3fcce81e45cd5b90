"""Cached tokenizers that load without transformers encode and decode as transformers' do, and are cached only then."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizer import TEMPLATE, WORDS, build
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Fast
from transformers import AutoTokenizer, CodeGenTokenizer, GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from outrider.workers.errors import ModelError
from outrider.workers.models import kept_tokenizers, preparation
from outrider.workers.models.fast_tokenizer import AnyTokenizer, FastTokenizer, fast_inside
from outrider.workers.models.model_info import find
from outrider.workers.models.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / f"tokenizers-{os.geteuid()}"


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab", "é"]
MERGES = [("a", "b"), ("▁", "a"), ("▁a", "b")]


def pocket() -> Any:
    return AutoTokenizer.from_pretrained(find("pocket"))


def llama() -> Any:
    return LlamaTokenizer(vocab={piece: number for number, piece in enumerate(PIECES)}, merges=MERGES)


def gemma() -> Any:
    pieces = ["<pad>", "<eos>", "<bos>", *PIECES[:1], *PIECES[3:]]
    return GemmaTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, merges=MERGES)


def unigram() -> Any:
    """Scores of sixteen digits, and a class that pads and cuts off where it was asked to."""
    seeded = random.Random(3)
    backend = Fast(models.Unigram([(piece, -seeded.random() * 20) for piece in PIECES], 0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    whole = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<unk>")
    whole.split_special_tokens = True
    return whole


def framed() -> Any:
    backend = Fast(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="cat $A mat", special_tokens=[("cat", 2), ("mat", 6)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", additional_special_tokens=["on"])


MAKERS = {maker.__name__: maker for maker in (pocket, llama, gemma, unigram, framed)}


@cache
def both(name: str) -> tuple[FastTokenizer, AnyTokenizer]:
    whole = MAKERS[name]()
    alone = fast_inside(whole)
    assert alone is not None
    return alone, AnyTokenizer(whole)


WRITTEN = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from([*PIECES, *WORDS, "<|endoftext|>", " ", "\n", "def f(x):", "ﬁ"]), max_size=8).map("".join),
)


@pytest.mark.parametrize("name", MAKERS)
@given(texts=st.lists(WRITTEN, min_size=1, max_size=3), framed=st.booleans())
def test_ids_are_those_of_transformers(name: str, texts: list[str], framed: bool) -> None:
    alone, whole = both(name)
    assert alone.encode(texts, framed) == whole.encode(texts, framed)
    assert alone.encode(texts[:1], framed) == whole.encode(texts[:1], framed)


@pytest.mark.parametrize("name", MAKERS)
@given(ids=st.lists(st.integers(0, 300), max_size=12), skip_special=st.booleans())
def test_texts_are_those_of_transformers(name: str, ids: list[int], skip_special: bool) -> None:
    alone, whole = both(name)
    assert alone.decode(ids, skip_special) == whole.decode(ids, skip_special)
    assert [alone.token(id_) for id_ in ids] == [whole.token(id_) for id_ in ids]


@pytest.mark.parametrize("name", MAKERS)
def test_tokens_are_those_of_transformers(name: str) -> None:
    alone, whole = both(name)
    assert alone.vocabulary() == whole.vocabulary()
    assert {id_: str(token) for id_, token in alone.added.items()} == {
        id_: str(token) for id_, token in whole.added.items()
    }
    assert all(alone.added[id_].special == token.special for id_, token in whole.added.items())


def test_one_with_methods_of_its_own_is_left_to_transformers() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *given: Any, **options: Any) -> str:
            return super()._decode(*given, **options).upper()

    class Louder(Shouting):
        pass

    backend = Fast(models.WordLevel({"a": 0}, unk_token="a"))
    assert fast_inside(PreTrainedTokenizerFast(tokenizer_object=backend)) is not None
    assert fast_inside(Shouting(tokenizer_object=backend)) is None
    assert fast_inside(Louder(tokenizer_object=backend)) is None
    assert fast_inside(CodeGenTokenizer(vocab={"a": 0, "<|endoftext|>": 1}, merges=[])) is None
    patched = PreTrainedTokenizerFast(tokenizer_object=backend)
    patched._decode = lambda *given, **options: "?"
    assert fast_inside(patched) is None


def test_one_that_loses_digits_when_it_is_written_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Fast.from_str

    def lossy(text: str) -> Fast:
        return read(text.replace("-1.2345678901234567", "-1.2345678901234"))

    backend = Fast(models.Unigram([("a", -1.2345678901234567)], 0))
    whole = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert fast_inside(whole) is not None
    monkeypatch.setattr("outrider.workers.models.fast_tokenizer.Fast", type("Lossy", (), {"from_str": staticmethod(lossy)}))
    assert fast_inside(whole) is None


def started(path: str | Path) -> Tokenizer:
    """As a process has it that starts."""
    tokenizer = Tokenizer(path)
    tokenizer.keep()
    return tokenizer


@pytest.fixture
def whole_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where transformers was asked for a tokenizer."""
    asked: list[str] = []
    load = AutoTokenizer.from_pretrained

    def counted(path: str, **options: Any) -> Any:
        asked.append(path)
        return load(path, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", counted)
    return asked


def test_transformers_is_asked_once_for_texts_and_again_for_conversations(tmp_path: Path, whole_loads: list[str]) -> None:
    path = build(tmp_path / "t", WORDS, template=TEMPLATE).path
    first, second = started(path), started(path)
    assert second.encode("the cat sat") == first.encode("the cat sat") == [1, 2, 3]
    assert second.decode([1, 2, 6]) == first.decode([1, 2, 6]) == "the cat"
    assert second.chats and second.meanings() == first.meanings()
    assert whole_loads == [path]
    assert second.encode_rendered(second.render([{"role": "user", "content": "the cat"}])) == [1, 2, 4]
    assert whole_loads == [path, path]


def test_files_with_other_content_are_another_tokenizer(tmp_path: Path, whole_loads: list[str]) -> None:
    path = build(tmp_path / "t", WORDS).path
    assert started(path).encode("cat") == [2] and not started(path).chats
    build(tmp_path / "t", [WORDS[0], *reversed(WORDS[1:])])
    assert started(path).encode("cat") == [5]
    build(tmp_path / "t", WORDS, template=TEMPLATE)
    assert started(path).encode("cat") == [2] and started(path).chats
    assert len(whole_loads) == 3


def test_other_versions_are_not_believed(tmp_path: Path, whole_loads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(tmp_path / "t", WORDS).path
    started(path)
    monkeypatch.setattr(kept_tokenizers, "version", lambda library: "99")
    started(path)
    assert len(whole_loads) == 2


@pytest.mark.parametrize("harm", ["cut", "changed", "empty", "writable", "a link"])
def test_what_was_kept_and_harmed_is_not_used(
    harm: str, tmp_path: Path, cache_of_its_own: Path, whole_loads: list[str]
) -> None:
    path = build(tmp_path / "t", WORDS).path
    started(path)
    (kept,) = cache_of_its_own.iterdir()
    content = kept.read_bytes()
    match harm:
        case "cut":
            kept.write_bytes(content[:-9])
        case "changed":
            kept.write_bytes(content.replace(b"cat", b"dog"))
        case "empty":
            kept.write_bytes(b"")
        case "writable":
            kept.chmod(0o666)
        case _:
            kept.rename(tmp_path / "elsewhere")
            kept.symlink_to(tmp_path / "elsewhere")
    assert started(path).encode("cat") == [2]
    assert len(whole_loads) == 2
    assert started(path).encode("cat") == [2]
    assert len(whole_loads) == 2, "the next one finds it mended"


def test_files_that_change_while_they_are_read_are_not_kept(
    tmp_path: Path, cache_of_its_own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(tmp_path / "t", WORDS).path
    load = AutoTokenizer.from_pretrained

    def changing(path: str, **options: Any) -> Any:
        loaded = load(path, **options)
        build(Path(path), [*WORDS, "more"])
        return loaded

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", changing)
    assert started(path).encode("cat") == [2]
    assert not cache_of_its_own.exists()


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    path = build(tmp_path / "t", WORDS).path
    assert started(path).encode("cat") == started(path).encode("cat") == [2]


def test_a_template_of_other_files_is_not_taken(tmp_path: Path) -> None:
    path = build(tmp_path / "t", WORDS, template=TEMPLATE).path
    started(path)
    begun, late = started(path), started(path)
    begun.load_template()
    (tmp_path / "t" / "chat_template.jinja").write_text("mat")
    begun.load_template()
    assert begun.encode_rendered(begun.render([{"role": "user", "content": "the cat"}])) == [1, 2, 4]
    for _ in range(2):
        with pytest.raises(ModelError, match="changed while its model is in use"):
            late.load_template()
    assert late.encode("the cat") == [1, 2]


def test_whoever_stays_takes_the_files_as_they_are_when_a_model_is_prepared(tmp_path: Path) -> None:
    path = build(tmp_path / "t", WORDS, template=TEMPLATE).path
    chat = [{"role": "user", "content": "the cat"}]
    preparation.prepare_pair(path, "none")
    assert preparation.encode(path, [chat, "mat"]) == [(1, 2, 4), (6,)]
    build(tmp_path / "t", [WORDS[0], *reversed(WORDS[1:])], template=TEMPLATE)
    assert preparation.encode(path, [chat, "mat"]) == [(1, 2, 4), (6,)], "as long as nobody prepares it again"
    preparation.prepare_pair(path, "none")
    assert preparation.encode(path, [chat, "mat"]) == [(6, 5, 3), (1,)]


@pytest.mark.parametrize("flag", ["special", "normalized"])
def test_a_token_that_was_added_twice_in_two_ways_is_left_to_transformers(flag: str) -> None:
    """As where tokenizer.json and tokenizer_config.json differ. The library minds both ways, and writes the last."""
    backend = Fast(models.BPE({"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4}, [("▁", "a")], unk_token="<unk>"))
    if flag == "normalized":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    whole = PreTrainedTokenizerFast(tokenizer_object=backend)
    add = whole.backend_tokenizer.add_special_tokens if flag == "special" else whole.backend_tokenizer.add_tokens
    add([AddedToken("<think>", **{flag: True})])
    assert fast_inside(whole) is not None
    whole.backend_tokenizer.add_tokens([AddedToken("<think>", **{flag: False})])
    assert fast_inside(whole) is None


def test_what_the_library_cannot_read_again_is_left_to_transformers(tmp_path: Path) -> None:
    """Two tokens with one id."""
    shutil.copytree(find("pocket"), tmp_path / "t")
    file = tmp_path / "t" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["".join(content["model"]["merges"][0])] = vocabulary[max(vocabulary, key=vocabulary.get)]
    file.write_text(json.dumps(content))
    tokenizer = started(tmp_path / "t")
    assert isinstance(tokenizer._coder, AnyTokenizer)
    assert tokenizer.encode("import os") == AutoTokenizer.from_pretrained(tmp_path / "t").encode("import os")


def test_what_is_transformers_alone_is_held_against_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(tmp_path / "t", WORDS).path
    tried: list[Any] = []
    monkeypatch.setattr("outrider.workers.models.tokenizer.fast_inside", tried.append)
    assert [started(path).encode("the cat") for _ in range(3)] == [[1, 2]] * 3
    assert len(tried) == 1


def test_those_used_longest_ago_give_way(
    tmp_path: Path, cache_of_its_own: Path, whole_loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_tokenizers, "MOST_KEPT", 4)
    paths = [build(tmp_path / str(number), [*WORDS, str(number)]).path for number in range(5)]
    for path in paths:
        started(path)
        started(paths[0])
    assert len(whole_loads) == 5
    assert len(list(cache_of_its_own.iterdir())) == 3


WITHOUT_TRANSFORMERS = """
import sys
from outrider.workers.models.preparation import decode, encode, prepare_pair
target, draft, name, notes = prepare_pair("pocket", "auto")
(tokens,) = encode(target.path, ["import os"])
from outrider.workers.build import build_target
from outrider.workers.messages import ModelSpec, ReplicaSpec
build_target(ModelSpec(target.path, "native", "fp32", threads=1, digest=target.digest), ReplicaSpec(1, 0))
print(tokens, decode(target.path, tokens), name, "transformers" in sys.modules, "torch" in sys.modules)
"""


@pytest.mark.slow  # a process that imports what it needs
def test_a_job_of_texts_loads_neither_transformers_nor_torch() -> None:
    tokenizer = started(find("pocket"))
    started(find("pocket-draft"))
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRANSFORMERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{tuple(tokenizer.encode('import os'))} import os pocket-draft+suffix False False"
