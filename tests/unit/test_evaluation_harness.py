"""`python examples/evaluation_harness.py` without the harness itself: what it asks of a job, and makes of its answers."""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import outrider

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "evaluation_harness.py"
# Text, what the tokens are, and what the model thinks of them; after "a b" it would rather go on with "d".
TOLD = {
    "tokens": ["a", " b", " c", "!"],
    "text_offset": [0, 1, 3, 5],
    "token_logprobs": [None, -1.0, -2.0, -0.5],
    "top_logprobs": [None, {" b": -1.0}, {" c": -2.0, " d": -0.1}, {"!": -0.5}],
}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The example's names, over modules of lm_eval that have nothing in them."""
    names = {"lm_eval": (), "lm_eval.api": (), "lm_eval.api.instance": ("Instance",), "lm_eval.api.model": ("LM",)}
    for name, classes in (names | {"lm_eval.tasks": ("TaskManager",)}).items():
        module = types.ModuleType(name)
        for each in classes:
            setattr(module, each, type(each, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    return runpy.run_path(str(EXAMPLE))


def asked(*arguments: Any) -> Any:
    return types.SimpleNamespace(args=arguments)


def test_requests_become_one_job(harness: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[list[dict[str, Any]]] = []

    def run(rows: list[dict[str, Any]], **options: Any) -> Any:
        assert options == {"model": "m"}
        jobs.append(rows)
        records = [types.SimpleNamespace(logprobs=TOLD, text="answer") for _ in rows]
        return types.SimpleNamespace(errors=lambda: iter(()), results=lambda: iter(records))

    monkeypatch.setattr(outrider, "run", run)
    model = harness["Outrider"](model="m")
    assert model.loglikelihood([asked("a b", " c!"), asked("a b c", "!"), asked("a ", "b c!")]) == [
        (-2.5, False),
        (-0.5, True),
        (-3.5, False),
    ]
    assert jobs[0][0] == {"id": "0", "prompt": "a b c!", "echo": True, "logprobs": 1, "max_tokens": 0}
    assert model.loglikelihood_rolling([asked("a b c!")]) == [-3.5]
    assert model.generate_until([asked("x", {"until": "\n", "max_gen_toks": 5})]) == ["answer"]
    assert jobs[2] == [{"id": "0", "prompt": "x", "stop": ["\n"], "max_tokens": 5, "temperature": 0.0}]
