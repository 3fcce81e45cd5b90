"""Beam: what a head reads of it, and rope by type of layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_texts import one_thread
from handed_states import check_states
from tiny_models import tiny_config

from outrider.kernels.program import Format, Kind
from outrider.workers.errors import ModelError
from outrider.workers.models.families import build_program


@one_thread()
def test_a_head_reads_the_residual_as_it_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program keeps the undivided sum."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    check_states("beam", (0, 1, 4), tmp_path)


def values(**changes: Any) -> dict[str, Any]:
    return dict(json.loads(tiny_config("beam").to_json_string(use_diff=False))) | changes


def test_layers_whose_rope_is_null_have_none() -> None:
    turned = {"rope_type": "default", "rope_theta": 100.0}
    for ropes, count in (
        ({"sliding_attention": turned, "full_attention": None}, 8),
        ({"sliding_attention": None, "full_attention": turned}, 2),
        ({"sliding_attention": turned, "full_attention": turned}, 10),
        ({"sliding_attention": None, "full_attention": None}, 0),
    ):
        program = build_program(values(rope_parameters=ropes), Format.FP32)
        assert sum(op.kind is Kind.ROPE for op in program.ops) == count
        assert sum(op.kind is Kind.SCALE for op in program.ops) == 5 - count // 2


@pytest.mark.parametrize(
    "ropes",
    [
        {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
        {"rope_type": "default", "rope_theta": 100.0},
        {"sliding_attention": {"rope_type": "default"}, "full_attention": None},
        {"sliding_attention": 3, "full_attention": None},
        [3],
    ],
)
def test_rope_that_says_nothing_of_a_type_of_layer_is_refused(ropes: Any) -> None:
    with pytest.raises(ModelError, match="rope_parameters"):
        build_program(values(rope_parameters=ropes), Format.FP32)
