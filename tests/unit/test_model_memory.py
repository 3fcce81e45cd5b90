"""What a model and a replica take of memory, as it is foretold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from native_models import save_tiny

from outrider.runner.planning.replica_memory import PROCESS_BYTES, ProcessMemory, ReplicaMemory
from outrider.workers.messages import ModelSpec
from outrider.workers.models.memory_of_program import memory_of
from outrider.workers.models.model_memory import MOST_RESERVED, ModelMemory
from outrider.workers.models.opening import open_model

ALIGNMENT = 4096
MODEL = ModelMemory(weights=1000, working=100, row=10, token=2, first_tokens=256)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("memory") / "llama")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "w8a8", "w4a8"])
def test_weights_are_counted_as_they_are_packed(
    precision: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables, norms and scales included, which a number of bytes for each weight leaves out."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    spec = ModelSpec(str(model), "native", precision)
    told = memory_of(spec, 8)
    assert told is not None
    [(_, packed)] = open_model(spec).weights
    assert 0 <= packed - told.weights <= 64 * ALIGNMENT


def test_keys_and_values_are_counted_as_they_are_kept(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    spec = ModelSpec(str(model), "native", "w8a8")
    told, small = memory_of(spec, 8), memory_of(replace(spec, cache_precision="int8"), 8)
    assert told is not None and small is not None
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert told.token == 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * -(-size // 16) * 16
    assert told.token / 2 < small.token < told.token
    assert told.first_tokens == min(256, config["max_position_embeddings"])


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next"])
def test_a_row_has_its_recurrent_states(name: str, tmp_path: Path) -> None:
    told = memory_of(ModelSpec(str(save_tiny(name, tmp_path / name)), "native", "bf16"), 8)
    assert told is not None and told.row > 0


def test_what_is_not_known_before_a_model_is_open_is_not_guessed(model: Path) -> None:
    assert memory_of(ModelSpec(str(model), "hf", "fp32"), 8) is None


def test_a_replica_takes_weights_processes_and_the_tokens_of_its_rows() -> None:
    target, draft = ProcessMemory(MODEL, "native", True), ProcessMemory(ModelMemory(500), "hf", False)
    sizes = ReplicaMemory(target, draft).sizes(4)
    assert (sizes.target, sizes.target_kv) == (1000, 4 * 256 * 2 + 4 * 10)
    assert sizes.target_room == PROCESS_BYTES["native"] + 100
    assert (sizes.draft, sizes.draft_kv, sizes.draft_room) == (500, 0, PROCESS_BYTES["hf"])
    assert ReplicaMemory(target, None).sizes(4, tokens=5000).target_kv == 5000 * 2 + 4 * 10
    assert ReplicaMemory(target, None).sizes(4, tokens=5).target_kv == sizes.target_kv
    assert ReplicaMemory(target, None).sizes(4).draft is None
    assert replace(MODEL, token=1 << 30).of_rows(4, 1) == MOST_RESERVED + 40, "more is taken when rows need it"
