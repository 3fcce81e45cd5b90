"""config.json of published checkpoints, as far as they are known here: they say in words of their own what is always so.

A key that is not known would send the model away. What only pictures need is left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.kernels.program import Format
from outrider.workers.models.families import build_program
from outrider.workers.models.language_model import language_config

FILE = Path(__file__).parents[1] / "support" / "published_configs.jsonl"
CONFIGS: dict[str, dict[str, Any]] = {
    line["name"]: line["config"] for line in map(json.loads, FILE.read_text().splitlines())
}
# Millions of weights in matrices and embeddings, as their names say.
SIZES = (
    {"gemma-3-12b-it": 11_700, "Qwen2.5-VL-7B": 7_600, "Qwen3.5-35B-A3B": 34_600, "gpt-oss-20b": 20_900}
    | {
        "GLM-4.5-Air": 106_900,
        "granite-3.1-1b-a400m": 1_330,
        "LFM2-8B-A1B": 8_340,
        "MiniMax-M2": 228_700,
        "Phi-3.5-MoE": 41_900,
        "Minitron-4B": 4_190,
    }
    | {
        "starcoder2-7b": 7_200,
        "c4ai-command-r-v01": 35_000,
        "c4ai-command-r7b-12-2024": 8_000,
        "phi-2": 2_780,
        "gpt2": 124,
        "openai-gpt": 116,
        "stablelm-3b-4e1t": 2_800,
        "gpt-j-6b": 6_050,
        "codegen-2B-mono": 2_780,
        "falcon-7b": 6_900,
        "falcon-11B": 11_100,
        "persimmon-8b-base": 9_400,
        "gemma-3n-E2B-it": 4_460,
        "gemma-3n-E4B-it": 6_870,
        "gemma-4-E2B-it": 4_630,
        "gemma-4-26B-A4B-it": 25_200,
        "gemma-4-31B-it": 30_700,
        "gemma-4-12B-it": 11_950,
        "gpt-neo-1.3B": 1_320,
        "bloom-560m": 559,
        "mpt-7b": 6_650,
        "mpt-7b-storywriter": 6_650,
        "falcon-rw-1b": 1_310,
    }
)
SIZES |= {
    "EXAONE-3.5-7.8B": 7_800,
    "Seed-OSS-36B": 36_150,
    "EXAONE-4.0-32B": 32_000,
    "GLM-4-9B-0414": 9_400,
    "ERNIE-4.5-0.3B": 360,
    "OLMo-1B": 1_180,
    "MiniCPM3-4B": 4_070,
    "biogpt": 347,
    "falcon-mamba-7b": 7_270,
    "Mamba-Codestral-7B-v0.1": 7_290,
}


@pytest.mark.one_in(20)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_native_engine_takes_it(name: str) -> None:
    program = build_program(language_config(CONFIGS[name], "config.json"), Format.BF16)
    weights = {source: weight.rows * weight.columns for weight in program.weights for source in weight.sources[:1]}
    if name in SIZES:
        assert sum(weights.values()) / 1e6 == pytest.approx(SIZES[name], rel=0.02)
