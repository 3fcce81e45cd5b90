"""The benchmark's prompts: short ones, ones of given lengths, and beginnings of Python functions.

``--task quantize``, as in the older tools, measures nothing and is mapped to ``outrider quantize``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.options.bench import BenchSpec
from outrider.runner.options.option import flag_of
from outrider.workers.errors import UsageError
from outrider.workers.models.model_info import ModelInfo

QUANTIZE = "quantize"
# Bits by the precision that the older tools quantised for, and (ALGORITHMS) by the algorithm if no precision is given.
BITS = {"w4abf16": 4, "w4a8": 4, "w8a8": 8, "w8af32": 8}
QUANTIZE_OPTIONS = ("model", "out", "calibration", "per", "wait_for_cores", "allow_pickle")
ALGORITHMS = {"awq": 4, "gptq": 4, "rtn": 4, "auto": 4, "smoothquant": 8}
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
# From this length on the classic tables measure the prompt, and generate LONG_TOKENS tokens.
LONG_PROMPT = 1024


@dataclass(frozen=True, slots=True)
class Example:
    prompt: tuple[int, ...]
    new_tokens: int


def sizes(lengths: Sequence[int], new_tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Prompt length and new tokens of every example of ``benchmark``; defaults are those of the classic tables."""
    return [
        (length, count)
        for length in lengths or LENGTHS
        for count in new_tokens or ((LONG_TOKENS,) if length >= LONG_PROMPT else TOKENS)
    ]


def examples(
    task: str, lengths: Sequence[int], new_tokens: Sequence[int], model_info: ModelInfo, tokenizer_process: TokenizerProcess
) -> list[Example]:
    if task == "benchmark":
        asked = sizes(lengths, new_tokens)
        for length, count in asked:
            _check(length, count, model_info)
        text = _encoded(
            model_info, tokenizer_process, [_prose(max(length for length, _ in asked), model_info, tokenizer_process)]
        )[0]
        return [Example(text[:length], count) for length, count in asked]
    if lengths:
        raise UsageError(f"--lengths chooses the prompts of --task benchmark, --task {task} has its own: leave it out")
    prompts, usual = (SHORT, SHORT_TOKENS) if task == "decode" else (CODE, CODE_TOKENS)
    made = [
        Example(prompt, count)
        for prompt in _encoded(model_info, tokenizer_process, list(prompts))
        for count in new_tokens or (usual,)
    ]
    for example in made:
        _check(len(example.prompt), example.new_tokens, model_info)
    return made


def quantize_options(spec: BenchSpec) -> dict[str, Any]:
    """The options of ``outrider quantize`` for ``outrider bench --task quantize``."""
    from outrider.runner.quality.quantize import METHODS

    measuring = sorted(
        name for name in spec.model_fields_set if name not in ("task", "algorithm", "precision", *QUANTIZE_OPTIONS)
    )
    if measuring:
        flag = flag_of(BenchSpec, measuring[0])
        raise UsageError(f"{flag} is for measuring, and --task quantize makes a checkpoint: leave it out")
    if spec.precision != "auto" and spec.precision not in BITS:
        raise UsageError(f'--precision: --task quantize makes {", ".join(BITS)}, got "{spec.precision}"')
    bits = ALGORITHMS[spec.algorithm] if spec.precision == "auto" else BITS[spec.precision]
    if spec.algorithm not in METHODS[bits]:
        known = ", ".join(METHODS[bits])
        raise UsageError(f"--algorithm: {spec.algorithm} is not for {bits} bits; choose one of {known}")
    out = spec.out or Path(f"{Path(spec.model).name}-{spec.algorithm}-int{bits}")
    taken = {name: getattr(spec, name) for name in QUANTIZE_OPTIONS if name in spec.model_fields_set}
    return taken | {"method": spec.algorithm, "bits": bits, "out": out}


def check_measuring(spec: BenchSpec) -> None:
    """Refuse options that only ``--task quantize`` has."""
    for name in ("algorithm", "out", "calibration"):
        if name in spec.model_fields_set:
            raise UsageError(f"--{name} is for --task quantize, --task {spec.task} makes no checkpoint: leave it out")


def _check(length: int, count: int, model_info: ModelInfo) -> None:
    if length + count > model_info.context:
        prompts, new = model_info.context - count, model_info.context - length
        advice = f"prompts of at most {prompts:,}" if prompts > 0 else f"at most {max(new, 1):,} new tokens"
        raise UsageError(
            f"a prompt of {length:,} tokens and {count:,} new ones do not fit into {model_info.name}, which holds "
            f"{model_info.context:,}; ask for {advice}"
        )


def _prose(tokens: int, model_info: ModelInfo, tokenizer_process: TokenizerProcess) -> str:
    """The bundled text, repeated until it has at least ``tokens`` tokens."""
    text = (files("outrider.runner.bench") / "text.txt").read_text(encoding="utf-8")
    found = len(_encoded(model_info, tokenizer_process, [text])[0])
    return text * -(-tokens // max(1, found - 2))


def _encoded(model_info: ModelInfo, tokenizer_process: TokenizerProcess, prompts: list[str]) -> list[tuple[int, ...]]:
    encoded = tokenizer_process.encode(model_info.path, prompts)
    for tokens in encoded:
        if isinstance(tokens, str):
            raise UsageError(f"{model_info.name}: {tokens}")
    return [tuple(map(int, tokens)) for tokens in encoded]
