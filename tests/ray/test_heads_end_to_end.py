"""A head on the target's hidden states across actors, alone or in the target's checkpoint: the job's texts equal those of a
job without a draft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import described, outrider
from mtp import with_mtp

from outrider.workers.models.model_info import find

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"
pytestmark = [pytest.mark.slow, pytest.mark.ray]


def test_assisted_text_is_plain_text(undisturbed: Path, tmp_path: Path) -> None:
    speculating = ("--draft", "pocket-head", "--draft-tokens", 4, "--layout", "shared")
    run = outrider("run", EXAMPLES, *speculating, "--out", tmp_path / "job")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "job" / "results.jsonl").read_bytes() == (undisturbed / "results.jsonl").read_bytes()
    job = described(tmp_path / "job")
    assert job["summary"]["accepted"] > 0.25 * job["summary"]["tokens"]
    assert [costs["transport"] for costs in job["costs"].values()] == ["shared memory"]


def test_what_a_head_cannot_go_with_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for arguments, sentence in [
        (("--engine", "hf"), "which only the native engine supports"),
        (("-m", "pocket-head"), "which can only be a draft"),
        (("-m", "pocket-draft"), "it reads states of 256 numbers, the target's have 128"),
    ]:
        run = outrider("run", EXAMPLES, "--draft", "pocket-head", *arguments, "--out", tmp_path / "job")
        assert run.returncode in (1, 2)
        assert sentence in run.stderr


def test_a_targets_own_layer_for_multi_token_prediction(tmp_path: Path) -> None:
    """Of a target with recurrent layers."""
    model, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    with_mtp("qwen3-next", model, apt=True, vocab_size=4096, max_position_embeddings=512, **tokens)
    for file in find("pocket").glob("tokenizer*"):
        shutil.copy(file, model)
    # Many, since rows are begun without a draft that is not there yet.
    rows = [{"id": f"row-{number}", "prompt": f"def function_{number}(", "max_tokens": 64} for number in range(160)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_tiny = ("-m", model, "--precision", "w4a8")
    speculating = ("--draft", "mtp", "--draft-tokens", 3, "--layout", "shared")
    for name, options in (("plain", ("--draft", "none")), ("assisted", speculating), ("by itself", ())):
        run = outrider("run", prompts, *of_tiny, *options, "--out", tmp_path / name)
        assert run.returncode == 0, run.stderr
    plain, *others = ((tmp_path / name / "results.jsonl").read_bytes() for name in ("plain", "assisted", "by itself"))
    assert others == [plain, plain]
    job = described(tmp_path / "assisted")
    assert job["summary"]["accepted"] > 0
    assert described(tmp_path / "by itself")["draft"]["name"] == job["draft"]["name"] == f"{model}/mtp"

    one, on_hf = tmp_path / "one.jsonl", ("--engine", "hf", "--precision", "fp32")
    one.write_text(json.dumps(rows[0]) + "\n")
    run = outrider("run", one, *of_tiny, *on_hf, "--out", tmp_path / "hf")
    assert run.returncode == 0, run.stderr
    assert described(tmp_path / "hf")["draft"] == "suffix"
    run = outrider("run", prompts, "-m", "pocket", "--draft", f"{model}/mtp", "--out", tmp_path / "other")
    assert f"it is the layer for multi-token prediction of {model}" in run.stderr
