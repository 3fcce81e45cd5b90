"""Each dense GGUF architecture computes the logits of the checkpoint that the file was converted from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_architectures import WRITTEN, write_architecture
from gguf_models import mostly
from native_models import TOKENS, logits, open_native
from quantised_models import rewritten
from tiny_models import tiny_model

from outrider.kernels.program import Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.config_file import read_config
from outrider.workers.models.formats.gguf.architectures import ARCHITECTURES
from outrider.workers.models.formats.gguf.checkpoint import GgufCheckpoint
from outrider.workers.models.model_info import read_model_info

# What their metadata cannot say is as llama.cpp takes it.
AS_FILES_ARE: dict[str, Any] = {"gemma2": {"query_pre_attn_scalar": 24}, "gemma3": {"query_pre_attn_scalar": 24}}
EACH_SIXTH = {"num_hidden_layers": 7, "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]}
# A tiny model, changes to it, and its architecture.
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("gemma", {}, "gemma"),
    ("gemma2", {}, "gemma2"),
    ("gemma2-caps", {}, "gemma2"),
    ("gemma3", EACH_SIXTH, "gemma3"),
    ("gemma3-bases", EACH_SIXTH, "gemma3"),
    # Files have the layers' table for all tokens.
    ("gemma3n", {"vocab_size_per_layer_input": 203}, "gemma3n"),
    ("gemma4", {}, "gemma4"),
    ("gemma4-plain", {}, "gemma4"),
    ("gemma4-by-layer", {}, "gemma4"),
    ("gemma4-moe", {}, "gemma4"),
    ("phi", {}, "phi2"),
    ("phi3", {}, "phi3"),
    ("phi3-partial", {}, "phi3"),
    ("phi3-long", {}, "phi3"),
    ("granite", {}, "granite"),
    ("granite-hybrid", {"intermediate_size": 56}, "granite"),
    ("granite", {"attention_multiplier": 16**-0.5}, "minicpm"),
    ("hunyuan", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "maincoder"),
    ("glm4", {}, "glm4"),
    ("glm", {}, "chatglm"),
    ("ernie", {}, "ernie4_5"),
    ("cohere", {}, "command-r"),
    ("cohere2", {"sliding_window_pattern": 4, "num_hidden_layers": 5}, "cohere2"),
    ("olmo", {"attention_bias": False}, "olmo"),
    ("olmo2", {}, "olmo2"),
    ("olmo3", {}, "olmo2"),
    ("smollm3", {"no_rope_layer_interval": 4}, "smollm3"),
    ("arcee", {}, "arcee"),
    ("llama-head-dim", {"hidden_act": "silu"}, "mistral3"),
    ("ministral3", {}, "mistral3"),
    ("llama-gqa-8", {}, "internlm2"),
    ("seed-oss", {}, "seed_oss"),
    ("hunyuan", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "hunyuan-dense"),
    ("exaone", {}, "exaone"),
    ("exaone4", {}, "exaone4"),
    ("exaone4-open", {}, "exaone4"),
    ("starcoder2", {"sliding_window": None}, "starcoder2"),
    ("stablelm", {}, "stablelm"),
    ("stablelm-parallel", {}, "stablelm"),
    ("nemotron", {}, "nemotron"),
    ("jais2", {}, "jais2"),
    ("jais2-plain", {"hidden_act": "relu2"}, "jais2"),
    ("gpt2", {}, "gpt2"),
    ("neox", {}, "gptneox"),
    ("neox-serial", {"hidden_act": "gelu", "tie_word_embeddings": False, "attention_bias": True}, "gptneox"),
    ("falcon", {}, "falcon"),
    ("falcon-one-norm", {}, "falcon"),
    ("falcon-new", {"bias": False}, "falcon"),
    ("bloom", {}, "bloom"),
    ("mpt", {}, "mpt"),
    ("mpt-clipped", {"attn_config": {"clip_qkv": 0.7}}, "mpt"),
]


def save(name: str, architecture: str, path: Path, **changes: Any) -> Any:
    model = tiny_model(name, **(AS_FILES_ARE.get(architecture, {}) | changes))
    model.config.bos_token_id, model.config.eos_token_id = 0, 1
    model.save_pretrained(path)
    return model


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("name", "changes", "architecture"), CASES, ids=[f"{case[2]}-{case[0]}" for case in CASES])
def test_an_architecture_computes_what_its_checkpoint_does(
    name: str, changes: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    """In F32: names, the order of rows, norms, rope, windows and multipliers are those of the model."""
    model = save(name, architecture, tmp_path, **changes)
    path = write_architecture(tmp_path, tmp_path / "model.gguf", architecture, mostly("F32"))
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(logits(open_native(path, "fp32")), wanted, rtol=1e-4, atol=2e-5)


# Families that turn a part of each head where nothing else is said.
PARTIAL = {
    "phi": "phi2",
    "glm4": "glm4",
    "glm": "chatglm",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
    "neox": "gptneox",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PARTIAL)
def test_heads_that_are_turned_whole_are(name: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    model = save(name, PARTIAL[name], tmp_path, rope_parameters=rope)
    path = write_architecture(tmp_path, tmp_path / "model.gguf", PARTIAL[name], mostly("F32"))
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(logits(open_native(path, "fp32")), wanted, rtol=1e-4, atol=2e-5)


def test_every_architecture_is_tried() -> None:
    tried = {architecture for *_, architecture in CASES}
    assert tried == WRITTEN.keys()
    assert tried <= ARCHITECTURES.keys()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["llama-tied-biased", "glm", "phi", "granite"])
def test_queries_keys_and_values_may_lie_together(name: str, tmp_path: Path) -> None:
    architecture = {"llama-tied-biased": "mistral3", "glm": "chatglm", "phi": "phi2"}.get(name, name)
    save(name, architecture, tmp_path)
    apart = write_architecture(tmp_path, tmp_path / "apart.gguf", architecture, mostly("Q8_0", "F32"))
    joined = write_architecture(tmp_path, tmp_path / "joined.gguf", architecture, mostly("Q8_0", "F32"), fused=True)
    assert (logits(open_native(apart, "fp32")) == logits(open_native(joined, "fp32"))).all()


@pytest.mark.parametrize(
    ("name", "changes", "architecture"), [("neox", {}, "gptneox"), ("falcon-new", {"bias": False}, "falcon")]
)
def test_blocks_of_rows_in_another_order_are_what_the_library_reads(
    name: str, changes: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    """Row by row: the checkpoint's rows, which the file has elsewhere, as the library rounds them."""
    model = save(name, architecture, tmp_path, **changes)
    path = write_architecture(tmp_path, tmp_path / "model.gguf", architecture, mostly("Q4_0", "F32"))
    tensor = next(name for name in model.state_dict() if name.endswith("query_key_value.weight"))
    wanted = model.state_dict()[tensor].numpy()
    rounded = gguf.dequantize(gguf.quantize(wanted, gguf.GGMLQuantizationType.Q4_0), gguf.GGMLQuantizationType.Q4_0)
    checkpoint = GgufCheckpoint(path)
    np.testing.assert_array_equal(checkpoint.rows(Tensor(tensor, wanted.shape), 3, len(wanted)), rounded[3:])
    checkpoint.close()


