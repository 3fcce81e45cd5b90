"""The pocket pair, quantised as people bring it: a job with a draft.

That it writes what a job without one does, and so in other formats: tests/unit/test_quantised_speculation.py, without Ray.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import described, outrider
from gguf_models import write_gguf

from outrider.workers.models.model_info import find

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"


def mixture(name: str, values: np.ndarray) -> str:
    """Like Q4_K_M: some matrices in more bits; 704 columns are no whole super-blocks."""
    if values.ndim == 1:
        return "F32"
    return "Q8_0" if values.shape[1] % 256 else "Q6_K" if "attn_v" in name or "token_embd" in name else "Q4_K"


def test_a_gguf_file_is_a_target_with_a_draft(tmp_path: Path) -> None:
    model = write_gguf(find("pocket"), tmp_path / "model.gguf", mixture)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(EXAMPLES.read_text().splitlines(keepends=True)[:6]))
    speculating = ("--draft", "pocket-draft", "--draft-tokens", 4)
    run = outrider("run", rows, "-m", model, *speculating, "--max-tokens", 24, "--out", tmp_path / "job")
    assert run.returncode == 0, run.stderr
    job = described(tmp_path / "job")
    assert (job["summary"]["done"], job["summary"]["failed"]) == (6, 0)
    assert job["identity"]["precision"] == "w4a8"
    assert "gguf Q4_K, 4 bits, groups of 32 (40)" in job["numeric_path"]["weights"]
