"""GGUF files of Apertus: the numbers of its activation are metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_converter import Tensors, convert
from native_models import logits, open_native
from safetensors.torch import load_file
from tiny_models import tiny_model

from outrider.workers.errors import ModelError

KEYS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 96,
    "feed_forward_length": 208,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.key_length": 24,
    "attention.value_length": 24,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 24,
}
NUMBERS = ("alpha_n", "alpha_p", "beta", "eps")


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    tiny_model("apertus", rope_parameters=rope).save_pretrained(tmp_path)
    return tmp_path


def numbers_of(path: Path) -> dict[str, Any]:
    tensors = load_file(path / "model.safetensors")
    return {
        f"xielu.{name}": [tensors[f"model.layers.{layer}.mlp.act_fn.{name}"].float().item() for layer in range(2)]
        for name in NUMBERS
    }


def write(path: Path, numbers: dict[str, Any]) -> Path:
    def prepare(tensors: Tensors) -> Tensors:
        return {name: values for name, values in tensors.items() if ".act_fn." not in name}

    return convert(path, path / "model.gguf", "apertus", KEYS, prepare=prepare, others=numbers)


def test_a_file_computes_what_its_checkpoint_does(checkpoint: Path) -> None:
    numbers = numbers_of(checkpoint)
    assert len(set(numbers["xielu.alpha_n"])) == 2, "layers of one number would show nothing"
    path = write(checkpoint, numbers)
    wanted = logits(open_native(checkpoint, "fp32"))
    assert (logits(open_native(path, "fp32")) == wanted).all()
    assert (logits(open_native(path, "bf16")) == logits(open_native(checkpoint, "bf16"))).all()
    # One number is that of all layers.
    alike = {key: values[0] if len(set(values)) == 1 else values for key, values in numbers.items()}
    assert type(alike["xielu.eps"]) is float
    assert (logits(open_native(write(checkpoint, alike), "fp32")) == wanted).all()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"xielu.beta": [0.5]}, r"has 'xielu.beta': \[0.5\], where 2 values are needed"),
        ({"xielu.beta": [1, 2]}, r"has 'xielu.beta': \[1, 2\], where 2 values are needed"),
        ({"xielu.eps": None}, "has 'xielu.eps': None, where 2 values are needed"),
    ],
)
def test_numbers_that_are_not_there_are_refused(changed: dict[str, Any], said: str, checkpoint: Path) -> None:
    numbers = {key: value for key, value in (numbers_of(checkpoint) | changed).items() if value is not None}
    with pytest.raises(ModelError, match=said):
        open_native(write(checkpoint, numbers), "fp32")
