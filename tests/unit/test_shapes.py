"""The classic systems: their configurations, and tiny versions of them through the command line, offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from benchmarks.mixture import make
from benchmarks.shapes.__main__ import lay, smaller
from benchmarks.shapes.catalogue import System, catalogue, find_system
from outrider.kernels.program import Format
from outrider.workers.engines.engine import Feed
from outrider.workers.errors import PairError
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.families import build_program
from outrider.workers.models.model_info import find
from outrider.workers.models.opening import open_model
from outrider.workers.models.preparation import prepare_pair

# Parameters as the models' own pages state them, in billions.
STATED = {
    "facebook/opt-125m": 0.125,
    "facebook/opt-350m": 0.331,
    "facebook/opt-6.7b": 6.66,
    "facebook/opt-13b": 12.85,
    "meta-llama/Llama-2-7b-hf": 6.74,
    "meta-llama/Llama-2-7b-chat-hf": 6.74,
    "JackFram/llama-160m": 0.162,
    "amd/AMD-Llama-135m": 0.134,
    "amd/AMD-Llama-135m-code": 0.134,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.10,
    "codellama/CodeLlama-7b-hf": 6.74,
    "Qwen/Qwen1.5-7B-Chat": 7.72,
    "Qwen/Qwen1.5-0.5B-Chat": 0.464,
    "bigcode/starcoder": 15.5,
    "bigcode/gpt_bigcode-santacoder": 1.12,
    "bigcode/tiny_starcoder_py": 0.164,
    "Qwen/Qwen3-30B-A3B": 30.5,
}
LLAMA = dict(
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=4128,
    max_position_embeddings=256,
)
OPT = dict(
    hidden_size=64,
    ffn_dim=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    word_embed_proj_dim=64,
    vocab_size=4128,
    max_position_embeddings=256,
)
BIGCODE = dict(n_embd=64, n_inner=96, n_layer=2, n_head=4, vocab_size=4128, n_positions=256)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", STATED)
def test_the_configurations_have_the_stated_size(name: str) -> None:
    program = build_program(find_system(name).config, Format.BF16)
    shapes = {tensor.name: tensor.shape for weight in program.weights for tensor in weight.sources}
    parameters = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
    assert parameters / 1e9 == pytest.approx(STATED[name], rel=0.01)


def tiny(name: str, settings: dict[str, Any], **more: Any) -> System:
    system = find_system(name)
    assert settings.keys() <= system.config.keys()
    return replace(system, config=system.config | settings | more)


def test_short_names_find_their_shapes() -> None:
    assert find_system("opt-6.7b").name == "facebook/opt-6.7b"
    with pytest.raises(SystemExit, match='"opt-7b" is not in the catalogue'):
        find_system("opt-7b")
    assert all(system.folder == f"models--{name.replace('/', '--')}" for name, system in catalogue().items())


@pytest.mark.slow
def test_families_are_told_apart_and_drafts_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    for name, settings in (
        ("opt-6.7b", OPT),
        ("opt-125m", OPT),
        ("codellama-7b", LLAMA | {"vocab_size": 32016}),
        ("amd-llama-135m-code", LLAMA | {"vocab_size": 32000}),
        ("Qwen1.5-7B-Chat", LLAMA | {"vocab_size": 151936}),
        ("Qwen/Qwen1.5-0.5B-Chat", LLAMA | {"vocab_size": 151936}),
        ("starcoder", BIGCODE),
        ("bigcode/tiny_starcoder_py", BIGCODE),
    ):
        lay(tiny(name, settings), tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert prepare_pair("opt-6.7b", "auto")[2:] == ("facebook/opt-125m+suffix", [])
    assert prepare_pair("codellama-7b", "auto")[2:] == ("amd/AMD-Llama-135m-code+suffix", [])
    assert prepare_pair("Qwen1.5-7B-Chat", "auto")[2:] == ("Qwen/Qwen1.5-0.5B-Chat+suffix", [])
    assert prepare_pair("starcoder", "auto")[2:] == ("bigcode/tiny_starcoder_py+suffix", [])
    assert prepare_pair("starcoder", "model")[2:] == ("bigcode/tiny_starcoder_py", [])
    with pytest.raises(PairError, match="choose a draft with the target's tokenizer"):
        prepare_pair("opt-6.7b", "amd/AMD-Llama-135m-code")


def test_what_was_laid_otherwise_is_not_taken(tmp_path: Path) -> None:
    system = tiny("opt-6.7b", OPT)
    assert lay(system, tmp_path, seed=1) == lay(system, tmp_path, seed=1)
    with pytest.raises(SystemExit, match=r"opt-6\.7b was laid with other options \(see .*SHAPE\.md\): remove it first"):
        lay(system, tmp_path, seed=2)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    ("target", "draft", "settings", "inflated"),
    [
        ("opt-6.7b", "facebook/opt-125m", OPT, False),
        ("llama-2-7b", "JackFram/llama-160m", LLAMA | {"vocab_size": 32000}, True),
    ],
)
def test_a_tiny_pair_through_the_command_line(
    tmp_path: Path, target: str, draft: str, settings: dict[str, Any], inflated: bool
) -> None:
    for name in (target, draft):
        lay(tiny(name, settings), tmp_path / "hub")
    command = [sys.executable, "-c", "from outrider.runner.cli.main import main; main()", "bench", "--model_name", target]
    options = ["--task", "decode", "--new-tokens", "6", "--precision", "w4a8", "--compare", "--draft-tokens", "3"]
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "OUTRIDER_CACHE": str(tmp_path / "packed")}
    done = subprocess.run(
        [*command, *options, "--json", "figures.json"],
        cwd=tmp_path,
        env={**os.environ, **hub},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "rounded to nearest on load (rtn)" in done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["draft_name"] == draft
    plain, assisted = found["modes"]["plain"]["rows"], found["modes"]["assisted"]["rows"]
    assert len(plain) == len(assisted) == 10
    for one, other, compared in zip(plain, assisted, found["comparison"], strict=True):
        assert one["new_tokens"] == other["new_tokens"] == 6
        assert one["tokens"] == other["tokens"] and compared["first_difference"] is None
        assert one["tokens_per_second"] * one["ms_per_token"] == pytest.approx(1000)
        assert one["total_seconds"] == pytest.approx((one["prefill_ms"] + 5 * one["ms_per_token"]) / 1e3)
        assert one["tokens_per_round"] == 1.0 and one["proposed"] == 0 < other["proposed"]
    if inflated:
        assert found["modes"]["assisted"]["all"]["tokens_per_round"] > 1.5, "the same function accepts its own proposals"
    assert done.stdout.count("| Example# | Prompt Length (tokens) | New Tokens Generated | Total Time (s) |") == 2


SPARSE = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256)


@pytest.mark.parametrize(
    "system",
    [
        tiny("Qwen/Qwen3-30B-A3B", SPARSE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32),
        tiny("openai/gpt-oss-20b", SPARSE, num_local_experts=6, num_experts_per_tok=2, intermediate_size=32),
    ],
    ids=lambda system: system.family,
)
def test_sparse_shapes_are_run_by_the_native_engine(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = lay(smaller(system, 2, 4128), tmp_path)
    opened = open_model(ModelSpec(str(path), "native", "w4abf16" if system.family == "gpt_oss" else "w4a8", threads=1))
    assert ("mxfp4" in opened.notes[0]) is (system.family == "gpt_oss")
    opened.engine.open(0, Sampling(), 3)
    assert opened.engine.feed([Feed(0, [5, 6, 7], 1)])[0].tokens
    assert opened.engine.mixture is not None and len(opened.engine.mixture.routers) == 2


@pytest.mark.slow
def test_a_dense_model_becomes_a_mixture_that_writes_nearly_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    dense = find("pocket")
    make(dense, tmp_path / "mixture", experts=3, chosen=2, noise=0.0, seed=1)
    prompt = list(range(40, 60))
    scores = []
    for path in (dense, tmp_path / "mixture"):
        engine = open_model(ModelSpec(str(path), "native", "fp32", threads=1)).engine
        engine.open(0, Sampling(), len(prompt))
        scores.append(engine.scores([Feed(0, prompt, len(prompt))]))
    assert np.abs(scores[0] - scores[1]).max() < 1e-4 * np.abs(scores[0]).max()
