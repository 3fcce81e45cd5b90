"""``outrider topology --plan`` looks at weight files with the care that a run has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.runner.cli.main import app
from outrider.workers.errors import ModelError
from outrider.workers.models.model_info import weight_bytes

KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pipe": (os.mkfifo, "is a pipe"),
    "a directory": (Path.mkdir, "is a directory"),
    "a loop": (lambda file: file.symlink_to(file.name), "Too many levels"),
    "a link to nowhere": (lambda file: file.symlink_to("gone"), "No such file"),
    "garbage": (lambda file: file.write_bytes(b"garbage"), "is not a whole safetensors file"),
    "nothing": (lambda file: None, "holds no weights"),
}


@pytest.mark.parametrize("option", ["--model", "--draft"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_none_are_a_sentence(kind: str, option: str, tmp_path: Path) -> None:
    make, sentence = KINDS[kind]
    make(tmp_path / "model.safetensors")
    other = ["--model-bytes", "1000"] if option == "--draft" else []
    done = CliRunner().invoke(app, ["topology", "--plan", option, str(tmp_path), *other])
    assert isinstance(done.exception, ModelError), done.exception
    assert sentence in str(done.exception)


def test_a_model_that_is_a_loop_of_links(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(ModelError, match="is a link to nowhere, or to itself"):
        weight_bytes(str(loop))


def test_the_bundled_models_have_a_size() -> None:
    assert weight_bytes("pocket") > weight_bytes("pocket-draft") > 0
