"""Pre-tokenizers: how a byte-level tokenizer splits text into words, by the name in a GGUF file (tokenizer.ggml.pre).

The names are llama.cpp's. The patterns are those of the models' own tokenizer.json where these are known, else llama.cpp's,
which approximates some: letters of either case outside of ASCII, marks, line ends of other kinds than "\\n".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

# A pattern whose matches become words, or a function that makes a step of the library.
Step = str | Callable[[], Any]


@dataclass(frozen=True)
class PreTokenizer:
    """``steps``: each splits the pieces of the one before."""

    steps: tuple[Step, ...]
    # Whether text is normalised to NFC first.
    composed: bool = False
    # Whether a word that is a token is taken as it is, without merges.
    whole_words: bool = False
    # Whether texts begin with the bos token if the file does not say, as in llama.cpp.
    begins: bool = False

    def build(self) -> Any:
        """The library's pre-tokenizer: splits text into words, and maps bytes to letters."""
        steps = [step() if callable(step) else pre_tokenizers.Split(Regex(step), "isolated") for step in self.steps]
        # GPT-2's own step maps bytes to letters as well (Falcon's steps split these further).
        if _gpt_2 not in self.steps:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


def _gpt_2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Digits(individual_digits=True)


def _runs_of_digits() -> Any:
    return pre_tokenizers.Digits(individual_digits=False)


def _single_punctuation() -> Any:
    return pre_tokenizers.Punctuation("isolated")


def _runs_of_punctuation() -> Any:
    return pre_tokenizers.Punctuation("contiguous")


