"""Apertus 1.5, whose head may lack the tokens of pictures and sound: its first rows are those of texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from family_texts import LENGTHS, WRITTEN, prompt
from native_models import TOKENS, logits, open_native
from tiny_models import tiny_config, tiny_model
from transformers import PreTrainedModel

from benchmarks.families.check import write
from outrider.kernels.program import Format
from outrider.workers.errors import ModelError
from outrider.workers.models.families import build_program
from outrider.workers.models.probe import written_by_transformers

ROWS = 150


@pytest.fixture
def pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[PreTrainedModel, Path]:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    model = tiny_model("apertus-1.5", output_vocab_size=ROWS)
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


@torch.no_grad()
def test_a_pruned_head_scores_its_own_tokens_and_no_other(pruned: tuple[PreTrainedModel, Path]) -> None:
    model, path = pruned
    expected = model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    found = logits(open_native(path, "fp32"))
    assert expected.shape[1] == ROWS
    np.testing.assert_allclose(found[:, :ROWS], expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
    assert (found[:, ROWS:] < -1e29).all()


def test_texts_with_a_pruned_head_are_those_of_transformers(pruned: tuple[PreTrainedModel, Path]) -> None:
    model, path = pruned
    prompts = [prompt(length, 3, ROWS) for length in LENGTHS]
    found, (proposed, _) = write(open_native(path, "fp32"), prompts)
    assert found == [list(written_by_transformers(model, each, WRITTEN).written) for each in prompts]
    assert proposed > 10


@pytest.mark.parametrize("rows", [ROWS, 204, -1])
def test_a_head_that_cannot_be_pruned_so_is_refused(rows: int) -> None:
    config = tiny_config("apertus-1.5").to_dict() | {"output_vocab_size": rows, "tie_word_embeddings": rows == ROWS}
    with pytest.raises(ModelError, match=r'"output_vocab_size"'):
        build_program(config, Format.BF16)


def test_a_head_with_all_rows_is_not_pruned() -> None:
    config = tiny_config("apertus-1.5").to_dict()
    whole = build_program(config | {"output_vocab_size": config["vocab_size"]}, Format.BF16)
    assert whole == build_program(config, Format.BF16)
