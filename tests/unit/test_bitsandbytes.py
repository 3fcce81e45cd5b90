"""Checkpoints that bitsandbytes quantised: the library's own numbers, and transformers' own logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_models import logits, open_native
from quantised_models import Tensors, rewritten, save_small, set_config
from safetensors.torch import load_file, save_file

from outrider.kernels.quantised import QuantisedRows
from outrider.workers.errors import ModelError
from outrider.workers.models.formats.bitsandbytes import read_bitsandbytes
from outrider.workers.models.formats.matrix import Matrix
from outrider.workers.models.formats.raw import RawTensors
from outrider.workers.models.formats.section import Section
from outrider.workers.models.headers import read_header
from outrider.workers.models.model_info import read_model_info

FIXTURES = Path(__file__).parents[1] / "support" / "bitsandbytes_fixtures.safetensors"
FOUR: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16",
    "llm_int8_threshold": 6.0,
    "llm_int8_skip_modules": None,
}
EIGHT: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
SHAPE = (24, 128)


def parts_of(name: str) -> Tensors:
    found = load_file(FIXTURES)
    return {key.removeprefix(f"{name}/"): value for key, value in found.items() if key.startswith(f"{name}/")}


def matrix_of(path: Path, parts: Tensors, stated: dict[str, Any], shape: tuple[int, int] = SHAPE) -> Matrix:
    save_file({f"layer.{name}": value.contiguous() for name, value in parts.items()}, path / "a.safetensors")
    raw = RawTensors(read_header(path / "a.safetensors"))
    found = read_bitsandbytes(Section(stated, "config.json: quantization_config")).matrix(raw, "layer", shape)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["nf4.False", "nf4.True", "fp4.False", "fp4.True", "int8"])
def test_numbers_are_the_librarys(name: str, tmp_path: Path) -> None:
    parts = parts_of(name)
    expected = parts.pop("expected").float().numpy()
    matrix = matrix_of(tmp_path, parts, EIGHT if name == "int8" else FOUR)
    whole: QuantisedRows = matrix.rows(0, SHAPE[0])
    found = whole.dequantise()
    # Of eight bits the library divides behind its product.
    np.testing.assert_allclose(found, expected, rtol=2e-7 if name == "int8" else 0, atol=0)
    np.testing.assert_array_equal(matrix.rows(5, 9).dequantise(), found[5:9])
    assert sorted(matrix.parts) == sorted(f"layer.{part}" for part in parts)


def saved(path: Path, kind: str, **stated: Any) -> Path:
    save_small(path)
    tensors = {name: value for name, value in parts_of(f"model {kind}").items() if name != "expected"}
    save_file(tensors, path / "model.safetensors")
    set_config(path, dtype="float32", quantization_config=(EIGHT if kind == "int8" else FOUR) | stated)
    return path


@pytest.mark.parametrize(
    ("kind", "precision", "error"), [("nf4", "fp32", 2e-6), ("nf4", "bf16", 0.03), ("int8", "w8af32", 0.02)]
)
def test_a_model_computes_what_transformers_does(kind: str, precision: str, error: float, tmp_path: Path) -> None:
    """Which with eight bits rounds activations."""
    path = saved(tmp_path, kind)
    assert read_model_info(str(path)).made_for == ("bf16" if kind == "nf4" else "w8af32")
    expected = parts_of(f"model {kind}")["expected"].numpy()
    found = logits(open_native(path, precision), TOKENS)
    assert np.abs(found - expected).max() < error * np.abs(expected).max()


STATE = "weight.quant_state.bitsandbytes__nf4"


def stating(**changes: Any) -> Callable[[Tensors], object]:
    """What stands beside a matrix, otherwise."""

    def change(parts: Tensors) -> None:
        values = json.loads(parts[STATE].numpy().tobytes()) | changes
        parts[STATE] = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (stating(blocksize=48), "has 128 columns, which its blocks of 48 do not divide"),
        (stating(blocksize=None), 'has no "blocksize"'),
        (stating(shape=[128, 24]), "is of the shape [128, 24], config.json says (24, 128)"),
        (stating(nested_blocksize=0), "has scales in blocks of 0"),
        (stating(nested_offset="x"), "has \"nested_offset\": 'x', where a number is needed"),
        (lambda parts: parts.update({STATE: torch.zeros(9, dtype=torch.uint8)}), "has no JSON in its"),
        (lambda parts: parts.update({"weight.quant_map": parts["weight.quant_map"] * 2}), "has another table than nf4"),
        (lambda parts: parts.update({"weight": parts["weight"].view(torch.int8)}), "must be of type U8, it is I8"),
        (lambda parts: parts.pop("weight.absmax"), 'lacks its "weight.absmax"'),
    ],
)
def test_what_does_not_fit_is_refused(change: Callable[[Tensors], object], said: str, tmp_path: Path) -> None:
    parts = parts_of("nf4.True")
    parts.pop("expected")
    change(parts)
    with pytest.raises(ModelError) as error:
        matrix_of(tmp_path, parts, FOUR)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (FOUR | {"load_in_8bit": True}, 'has to say one of "load_in_4bit" and "load_in_8bit"'),
        ({"quant_method": "bitsandbytes"}, 'has to say one of "load_in_4bit" and "load_in_8bit"'),
        (FOUR | {"a_key_of_tomorrow": 1}, "has 'a_key_of_tomorrow', which is not known here"),
    ],
)
def test_what_is_not_known_is_refused(stated: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = saved(tmp_path, "nf4")
    set_config(path, quantization_config=stated)
    with pytest.raises(ModelError, match="quantization_config") as error:
        open_native(path, "bf16")
    assert said in str(error.value)


def test_columns_of_another_order_of_rows_are_refused(tmp_path: Path) -> None:
    parts = parts_of("int8") | {"weight_format": torch.tensor(2, dtype=torch.uint8)}
    parts.pop("expected")
    with pytest.raises(ModelError, match='has the "weight_format" 2; 0, by rows, is read'):
        matrix_of(tmp_path, parts, EIGHT)


def test_weights_that_would_be_quantised_on_loading_are_refused(tmp_path: Path) -> None:
    save_small(tmp_path)
    set_config(tmp_path, quantization_config=FOUR)
    with pytest.raises(ModelError, match="weights that transformers quantises as it loads them"):
        open_native(tmp_path, "bf16")


def test_layers_that_were_left_out_are_as_they_were(tmp_path: Path) -> None:
    path = saved(tmp_path, "nf4", llm_int8_skip_modules=["q_proj", "lm_head"])
    name = "model.layers.0.self_attn.q_proj.weight"
    plain = torch.randn(64, 64)

    def change(tensors: Tensors) -> Tensors:
        return {key: value for key, value in tensors.items() if not key.startswith(name)} | {name: plain}

    rewritten(path, change)
    assert np.isfinite(logits(open_native(path, "fp32"), TOKENS)).all()
