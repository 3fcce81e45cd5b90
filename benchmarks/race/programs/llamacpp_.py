"""llama.cpp in the race, by its own programs: ``llama-batched-bench``, and assisted ``llama-speculative-simple``.

``kind`` is the folder of the programs. The first one's prompts are random tokens, as many as ours have, and it does not
tell what it writes; the second one is given our prompts as texts, one at a time. Seconds are those that they print.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from llama_gguf import convert
from protocol import LOOKUP, Answer, Request, Setup, candidates, numbered_modes, serve

# The tokens of one pass over prompts.
PASS = "-b 512 -ub 512"
GREEDY = "--temp 0 --ignore-eos"
# Of its kinds of lookup and their lengths (2, 3, 4) the best on HumanEval: 65 tokens/s where the others had 42 to 62.
NGRAM = 2
DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
ENCODED = re.compile(r"encoded\s+(\d+) tokens in\s+([\d.]+) seconds")
ACCEPTED = re.compile(r"n_accept\s+=\s+(\d+)")


class LlamaCpp:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._programs = Path(setup.kind)
        self._target, self._draft = (
            str(convert(Path(path), Path(setup.work) / f"{Path(path).name}-q4_0.gguf"))
            for path in (setup.target, setup.draft)
        )
        self.modes = {"plain": setup.most_rows, **dict.fromkeys(numbered_modes(setup.draft_tokens), 1)}
        found = re.search(r"version: (.+)", self._run("llama-batched-bench", "--version"))
        version = found[1] if found else "of unknown version"
        assisted = "; ".join(f"{mode}: {' '.join(self._by(mode))}" for mode in numbered_modes(setup.draft_tokens))
        flags = f"{' '.join(self._threads())} (plain: {PASS}; assisted: {GREEDY}; {assisted})"
        self.about = f"llama.cpp {version}, Q4_0, head in Q8_0, its own programs, {flags}"

    def answer(self, request: Request) -> Answer:
        if request.mode == "plain":
            return self._batch(len(request.prompts), len(request.prompts[0]), request.new_tokens)
        answers = [self._speculate(text, self._by(request.mode), request.new_tokens) for text in request.texts]
        seconds, decoded, decoding, rounds = map(sum, zip(*answers, strict=True))
        return Answer(seconds, int(decoded), decoding, None, decoded / rounds)

    def _batch(self, rows: int, prompt: int, new_tokens: int) -> Answer:
        context = rows * (prompt + new_tokens + 8)
        sizes = f"-c {context} {PASS} -npp {prompt} -ntg {new_tokens} -npl {rows} --output-format jsonl"
        printed = self._run("llama-batched-bench", "-m", self._target, *self._threads(), *sizes.split())
        [line] = [json.loads(line) for line in printed.splitlines() if line.startswith("{") and '"t_tg"' in line]
        return Answer(line["t"], rows * new_tokens, line["t_tg"], None, 1.0)

    def _by(self, mode: str) -> list[str]:
        """The options that say what candidates come from."""
        most = candidates(mode)
        if mode.startswith(LOOKUP):
            return f"--spec-type ngram-simple --spec-ngram-simple-size-n {NGRAM} --spec-ngram-simple-size-m {most}".split()
        return ["-md", self._draft, *f"--spec-type draft-simple --spec-draft-n-max {most}".split()]

    def _speculate(self, text: str, by: list[str], new_tokens: int) -> tuple[float, int, float, int]:
        """Seconds, tokens that were written, in how many seconds, and rounds."""
        sizes = f"-c {self._setup.longest} -n {new_tokens} {GREEDY}".split()
        words = ("-m", self._target, *self._threads(), *sizes, *by, "-p", text)
        printed = self._run("llama-speculative-simple", *words)
        decoded, encoded, accepted = (pattern.search(printed) for pattern in (DECODED, ENCODED, ACCEPTED))
        if decoded is None or encoded is None or accepted is None:
            raise SystemExit(f"llama-speculative-simple did not say what it took: {printed[-300:]}")
        written, seconds = int(decoded[1]), float(decoded[2])
        return float(encoded[2]) + seconds, written, seconds, written - int(accepted[1])

    def _threads(self) -> list[str]:
        return ["-t", str(self._setup.threads), "-tb", str(self._setup.threads)]

    def _run(self, program: str, *words: str) -> str:
        ended = subprocess.run([str(self._programs / program), *words], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{program} ended with {ended.returncode}: {ended.stderr.strip()[-300:]}")
        print(ended.stderr[-2000:], file=sys.stderr)
        return ended.stdout + ended.stderr


if __name__ == "__main__":
    serve(LlamaCpp)
