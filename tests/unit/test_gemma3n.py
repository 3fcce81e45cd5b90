"""Gemma 3n: keys of config.json that are refused, and tokens outside the table of per-layer embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from family_texts import one_thread
from native_models import TOKENS, logits, open_native, pass_over_unused_keys
from quantised_models import rewritten
from tiny_models import GEMMA3N, tiny_model

from outrider.kernels.program import Format, Kind, Program
from outrider.workers.errors import ModelError
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.families import build_program
from outrider.workers.models.model_info import read_model_info
from outrider.workers.precisions import PRECISIONS

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def program_of(format: Format = Format.BF16, **changes: Any) -> Program:
    return build_program({"model_type": "gemma3n_text", **GEMMA3N, **changes}, format)


def test_late_layers_read_the_keys_of_the_last_layer_of_their_type() -> None:
    program = program_of()
    found = [(op.integer, op.window) for op in program.ops if op.kind is Kind.ATTENTION]
    assert found == [(0, 7), (1, 7), (2, 0), (1, 7), (2, 0)]
    assert program.layers == 3


def test_gates_are_cut_where_normal_ones_would_leave_that_share_open() -> None:
    """The factor is rounded to the type of the embeddings, as transformers rounds it."""
    shares = [share for share in GEMMA3N["activation_sparsity_pattern"] if share]
    for format, apart in ((Format.FP32, 1e-6), (Format.BF16, 2**-8)):
        found = [op.scale for op in program_of(format).ops if op.kind is Kind.GAUSSIAN_TOP_K]
        assert [NormalDist().cdf(scale) for scale in found] == pytest.approx(shares, abs=apart)
    assert 1.6484375 in [op.scale for op in program_of().ops]


def test_coefficients_are_computed_alike_on_every_instruction_set() -> None:
    assert program_of(Format.W4A8).integer
    assert not program_of().integer


def test_what_is_usual_need_not_be_said() -> None:
    left_out = ["layer_types", "activation_sparsity_pattern", "intermediate_size", "num_kv_shared_layers"]
    left_out += ["vocab_size_per_layer_input", "sliding_window", "final_logit_softcapping", "laurel_rank"]
    config = {key: value for key, value in GEMMA3N.items() if key not in left_out}
    config |= {"model_type": "gemma3n_text", "num_hidden_layers": 25}
    said = {
        "layer_types": ([SLIDING] * 4 + [FULL]) * 5,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 15,
        "intermediate_size": [16384] * 25,
        "num_kv_shared_layers": 15,
        "vocab_size_per_layer_input": 262144,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "laurel_rank": 64,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    }
    assert build_program(config, Format.BF16) == build_program(config | said, Format.BF16)
    few = {**config, "num_hidden_layers": 10, "num_kv_shared_layers": 5}
    assert not any(op.kind is Kind.GAUSSIAN_TOP_K for op in build_program(few, Format.BF16).ops)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_kv_shared_layers": 3}, '"num_kv_shared_layers" is 3 of 5: some of them have no layer of their type before'),
        ({"num_kv_shared_layers": 6}, '"num_kv_shared_layers" is 6 of 5'),
        ({"altup_active_idx": 4}, '"altup_active_idx" is 4, there are 4 streams'),
        ({"altup_active_idx": -1}, '"altup_active_idx" must be a whole number of at least 0, got -1'),
        ({"altup_correct_scale": False}, 'does not know "altup_correct_scale": False; the hf engine does'),
        ({"activation_sparsity_pattern": [0.5] * 4}, '"activation_sparsity_pattern" must be 5 numbers of less than 1'),
        (
            {"activation_sparsity_pattern": [0.5] * 4 + [1.0]},
            '"activation_sparsity_pattern" must be 5 numbers of less than 1',
        ),
        (
            {"activation_sparsity_pattern": [0.5] * 4 + [None]},
            '"activation_sparsity_pattern" must be 5 numbers of less than',
        ),
        ({"activation_sparsity_pattern": 0.95}, '"activation_sparsity_pattern" must be 5 numbers of less than 1, got 0.95'),
        ({"intermediate_size": [208] * 4}, '"intermediate_size" must be 5 positive whole numbers, or one, got [208'),
        ({"intermediate_size": [208] * 4 + [0]}, '"intermediate_size" must be 5 positive whole numbers, or one'),
        ({"intermediate_size": 0}, '"intermediate_size" must be a positive whole number, got 0'),
        ({"hidden_size_per_layer_input": 1}, 'does not know "hidden_size_per_layer_input": 1'),
        ({"hidden_size_per_layer_input": 0}, '"hidden_size_per_layer_input" must be a positive whole number, got 0'),
        ({"rope_scaling": {"rope_type": "proportional"}}, "does not know the rope type 'proportional'"),
        ({"attn_logit_softcapping": 50.0}, 'does not know "attn_logit_softcapping": 50.0'),
        ({"hidden_activation": "quick_gelu"}, 'does not know the activation "quick_gelu"'),
    ],
)
def test_what_cannot_be_followed_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError) as refusal:
        program_of(**changes)
    assert sentence in str(refusal.value)


def test_no_head_reads_its_layers_inputs() -> None:
    """They are several streams, which nobody's head was trained on."""
    with pytest.raises(ModelError, match=r"the inputs of layers \[1, 3\] cannot be returned"):
        build_program({"model_type": "gemma3n_text", **GEMMA3N}, Format.BF16, states=(1, 3))


