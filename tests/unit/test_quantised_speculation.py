"""Assisted text is plain text, token for token, where the target comes quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from built import draft_of, opened, target_of, write
from gguf_models import mostly, write_gguf
from quantised_models import compressed, copied_pocket

from outrider.workers.messages import Row, Sampling
from outrider.workers.models.model_info import find, read_model_info

INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
MAKERS: dict[str, Callable[[Path], Path]] = {
    "int4": lambda path: compressed(
        copied_pocket(path / "model"), num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "gguf": lambda path: write_gguf(find("pocket"), path / "pocket.gguf", mostly("Q4_K")),
    "int8 by row": lambda path: compressed(
        copied_pocket(path / "model"), format="int-quantized", num_bits=8, strategy="channel", activations=INT8
    ),
    "gguf Q8_0": lambda path: write_gguf(find("pocket"), path / "pocket.gguf", mostly("Q8_0")),
}
IN_THE_FAST_SET = ("int4",)
WEIGHTS = {
    "int4": "compressed-tensors pack-quantized, 4 bits, groups of 32 (56)",
    "gguf": "gguf Q4_K, 4 bits, groups of 32 (",
}


@pytest.mark.parametrize(
    "name", [name if name in IN_THE_FAST_SET else pytest.param(name, marks=pytest.mark.slow) for name in MAKERS]
)
def test_assisted_text_is_plain_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = MAKERS[name](tmp_path)
    target = opened(path, "native", read_model_info(str(path)).made_for)
    assert name not in WEIGHTS or WEIGHTS[name] in target.numeric_path["weights"]
    draft = opened(find("pocket-draft"), "native", "bf16")
    random = np.random.default_rng(3)
    rows = []
    for key in range(10):
        prompt = tuple(random.integers(1, 4096, int(random.integers(1, 30))).tolist())
        rows.append(Row(key, prompt, 10, Sampling(temperature=key % 2, seed=key)))

    plain, _ = write(target_of(target, 4, 0), rows)
    assisted, verifier = write(target_of(target, 4, 4, draft_of(draft)), rows)
    assert {key: row.tokens for key, row in assisted.items()} == {key: row.tokens for key, row in plain.items()}
    assert verifier.counters.accepted > 0, "the draft was never right, so nothing was tested"
