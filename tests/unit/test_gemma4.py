"""Gemma 4: keys of config.json about layers, and tensors of its checkpoints that outrider does not use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_texts import one_thread
from handed_states import check_states
from native_models import pass_over_unused_keys
from quantised_models import rewritten
from tiny_models import GEMMA4

from outrider.kernels.program import Format, Kind, Program
from outrider.workers.errors import ModelError
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.families import build_program
from outrider.workers.precisions import PRECISIONS

SLIDING, FULL = "sliding_attention", "full_attention"
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def program_of(**changes: Any) -> Program:
    return build_program({"model_type": "gemma4_text", **GEMMA4, **changes}, Format.BF16)


def heads_of(program: Program) -> list[tuple[int, int, int]]:
    return [(op.integer, op.kv_heads, op.head_size) for op in program.ops if op.kind is Kind.ATTENTION]


def test_layers_without_keys_read_those_of_the_last_layer_of_their_type() -> None:
    program = program_of()
    assert heads_of(program) == [(0, 2, 24), (1, 2, 24), (2, 1, 40), (1, 2, 24), (1, 2, 24), (2, 1, 40)]
    assert (program.layers, program.token_bytes) == (3, 2 * (2 * 2 * (24 + 32) + 40 + 48))


def test_what_is_said_layer_by_layer_is_what_is_said_of_full_ones() -> None:
    """As transformers saves it, and as it is published; of both, the first counts."""
    full = {"head_dim": 40, "num_key_value_heads": 1}
    by_layer = {"2": full, "5": full}
    usual = program_of()
    assert program_of(global_head_dim=None, num_global_key_value_heads=None, per_layer_config=by_layer) == usual
    assert program_of(global_head_dim=64, per_layer_config=by_layer) == usual
    assert heads_of(program_of(per_layer_config={"0": {}}))[2] == (2, 2, 24)


def test_what_is_usual_need_not_be_said() -> None:
    left_out = ("layer_types", "num_global_key_value_heads", "vocab_size_per_layer_input")
    config = {key: value for key, value in GEMMA4.items() if key not in left_out} | {"model_type": "gemma4_text"}
    said = {"layer_types": [SLIDING] * 5 + [FULL], "vocab_size_per_layer_input": 262144, "rope_parameters": ROPES}
    config |= {"num_kv_shared_layers": 0}
    assert build_program(config, Format.BF16) == build_program(config | said, Format.BF16)
    # The last one is a full one, whatever is said.
    assert build_program(config | {"layer_types": [SLIDING] * 6}, Format.BF16) == build_program(config, Format.BF16)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_bidirectional_attention": "all"}, "does not know \"use_bidirectional_attention\": 'all'"),
        ({"num_kv_shared_layers": 4}, '"num_kv_shared_layers" is 4 of 6: some of them have no layer of their type before'),
        ({"num_kv_shared_layers": 7}, '"num_kv_shared_layers" is 7 of 6'),
        ({"global_head_dim": None}, 'does not know "global_head_dim": None'),
        ({"per_layer_config": [40]}, '"per_layer_config" must be an object of layers by their number, got [40]'),
        (
            {"per_layer_config": {"full": {}}},
            "\"per_layer_config\" must be an object of layers by their number, got {'full': {}}",
        ),
        ({"per_layer_config": {"6": {"head_dim": 40}}}, '"per_layer_config" is of a layer 6, there are 6'),
        (
            {"per_layer_config": {"1": {"head_dim": 40}}},
            '"per_layer_config" in which layers of the type "sliding_attention"',
        ),
        ({"per_layer_config": {"2": {"skip": ["mlp"]}}}, "does not know \"per_layer_config\" with {'skip': ['mlp']}"),
        (
            {"per_layer_config": {"2": {"head_dim": 0}}},
            '"per_layer_config": "head_dim" must be a positive whole number, got 0',
        ),
        ({"hidden_size_per_layer_input": 1}, 'does not know "hidden_size_per_layer_input": 1'),
        ({"vocab_size_per_layer_input": 200}, '"vocab_size_per_layer_input": 200 and 203 tokens'),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, '"top_k_experts" is 5, there are 4 experts'),
        ({"enable_moe_block": True}, 'has no "num_experts"'),
        ({"rope_parameters": {FULL: ROPES[FULL]}}, 'has no "rope_theta" for layers of the type "sliding_attention"'),
        ({"rope_parameters": ROPES | {FULL: {"rope_type": "proportional"}}}, 'no "rope_theta" for layers of the type'),
        ({"rope_parameters": ROPES | {FULL: ROPES[FULL] | {"partial_rotary_factor": 1.5}}}, "partial rotary embeddings"),
        ({"rope_parameters": ROPES | {FULL: ROPES[FULL] | {"partial_rotary_factor": 0.01}}}, "partial rotary embeddings"),
        ({"rope_parameters": ROPES | {SLIDING: ROPES[SLIDING] | {"partial_rotary_factor": 0.5}}}, "partial rotary"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 'does not know "rope_scaling"'),
        ({"attn_logit_softcapping": 50.0}, 'does not know "attn_logit_softcapping": 50.0'),
    ],
)
def test_what_cannot_be_followed_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError) as refusal:
        program_of(**changes)
    assert sentence in str(refusal.value)


def test_rope_of_that_type_is_of_this_family_alone() -> None:
    llama = {key: value for key, value in GEMMA4.items() if key in ("vocab_size", "hidden_size", "intermediate_size")}
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 64}
    with pytest.raises(ModelError, match="does not know the rope type 'proportional'"):
        build_program({"model_type": "llama", **llama, **sizes, "rope_parameters": ROPES[FULL]}, Format.BF16)


@one_thread()
def test_inputs_of_layers_that_a_prompt_spares_are_handed_out_all_the_same(tmp_path: Path) -> None:
    """To a head, which wants those of every token."""
    check_states("gemma4", (1, 3, 5), tmp_path)


def test_keys_and_values_of_layers_that_have_none_are_passed_over(tmp_path: Path) -> None:
    """Published checkpoints hold them; any other layer's are asked for."""
    pass_over_unused_keys("gemma4", tmp_path)
    rewritten(tmp_path, lambda tensors: tensors | {"model.layers.2.self_attn.v_proj.weight": torch.zeros(40, 96)})
    with pytest.raises(ModelError, match=r"holds .model\.layers\.2\.self_attn\.v_proj\.weight., which no part"):
        read_program(tmp_path, PRECISIONS["bf16"])
