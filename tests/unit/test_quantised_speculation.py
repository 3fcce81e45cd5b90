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

MAKERS: dict[str, Callable[[Path], Path]] = {
    "int4": lambda path: compressed(
        copied_pocket(path / "model"), num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "gguf": lambda path: write_gguf(find("pocket"), path / "pocket.gguf", mostly("Q4_K")),
}


@pytest.mark.parametrize("name", MAKERS)
def test_assisted_text_is_plain_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = MAKERS[name](tmp_path)
    target = opened(path, "native", read_model_info(str(path)).made_for)
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
