"""Chat templates that loop, grow or die cost their own conversation, and a few seconds."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.workers.errors import ModelError
from outrider.workers.models import templates
from outrider.workers.models.templates import Render, render_all

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(templates, "POLL_SECONDS", 0.02)


def of(text: str) -> Render:
    # What is constant is computed when a template is compiled, which is no time to be caught unprotected either.
    return lambda messages: str(ImmutableSandboxedEnvironment().from_string(text).render(messages=messages))


def only(kind: str, otherwise: str) -> Render:
    """A template that does its worst on one conversation only."""
    return of("{% if messages == 'bad' %}" + otherwise + "{% else %}<{{ messages }}>{% endif %}")


def test_what_a_template_writes() -> None:
    assert render_all(of("<{{ messages }}>"), ["a", "b"], "model") == [("<a>", ""), ("<b>", "")]
    assert render_all(of(""), [], "model") == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("worst", "refusal"),
    [
        ("{{ 'a' * 10 ** 10 }}", "asks for more than 1 GB of memory"),
        ("{{ [0] * 10 ** 10 }}", "asks for more than 1 GB of memory"),
        ("{{ 'a' * 10 ** 7 }}b", "makes 10,000,001 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the messages: maximum recursion depth"),
        ("{{ missing.attribute }}", "refuses the messages: 'missing' is undefined"),
        ("{{ range(10 ** 9) | list }}", "refuses the messages: Range too big"),
    ],
)
def test_the_others_are_written_all_the_same(worst: str, refusal: str) -> None:
    first, bad, last = render_all(only("bad", worst), ["a", "bad", "b"], "model")
    assert (first, last) == (("<a>", ""), ("<b>", ""))
    assert bad[0] == "" and refusal in bad[1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("worst", [LOOP, "{{ 10 ** (10 ** (messages | length * 3)) }}"])
def test_one_that_does_not_end_is_ended(impatient: None, worst: str) -> None:
    started = time.monotonic()
    first, bad, last = render_all(only("bad", worst), ["a", "bad", "b"], "model")
    assert (first, last) == (("<a>", ""), ("<b>", ""))
    assert bad == ("", "ran for more than 0.2 s, or died, on these messages")
    assert time.monotonic() - started < 5


def test_what_the_parent_holds_is_nothing_that_a_collection_in_the_fork_visits() -> None:
    def collected(messages: Any) -> str:
        return str(len(gc.get_objects()))

    held = [[number] for number in range(10_000)]
    assert int(render_all(collected, ["a"], "model")[0][0]) < len(held)


@pytest.mark.slow
@pytest.mark.parametrize("worst", [LOOP, "{{ 10 ** (10 ** 10) }}"])
def test_a_template_that_loops_for_all_is_named(impatient: None, worst: str) -> None:
    with pytest.raises(ModelError, match=r"the chat template of /models/x ran for more than 0.2 s.*it cannot be used"):
        render_all(of(worst), ["a"] * 100, "/models/x")


def test_a_rendering_process_that_dies_is_its_own_conversations_loss() -> None:
    def dies(messages: Any) -> str:
        if messages == "bad":
            import os

            os._exit(7)
        return str(messages)

    assert [text for text, _ in render_all(dies, ["a", "bad", "b"], "model")] == ["a", "", "b"]