def test_streams_that_lie_together_and_keys_that_nobody_reads(tmp_path: Path) -> None:
    """Gemma 3n's: a matrix of each stream as the library rounds it; keys and values of layers that have earlier ones'."""
    model = save("gemma3n", "gemma3n", tmp_path, vocab_size_per_layer_input=203)
    path = write_architecture(tmp_path, tmp_path / "model.gguf", "gemma3n", mostly("Q8_0", "F32"))
    checkpoint = GgufCheckpoint(path)
    streams = {name: each.numpy() for name, each in model.state_dict().items() if "projections." in name}
    assert len(streams) == 6
    for name, values in streams.items():
        rounded = gguf.dequantize(gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
        np.testing.assert_array_equal(checkpoint.rows(Tensor(name, values.shape), 0, len(values)), rounded)
    checkpoint.close()
    found = logits(open_native(path, "w8a8"))
    own = [f"model.layers.1.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    rewritten(tmp_path, lambda tensors: tensors | {name.replace(".1.", ".3."): tensors[name].clone() for name in own})
    path = write_architecture(tmp_path, tmp_path / "more.gguf", "gemma3n", mostly("Q8_0", "F32"))
    np.testing.assert_array_equal(logits(open_native(path, "w8a8")), found)


def written(path: Path, name: str, architecture: str, **more: Any) -> Path:
    save(name, architecture, path)
    return write_architecture(path, path / "model.gguf", architecture, mostly("F32"), **more)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("name", "architecture", "more", "said"),
    [
        ("gemma3", "gemma3", {"attention__scale": 0.5}, "'gemma3.attention.scale': 0.5, which the native engine"),
        ("gemma3", "gemma3", {"attn_logit_softcapping": 50.0}, "'gemma3.attn_logit_softcapping': 50.0"),
        ("gemma2", "gemma2", {"rope__freq_base_swa": 5.0}, "'gemma2.rope.freq_base_swa': 5.0"),
        ("gemma3n", "gemma3n", {"altup__num_inputs": 3}, "'gemma3n.altup.num_inputs': 3, which"),
        ("gemma3n", "gemma3n", {"activation_sparsity_scale": [1] * 4}, "where 5 values are needed"),
        ("gemma4", "gemma4", {"expert_count": 4}, "has no 'gemma4.expert_used_count'"),
        ("gemma4", "gemma4", {"attention__value_length_swa": 8}, "'gemma4.attention.value_length_swa': 8, which"),
        ("gemma4", "gemma4", {"feed_forward_length": [208] * 5 + [99]}, "'gemma4.feed_forward_length': "),
        ("gemma4", "gemma4", {"rope__scaling__factor": 2.0}, "has a scaling of rope, which"),
        ("granite", "granite", {"rope__scaling__finetuned": False}, "'granite.rope.scaling.finetuned': False"),
        ("granite", "granite", {"rope__scaling__attn_factor": 2.0}, "'granite.rope.scaling.attn_factor': 2.0"),
        ("granite", "minicpm", {"attention__scale": 0.5}, "'minicpm.attention.scale': 0.5"),
        ("granite", "minicpm", {"expert_count": 2}, "'minicpm.expert_count': 2"),
        ("llama", "mistral3", {"attention__temperature_scale": 0.1}, "'mistral3.attention.temperature_scale'"),
        ("llama", "mistral3", {"rope__scaling__yarn_log_multiplier": 1.0}, "'mistral3.rope.scaling.yarn_log_multiplier'"),
        ("llama", "mistral3", {"rope__dimension_count": 8}, "rotates a part of each head only"),
        ("phi", "phi2", {"rope__dimension_count": 20}, "'phi2.rope.dimension_count': 20, which"),
        ("glm4", "glm4", {"rope__dimension_count": 0}, "'glm4.rope.dimension_count': 0, which"),
        ("cohere2", "cohere2", {"rope__freq_base_swa": 5.0}, "'cohere2.rope.freq_base_swa': 5.0"),
        (
            "phi3-long",
            "phi3",
            {"rope__scaling__type": "yarn"},
            "has both a 'rope_factors_long.weight' and another rope scaling",
        ),
        ("neox", "gptneox", {"attention__head_count_kv": 2}, "'gptneox.attention.head_count_kv': 2"),
        ("gpt2", "gpt2", {"attention__head_count_kv": 2}, "'gpt2.attention.head_count_kv': 2"),
        ("granite", "granite", {"attention__head_count_kv": [2, 3]}, "'granite.attention.head_count_kv': "),
        ("granite", "granite", {"attention__head_count_kv": [2]}, "where 2 values are needed"),
        ("smollm3", "smollm3", {"attention__sliding_window": 64}, "'smollm3.attention.sliding_window': 64, which"),
        ("falcon", "falcon", {"tensor_data_layout": "another"}, "'falcon.tensor_data_layout': 'another'"),
        ("bloom", "bloom", {"feed_forward_length": 200}, "'bloom.feed_forward_length': 200, which"),
        ("bloom", "bloom", {"attention__head_count_kv": 2}, "'bloom.attention.head_count_kv': 2"),
        ("bloom", "bloom", {"attention__key_length": 8}, "has keys and values of different sizes|attention.key_length': 8"),
        ("mpt", "mpt", {"attention__max_alibi_bias": 8.5}, "'mpt.attention.max_alibi_bias': 8.5"),
        ("olmo", "olmo", {"attention__clamp_kqv": 8.0}, "'olmo.attention.clamp_kqv': 8.0"),
        ("olmo", "olmo", {"attention__layer_norm_epsilon": 1e-6}, "'olmo.attention.layer_norm_epsilon'"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(
    name: str, architecture: str, more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=said):
        read_model_info(str(written(tmp_path, name, architecture, **more)))


def test_what_says_nothing_of_texts_is_left_alone(tmp_path: Path) -> None:
    image: dict[str, Any] = {"mm__tokens_per_image": 256}
    assert read_config(written(tmp_path / "a", "gemma3", "gemma3", **image))["model_type"] == "gemma3_text"
    none: dict[str, Any] = {"attention__sliding_window": 0}
    assert read_config(written(tmp_path / "c", "smollm3", "smollm3", **none))["model_type"] == "smollm3"
    layout: dict[str, Any] = {"tensor_data_layout": "Meta AI original pth"}
    assert read_config(written(tmp_path / "b", "llama", "mistral3", **layout))["model_type"] == "llama"


@pytest.mark.parametrize(("every", "full"), [(2, [1, 3, 5]), (0, []), (1, [0, 1, 2, 3, 4, 5, 6])])
def test_a_pattern_of_windows_may_be_a_number(every: int, full: list[int], tmp_path: Path) -> None:
    save("gemma3", "gemma3", tmp_path, **EACH_SIXTH)
    more: dict[str, Any] = {"attention__sliding_window_pattern": every}
    path = write_architecture(tmp_path, tmp_path / "model.gguf", "gemma3", mostly("F32"), **more)
    types = read_config(path)["layer_types"]
    assert [layer for layer, kind in enumerate(types) if kind == "full_attention"] == full
    assert len(types) == 7


def test_each_size_of_the_largest_gemma_scales_as_it_was_made(tmp_path: Path) -> None:
    """GGUF has no key for it: 27B is told by its layers, in llama.cpp as well."""
    smaller: dict[str, Any] = {"attention__key_length": 20, "attention__value_length": 20, "rope__dimension_count": 20}
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        largest: dict[str, Any] = smaller | {"block_count": layers}
        path = written(tmp_path / f"{architecture}-27b", architecture, architecture, **largest)
        assert read_config(path)["query_pre_attn_scalar"] == 96 // 4
        path = written(tmp_path / architecture, architecture, architecture, **smaller)
        assert read_config(path)["query_pre_attn_scalar"] == 20
