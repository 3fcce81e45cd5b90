"""A config.json that was edited: the native engine computes what transformers computes from it, or refuses the model."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from edited_configs import GONE, edited, edits
from family_texts import one_thread
from native_models import TOKENS, logits, open_native, save_tiny
from tiny_models import MIXTURES, TINY
from transformers import AutoModelForCausalLM

from outrider.workers.errors import ModelError
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.opening import check_weights, native_supports

# Relative to the largest logit: the order of sums in float32. What is read otherwise shows in tenths.
BOUND = 1e-4
# Edits of a family that are tried unless all are, up to how many until some are computed, and how many that are.
SOME, MOST, COMPUTED = 5, 8, 1
# transformers sets a Youtu's embedding of the padding token to 0 after it has read it; its makers' own code does not.
# Its own attention adds the biases of Falcon's ALiBi twice.
OF_TRANSFORMERS_ALONE: dict[str, list[dict[str, Any]]] = {
    "youtu": [{"pad_token_id": -1}],
    "falcon-rw": [{"attn_implementation": "eager"}, {"_attn_implementation": "eager"}],
}
# One model of each family; and those of a family whose layers are of other kinds.
FAMILIES = list({kind: name for name, (kind, _) in reversed((TINY | MIXTURES).items())}.values())[::-1]
FAMILIES += ["granite-mamba", "nemotron-h-moe", "falcon-rw"]


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """For these tests only: others, which any process may run next, read what is logged."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    caplog.set_level(logging.ERROR, "outrider")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@one_thread()
@torch.no_grad()
def by_transformers(path: Path) -> np.ndarray[Any, Any] | None:
    """None where transformers does not run it either, or without a part of its weights."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, report = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
            found: np.ndarray[Any, Any] = model.eval()(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    except Exception:  # configurations and models refuse in ways of their own
        return None
    return None if report.get("missing_keys") or not np.isfinite(found).all() else found


def by_the_native_engine(path: Path) -> np.ndarray[Any, Any] | None:
    """None where it leaves the model to transformers, or nobody runs it; no other exception is one."""
    try:
        read_model_info(str(path), by_headers=True)
        if native_supports(str(path)) is not None:
            return None
        check_weights(str(path), "native", precision="fp32")
    except ModelError:
        return None
    return logits(open_native(path, "fp32"))


def differences(path: Path, changes: list[dict[str, Any]], least: int) -> tuple[list[str], int]:
    """Of the first ``least`` changes, and of more until COMPUTED are computed: what is wrong, and how many are computed."""
    config = json.loads((path / "config.json").read_text())
    wrong, computed = [], 0
    for number, change in enumerate(changes):
        if number >= least and computed >= COMPUTED:
            break
        (path / "config.json").write_text(json.dumps(edited(config, change)))
        found = by_the_native_engine(path)
        expected = None if found is None else by_transformers(path)
        if found is None or expected is None:
            continue
        computed += 1
        distance = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)
        if not distance < BOUND:
            said = {key: "gone" if value is GONE else value for key, value in change.items()}
            wrong.append(f"{said}: {distance:.1e}")
    return wrong, computed


def edits_of(name: str, path: Path) -> list[dict[str, Any]]:
    every = edits(json.loads((path / "config.json").read_text()))
    return [change for change in every if change not in OF_TRANSFORMERS_ALONE.get(name, [])]


@pytest.mark.long
@pytest.mark.one_in(130)
@pytest.mark.parametrize("name", FAMILIES)
def test_some_edits_of_a_configuration(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path / "model")
    wrong, computed = differences(path, Random(name).sample(edits_of(name, path), MOST), SOME)
    assert not wrong, f"{name}: {'; '.join(wrong)}"
    assert computed >= COMPUTED


@pytest.mark.slow
@pytest.mark.skipif("OUTRIDER_EVERY_EDIT" not in os.environ, reason="takes minutes: set OUTRIDER_EVERY_EDIT=1")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_edit_of_a_configuration(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path / "model")
    every = edits_of(name, path)
    wrong, _ = differences(path, every, len(every))
    assert not wrong, f"{name}: {'; '.join(wrong)}"
