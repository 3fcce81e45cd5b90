"""Long texts at the server: whoever asks beside them need not wait for their tokens."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
from silent_server import silent_server

from outrider.runner.job.prompts import BadRow
from outrider.runner.serve import host_child
from outrider.runner.serve.host_child import _Host
from outrider.runner.serve.long_texts import LONG_CHARACTERS, LongTexts, is_long
from outrider.workers.errors import JobChangedError

PATIENCE = 60.0
LONG = {"body": {"prompt": "a" * LONG_CHARACTERS + "b"}}
SHORT = {"body": {"prompt": "c"}}


@dataclass
class World:
    """A host whose admissions of long texts wait for ``go``; its answers are refusals, the last letter of the prompt."""

    monkeypatch: pytest.MonkeyPatch
    answers: SimpleQueue[dict[str, Any]] = field(default_factory=SimpleQueue)
    go: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    second: mock.Mock = field(default_factory=mock.Mock)

    def __post_init__(self) -> None:
        self.host: Any = _Host({"options": {"input": "-"}, "name": "small"}, silent_server(self.answers.put))
        self.host._models, self.host._driver = mock.Mock(), mock.Mock()
        self.host._models.target.path = "/models/small"
        self.host._tokenizer_process = mock.sentinel.first
        self.host._long_texts = LongTexts(self.second, self.host._models.target)
        self.monkeypatch.setattr(host_child, "admit_one", self._admit)

    def _admit(self, entry: dict[str, Any], number: int, spec: object, target: object, process: object) -> BadRow:
        if process is self.second:
            self.begun.set()
            assert self.go.wait(PATIENCE)
        else:
            assert process is mock.sentinel.first
        return BadRow(str(number), number, entry["body"]["prompt"][-1])

    def handle(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self.host._handle(message)
        self.turn()

    def turn(self) -> None:
        while not self.host._inbox.empty():
            self.host._inbox.get()()

    def answer(self) -> tuple[str, str]:
        said = self.answers.get(timeout=PATIENCE)
        return said["answer"], said["error"].sentence


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def asks(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {"ask": name, "entry": entry, "streamed": False}


def test_short_texts_do_not_wait_for_a_long_one(world: World) -> None:
    """They waited for 4 to 51 s, for as long as a prompt of 5 MB was being encoded."""
    world.handle(asks("long", LONG), asks("short", SHORT))
    assert world.answer() == ("short", "c")
    assert world.answers.empty()
    world.go.set()
    assert world.answer() == ("long", "b")


def test_a_client_that_goes_while_its_long_text_waits_costs_nothing(world: World) -> None:
    world.handle(asks("first", LONG), asks("second", LONG), asks("third", LONG))
    assert world.begun.wait(PATIENCE)
    world.handle({"take_back": "second"}, {"take_back": "first"})
    world.go.set()
    assert [world.answer()[0] for _ in range(2)] == ["first", "third"]
    world.host._long_texts.close()
    world.turn()
    # The first was being admitted: its row is withdrawn behind that.
    assert world.host._driver.withdraw_single.call_args_list == [mock.call("first")]


def test_a_client_that_goes_later_has_its_row_withdrawn(world: World) -> None:
    world.go.set()
    world.handle(asks("long", LONG))
    world.answer()
    world.handle({"take_back": "long"}, {"take_back": "other"})
    world.host._long_texts.close()
    world.host._texts.shutdown()
    world.turn()
    assert sorted(call.args[0] for call in world.host._driver.withdraw_single.call_args_list) == ["long", "other"]


def test_a_model_whose_files_have_changed_encodes_no_long_text(world: World) -> None:
    """The second process reads the tokenizer when the first long text comes; the model was loaded long before."""
    world.second.check_unchanged.side_effect = JobChangedError("the files of /models/small have changed")
    world.go.set()
    world.handle(asks("long", LONG))
    assert world.answer() == ("long", "the files of small have changed")
    world.second.check_unchanged.side_effect = None
    world.handle(asks("again", LONG), asks("more", LONG))
    assert [world.answer()[0] for _ in range(2)] == ["again", "more"]
    assert world.second.check_unchanged.call_args_list == [mock.call(world.host._models.target)] * 2, "once, where it fits"


@pytest.mark.parametrize(
    ("body", "long"),
    [
        ({"prompt": "a" * (LONG_CHARACTERS - 100), "n": 1, "echo": True, "stop": None}, False),
        ({"prompt": "a" * (LONG_CHARACTERS + 1)}, True),
        ({"prompt": [7] * (LONG_CHARACTERS + 1)}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 60_000}]}] * 2}, True),
        ({"messages": [{"role": "user", "content": "a" * 60_000}]}, False),
        ({"prompt": "a", "response_format": {"json_schema": {"enum": ["b" * 30] * 4000}}}, True),
    ],
)
def test_which_texts_are_long(body: dict[str, Any], long: bool) -> None:
    assert is_long({"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}) is long
