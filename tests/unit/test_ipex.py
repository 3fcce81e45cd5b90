"""Intel's extension, replaced by a fake: which models go through it, and what job.json says of it."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import save_tiny

from outrider.workers.engines.engine import Feed
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models import ipex
from outrider.workers.models.opening import open_model

TORCH = importlib.metadata.version("torch")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `optimize` was asked for, by a stand-in made for the torch that is here."""
    found: list[Any] = []

    def optimize(model: torch.nn.Module, *, dtype: torch.dtype, inplace: bool) -> torch.nn.Module:
        assert inplace and not model.training
        found.append(dtype)
        return model

    module = types.ModuleType(ipex.MODULE)
    module.optimize = optimize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ipex.MODULE, module)
    monkeypatch.setattr(ipex, "version", lambda: TORCH)
    return found


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_model_goes_through_it_in_its_precision(
    precision: str, dtype: torch.dtype, calls: list[Any], tmp_path: Path
) -> None:
    spec = ModelSpec(str(save_tiny("llama", tmp_path / "model")), "hf", precision)
    opened = open_model(spec)
    assert calls == [dtype]
    assert opened.numeric_path["ipex"] == TORCH
    assert any("ipex.optimize" in note and precision in note for note in opened.notes)
    without = open_model(replace(spec, ipex=False))
    assert calls == [dtype]
    assert "ipex" not in without.numeric_path


def _refuse(*inputs: Any) -> None:
    raise RuntimeError("Expected 6-dimensional input for 6-dimensional weight")


def _lose_the_head(module: torch.nn.Module, inputs: Any, scores: torch.Tensor) -> torch.Tensor:
    return scores.flip(-1)


@pytest.mark.parametrize(
    ("hook", "trouble"),
    [(_refuse, "it fails (Expected 6-dimensional input for 6-dimensional weight)"), (_lose_the_head, "its scores lie ")],
)
def test_a_model_that_it_breaks_runs_without_it_and_says_so(
    hook: Any, trouble: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As mamba, whose convolution's weight goes to a function and not to the module that the extension puts there."""
    spec = ModelSpec(str(save_tiny("llama", tmp_path / "model")), "hf", "fp32")

    def breaking(model: Any, *, dtype: torch.dtype, inplace: bool) -> Any:
        model.get_output_embeddings().register_forward_hook(hook)
        return model

    monkeypatch.setattr(sys.modules[ipex.MODULE], "optimize", breaking)
    opened = open_model(spec)
    assert "ipex" not in opened.numeric_path
    assert any("without Intel's extension" in note and trouble in note for note in opened.notes)
    assert scores(opened.engine) == scores(open_model(replace(spec, ipex=False)).engine)


def scores(engine: Any) -> list[list[float]]:
    engine.open(0, Sampling(), 3)
    found: list[list[float]] = engine.scores([Feed(0, [3, 1, 4], 2)]).tolist()
    return found


def test_a_head_that_it_packs_keeps_its_vocabulary(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It packs an untied head's bf16 weight in blocks, and the weight's first dimension is no longer the vocabulary."""
    spec = ModelSpec(str(save_tiny("llama", tmp_path / "model")), "hf", "bf16")
    expected = open_model(replace(spec, ipex=False)).engine

    class Packed(torch.nn.Module):
        def __init__(self, head: torch.nn.Linear) -> None:
            super().__init__()
            self.out_features, self._head = head.out_features, (head.weight.detach(),)
            self.weight = torch.nn.Parameter(head.weight.detach().reshape(1, -1, head.in_features))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(hidden, self._head[0])

    def packing(model: Any, *, dtype: torch.dtype, inplace: bool) -> Any:
        model.set_output_embeddings(Packed(model.get_output_embeddings()))
        return model

    monkeypatch.setattr(sys.modules[ipex.MODULE], "optimize", packing)
    opened = open_model(spec)
    assert opened.numeric_path["ipex"] == TORCH
    assert opened.engine.vocabulary == expected.vocabulary
    assert scores(opened.engine) == scores(expected)


def test_it_is_left_out_where_it_has_no_business(calls: list[Any], tmp_path: Path) -> None:
    spec = ModelSpec(str(save_tiny("llama", tmp_path / "model")), "hf", "fp32")
    assert ipex.used_for(spec) == TORCH
    for other in (replace(spec, engine="native"), replace(spec, device="cuda"), replace(spec, precision="fp16")):
        assert ipex.used_for(other) is None


def test_beside_another_torch_it_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipex, "version", lambda: "1.13.0+cpu")
    assert ipex.used_for(ModelSpec("", "hf", "fp32")) is None
    assert ipex.mismatch() == f"intel-extension-for-pytorch 1.13.0+cpu is made for torch 1.13, and torch is {TORCH}"
    monkeypatch.setattr(ipex, "version", lambda: None)
    assert ipex.mismatch() is None
