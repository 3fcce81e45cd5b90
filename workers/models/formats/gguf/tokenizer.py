"""Builds the tokenizer in a GGUF file, equal to the one that transformers loads from the original model."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.gguf.end_tokens import CONTROL, TOKENIZER, USER_DEFINED
from outrider.workers.models.formats.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from outrider.workers.models.formats.gguf.split import read_gguf
from outrider.workers.models.headers import quoted

NORMAL, UNKNOWN, UNUSED, BYTE = 1, 2, 5, 6
TEMPLATE = "tokenizer.chat_template"
# Settings that change the text before it is split, or its first and last tokens, and are not supported.
NOT_DONE = (
    "add_sep_token",
    "remove_extra_whitespaces",
    "precompiled_charsmap",
    "normalizer.lowercase",
    "normalizer.strip_accents",
)
# llama.cpp's default ids, for files with sentencepiece's tokens that do not state them.
DEFAULT_IDS = {"bos": 1, "eos": 2}
# The name of a pre-tokenizer that is not byte-level, although the file's "tokenizer.ggml.model" is "gpt2".
SARVAM = "sarvam-moe"
JOINED = {"gemma4": "gemma4", SARVAM: SARVAM}
# Phi 3's special tokens also match the white space after them, except for these.
PHI_3 = ("phi3", "phimoe")
PHI_3_KEEPING_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def gguf_tokenizer(path: Path) -> Any:
    """A tokenizer of transformers; a ModelError where the file has a kind of tokenizer that is not supported."""
    return _Parts(path).tokenizer()


class _Parts:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_gguf(path).metadata
        self.tokens = self._list("tokens", str)
        if not self.tokens or len(set(self.tokens)) != len(self.tokens):
            raise self._refused("has no list of different tokens")
        self.types = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self._refused(f"has {len(self.tokens):,} tokens and {len(self.types):,} types of them")
        self.kind = self.values.get(f"{TOKENIZER}model")
        if self.kind == "gpt2":
            self.kind = JOINED.get(str(self.values.get(f"{TOKENIZER}pre")), self.kind)

    def _refused(self, what: str) -> ModelError:
        return ModelError(f"the tokenizer of {self.path} {what}")

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self.values.get(TOKENIZER + key, [])
        if not isinstance(value, list) or not all(type(each) is kind for each in value):
            raise self._refused(f"has a {quoted(TOKENIZER + key)} that is no list of the right kind")
        return value

    def tokenizer(self) -> Any:
        makers = {"gpt2": self._byte_level, "llama": self._sentence_pieces, "gemma4": self._joined_pieces}
        maker = self._joined_pieces if self.kind == SARVAM else makers.get(str(self.kind))
        if maker is None:
            raise self._refused(f"is of the kind {quoted(self.kind)}; {', '.join(makers)} are known")
        for key in NOT_DONE:
            if self.values.get(TOKENIZER + key):
                raise self._refused(
                    f"asks for {quoted(TOKENIZER + key)}, which is not done here; run the model from its own files"
                )
        fast = maker()
        self._add_special(fast)
        # Files of Gemma 4 without bos were made by a faulty converter.
        starts = self.kind == "gemma4" or self._stated("add_bos_token", self._usually_starts())
        ends = self._stated("add_eos_token", False)
        self._frame(fast, self._named("bos") if starts else None, self._named("eos") if ends else None)
        names = {f"{role}_token": self._named(role) for role in ("bos", "eos")}
        names |= {"unk_token": self._named("unknown"), "pad_token": self._named("padding")}
        return PreTrainedTokenizerFast(
            tokenizer_object=fast,
            clean_up_tokenization_spaces=False,
            chat_template=self._templates(),
            **{role: name for role, name in names.items() if name is not None},
        )

    def _usually_starts(self) -> bool:
        return self._pre_tokenizer().begins if self.kind == "gpt2" else self.kind == "llama"

    def _templates(self) -> str | dict[str, str] | None:
        """The chat template, or several by name (``tool_use`` for rows with tools)."""
        named = {
            key.removeprefix(f"{TEMPLATE}."): value for key, value in self.values.items() if key.startswith(f"{TEMPLATE}.")
        }
        template = self.values.get(TEMPLATE)
        if not all(isinstance(each, str) for each in (*named.values(), template or "")):
            raise self._refused("has a chat template that is no text")
        return {"default": template, **named} if named and template is not None else template

    def _stated(self, key: str, default: bool) -> bool:
        """Whether every text gets the token of ``key``; if the file says so, it must name the token."""
        role = key.split("_")[1]
        stated = self.values.get(TOKENIZER + key)
        if stated and self._named(role) is None:
            raise self._refused(
                f"asks for {quoted(TOKENIZER + key)} and names no {role}_token_id; take another file of the model"
            )
        return default if stated is None else bool(stated)

    def _named(self, role: str) -> str | None:
        id_ = self.values.get(f"{TOKENIZER}{role}_token_id")
        if id_ is None:
            default = DEFAULT_IDS.get(role) if self.kind == "llama" else None
            controls = default is not None and default < len(self.tokens) and self.types[default] == CONTROL
            return str(self.tokens[default]) if default is not None and controls else None
        if type(id_) is not int or not 0 <= id_ < len(self.tokens):
            raise self._refused(f"names the token {quoted(id_)} as its {role}, and has {len(self.tokens):,}")
        return str(self.tokens[id_])

    def _vocabulary(self) -> dict[str, int]:
        return {token: id_ for id_, token in enumerate(self.tokens)}

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self.values.get(f"{TOKENIZER}pre", "default")
        if name == "default":
            raise self._refused(
                f'does not say how it cuts text ("{TOKENIZER}pre"): convert the model anew, or take a newer file'
            )
        if name not in PRE_TOKENIZERS:
            raise self._refused(
                f"cuts text in the way {quoted(name)}, which is not known here; run the model from its own files"
            )
        return PRE_TOKENIZERS[name]

    def _byte_level(self) -> Fast:
        words = self._pre_tokenizer()
        fast = Fast(models.BPE(self._vocabulary(), self._stated_merges(), ignore_merges=words.whole_words))
        fast.pre_tokenizer = words.build()
        if words.composed:
            fast.normalizer = normalizers.NFC()
        fast.decoder = decoders.ByteLevel()
        return fast

    def _stated_merges(self) -> list[tuple[str, str]]:
        found, known = [], self._vocabulary()
        for merge in self._list("merges", str):
            left, between, right = merge.partition(" ")
            if not between or " " in right:
                raise self._refused("has a merge that is not of two parts")
            if left not in known or right not in known or left + right not in known:
                raise self._refused(f"has the merge {quoted(merge)}, of which a part or the whole is no token")
            found.append((left, right))
        return found

    def _joined_pieces(self) -> Fast:
        """Gemma 4 and Sarvam: BPE with listed merges over text in which "▁" stands for a space."""
        model = models.BPE(
            self._vocabulary(), self._stated_merges(), unk_token=self._named("unknown"), fuse_unk=True, byte_fallback=True
        )
        fast = Fast(model)
        fast.normalizer = normalizers.Replace(" ", "▁")
        if self.kind == SARVAM:
            fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
        fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        return fast

    def _sentence_pieces(self) -> Fast:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self._refused(f"has {len(self.tokens):,} tokens and {len(scores):,} scores of them")
        vocabulary = self._vocabulary()
        plain = {
            token: score for token, score, type_ in zip(self.tokens, scores, self.types, strict=True) if type_ == NORMAL
        }
        unknown = self._named("unknown") or next(
            (token for token, type_ in zip(self.tokens, self.types, strict=True) if type_ == UNKNOWN), None
        )
        if _is_of_chances(plain.values()):
            if unknown is None:
                raise self._refused("names no token for what is unknown, which a unigram model needs")
            fast = Fast(models.Unigram(self._chances(scores), vocabulary[unknown], byte_fallback=True))
        else:
            merges = _merges(vocabulary, plain)
            fast = Fast(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        prefix = self.values.get(f"{TOKENIZER}add_space_prefix", True)
        steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
        fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
        fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
        return fast

    def _chances(self, scores: list[float]) -> list[tuple[str, float]]:
        """Tokens and scores of a unigram model. Special tokens are found before it is asked; their scores must not be the
        lowest, which decides what an unknown character costs."""
        if not all(map(math.isfinite, scores)):
            raise self._refused("has a score that is not a finite number")
        least = min(score for score, type_ in zip(scores, self.types, strict=True) if type_ == NORMAL)
        return [
            (token, score if type_ in (NORMAL, BYTE) else least if type_ == UNUSED else 0.0)
            for token, score, type_ in zip(self.tokens, scores, self.types, strict=True)
        ]

    def _add_special(self, fast: Fast) -> None:
        phi_3 = self.values.get("general.architecture") in PHI_3 and self.kind == "llama"
        special, users = [], []
        for token, type_ in zip(self.tokens, self.types, strict=True):
            listed = type_ in (CONTROL, UNKNOWN, USER_DEFINED)
            # Phi 3's files list its special token "</s>" as an ordinary one.
            stripping = phi_3 and (listed or token == "</s>") and token not in PHI_3_KEEPING_SPACES
            if type_ in (CONTROL, UNKNOWN):
                special.append(AddedToken(token, special=True, rstrip=stripping))
            elif listed or stripping:
                users.append(AddedToken(token, normalized=False, rstrip=stripping))
        fast.add_special_tokens(special)
        fast.add_tokens(users)

    def _frame(self, fast: Fast, first: str | None, last: str | None) -> None:
        """Add the first and last token of every text."""
        if first is None and last is None:
            return
        pieces = [*([first] if first else []), "$A", *([last] if last else [])]
        ids = [(token, self.tokens.index(token)) for token in {first, last} if token is not None]
        frame = processors.TemplateProcessing(single=" ".join(pieces), special_tokens=ids)
        byte_level = processors.ByteLevel(trim_offsets=False)
        fast.post_processor = processors.Sequence([byte_level, frame]) if self.kind == "gpt2" else frame


def _is_of_chances(scores: Collection[float]) -> bool:
    """Whether these are the scores of a unigram model, which are logarithms of chances. llama.cpp's converter writes it as
    it writes byte pairs, whose scores are whole numbers: their ranks."""
    return 2 * sum(not score.is_integer() for score in scores) > len(scores)


def _merges(vocabulary: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Merges equivalent to sentencepiece, which joins the neighbours whose union has the best score: every split of every
    token into two tokens, by falling score of the token, and ties as transformers orders them, the longest left part first.

    llama.cpp's converter has no scores where a model has only a tokenizer.json (``LlamaHfVocab``): it writes one number for
    all tokens. Ids are in the order of merges then, as sentencepiece and tokenizers number what they train.
    """
    if len(set(scores.values())) == 1:
        scores = {token: -float(vocabulary[token]) for token in scores}
    found: list[tuple[float, int, int, str, str]] = []
    for whole, score in scores.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in scores and right in scores:
                found.append((-score, -len(left), -len(right), left, right))
    # Stable, so that what is left of ties is in the order of ids.
    found.sort(key=lambda each: each[:3])
    return [(left, right) for *_, left, right in found]
