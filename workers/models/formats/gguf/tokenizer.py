"""The tokenizer inside a GGUF file, as transformers would have loaded it from the model's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.gguf.end_tokens import CONTROL, TOKENIZER
from outrider.workers.models.formats.gguf.file import read_gguf
from outrider.workers.models.headers import quoted

NORMAL, UNKNOWN, USER_DEFINED, UNUSED, BYTE = 1, 2, 4, 5, 6
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE_DIGITS = _WORDS + r"\p{N}{1,3}" + _REST
# By the name of a way to cut text into words: a pattern, or None for GPT-2's own.
CUTS: dict[str, str | None] = {
    "gpt-2": None,
    "mpt": None,
    "llama-bpe": _THREE_DIGITS,
    "smaug-bpe": _THREE_DIGITS,
    "dbrx": _THREE_DIGITS,
    "chatglm-bpe": _THREE_DIGITS,
    "glm4": _THREE_DIGITS,
    "qwen2": _WORDS + r"\p{N}" + _REST,
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "seed-coder": _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": _TEKKEN,
    "gpt-4o": _GPT_4O,
    "minimax-m2": _GPT_4O,
}
ALIKE = {
    "llama-v3": "llama-bpe",
    "llama3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "stablelm2": "qwen2",
    "hunyuan": "qwen2",
    "lfm2": "llama-bpe",
    "cohere2moe": "tiny_aya",
    "gpt2": "gpt-2",
    "phi-2": "gpt-2",
    "exaone4": "gpt-2",
    "olmo": "mpt",
    "hunyuan-dense": "deepseek-v3",
}
# Digits by themselves, then GPT-2's cut.
DIGITS = ("starcoder", "refact", "smollm", "command-r", "exaone")
# Several cuts after one another, each of what the one before left together.
IN_TURN = {
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    # Digits in threes from the last.
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O),
}
FALCON = "falcon"
# Text that may be written in several ways is brought into one of them first.
NORMALISED = ("qwen2", "qwen35", "mpt", "command-r", "tiny_aya")
WHOLE_WORDS_FIRST = ("llama-bpe", "smaug-bpe", "glm4", "tekken", "gpt-4o")
# Where the file does not say, texts of these begin with the first token (bos), as in llama.cpp.
WITH_A_FIRST = ("llama-bpe", "tekken")


def gguf_tokenizer(path: Path) -> Any:
    """One of transformers' tokenizers; a ModelError where the file's is of a kind that is not known here."""
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

    def _refused(self, what: str) -> ModelError:
        return ModelError(f"the tokenizer of {self.path} {what}")

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self.values.get(TOKENIZER + key, [])
        if not isinstance(value, list) or not all(type(each) is kind for each in value):
            raise self._refused(f"has a {quoted(TOKENIZER + key)} that is no list of the right kind")
        return value

    def tokenizer(self) -> Any:
        kind = self.values.get(f"{TOKENIZER}model")
        makers = {"gpt2": self._byte_level, "llama": self._sentence_pieces, "gemma4": self._joined_pieces}
        if kind not in makers:
            raise self._refused(f"is of the kind {quoted(kind)}; {', '.join(makers)} are known")
        fast = makers[kind]()
        self._add_special(fast)
        starts = self.values.get(f"{TOKENIZER}add_bos_token", kind != "gpt2" or self._cut() in WITH_A_FIRST)
        ends = self.values.get(f"{TOKENIZER}add_eos_token", False)
        self._frame(fast, self._named("bos") if starts else None, self._named("eos") if ends else None)
        names = {f"{role}_token": self._named(role) for role in ("bos", "eos")}
        names |= {"unk_token": self._named("unknown"), "pad_token": self._named("padding")}
        template = self.values.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise self._refused("has a chat template that is no text")
        return PreTrainedTokenizerFast(
            tokenizer_object=fast,
            clean_up_tokenization_spaces=False,
            chat_template=template,
            **{role: name for role, name in names.items() if name is not None},
        )

    def _named(self, role: str) -> str | None:
        id_ = self.values.get(f"{TOKENIZER}{role}_token_id")
        if id_ is None:
            return None
        if type(id_) is not int or not 0 <= id_ < len(self.tokens):
            raise self._refused(f"names the token {quoted(id_)} as its {role}, and has {len(self.tokens):,}")
        return str(self.tokens[id_])

    def _vocabulary(self) -> dict[str, int]:
        return {token: id_ for id_, token in enumerate(self.tokens)}

    def _cut(self) -> str:
        name = str(self.values.get(f"{TOKENIZER}pre", "default"))
        return ALIKE.get(name, name)

    def _byte_level(self) -> Fast:
        cut = self._cut()
        known = (*CUTS, *DIGITS, *IN_TURN, FALCON)
        if cut not in known:
            raise self._refused(
                f"cuts text in the way {quoted(cut)}, which is not known here; {', '.join(sorted(known))} are"
            )
        model = models.BPE(self._vocabulary(), self._stated_merges(), ignore_merges=cut in WHOLE_WORDS_FIRST)
        fast = Fast(model)
        fast.pre_tokenizer = pre_tokenizers.Sequence(_steps(cut))
        if cut in NORMALISED:
            fast.normalizer = normalizers.NFC()
        fast.decoder = decoders.ByteLevel()
        return fast

    def _stated_merges(self) -> list[tuple[str, str]]:
        found = []
        for merge in self._list("merges", str):
            left, between, right = merge.partition(" ")
            if not between or " " in right:
                raise self._refused("has a merge that is not of two parts")
            found.append((left, right))
        return found

    def _joined_pieces(self) -> Fast:
        """Gemma 4's: spaces are letters, and unions are listed as byte-level tokenizers list theirs."""
        model = models.BPE(
            self._vocabulary(), self._stated_merges(), unk_token=self._named("unknown"), fuse_unk=True, byte_fallback=True
        )
        fast = Fast(model)
        fast.normalizer = normalizers.Replace(" ", "▁")
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
        merges = _merges(vocabulary, plain)
        fast = Fast(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        prefix = self.values.get(f"{TOKENIZER}add_space_prefix", True)
        steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
        fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
        fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
        return fast

    def _add_special(self, fast: Fast) -> None:
        named = list(zip(self.tokens, self.types, strict=True))
        fast.add_special_tokens([AddedToken(token, special=True) for token, type_ in named if type_ in (CONTROL, UNKNOWN)])
        fast.add_tokens([AddedToken(token, normalized=False) for token, type_ in named if type_ == USER_DEFINED])

    def _frame(self, fast: Fast, first: str | None, last: str | None) -> None:
        """What every text begins and ends with."""
        if first is None and last is None:
            return
        pieces = [*([first] if first else []), "$A", *([last] if last else [])]
        ids = [(token, self.tokens.index(token)) for token in {first, last} if token is not None]
        frame = processors.TemplateProcessing(single=" ".join(pieces), special_tokens=ids)
        byte_level = self.values.get(f"{TOKENIZER}model") == "gpt2"
        fast.post_processor = (
            processors.Sequence([processors.ByteLevel(trim_offsets=False), frame]) if byte_level else frame
        )


def _steps(cut: str) -> list[Any]:
    """What cuts a text into words, whose bytes are letters then."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt_2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if cut == FALCON:
        digits = [
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
        return [pre_tokenizers.Punctuation("contiguous"), gpt_2, *digits]
    if cut in DIGITS:
        return [pre_tokenizers.Digits(individual_digits=True), gpt_2]
    pattern = CUTS.get(cut)
    patterns = IN_TURN.get(cut, () if pattern is None else (pattern,))
    return [*(pre_tokenizers.Split(Regex(each), "isolated") for each in patterns), plain if patterns else gpt_2]


def _merges(vocabulary: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """sentencepiece joins the two neighbours whose union has the best score: the unions, the best first."""
    found: list[tuple[float, int, int, str, str]] = []
    for whole, score in scores.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in scores and right in scores:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
