"""GGUF files of latent attention (`deepseek2`, `minicpm3`), as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_converter import Tensors, convert, heads_apart
from gguf_models import mostly
from native_models import logits, open_native
from tiny_models import tiny_model

from outrider.kernels.program import Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.config_file import read_config
from outrider.workers.models.formats.gguf.checkpoint import GgufCheckpoint
from outrider.workers.models.model_info import read_model_info

HEADS, PLAIN, TURNED, RANK = 6, 16, 8, 24
BASE: dict[str, Any] = {
    "block_count": 3,
    "context_length": 128,
    "embedding_length": 96,
    "feed_forward_length": 208,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.kv_lora_rank": RANK,
    "attention.key_length": RANK + TURNED,
    "attention.value_length": RANK,
    "attention.key_length_mla": PLAIN + TURNED,
    "attention.value_length_mla": 16,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": TURNED,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
}
YARN: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_log_multiplier": 0.07,
}
# A tiny model, changes to it, and its file's keys beside those above.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # As V2-Lite: queries are made from the layer's input.
    "v2-lite": (
        "deepseek-v2",
        {"attention_bias": False},
        YARN | {"expert_count": 7, "expert_used_count": 3, "expert_feed_forward_length": 40},
    ),
    "biased": (
        "deepseek-v2",
        {},
        YARN
        | {"expert_count": 7, "expert_used_count": 3, "expert_feed_forward_length": 40}
        | {"expert_group_count": 1, "expert_group_used_count": 1, "expert_gating_func": 1},
    ),
    "v2": (
        "deepseek-v2-groups",
        {},
        {"block_count": 2, "attention.q_lora_rank": 40, "attention.value_length_mla": 24}
        | {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 40, "expert_shared_count": 1}
        | {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 1.5}
        | {"leading_dense_block_count": 0},
    ),
    "v3": (
        "deepseek-v3",
        {},
        YARN
        | {"attention.q_lora_rank": 40, "attention.value_length_mla": 8, "expert_shared_count": 1}
        | {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 40, "expert_gating_func": 2}
        | {"expert_group_count": 4, "expert_group_used_count": 2}
        | {"expert_weights_scale": 2.5, "expert_weights_norm": True},
    ),
    "glm-flash": (
        "glm4-moe-lite",
        {"mlp_layer_types": ["dense", "sparse"]},
        {"block_count": 2, "attention.q_lora_rank": 40, "attention.value_length_mla": 24}
        | {"attention.layer_norm_rms_epsilon": 1e-5}
        | {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 40, "expert_gating_func": 2}
        | {"expert_group_count": 1, "expert_group_used_count": 1}
        | {"expert_weights_scale": 1.8, "expert_weights_norm": True},
    ),
    "mistral4": (
        "mistral4",
        {},
        YARN
        | {"block_count": 2, "attention.q_lora_rank": 40, "attention.value_length_mla": 24}
        | {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 40, "expert_weights_norm": True}
        | {"rope.scaling.original_context_length": 8, "attention.temperature_scale": 0.3, "leading_dense_block_count": 0}
        | {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 1.0},
    ),
    "youtu": (
        "youtu-wide",
        {"rope_interleave": True, "tie_word_embeddings": True},
        {"block_count": 2, "attention.q_lora_rank": 40, "attention.value_length_mla": 40}
        | {"expert_shared_count": 0, "expert_feed_forward_length": 208, "leading_dense_block_count": 2},
    ),
}

ARCHITECTURES = {"mistral4": "mistral4"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own: the same file, read in another way, is another packed model."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def untied(prepare: Callable[[Tensors], Tensors], tied: bool) -> Callable[[Tensors], Tensors]:
    """The converter leaves a head out that is the embedding."""
    return lambda tensors: prepare({name: each for name, each in tensors.items() if not tied or name != "lm_head.weight"})


def write(name: str, path: Path, changes: dict[str, Any] | None = None, **more: Any) -> Path:
    """``changes`` of keys, None for those that are left out; ``more``: what `convert` takes."""
    model, settings, keys = CASES[name]
    model_ = tiny_model(model, **settings)
    model_.save_pretrained(path)
    metadata = {key: value for key, value in (BASE | keys | (changes or {})).items() if value is not None}
    prepare = untied(more.pop("prepare", heads_apart(HEADS, PLAIN)), model_.config.tie_word_embeddings)
    return convert(path, path / "model.gguf", ARCHITECTURES.get(name, "deepseek2"), metadata, prepare=prepare, **more)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    assert (logits(open_native(path, "fp32")) == logits(open_native(tmp_path, "fp32"))).all()


# Of files from before keys and values were two tensors.
WHOLE = {
    "attention.head_count_kv": HEADS,
    "attention.key_length": PLAIN + TURNED,
    "attention.value_length": 16,
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
}


def test_keys_and_values_may_be_one_tensor(tmp_path: Path) -> None:
    path = write("v2-lite", tmp_path, WHOLE, prepare=lambda tensors: tensors)
    assert "blk.0.attn_kv_b.weight" in {each.name for each in gguf.GGUFReader(path).tensors}
    assert (logits(open_native(path, "fp32")) == logits(open_native(tmp_path, "fp32"))).all()


@pytest.mark.parametrize(("keys", "values"), [("Q8_0", "Q5_0"), ("F16", "Q8_0"), ("F16", "F16"), ("F16", "F32")])
def test_keys_and_values_are_what_the_file_has(keys: str, values: str, tmp_path: Path) -> None:
    """Of values the codes as they are; of keys, whose blocks go across rows, what their codes stand for."""
    settings = {"kv_lora_rank": 64, "qk_nope_head_dim": 32}
    model = tiny_model("deepseek-v2", **(CASES["v2-lite"][1] | settings))
    model.save_pretrained(tmp_path)
    sizes = {"attention.kv_lora_rank": 64, "attention.key_length": 72, "attention.value_length": 64}
    metadata = BASE | CASES["v2-lite"][2] | sizes | {"attention.key_length_mla": 40}

    def choose(name: str, tensor: Any) -> str:
        return keys if "attn_k_b" in name else values if "attn_v_b" in name else "F32"

    path = convert(tmp_path, tmp_path / "m.gguf", "deepseek2", metadata, choose, heads_apart(HEADS, 32))
    stored = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(path).tensors}
    k, v = (stored[f"blk.1.attn_{part}_b.weight"].astype(np.float32) for part in "kv")
    wanted = np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(-1, 64)
    checkpoint = GgufCheckpoint(path)
    whole = Tensor("model.layers.1.self_attn.kv_b_proj.weight", wanted.shape)
    for start, stop in ((0, len(wanted)), (5, 17), (40, 48), (33, 100)):
        np.testing.assert_array_equal(checkpoint.rows(whole, start, stop).astype(np.float32), wanted[start:stop])
    of_values = Tensor(whole.name, whole.shape, ((32, 48), (80, 96)))
    matrix = checkpoint.matrix(of_values)
    assert (matrix is not None) == (values in ("Q8_0", "Q5_0"))
    if matrix is not None:
        np.testing.assert_array_equal(matrix.rows(80, 96).dequantise(), wanted[80:96])
    of_keys = Tensor(whole.name, whole.shape, ((0, 32), (48, 80)))
    assert checkpoint.matrix(of_keys) is None
    assert checkpoint.matrix(whole) is None
    assert checkpoint.type_of(of_keys) == ("F16" if keys == "F16" else "F32")
    assert checkpoint.type_of(whole) == ("F16" if (keys, values) == ("F16", "F16") else "F32")
    assert [len(checkpoint.parts(each)) for each in (whole, of_keys, of_values)] == [2, 1, 1]
    checkpoint.close()


def test_a_quantised_file_computes_what_its_codes_stand_for(tmp_path: Path) -> None:
    """Activations are not rounded here; products of codes add up in another order."""
    path = write("v3", tmp_path, choose=mostly("Q8_0", "F32"))
    wanted, found = logits(open_native(path, "fp32")), logits(open_native(path, "w8af32"))
    assert np.sqrt(((wanted - found) ** 2).mean() / (wanted**2).mean()) < 0.02


def test_what_old_files_leave_out_is_as_the_models_have_it(tmp_path: Path) -> None:
    unsaid = {"expert_group_count": None, "expert_group_used_count": None}
    config = read_config(write("v3", tmp_path, unsaid | {"expert_count": 256}))
    assert (config["model_type"], config["n_group"], config["topk_group"]) == ("deepseek_v3", 8, 4)
    config = read_config(write("v2", tmp_path, unsaid | {"expert_count": 160}))
    assert (config["model_type"], config["n_group"], config["topk_group"]) == ("deepseek_v2", 8, 3)
    config = read_config(write("v2", tmp_path, unsaid))
    assert (config["topk_method"], config["n_group"]) == ("greedy", 1)


def test_a_mistral_s_queries_have_the_usual_factors(tmp_path: Path) -> None:
    """llama.cpp's converter writes none."""
    config = read_config(write("mistral4", tmp_path, {"attention.temperature_scale": None}))
    assert config["rope_parameters"]["llama_4_scaling_beta"] == 0.1


