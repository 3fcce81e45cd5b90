"""The bound of a text's tokens that is known without encoding it, on tokenizers of the usual kinds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from test_tokenizer import build
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast

from outrider.workers.models import preparation, tokenizer
from outrider.workers.models.limits import TooManyTokens
from outrider.workers.models.longest_token import BYTE_LETTERS, BYTE_TOKENS, longest_token
from outrider.workers.models.model_info import ModelInfo

# Merged from left to right into runs of four.
MERGES = [("a", "b"), ("ab", "ab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("▁", "▁"), ("▁▁", "▁▁")]
LETTERS = "abc  <s>\n▁.9éüßạ̈̂ΐᾂ각각ﬃ…\u200d\U0001f600"


def by_bytes(**options: object) -> Fast:
    fast = Fast(models.BPE(vocab(BYTE_LETTERS), MERGES[:4], **options))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return fast


def by_fallback() -> Fast:
    """As Llama 2's."""
    fast = Fast(models.BPE(vocab(BYTE_TOKENS | {"a", "b", "▁"}), [*MERGES[:2], *MERGES[4:]], byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return fast


def vocab(words: frozenset[str]) -> dict[str, int]:
    merged = [left + right for left, right in MERGES if (left + right)[0] in words]
    return {word: index for index, word in enumerate([*sorted(words), *merged])}


def normalized(*steps: normalizers.Normalizer) -> Fast:
    fast = by_bytes()
    fast.normalizer = normalizers.Sequence(list(steps))
    return fast


def split(*steps: pre_tokenizers.PreTokenizer) -> Fast:
    fast = by_bytes()
    fast.pre_tokenizer = pre_tokenizers.Sequence([*steps, fast.pre_tokenizer])
    return fast


def marked(token: AddedToken) -> Fast:
    fast = by_bytes()
    fast.add_special_tokens([token])
    return fast


BOUNDED: dict[str, tuple[Callable[[], Fast], int]] = {
    "bytes": (by_bytes, 4),
    "letters, and bytes for unknown ones": (by_fallback, 6),
    "composed": (lambda: normalized(normalizers.NFC()), 16),
    "composed in lower case": (lambda: normalized(normalizers.NFKC(), normalizers.Lowercase()), 16),
    "taken apart": (lambda: normalized(normalizers.NFKD()), 4),
    "replaced by more": (lambda: normalized(normalizers.Replace("a", "ab")), 4),
    "in pieces": (lambda: split(pre_tokenizers.Digits(), pre_tokenizers.Split(Regex(r"\s+"), "merged_with_next")), 4),
    "a long mark": (lambda: marked(AddedToken("<s>" * 5)), 15),
}
UNBOUNDED: dict[str, Callable[[], Fast]] = {
    "words": lambda: Fast(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "unigrams": lambda: Fast(models.Unigram([("a", -1.0), ("<unk>", -2.0)], unk_id=1, byte_fallback=False)),
    "unknown letters as one": lambda: Fast(models.BPE({"<unk>": 0}, [], unk_token="<unk>", fuse_unk=True)),
    "unknown letters as none": lambda: Fast(models.BPE({"a": 0}, [])),
    "without a byte": lambda: Fast(models.BPE(vocab(BYTE_TOKENS - {"<0x41>"}), [], byte_fallback=True)),
    "with luck": lambda: by_bytes(dropout=0.5),
    "stripped": lambda: normalized(normalizers.Strip()),
    "shortened": lambda: normalized(normalizers.Replace("ab", "a")),
    "shortened by a pattern": lambda: normalized(normalizers.Replace(Regex("a+"), "aaaa")),
    "without accents": lambda: normalized(normalizers.NFD(), normalizers.StripAccents()),
    "blanks removed": lambda: split(pre_tokenizers.Split(" ", "removed")),
    "blanks between words": lambda: split(pre_tokenizers.WhitespaceSplit()),
    "a mark that takes the blanks before it": lambda: marked(AddedToken("<s>", lstrip=True)),
    "a mark that takes the blanks behind it": lambda: marked(AddedToken("<s>", rstrip=True)),
}


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_has_fewer_tokens(kind: str) -> None:
    made, bound = BOUNDED[kind]
    fast = made()
    assert longest_token(fast) == bound
    chance = random.Random(kind)
    for _ in range(300):
        drawn = [chance.choice(LETTERS) * chance.choice((1, 1, 2, 9)) for _ in range(chance.randrange(1, 30))]
        text = "".join(drawn) + chance.choice(("", "ab" * 20, " " * 40, "<s>" * 30))
        assert len(fast.encode(text, add_special_tokens=False)) * bound >= len(text), repr(text)


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_may_drop_letters_has_no_bound(kind: str) -> None:
    assert longest_token(UNBOUNDED[kind]()) is None


def test_the_letters_of_bytes() -> None:
    assert set(pre_tokenizers.ByteLevel.alphabet()) == BYTE_LETTERS


@pytest.fixture
def model_info(tmp_path: Path) -> ModelInfo:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    made = build(tmp_path / "model", ["a"], template=template)
    by_bytes().save(str(tmp_path / "model" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def test_a_long_prompt_that_cannot_fit_is_not_encoded(model_info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server encoded one of 5 MB for 4 to 51 s, to count tokens of which it then said that they are too many."""
    encoded: list[str] = []
    whole, rendered = tokenizer.Tokenizer.encode_all, tokenizer.Tokenizer.encode_rendered
    monkeypatch.setattr(tokenizer.Tokenizer, "encode_all", lambda self, texts: encoded.extend(texts) or whole(self, texts))
    monkeypatch.setattr(
        tokenizer.Tokenizer, "encode_rendered", lambda self, text: encoded.append(text) or rendered(self, text)
    )
    # Four characters a token: the first has as many tokens as fit with no answer, the last as fit with one.
    texts = ["ab" * 60_000, "abc", "ab" * 59_998]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    for prompts in (texts, conversations):
        refused, short, held = preparation.encode(model_info.path, list(prompts), context=30_000)
        assert refused == (
            "the prompt has 120,000 characters, which are 30,000 tokens or more, and the model holds 30,000 with the "
            "answer; shorten it"
        )
        assert isinstance(refused, TooManyTokens)
        assert (len(short), len(held)) == (2, 29_999)
    assert encoded == texts[1:] * 2
    assert len(preparation.encode(model_info.path, texts[:1])[0]) == 30_000, "where nobody named a context"
