"""GGUF files with a tokenizer only, and texts, for which llama.cpp's tokens were recorded (make_llama_cpp_tokens.py)."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
from tokenizers import pre_tokenizers

ANSWERS = Path(__file__).with_name("llama_cpp_tokens.json")
# Pre-tokenizers whose patterns llama.cpp approximates, while ours are those of the model's tokenizer.json.
APPROXIMATED = frozenset(
    {"tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tiny_aya", "cohere2moe", "kimi-k2", "youtu"}
    | {"afmoe", "superbpe", "laguna", "falcon", "deepseek-coder", "deepseek-llm"}
)
WRITTEN = [
    "It's 1234567 12 x123y I'M we'LL DON'T it\u2019s x're 'Ve",
    "Hello, World! (ok)",
    "foo_bar+baz-=qux $5.00 <b>~ #1",
    "HelloWorld ABCdef camelCase \u00c9COLE\u00e9t\u00e9",
    "a  b   c    ",
    "  \n \n\n x\t\ty\r\n\r\nz \r",
    "a?\n b!!\r\n. /\n//",
    "\u4e2d\u6587\u5b57\u3068\u65e5\u672c\u8a9e\u30ab\u30bf\u30ab\u30ca\u3001",
    "\ud55c\uad6d\uc5b4\u3002\uff11\uff12\uff13\uff14 \u2167\u00b2\u00bd",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e20\u0e32\u0e29\u0e32 \u0ea5\u0eb2\u0ea7",
    "\u1781\u17d2\u1798 \u1019\u103c\u1014\u103a",
    "\u0639\u0631\u0628\u0649\u060c \u0663\u0664\u0665\u0666 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "e\u0301 q\u093f \u0308\u20e3",
    "\U0001f469\U0001f3fd\u200d\U0001f4bb\U0001f1e9\U0001f1ea \u20ac\u2122\u00b0\u2192\u221a \u200b\ufeff",
    "\u00a0x\u3000y\u2028z\x0b \x1c",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac",
    "\u13a0\uab70\u01c5\u212a \u017f",
    " and so on... (1990-2024), http://a.b/c?d=e&f",
    f"x{' ' * 11}y{' ' * 6}\n{' ' * 5}z{' ' * 3}",
]
PARTS = [
    *"aZq\u00e9\u00df\u0436\u0416\u05d0\u062a\u0915\u0e01\ud55c\u30fc\u4e2d\u3005\u0661\u00b2\u00bd\u0301\u093f'\u2019-_/.,!?($+\u20ac"
]
PARTS += ["\U0001f600", "'s", "'LL", "7", "12", "123", "45678", "Word", "word"]
SPACES = [" ", " ", " ", "  ", "\n", "\r\n", "\t", "\n\n", "\u00a0"]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>", "<unk>", "<|endoftext|>"]


def texts() -> list[str]:
    """Texts in many scripts: written ones, and random mixtures."""
    chosen = random.Random(7)
    return WRITTEN + ["".join(chosen.choices(PARTS + SPACES, k=chosen.randint(2, 12))) for _ in range(60)]


def texts_with_special_tokens() -> list[str]:
    chosen = random.Random(8)
    parts = ["the", "Hello", " ", "  ", " a", "b", "12", "3", "\n", "\u00e9", ".", *SPECIAL]
    return [*SPECIAL, *("".join(chosen.choices(parts, k=chosen.randint(2, 10))) for _ in range(60))]


@dataclass(frozen=True)
class Vocabulary:
    kind: str
    types: dict[str, int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)


MERGES = [
    "h e",
    "t he",
    "\u0120 the",
    "1 2",
    "\u0120 1",
    "12 3",
    "\u0120 \u0120",
    "l l",
    "H e",
    "\u0120 a",
    "\u010a \u010a",
]
TYPES = {"<unk>": 2, "<s>": 3, "</s>": 4, "<|endoftext|>": 3, "<|user|>": 3, "<|end|>": 4}


def byte_level() -> Vocabulary:
    """A byte-level vocabulary; ``Hello`` is a token that no merges lead to."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    types = TYPES | dict.fromkeys([*letters, *(merge.replace(" ", "") for merge in MERGES), "Hello"], 1)
    return Vocabulary("gpt2", types, merges=MERGES)


def sentence_pieces() -> Vocabulary:
    words = [
        "\u2581",
        "a",
        "b",
        "t",
        "h",
        "e",
        "l",
        "o",
        "H",
        "1",
        "2",
        ".",
        "th",
        "the",
        "\u2581the",
        "\u2581a",
        "He",
        "ll",
        "llo",
        "Hello",
    ]
    words += ["\u2581\u2581", "12", "\u25811"]
    types = TYPES | dict.fromkeys([f"<0x{byte:02X}>" for byte in range(256)], 6) | dict.fromkeys(words, 1)
    scores = [0.0] * (len(types) - len(words)) + [-float(rank) for rank in range(len(words))]
    return Vocabulary("llama", types, scores)


def joined_pieces() -> Vocabulary:
    """A vocabulary like sentencepiece's with listed merges; no merge joins a line end with other characters."""
    pairs = ["h e", "t he", "\u2581 the", "1 2", "\u2581 \u2581", "l l", "H e", "\u2581 a", "\n \n"]
    letters = {letter for pair in pairs for letter in pair.replace(" ", "")} | set("abo3.")
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *sorted(letters), *(pair.replace(" ", "") for pair in pairs)]
    types = TYPES | {token: 6 if token.startswith("<0x") else 1 for token in tokens}
    return Vocabulary("gpt2", types, merges=pairs)


# name -> (vocabulary, further metadata, architecture of the model).
CASES: dict[str, tuple[Vocabulary, dict[str, Any], str]] = {
    "bytes, Llama 3": (byte_level(), {"pre": "llama-bpe"}, "llama"),
    "bytes, Llama 3, no first": (byte_level(), {"pre": "llama-bpe", "add_bos_token": False}, "llama"),
    "bytes, GPT-2": (byte_level(), {"pre": "gpt-2"}, "llama"),
    "bytes, framed": (byte_level(), {"pre": "qwen2", "add_bos_token": True, "add_eos_token": True}, "llama"),
    "joined, Gemma 4": (joined_pieces(), {"pre": "gemma4"}, "llama"),
    "joined, Sarvam": (joined_pieces(), {"pre": "sarvam-moe"}, "llama"),
    "pieces": (sentence_pieces(), {}, "llama"),
    "pieces, framed": (sentence_pieces(), {"add_bos_token": False, "add_eos_token": True}, "llama"),
    "pieces, no space first": (sentence_pieces(), {"add_space_prefix": False}, "llama"),
    "pieces, Phi 3": (sentence_pieces(), {}, "phi3"),
}


def write_tokens(path: Path, vocabulary: Vocabulary, extra: dict[str, Any], architecture: str = "llama") -> Path:
    """Writes a GGUF file with the tokenizer and the keys that llama.cpp requires of every model, without tensors."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("Phi-3" if architecture == "phi3" else "Tokens")
    for count in (writer.add_context_length, writer.add_embedding_length, writer.add_block_count, writer.add_head_count):
        count(8)
    writer.add_feed_forward_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_token_list(list(vocabulary.types))
    writer.add_token_types(list(vocabulary.types.values()))
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    tokens = list(vocabulary.types)
    writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    for key, value in extra.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_string)(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def answers() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ANSWERS.read_text())
    return found
