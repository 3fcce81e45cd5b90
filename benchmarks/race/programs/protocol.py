"""How the race talks to an engine's program: JSON lines over standard input and output, by the standard library alone.

A program calls ``serve`` with its class. First line in: the setup. First line out: what is to be known of it. Then one
request a line, a batch of rows to be written in one of its modes, and one answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

LOOKUP = "lookup "
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Setup:
    """``longest`` is a row's, in tokens. ``work`` keeps conversions. ``kind`` is what a program that can run in several
    ways is to be (a precision, say), and ``draft_tokens`` the numbers of candidates a round of its assisted modes.
    """

    target: str
    draft: str
    threads: int
    kind: str
    draft_tokens: list[int]
    longest: int
    most_rows: int
    work: str


@dataclass(frozen=True)
class Request:
    """Prompts all have one length. ``texts`` are the same prompts for programs that take no token ids.

    ``again`` says that prompts come more than once: then nothing may be kept of what was written for them.
    """

    mode: str
    prompts: list[list[int]]
    texts: list[str]
    new_tokens: int
    again: bool


@dataclass(frozen=True)
class Answer:
    """``seconds`` is the time of all, prompts included; ``decoded`` tokens were written in ``decoding_seconds``, in which
    no prompt was read. ``tokens`` are the rows' (None where a program does not tell), ``a_round`` a row's tokens a pass.
    """

    seconds: float
    decoded: int
    decoding_seconds: float
    tokens: list[list[int]] | None
    a_round: float | None


class Engine(Protocol):
    """``modes`` are ``plain`` and assisted ones, each with the largest batch that it can do.

    ``k=3`` and ``auto`` are by the draft, ``lookup k=3`` by n-grams of the row's own text, ``auto+suffix`` by both.
    """

    modes: dict[str, int]
    about: str

    def __init__(self, setup: Setup) -> None: ...

    def answer(self, request: Request) -> Answer: ...


def serve(kind: type[Engine]) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever the libraries print goes where their complaints go.
    os.dup2(2, 1)

    def say(content: dict[str, Any]) -> None:
        out.write(json.dumps(content) + "\n")

    engine = kind(Setup(**json.loads(sys.stdin.readline())))
    say({"modes": engine.modes, "about": engine.about})
    for line in sys.stdin:
        say(asdict(engine.answer(Request(**json.loads(line)))))


def working_copy(folder: Path = HERE) -> str:
    """The commit that a folder's files are of, and a digest of what was changed since."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True).stdout

    try:
        commit, changes = git("describe", "--always", "--abbrev=10").decode().strip(), git("diff", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return "of no commit that is known"
    return f"at {commit}" + (f" and changes ({hashlib.sha256(changes).hexdigest()[:10]})" if changes else "")


def candidates(mode: str) -> int:
    """Of an assisted mode ``k=N`` or ``lookup k=N``; 0 for plain."""
    return 0 if mode == "plain" else int(mode.removeprefix(LOOKUP).removeprefix("k="))


def numbered_modes(counts: list[int]) -> list[str]:
    """By the draft, and by lookup."""
    return [f"{kind}k={count}" for kind in ("", LOOKUP) for count in counts]


def timed(generate: Callable[[int], tuple[list[list[int]], float | None]], new_tokens: int) -> Answer:
    """For a library that only tells when all is written: once for one token, once for all of them.

    The first one reads the prompts and writes a token a row, the second does the same and writes the others.
    """
    started = time.perf_counter()
    generate(1)
    between = time.perf_counter()
    tokens, a_round = generate(new_tokens)
    seconds = time.perf_counter() - between
    return Answer(seconds, len(tokens) * (new_tokens - 1), seconds - (between - started), tokens, a_round)
