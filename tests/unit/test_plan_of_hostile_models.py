"""``outrider topology --plan`` looks at weight files with the care that a run has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from native_models import save_tiny
from test_model_choice import Willing
from typer.testing import CliRunner

from outrider.runner.cli.main import app
from outrider.workers.errors import ModelError
from outrider.workers.models import preparation
from outrider.workers.models.model_info import read_model_info

KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pipe": (os.mkfifo, "is a pipe"),
    "a directory": (Path.mkdir, "is a directory"),
    "a loop": (lambda file: file.symlink_to(file.name), "Too many levels"),
    "a link to nowhere": (lambda file: file.symlink_to("gone"), "No such file"),
    "garbage": (lambda file: file.write_bytes(b"garbage"), "is not a whole safetensors file"),
    "nothing": (lambda file: None, "holds no weights"),
}


class InPlace(Willing):
    """A tokenizer process that is this one."""

    def __enter__(self) -> InPlace:
        return self

    def __exit__(self, *_: object) -> None: ...

    def prepare_pair(self, target: str, draft: str, say: Callable[[str], None]) -> Any:
        return preparation.prepare_pair(target, draft)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("whole") / "model")


@pytest.mark.parametrize("option", ["--model", "--draft"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_none_are_a_sentence(
    kind: str, option: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.runner.job.tokenizer_process.TokenizerProcess", InPlace)
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
