"""What the benchmark asks: short prompts, prompts of given lengths, and beginnings of Python functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from outrider.runner.job.tokenizer_process import Office
from outrider.workers.errors import UsageError
from outrider.workers.models.cards import ModelCard

TASKS = ("decode", "benchmark", "benchmark_code")
SHORT = (
    "The best way to learn a new language is",
    "What is the meaning of life?",
    "Once upon a time, in a small village by the sea,",
    "The three most important things in a kitchen are",
    "Explain how a bicycle stays upright.",
    "In the year 2050, most people will",
    "My favourite book is about a man who",
    "The difference between weather and climate is",
    "To repair a leaking tap you need",
    "Rivers run towards the sea because",
)
CODE = (
    'def is_palindrome(text: str) -> bool:\n    """Return whether the text reads the same in both directions."""\n',
    'def read_lines(path):\n    """Return the lines of a file without their line ends."""\n',
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number.\n\n    >>> fibonacci(7)\n    13\n    """\n',
    'def count_words(text: str) -> dict[str, int]:\n    """Count how often each word occurs in the text."""\n',
    'def merge(left: list[int], right: list[int]) -> list[int]:\n    """Merge two sorted lists into one sorted list."""\n',
    'class Stack:\n    """A stack of values: last in, first out."""\n\n    def __init__(self):\n',
    'def parse_version(text):\n    """Split a version such as "3.11.2" into a tuple of integers."""\n',
    'def gcd(a: int, b: int) -> int:\n    """The greatest common divisor of two positive numbers."""\n    while b:\n',
    'import argparse\n\n\ndef main():\n    """Print the size of every file that is named on the command line."""\n',
    'def flatten(nested):\n    """Yield the items of a list of lists, of any depth, from left to right."""\n',
)
SHORT_TOKENS, CODE_TOKENS, LONG_TOKENS = 30, 128, 60
LENGTHS = (256, 512, 1024, 1968)
TOKENS = (64, 128, 256, 512, 1024)
# From here on a prompt's own cost is what is looked at, and the classic tables write 60 tokens.
LONG_PROMPT = 1024


@dataclass(frozen=True, slots=True)
class Example:
    prompt: tuple[int, ...]
    new_tokens: int


def sizes(lengths: Sequence[int], new_tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Prompt length and new tokens of every example of ``benchmark``; what is not given is as in the classic tables."""
    return [
        (length, count)
        for length in lengths or LENGTHS
        for count in new_tokens or ((LONG_TOKENS,) if length >= LONG_PROMPT else TOKENS)
    ]


def examples(
    task: str, lengths: Sequence[int], new_tokens: Sequence[int], card: ModelCard, office: Office
) -> list[Example]:
    if task == "benchmark":
        asked = sizes(lengths, new_tokens)
        for length, count in asked:
            _check(length, count, card)
        text = _encoded(card, office, [_prose(max(length for length, _ in asked), card, office)])[0]
        return [Example(text[:length], count) for length, count in asked]
    if lengths:
        raise UsageError(f"--lengths chooses the prompts of --task benchmark, --task {task} has its own: leave it out")
    prompts, usual = (SHORT, SHORT_TOKENS) if task == "decode" else (CODE, CODE_TOKENS)
    made = [Example(prompt, count) for prompt in _encoded(card, office, list(prompts)) for count in new_tokens or (usual,)]
    for example in made:
        _check(len(example.prompt), example.new_tokens, card)
    return made


def _check(length: int, count: int, card: ModelCard) -> None:
    if length + count > card.context:
        prompts, new = card.context - count, card.context - length
        advice = f"prompts of at most {prompts:,}" if prompts > 0 else f"at most {max(new, 1):,} new tokens"
        raise UsageError(
            f"a prompt of {length:,} tokens and {count:,} new ones do not fit into {card.name}, which holds "
            f"{card.context:,}; ask for {advice}"
        )


def _prose(tokens: int, card: ModelCard, office: Office) -> str:
    """The bundled text, as often in a row as makes so many tokens."""
    text = (files("outrider.runner.bench") / "text.txt").read_text(encoding="utf-8")
    found = len(_encoded(card, office, [text])[0])
    return text * -(-tokens // max(1, found - 2))


def _encoded(card: ModelCard, office: Office, prompts: list[str]) -> list[tuple[int, ...]]:
    encoded = office.encode(card.path, prompts)
    for tokens in encoded:
        if isinstance(tokens, str):
            raise UsageError(f"{card.name}: {tokens}")
    return [tuple(map(int, tokens)) for tokens in encoded]