@one_thread()
@torch.no_grad()
def test_a_stream_of_next_to_nothing_is_not_made_as_long_as_the_first(tmp_path: Path) -> None:
    """Its mean square counts as 1e-5 then: a matrix that is nearly zero must not become noise of full size."""
    model = tiny_model("gemma3n")
    for matrices in (model.model.altup_projections, model.model.altup_unembed_projections):
        matrices[1].weight.mul_(1e-6)
    model.save_pretrained(tmp_path)
    expected = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    found = logits(open_native(tmp_path, "fp32"))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_keys_and_values_of_layers_that_have_none_are_passed_over(tmp_path: Path) -> None:
    """Published checkpoints hold them."""
    pass_over_unused_keys("gemma3n", tmp_path)


def published(path: Path) -> Path:
    """The model as a published multimodal checkpoint has it, under that checkpoint's names of tensors."""
    config = json.loads((path / "config.json").read_text())
    whole = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": config}
    (path / "config.json").write_text(json.dumps(whole | {"eos_token_id": [1, 106], "image_token_id": 198}))
    towers = {f"model.{name}.weight": torch.ones(2) for name in ("vision_tower.stem", "audio_tower.norm", "embed_vision.x")}
    rewritten(
        path,
        lambda tensors: (
            {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()} | towers
        ),
    )
    return path


def test_tokens_of_pictures_and_sounds_are_known(tmp_path: Path) -> None:
    """A prompt with one is refused: another table would embed it."""
    tiny_model("gemma3n").save_pretrained(tmp_path)
    assert read_model_info(str(tmp_path)).texts_below is None
    published(tmp_path)
    assert read_model_info(str(tmp_path)).texts_below == 262144
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": {"vocab_offset": 190}}))
    assert read_model_info(str(tmp_path)).texts_below == 190


@pytest.mark.slow
def test_the_language_model_of_one_that_sees_and_hears(tmp_path: Path) -> None:
    for name in ("alone", "inside"):
        tiny_model("gemma3n").save_pretrained(tmp_path / name)
    inside = published(tmp_path / "inside")
    np.testing.assert_array_equal(logits(open_native(inside, "w8a8")), logits(open_native(tmp_path / "alone", "w8a8")))
    assert read_program(inside, PRECISIONS["fp32"]).program == read_program(tmp_path / "alone", PRECISIONS["fp32"]).program