def _lines() -> Any:
    """Splits before line ends: they begin the piece that follows them."""
    return pre_tokenizers.Split(Regex(r"(?:\r?\n)+(?!\r?\n)"), "merged_with_next")


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_WORDS = f"{_CONTRACTIONS}|{_LETTERS}"
_LLAMA_3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN_2 = _WORDS + r"\p{N}" + _REST
_QWEN_35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(after: str, digits: str, line_ends: str, not_of: str = "") -> str:
    """The pattern of words in capitals, lower case, or capitals before lower case. ``after`` is a pattern that ends each
    word; ``not_of`` excludes letters from words."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{not_of}]", f"[{_LOWER}{not_of}]"
    words = f"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{line_ends}]*" + _SPACES


_TEKKEN = _cased("", r"\p{N}", r"\r\n/")
_GPT_4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", r"\r\n/")
_KIMI = r"[\p{Han}]+|" + _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", r"\r\n", r"&&[^\p{Han}]")
_DEEPSEEK_WORDS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_3 = (r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_WORDS + r"[\r\n]*" + _SPACES)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters of Latin, Greek, Cyrillic and further scripts with two cases.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    r"\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    r"\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    r"\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    r"\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    r"\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    r"\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    r"\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
_BLOOM = r" ?[^(\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_YOUTU_SCRIPTS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    r"|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
# Trinity: digits in groups of three counted from the last digit, then runs of certain scripts. Its own patterns for digits
# begin where the last match ended, which not every library supports. Splitting by 510 digits first bounds the lookahead.
_AFMOE = (
    r"\p{Nd}{1,510}(?=(?:\p{Nd}{510})*(?!\p{Nd}))",
    r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))",
    r"(?:[\u4E00-\u9FFF\u3040-\u309F\u30A0-\u30FF\u3400-\u4DBF\uF900-\uFAFF\uFF65-\uFF9F\u2F00-\u2FDF]+|[\u0E00-\u0E7F]+"
    r"|[\u0E80-\u0EFF]+|[\u1780-\u17FF]+|[\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF]+|[\uAC00-\uD7AF\u1100-\u11FF]+)",
    _DEEPSEEK_WORDS + r"[\r\n]*" + _SPACES,
)
# K-EXAONE: words, and phrases of words with single spaces between them.
_PHRASES = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS_2_SPACES = "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s{1}"

_BY_GPT_2 = PreTokenizer((_gpt_2,))
_BY_NEOX = PreTokenizer((_gpt_2,), composed=True)
_BY_STARCODER = PreTokenizer((_single_digits, _gpt_2))
_BY_LLAMA_3 = PreTokenizer((_LLAMA_3,), whole_words=True, begins=True)
_BY_QWEN_2 = PreTokenizer((_QWEN_2,))
_BY_QWEN_2_COMPOSED = PreTokenizer((_QWEN_2,), composed=True)
_BY_DEEPSEEK_3 = PreTokenizer(_DEEPSEEK_3)
_BY_GPT_4O = PreTokenizer((_GPT_4O,), whole_words=True)
_BY_GLM_4 = PreTokenizer((_LLAMA_3,), whole_words=True)
# Digits in groups of three counted from the last digit, if a word boundary follows it.
_BY_COMMAND_A = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O), composed=True)
_BY_LING = PreTokenizer(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)
_BY_BLOOM = PreTokenizer((_BLOOM,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _BY_GPT_2,
    "gpt2": _BY_GPT_2,
    "phi-2": _BY_GPT_2,
    "exaone4": _BY_GPT_2,
    "trillion": _BY_GPT_2,
    "jais": _BY_GPT_2,
    "gigachat": _BY_GPT_2,
    "a.x-4.0": _BY_GPT_2,
    "mellum": _BY_GPT_2,
    "granite-docling": _BY_GPT_2,
    "mpt": _BY_NEOX,
    "olmo": _BY_NEOX,
    "starcoder": _BY_STARCODER,
    "refact": _BY_STARCODER,
    "smollm": _BY_STARCODER,
    "codeshell": _BY_STARCODER,
    "exaone": _BY_STARCODER,
    "minerva-7b": _BY_STARCODER,
    "mellum2": _BY_STARCODER,
    "command-r": PreTokenizer((_single_digits, _gpt_2), composed=True),
    "falcon": PreTokenizer((_runs_of_punctuation, _gpt_2, _runs_of_digits, "[0-9][0-9][0-9]")),
    "llama-bpe": _BY_LLAMA_3,
    "llama-v3": _BY_LLAMA_3,
    "llama3": _BY_LLAMA_3,
    "falcon3": _BY_LLAMA_3,
    "pixtral": _BY_LLAMA_3,
    "midm-2.0": _BY_LLAMA_3,
    "lfm2": _BY_LLAMA_3,
    "smaug-bpe": PreTokenizer((_LLAMA_3,), whole_words=True),
    "dbrx": PreTokenizer((_LLAMA_3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA_3,)),
    "glm4": _BY_GLM_4,
    "glm5": _BY_GLM_4,
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _WORDS + r"\p{N}+" + _REST), whole_words=True),
    "jais-2": PreTokenizer((_WORDS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + _JAIS_2_SPACES,)),
    "qwen2": _BY_QWEN_2_COMPOSED,
    "deepseek-r1-qwen": _BY_QWEN_2_COMPOSED,
    "stablelm2": _BY_QWEN_2_COMPOSED,
    "hunyuan": _BY_QWEN_2_COMPOSED,
    "f2llmv2": _BY_QWEN_2_COMPOSED,
    "megrez": _BY_QWEN_2,
    "kormo": _BY_QWEN_2,
    "grok-2": _BY_QWEN_2,
    "solar-open": _BY_QWEN_2,
    "laguna": PreTokenizer((_lines, _QWEN_2)),
    "qwen35": PreTokenizer((_QWEN_35,), composed=True),
    "seed-coder": PreTokenizer((_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES,)),
    "ufakzeka": PreTokenizer((_LETTERS + r"\p{N}" + _REST,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, begins=True),
    "gpt-4o": _BY_GPT_4O,
    "llama4": _BY_GPT_4O,
    "kanana2": _BY_GPT_4O,
    "talkie": _BY_GPT_4O,
    "minimax-m2": PreTokenizer((_GPT_4O,)),
    "tiny_aya": _BY_COMMAND_A,
    "cohere2moe": _BY_COMMAND_A,
    "kimi-k2": PreTokenizer((_KIMI,)),
    "bailingmoe": _BY_LING,
    "bailingmoe2": _BY_LING,
    "llada-moe": _BY_LING,
    "deepseek-v3": _BY_DEEPSEEK_3,
    "hunyuan-dense": _BY_DEEPSEEK_3,
    "hy_v4": _BY_DEEPSEEK_3,
    "joyai-llm": _BY_DEEPSEEK_3,
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_WORDS + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, _single_digits)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            _DEEPSEEK_LETTERS,
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            _single_digits,
        )
    ),
    "youtu": PreTokenizer((_YOUTU_SCRIPTS, _cased(f"{_CONTRACTIONS}?", r"\p{N}", r"\r\n/")), whole_words=True),
    "bloom": _BY_BLOOM,
    "poro-chat": _BY_BLOOM,
    "gpt3-finnish": _BY_BLOOM,
    "viking": PreTokenizer((_BLOOM, _single_digits)),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _single_digits,
            _single_punctuation,
            _gpt_2,
        ),
        begins=True,
    ),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "afmoe": PreTokenizer(_AFMOE),
    "exaone-moe": PreTokenizer((_PHRASES,), composed=True),
}
