"""How the race talks to a contestant: JSON lines over standard input and output, and nothing but the standard library.

A contestant's program calls ``serve`` with its class. First line in: the setup. First line out: what is to be known of it.
Then one request a line, ``{"mode": …, "prompt": [ids], "new_tokens": n}``, and one answer: tokens, seconds and passes, the
passes of the target that yielded tokens (the one over the prompt included).
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Setup:
    """``draft_tokens`` are numbers of candidates a round, each an assisted mode; outrider has one mode, with its own number
    (None: as many as pay). ``work`` keeps conversions."""

    target: str
    draft: str
    threads: int
    precision: str
    draft_tokens: list[int]
    own_draft_tokens: int | None
    longest: int
    work: str


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    passes: int


class Contestant(Protocol):
    """``modes`` are ``plain`` and the assisted ones: ``k=3`` for 3 candidates a round, ``auto`` for as many as pay."""

    modes: list[str]
    about: str

    def __init__(self, setup: Setup) -> None: ...

    def generate(self, mode: str, prompt: list[int], new_tokens: int) -> Answer: ...


def serve(kind: type[Contestant]) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever the libraries print goes where their complaints go.
    os.dup2(2, 1)

    def say(content: dict[str, Any]) -> None:
        out.write(json.dumps(content) + "\n")

    contestant = kind(Setup(**json.loads(sys.stdin.readline())))
    say({"modes": contestant.modes, "about": contestant.about})
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        answer = contestant.generate(request["mode"], request["prompt"], request["new_tokens"])
        say({"seconds": time.perf_counter() - started, **asdict(answer)})


def candidates(mode: str) -> int:
    """Of an assisted mode ``k=N``; 0 for plain."""
    return 0 if mode == "plain" else int(mode.removeprefix("k="))
