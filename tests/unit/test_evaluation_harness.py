"""`python examples/evaluation_harness.py` without the harness: the jobs that it runs, and the answers that it returns."""

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
TOLD: dict[str, Any] = {
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


# A tokenizer that puts a token before a text.
BEGUN = {
    "tokens": ["<s>", *TOLD["tokens"]],
    "text_offset": [0, *TOLD["text_offset"]],
    "token_logprobs": [None, -4.0, *TOLD["token_logprobs"][1:]],
    "top_logprobs": [None, {"a": -4.0}, *TOLD["top_logprobs"][1:]],
}


class Jobs:
    """In the place of ``outrider.run``."""

    def __init__(self) -> None:
        self.rows: list[list[dict[str, Any]]] = []
        self.options: list[dict[str, Any]] = []
        self.told: dict[str, Any] = TOLD

    def run(self, rows: list[dict[str, Any]], **options: Any) -> Any:
        self.rows.append(rows)
        self.options.append(options)
        records = [types.SimpleNamespace(logprobs=self.told, text="answer") for _ in rows]
        return types.SimpleNamespace(errors=lambda: iter(()), results=lambda: iter(records))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    made = Jobs()
    monkeypatch.setattr(outrider, "run", made.run)
    return made


def asked(*arguments: Any) -> Any:
    return types.SimpleNamespace(args=arguments)


def test_requests_become_one_job(harness: dict[str, Any], jobs: Jobs) -> None:
    model = harness["Outrider"](model="m")
    assert model.loglikelihood([asked("a b", " c!"), asked("a b c", "!"), asked("a ", "b c!")]) == [
        (-2.5, False),
        (-0.5, True),
        (-3.5, False),
    ]
    assert jobs.rows[0][0] == {"id": "0", "prompt": "a b c!", "echo": True, "logprobs": 1, "max_tokens": 0}
    assert model.generate_until([asked("x", {"until": "\n", "max_gen_toks": 5})]) == ["answer"]
    assert jobs.rows[1] == [{"id": "0", "prompt": "x", "stop": ["\n"], "max_tokens": 5, "temperature": 0.0}]


def test_a_text_without_a_context_is_scored_from_its_first_token_on_or_refused(harness: dict[str, Any], jobs: Jobs) -> None:
    """Left out, a first token would count as one of which the model was sure."""
    model = harness["Outrider"](model="m")
    for ask in (model.loglikelihood, lambda requests: model.loglikelihood_rolling([asked("a b c!")])):
        with pytest.raises(ValueError, match="'a b c!' has no context, and nothing is known of a text's first token"):
            ask([asked("", "a b c!")])
    with pytest.raises(ValueError, match=r"' ' has no context|' a b c!' has no context"):
        model.loglikelihood([asked(" ", " a b c!")])
    jobs.told = BEGUN
    assert model.loglikelihood([asked("", "a b c!"), asked("a b", " c!")]) == [(-7.5, False), (-2.5, False)]
    assert model.loglikelihood_rolling([asked("a b c!")]) == [-7.5]
    jobs.told = TOLD
    model = harness["Outrider"](model="m", prefix="a")
    assert model.loglikelihood_rolling([asked(" b c!")]) == [-3.5]
    assert jobs.rows[-1][0]["prompt"] == "a b c!"


def test_a_character_of_several_tokens_is_no_token_before_the_text(harness: dict[str, Any], jobs: Jobs) -> None:
    jobs.told = {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9"],
        "text_offset": [0, 0],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {}],
    }
    with pytest.raises(ValueError, match="has no context"):
        harness["Outrider"](model="m").loglikelihood_rolling([asked("\u00e9")])


def test_what_lies_within_a_token_of_the_context_is_refused(harness: dict[str, Any], jobs: Jobs) -> None:
    with pytest.raises(ValueError, match="'c' lies within a token that begins in its context"):
        jobs.told = {
            "tokens": ["a", "bc"],
            "text_offset": [0, 1],
            "token_logprobs": [None, -1.0],
            "top_logprobs": [None, {}],
        }
        harness["Outrider"](model="m").loglikelihood([asked("ab", "c")])


def test_what_a_task_asks_of_generation_is_asked_of_the_job_or_refused(harness: dict[str, Any], jobs: Jobs) -> None:
    model = harness["Outrider"](model="m")
    given = {"do_sample": True, "temperature": 0.8, "top_p": 0.5, "top_k": 5, "repetition_penalty": 1.3, "until": None}
    model.generate_until([asked("x", given)])
    assert jobs.rows[0] == [
        {
            "id": "0",
            "prompt": "x",
            "stop": [],
            "max_tokens": 256,
            "temperature": 0.8,
            "top_p": 0.5,
            "top_k": 5,
            "repetition_penalty": 1.3,
        }
    ]
    sampling: list[tuple[dict[str, Any], float]] = [
        ({"do_sample": False, "temperature": 0.8}, 0.0),
        ({"temperature": 0.8}, 0.8),
        ({"do_sample": True}, 1.0),
        ({}, 0.0),
    ]
    for how, temperature in sampling:
        model.generate_until([asked("x", how)])
        assert jobs.rows[-1][0]["temperature"] == temperature
    with pytest.raises(ValueError, match="generation_kwargs: outrider does not know num_beams, typical_p; leave it out"):
        model.generate_until([asked("x", {"typical_p": 0.9, "num_beams": 4})])


def test_jobs_of_two_models_lie_in_two_directories(harness: dict[str, Any], jobs: Jobs, tmp_path: Path) -> None:
    for options in ({"model": "a"}, {"model": "b"}, {"model": "a", "precision": "w4a8"}, {"model": "a"}):
        harness["Outrider"](tmp_path, **options).generate_until([asked("x", {})])
        assert {name: value for name, value in jobs.options[-1].items() if name != "out"} == options
    first, second, third, again = (each["out"] for each in jobs.options)
    assert len({first, second, third}) == 3 and again == first
    assert first.parent == tmp_path
