"""Outlier channels are balanced before rounding; models without them are left as they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from native_models import logits, open_native
from tiny_models import tiny_config, tiny_model
from transformers import PreTrainedModel

from outrider.kernels.program import Format, Program
from outrider.workers.models.families import build_program
from outrider.workers.models.outlier_channels import channel_factors, norm_groups


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def program(name: str, precision: Format = Format.W4A8) -> Program:
    return build_program(json.loads(tiny_config(name).to_json_string()), precision)


def pair_names(name: str) -> list[tuple[list[str], list[str]]]:
    built = program(name)

    def sources(indices: tuple[int, ...]) -> list[str]:
        return [source.name for index in indices for source in built.weights[index].sources]

    return [(sources(group.vectors), sources(group.matrices)) for group in norm_groups(built)]


def test_every_norm_before_matrices_is_paired_with_them() -> None:
    found = pair_names("llama")
    assert len(found) == 5  # two a layer, and the last before the head
    attention = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    assert found[0] == (["model.layers.0.input_layernorm.weight"], attention)
    assert found[-1] == (["model.norm.weight"], ["lm_head.weight"])


def test_a_norm_whose_output_is_also_a_residual_is_left_alone() -> None:
    last = [f"model.decoder.layers.1.final_layer_norm.{part}" for part in ("weight", "bias")]
    assert pair_names("opt-350m") == [(last, ["model.decoder.project_out.weight"])], "behind it there is no layer"
    assert len(pair_names("opt")) == 5
    assert pair_names("opt")[0][0] == [f"model.decoder.layers.0.self_attn_layer_norm.{part}" for part in ("weight", "bias")]


def test_float_formats_are_left_alone() -> None:
    assert norm_groups(program("llama", Format.BF16)) == []


def test_only_channels_far_out_of_balance_get_a_factor() -> None:
    gain = np.array([1, 1.5, 0.7, 50, -50, 0.02, 0, 1], dtype=np.float32)
    maxima = np.array([1, 0.8, 1.2, 1 / 50, 1 / 50, 50, 1, 0], dtype=np.float32)
    factors = channel_factors(gain, maxima)
    assert factors is not None
    assert factors[[0, 1, 2, 6, 7]].tolist() == [1.0] * 5
    assert factors[[3, 4]].tolist() == [32.0, 32.0], "50 * 50 is 2^11.3, half of it is 2^5"
    assert factors[5] == pytest.approx(1 / 50, rel=0.5)
    assert channel_factors(np.ones(4, np.float32), np.ones(4, np.float32)) is None
    assert channel_factors(np.zeros(4, np.float32), np.ones(4, np.float32)) is None


@torch.no_grad()
def add_outliers(model: PreTrainedModel, factor: float) -> None:
    """The same function with four channels scaled through the first layer's norms."""
    block, channels = model.model.layers[0], [3, 17, 40, 95]
    attention, mlp = block.self_attn, block.mlp
    for norm, readers in (
        (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
    ):
        norm.weight[channels] *= factor
        for reader in readers:
            reader.weight[:, channels] /= factor


@pytest.mark.parametrize("precision", ["w8a8", "w4a8"])
def test_outliers_cost_next_to_nothing(precision: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "plain")
    exact = logits(open_native(tmp_path / "plain", "fp32"))
    add_outliers(model, 50.0)
    model.save_pretrained(tmp_path / "outliers")

    def loss(name: str) -> float:
        difference = logits(open_native(tmp_path / name, precision)) - exact
        return float(np.sqrt((difference**2).mean() / (exact**2).mean()))

    assert loss("outliers") < 1.15 * loss("plain")
