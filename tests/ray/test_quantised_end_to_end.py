"""The pocket pair, quantised into the formats that people bring: jobs with a draft write what jobs without one do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import described, outrider
from gguf_models import write_gguf
from quantised_models import compressed, copied_pocket

from outrider.workers.models.model_info import find

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"
INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}

BY_ROW = {"format": "int-quantized", "num_bits": 8, "strategy": "channel"}


def mixture(name: str, values: np.ndarray) -> str:
    """Like Q4_K_M: some matrices in more bits; 704 columns are no whole super-blocks."""
    if values.ndim == 1:
        return "F32"
    return "Q8_0" if values.shape[1] % 256 else "Q6_K" if "attn_v" in name or "token_embd" in name else "Q4_K"


MAKERS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "int4 by group, asymmetric": (
        lambda path: compressed(copied_pocket(path), num_bits=4, strategy="group", group_size=64, symmetric=False),
        "w4abf16",
        "compressed-tensors pack-quantized, 4 bits, groups of 64 (56)",
    ),
    "gguf": (
        lambda path: write_gguf(find("pocket"), path.with_suffix(".gguf"), mixture),
        "w4a8",
        "gguf Q4_K, 4 bits, groups of 32 (40)",
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_assisted_text_is_plain_text(name: str, tmp_path: Path) -> None:
    make, precision, weights = MAKERS[name]
    model = make(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(EXAMPLES.read_text().splitlines(keepends=True)[:6]))
    for draft in ("none", "pocket-draft"):
        run = outrider("run", rows, "-m", model, "--draft", draft, "--max-tokens", 24, "--out", tmp_path / draft)
        assert run.returncode == 0, run.stderr
    plain, assisted = (tmp_path / draft / "results.jsonl" for draft in ("none", "pocket-draft"))
    assert assisted.read_bytes() == plain.read_bytes()
    job = described(tmp_path / "pocket-draft")
    assert job["identity"]["precision"] == precision
    assert weights in job["numeric_path"]["weights"]
