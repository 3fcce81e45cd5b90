"""Quantised checkpoints on the hf engine whose layers look at all tokens of a pass: a row's text is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import compressed, save_small
from transformers import AutoConfig

from benchmarks.families.check import write
from outrider.workers.engines.ways import RowFeeding
from outrider.workers.messages import ModelSpec
from outrider.workers.models.hf_loading import load_hf
from outrider.workers.models.probe import find_way

BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
# Parts that come again, for candidates.
PROMPTS = [[7 + (index * 37 + length) % 190 for index in range(7)] * (length // 7) for length in (7, 28, 49, 63)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["int", "float"])
def test_activations_that_share_a_scale_with_the_whole_pass_change_no_text(kind: str, tmp_path: Path) -> None:
    activations = {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": True, "symmetric": True}
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
    compressed(save_small(tmp_path / "model"), format=f"{kind}-quantized", activations=activations, **weights)
    threads = torch.get_num_threads()
    engine, _, notes = load_hf(ModelSpec(str(tmp_path / "model"), "hf", "bf16", threads=1))
    try:
        alone = [write(engine, [prompt], 0)[0][0] for prompt in PROMPTS]
        together, (proposed, _) = write(engine, PROMPTS, 3)
    finally:
        torch.set_num_threads(threads)
    assert proposed > 10
    assert together == alone
    assert (
        "one token after the other, so that candidates gain nothing, because its tokens in a pass share a scale" in notes[0]
    )


@pytest.mark.parametrize(
    ("settings", "pooled"),
    [
        ({}, True),  # the library's own threshold
        ({"llm_int8_threshold": 6.0}, True),
        ({"llm_int8_threshold": 0.0}, False),
        ({"load_in_8bit": False, "load_in_4bit": True, "llm_int8_threshold": 6.0}, False),
    ],
)
def test_bitsandbytes_in_8_bits_looks_at_the_whole_pass_for_outliers(
    settings: dict[str, Any], pooled: bool, tmp_path: Path
) -> None:
    """Its library, tried apart, gave 3 of 8 rows of a batch another text before."""
    config = AutoConfig.from_pretrained(save_small(tmp_path))
    config.quantization_config = BITSANDBYTES | settings
    way = find_way(config)
    assert way.ragged is not pooled
    if pooled:
        assert way.feeding is RowFeeding.STEPPED
        assert "its tokens in a pass change one another (quantization_config: llm_int8_threshold 6.0)" in way.note
