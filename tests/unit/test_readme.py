"""README.md: the example's output is the bundled model's, and the page is no longer than 800 words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import outrider
from outrider.kernels.native import NativeFeed
from outrider.runner.job.journal import StoredRow
from outrider.runner.job.results import result_record
from outrider.workers.messages import ModelSpec, RowResult, Sampling
from outrider.workers.models.model_info import find
from outrider.workers.models.opening import open_model
from outrider.workers.models.tokenizer import Tokenizer

README = Path(__file__).resolve().parents[2] / "README.md"
MOST_WORDS = 800


def examples() -> list[str]:
    """The input line and the output line."""
    return re.findall(r"^```json\n(.*)\n```$", README.read_text(), re.M)


def test_it_can_be_read_in_five_minutes() -> None:
    assert len(README.read_text().split()) <= MOST_WORDS


def test_the_example_s_output_is_what_the_bundled_model_writes() -> None:
    given, shown = examples()
    row = json.loads(given)
    tokenizer = Tokenizer(find("pocket"))
    prompt = tuple(tokenizer.encode(row["prompt"]))
    written = greedy(prompt, row["max_tokens"])
    result = RowResult(
        key=0,
        tokens=written,
        text=tokenizer.decode(written),
        finish_reason="length",
        rounds=1,
        proposed=0,
        accepted=0,
        seconds=1.0,
    )
    stored = StoredRow(0, row["id"], 1, "completion", {"n": 1}, prompt)
    assert result_record(stored, [result], "pocket") == shown


def test_the_python_example_goes_beside_the_shell_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as it stands, and in a job directory of its own."""
    job, text = MagicMock(), README.read_text()
    monkeypatch.setattr(outrider, "run", job)
    [example] = re.findall(r"^```python\n((?:.*\n)*?)```$", text, re.M)
    exec(example, {})
    shell = "".join(re.findall(r"^```sh\n((?:.*\n)*?)```$", text, re.M))
    assert f"-o {job.call_args.kwargs['out']}" not in shell and "-o job" in shell


def greedy(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the target writes by itself, at the precision that it comes in."""
    model = open_model(ModelSpec(str(find("pocket")), "native", "fp32", threads=1)).engine.model  # type: ignore[attr-defined]
    row = model.open(Sampling(), len(prompt) + count)
    tokens: list[int] = []
    fed = list(prompt)
    while len(tokens) < count:
        [answer] = model.forward([NativeFeed(row, fed)])
        fed = answer.tokens
        tokens += fed
    model.close_row(row)
    return tuple(tokens)
