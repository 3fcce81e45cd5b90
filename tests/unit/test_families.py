"""The families' programs against transformers' own models."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import TINY, tiny_model
from torch_program import run

from outrider.kernels.program import Format
from outrider.workers.errors import ModelError
from outrider.workers.models.families import build_program

TOKENS = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 197]


@torch.no_grad()
@pytest.mark.parametrize("name", TINY)
def test_program_computes_what_transformers_computes(name: str) -> None:
    model = tiny_model(name)
    expected = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    program = build_program(json.loads(model.config.to_json_string()), Format.FP32)
    logits = run(program, model.state_dict(), TOKENS)
    distance = (logits - expected).abs().max() / expected.abs().max()
    assert distance < 1e-5, f"{name}: logits differ by {distance:.2e} of the largest"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gemma2"}, "does not know the family 'gemma2'"),
        ({"attn_logit_softcapping": 50.0}, 'does not know "attn_logit_softcapping": 50.0'),
        ({"partial_rotary_factor": 0.5}, 'does not know "partial_rotary_factor": 0.5'),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "does not know the rope type 'longrope'"),
        ({"hidden_act": "quick_gelu"}, 'does not know the activation "quick_gelu"'),
        ({"hidden_size": -4}, '"hidden_size" must be a positive whole number, got -4'),
        ({"hidden_size": None}, 'has no "hidden_size"'),
        ({"num_key_value_heads": 4}, "cannot lay this model out"),
        ({"head_dim": 12}, "cannot lay this model out"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by another tool (gptq)"),
    ],
)
def test_what_the_native_engine_does_not_know_is_refused(changes: dict, sentence: str) -> None:
    config = {"model_type": "llama", **TINY["llama"][1], **changes}
    with pytest.raises(ModelError) as refusal:
        build_program(config, Format.BF16)
    assert sentence in str(refusal.value)
