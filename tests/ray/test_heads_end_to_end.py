"""A head on the target's hidden states across actors: the job's texts equal those of a job without a draft."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import described, outrider

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