def test_glm_flash_is_told_by_its_layers_and_tokens(tmp_path: Path) -> None:
    """Its files say nothing of what is made of scores."""

    def many_tokens(tensors: Tensors) -> Tensors:
        return tensors | {"model.embed_tokens.weight": np.zeros((154880, 1), np.float32)}

    keys = {"expert_gating_func": None, "block_count": 47, "expert_weights_norm": None}
    assert read_config(write("glm-flash", tmp_path, keys))["model_type"] == "deepseek_v2"
    assert read_config(write("glm-flash", tmp_path, keys, prepare=many_tokens))["model_type"] == "deepseek_v3"


def test_the_factor_of_scores_is_that_of_the_configuration(tmp_path: Path) -> None:
    """The file has a tenth of it in float32."""
    for factor in (0.707, 1.0, 0.7):
        path = write("v2-lite", tmp_path, {"rope.scaling.yarn_log_multiplier": 0.1 * factor})
        rope = read_config(path)["rope_parameters"]
        assert (rope["mscale"], rope["mscale_all_dim"]) == (factor, factor)
    rope = read_config(write("v2-lite", tmp_path, {"rope.scaling.yarn_log_multiplier": None}))["rope_parameters"]
    assert "mscale_all_dim" not in rope


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another score of experts": ("v3", {"expert_gating_func": 3}, "'deepseek2.expert_gating_func': 3, which"),
    "Mistral's scores": ("mistral4", {"expert_gating_func": 2}, "'mistral4.expert_gating_func': 2, which"),
    "a Mistral without yarn": ("mistral4", dict.fromkeys(YARN), "has no rope of the type yarn"),
    "groups that nobody knows": ("v3", {"expert_group_count": None}, "no 'deepseek2.expert_group_count', and 8 experts"),
    "shares that are not normalised": ("v2", {"expert_weights_norm": True}, '"norm_topk_prob": True'),
    "layers without experts": ("youtu", {"leading_dense_block_count": 1}, "has no experts, and 1 of 2 layers that need"),
    "heads of keys": ("v3", {"attention.head_count_kv": 2}, "'deepseek2.attention.head_count_kv': 2, which"),
    "a size of keys": ("v3", {"attention.key_length": 99}, "'deepseek2.attention.key_length': 99, which"),
    "a size of values": ("v3", {"attention.value_length": 99}, "'deepseek2.attention.value_length': 99, which"),
    "a head that is turned whole": ("v3", {"rope.dimension_count": 24}, "'deepseek2.rope.dimension_count': 24, which"),
    "a factor without yarn": (
        "v2",
        {"rope.scaling.yarn_log_multiplier": 0.1},
        "'deepseek2.rope.scaling.yarn_log_multiplier': 0",
    ),
    "scales of queries": ("v3", {"attention.temperature_scale": 0.1}, "'deepseek2.attention.temperature_scale': 0.1"),
    "one size of heads": ("v3", {"attention.value_length_mla": None}, "no 'deepseek2.attention.value_length_mla'"),
    "no rank": ("v3", {"attention.kv_lora_rank": None}, "no 'deepseek2.attention.kv_lora_rank'"),
    "heads of another size": (
        "v3",
        {"attention.value_length_mla": 16},
        r"'blk.0.attn_v_b.weight' has shape \(6, 8, 24\), its metadata asks for \(6, 16, 24\)",
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_is_not_honoured_is_refused(name: str, tmp_path: Path) -> None:
    case, changes, said = REFUSED[name]
    path = write(case, tmp_path, changes)
    with pytest.raises(ModelError, match=said):
        open_native(path, "fp32") if '"' in said or "shape" in said else read_model_info(str(path))


def test_a_file_without_corrections_of_its_experts_is_refused(tmp_path: Path) -> None:
    def without(tensors: Tensors) -> Tensors:
        return heads_apart(HEADS, PLAIN)({name: each for name, each in tensors.items() if "correction" not in name})

    with pytest.raises(ModelError, match=r"lacks the tensor 'blk\.1\.exp_probs_b\.bias'"):
        open_native(write("v3", tmp_path, prepare=without), "fp32")


# Its values have their share of the width. What its layers are multiplied by is not in the file.
OF_MINICPM: dict[str, Any] = {
    key: value
    for key, value in BASE.items()
    if not key.startswith(("expert", "leading")) and not key.endswith(("_mla", "value_length"))
} | {
    "block_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.head_count_kv": HEADS,
    "attention.key_length": PLAIN + TURNED,
    "attention.q_lora_rank": 40,
}
SCALES: dict[str, Any] = {"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4}


def test_minicpm_3_is_what_its_checkpoint_is(tmp_path: Path) -> None:
    tiny_model("minicpm3", **SCALES).save_pretrained(tmp_path)
    path = convert(tmp_path, tmp_path / "m.gguf", "minicpm3", OF_MINICPM)
    assert (logits(open_native(path, "fp32")) == logits(open_native(tmp_path, "fp32"))).all()


def test_minicpm_3_with_long_rope(tmp_path: Path) -> None:
    short, long = [1.0, 1.25, 1.5, 1.75], [2.0, 3.0, 4.0, 5.0]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}
    model = tiny_model("minicpm3", **SCALES, rope_parameters=rope, original_max_position_embeddings=128)
    model.save_pretrained(tmp_path)

    def with_factors(tensors: Tensors) -> Tensors:
        stored = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
        return tensors | {name: np.array(values, np.float32) for name, values in stored.items()}

    path = convert(tmp_path, tmp_path / "m.gguf", "minicpm3", OF_MINICPM, prepare=with_factors)
    assert (logits(open_native(path, "fp32")) == logits(open_native(tmp_path, "fp32"))).all()
    first = OF_MINICPM | {"rope.scaling.original_context_length": 64}
    path = convert(tmp_path, tmp_path / "n.gguf", "minicpm3", first, prepare=with_factors)
    with pytest.raises(ModelError, match='"original_max_position_embeddings" is 64'):
        open_native(path, "fp32")
    other = OF_MINICPM | {"attention.value_length_mla": 16}
    path = convert(tmp_path, tmp_path / "o.gguf", "minicpm3", other)
    with pytest.raises(ModelError, match=r"'minicpm3\.attention\.value_length_mla': 16, which"):
        read_config(path)
