"""``outrider topology --plan`` looks at weight files with the care that a run has, and reads only their headers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
from built_once import CliRunner
from huggingface_hub import constants
from native_models import save_tiny
from typer.testing import Result

from outrider.runner.cli.main import app
from outrider.runner.job import tokenizer_process
from outrider.runner.job.tokenizer_process import PendingCall, PlanningProcess
from outrider.workers.errors import ModelError
from outrider.workers.models import model_info, preparation
from outrider.workers.models.model_info import read_model_info

KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pipe": (os.mkfifo, "is a pipe"),
    "a directory": (Path.mkdir, "is a directory"),
    "a loop": (lambda file: file.symlink_to(file.name), "Too many levels"),
    "a link to nowhere": (lambda file: file.symlink_to("gone"), "No such file"),
    "garbage": (lambda file: file.write_bytes(b"garbage"), "is not a whole safetensors file"),
    "nothing": (lambda file: None, "holds no weights"),
}


class InPlace(PlanningProcess):
    """A tokenizer process that is this one."""

    def _begin(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> PendingCall[Any]:
        answer: Future[Any] = Future()
        answer.set_result(function(*arguments, **options))
        return PendingCall(answer)


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "PlanningProcess", InPlace)
    monkeypatch.setattr(tokenizer_process, "_messages", mock.Mock(), raising=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("whole") / "model")


@pytest.mark.parametrize("option", ["--model", "--draft"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_none_are_a_sentence(kind: str, option: str, whole: Path, tmp_path: Path) -> None:
    model, (make, sentence) = Path(shutil.copytree(whole, tmp_path / "model")), KINDS[kind]
    (model / "model.safetensors").unlink()
    make(model / "model.safetensors")
    other = ["--model", "pocket"] if option == "--draft" else []
    done = CliRunner().invoke(app, ["topology", "--plan", option, str(model), *other])
    assert isinstance(done.exception, ModelError), done.exception
    assert sentence in str(done.exception)


def test_a_model_that_is_a_loop_of_links(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(ModelError, match="is a link to nowhere, or to itself"):
        read_model_info(str(loop))


def refused(*_: object, **options: object) -> Any:
    raise AssertionError("a plan does not do this")


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a hub that must not be asked."""
    local = huggingface_hub.snapshot_download
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refused)
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, local_files_only=False, **patterns: (local if local_files_only else refused)(
            name, local_files_only=True, **patterns
        ),
    )


def planned(*words: str) -> Result:
    return CliRunner().invoke(app, ["topology", "--json", "--per", "machine", "--replicas", "1", *words])


def roles(done: Result) -> list[str]:
    assert done.exit_code == 0, (done.output, done.exception)
    return [actor["role"] for actor in json.loads(done.stdout)["actors"]]


@pytest.mark.parametrize("draft", ["auto", "pocket-draft", "none"])
def test_a_plan_reads_no_weights(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_info, "digest", refused)
    done = planned("-m", "pocket", "--draft", draft)
    assert roles(done) == (["target"] if draft == "none" else ["target", "draft"]), done.output


def test_a_plan_tries_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "_native_refuses", lambda path: "it cannot")
    monkeypatch.setattr(tokenizer_process, "_hf_is_known", refused)
    done = planned("-m", "pocket", "--draft", "none")
    assert roles(done) == ["target"]
    assert "note: pocket runs on the hf engine" in done.stderr


def test_a_usual_draft_that_is_not_there_is_told_and_not_fetched(no_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "choose_draft", lambda target: "google/gemma-2-2b-it")
    done = planned("-m", "pocket")
    assert roles(done) == ["target"]
    assert done.stderr == (
        'note: this plan is without the usual draft: "google/gemma-2-2b-it" is not on this machine, and a plan downloads '
        "nothing, so its size is unknown: plan after a run has downloaded it, or give sizes with --model-bytes and "
        "--draft-bytes\n"
    )


@pytest.mark.parametrize("words", [["-m", "org/big"], ["-m", "pocket", "--draft", "org/big"]])
def test_a_model_that_is_named_and_not_there_is_refused(no_hub: None, words: list[str]) -> None:
    done = planned(*words)
    assert isinstance(done.exception, ModelError), done.exception
    assert str(done.exception).startswith('"org/big" is not on this machine, and a plan downloads nothing')
