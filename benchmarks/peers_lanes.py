"""The engines of the race as processes, and what each did in each of its modes."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).resolve().parent


@dataclass
class Entry:
    """A contestant's process."""

    name: str
    process: subprocess.Popen[str]
    modes: list[str] = field(default_factory=list)
    about: str = ""

    @classmethod
    def start(cls, name: str, python: Path, program: str, setup: dict[str, Any], log: Path) -> Self:
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w") as errors:
            process = subprocess.Popen(
                [str(python), str(HERE / "contestants" / program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        entry = cls(name, process)
        try:
            known = entry.ask(setup)
        except RuntimeError as error:
            raise RuntimeError(f"{error}; {last_line(log)}") from None
        entry.modes, entry.about = known["modes"], known["about"]
        return entry

    def ask(self, content: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(content) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        assert self.process.stdin is not None
        # One that has ended already cannot take what is left to be flushed.
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Lane:
    """One engine in one mode: seconds of each round, and by prompt what it wrote."""

    entry: Entry
    mode: str
    seconds: list[float] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    passes: int = 0
    written: int = 0
    unsteady: bool = False

    def run(self, prompts: list[list[int]], new_tokens: int) -> None:
        spent = 0.0
        for number, prompt in enumerate(prompts):
            answer = self.entry.ask({"mode": self.mode, "prompt": prompt, "new_tokens": new_tokens})
            if len(answer["tokens"]) != new_tokens:
                raise RuntimeError(f"it wrote {len(answer['tokens'])} tokens instead of {new_tokens}")
            spent += answer["seconds"]
            self.unsteady |= self.tokens.setdefault(number, answer["tokens"]) != answer["tokens"]
            self.passes += answer["passes"]
            self.written += new_tokens
        self.seconds.append(spent)


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:300]} (all of it in {log})" if lines else f"without a word ({log})"
