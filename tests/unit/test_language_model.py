"""Models that see as well: their texts are their language model's."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_texts import differences
from multimodal_models import KINDS, VOCABULARY, multimodal_model, save_multimodal
from native_models import TOKENS, logits, open_native
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

from outrider.kernels.program import Kind
from outrider.workers.errors import ModelError
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.config_file import quantisation_of, read_config
from outrider.workers.models.language_model import (
    MULTIMODAL,
    OMNI,
    USUAL,
    language_config,
    language_name,
)
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.opening import native_supports
from outrider.workers.precisions import PRECISIONS
from outrider.workers.quantising.quantiser import Wanted, program_of, quantise

QUICK = ("gemma3", "gemma4", "qwen2_vl", "qwen3_5", "smolvlm")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def edit(path: Path, **changes: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def renamed(path: Path, old: str, new: str) -> Path:
    file = path / "model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(file).items()}, file)
    return path


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS])
def test_a_model_that_sees_writes_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    # transformers 5.24 breaks on a text alone with the whole of Llama 4.
    reader = AutoModelForCausalLM if kind == "llama4" else AutoModelForMultimodalLM
    found, proposed = differences(save_multimodal(kind, tmp_path), reader=reader)
    assert not found
    assert proposed


@pytest.mark.slow
def test_ministral_3_is_a_language_model_inside_mistral3(tmp_path: Path) -> None:
    """Its factors of queries begin within these rows."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32}
    language = {"model_type": "ministral3", "rope_parameters": rope | {"llama_4_scaling_beta": 0.3}}
    path = save_multimodal("mistral3", tmp_path, language=language)
    assert any(op.kind is Kind.SCALE for op in read_program(path, PRECISIONS["fp32"]).program.ops)
    found, proposed = differences(path, reader=AutoModelForImageTextToText)
    assert not found
    assert proposed


@pytest.mark.slow
def test_mistral_small_4_is_a_language_model_inside_mistral3(tmp_path: Path) -> None:
    """Its factors of queries begin within these rows."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32}
    rope |= {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0, "max_position_embeddings": 512}
    language = {"model_type": "mistral4", "rope_parameters": rope, "num_key_value_heads": 4, "n_routed_experts": 6}
    language |= {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "kv_lora_rank": 24, "q_lora_rank": 40}
    language |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    path = save_multimodal("mistral3", tmp_path, language=language)
    assert any(op.kind is Kind.SCALE for op in read_program(path, PRECISIONS["fp32"]).program.ops)
    found, proposed = differences(path, reader=AutoModelForImageTextToText)
    assert not found
    assert proposed


@pytest.mark.parametrize("kind", [OMNI[0], pytest.param(OMNI[1], marks=pytest.mark.slow)])
def test_of_a_model_that_talks_the_part_that_thinks_is_run(kind: str, tmp_path: Path) -> None:
    """Within the whole its tensors and its configuration have one more name."""
    thinker = save_multimodal(f"{kind}_thinker", tmp_path / "thinker")
    whole = tmp_path / "whole"
    whole.mkdir()
    config = json.loads((thinker / "config.json").read_text())
    config = {"model_type": kind, "dtype": config.pop("dtype"), "thinker_config": config, "talker_config": {"any": 1}}
    (whole / "config.json").write_text(json.dumps(config))
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(thinker / "model.safetensors").items()}
    spoken = {"talker.codec_head.weight": np.ones((2, 2), np.float32), "token2wav.conv.weight": np.ones(1, np.float32)}
    save_file(tensors | spoken, whole / "model.safetensors")
    expected = read_program(thinker, PRECISIONS["fp32"]).program
    assert read_program(whole, PRECISIONS["fp32"]).program == expected
    assert (logits(open_native(whole, "fp32")) == logits(open_native(thinker, "fp32"))).all()
    edit(whole, thinker_config=None)
    with pytest.raises(ModelError, match="thinker_config"):
        read_config(whole)


def test_all_kinds_are_tried() -> None:
    """But models whose eyes are another library's (Gemma 3n: test_gemma3n.py), and models that talk (both below)."""
    assert KINDS.keys() == MULTIMODAL.keys() - {"gemma3n", "perception_lm", *OMNI}


def test_what_is_taken_for_granted_is_what_transformers_takes() -> None:
    places = {"qwen2_vl_text": "Qwen2VLTextConfig", "qwen2_5_vl_text": "Qwen2_5_VLTextConfig"}
    places |= {"qwen3_vl_text": "Qwen3VLTextConfig", "qwen3_5_text": "Qwen3_5TextConfig", "gemma3_text": "Gemma3TextConfig"}
    places |= {"gemma3n_text": "Gemma3nTextConfig"}
    places |= {"gemma4_text": "Gemma4TextConfig", "gemma4_unified_text": "Gemma4UnifiedTextConfig"}
    places |= {"qwen3_vl_moe_text": "Qwen3VLMoeTextConfig"}
    places |= {"qwen3_5_moe_text": "Qwen3_5MoeTextConfig", "cohere_compass_text": "CohereCompassTextConfig"}
    places |= {"apertus1p5_text": "Apertus1p5TextConfig", "llama4_text": "Llama4TextConfig"}
    places |= {"aria_text": "AriaTextConfig", "minimax_m3_vl_text": "MiniMaxM3VLTextConfig"}
    places |= {"deepseek_v3": "DeepseekV3Config", "hy_v4_vl_text": "HYV4VLTextConfig"}
    places |= {"ernie4_5_vl_moe_text": "Ernie4_5_VLMoeTextConfig"}
    places |= {"mistral_large4_text": "MistralLarge4TextConfig", "step3p5": "Step3p7TextConfig"}
    places |= {"muse_spark_text": "MuseSparkTextConfig"}
    places |= {"glm5_next_text": "Glm5NextTextConfig", "qwen4_exp_text": "Qwen4ExpTextConfig"}
    places |= {"glm4v_text": "Glm4vTextConfig", "glm4v_moe_text": "Glm4vMoeTextConfig"}
    places |= {"mllama_text_model": "MllamaTextConfig", "muse_glimmer_text": "MuseGlimmerTextConfig"}
    places |= {"qwen2_5_omni_text": "Qwen2_5OmniTextConfig", "qwen3_omni_moe_text": "Qwen3OmniMoeTextConfig"}
    places |= {"phi4_multimodal": "Phi4MultimodalConfig"}
    places |= {"granite4_vision_text": "Granite4VisionTextConfig"}
    places |= {"glm_ocr_text": "GlmOcrTextConfig", "hunyuan_vl_text": "HunYuanVLTextConfig"}
    places |= {"granite_docling_text": "GraniteDoclingTextConfig"}
    names = {"granite": "Granite", "hyperclovax": "HyperCLOVAX"}
    names |= {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "lfm2": "Lfm2"}
    names |= {"lfm3": "Lfm3", "mistral4": "Mistral4"}
    names |= {"cohere2": "Cohere2", "exaone4": "Exaone4", "ministral3": "Ministral3"}
    places |= {kind: f"{name}Config" for kind, name in names.items()}
    assert places.keys() == USUAL.keys()
    for kind, name in places.items():
        family = {"step3p5": "step3p7"}.get(kind, kind).removesuffix("_text").removesuffix("_text_model")
        module = import_module(f"transformers.models.{family}.configuration_{family}")
        usual = getattr(module, name)()
        theta = (getattr(usual, "rope_parameters", None) or {}).get("rope_theta")
        for key, value in USUAL[kind].items():
            if value is None:  # it has none, or as many as of another
                assert getattr(usual, key, None) in (None, usual.num_attention_heads)
                continue
            assert (theta if key == "rope_theta" else getattr(usual, key)) == value, f"{kind}: {key}"


def test_a_published_gemma_says_little_of_its_language_model() -> None:
    """config.json of the 4b, as it is published."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {"model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "text_config": text}
    found = language_config(whole, "config.json")
    assert found["torch_dtype"] == "bfloat16"
    assert found["vocab_size"] == 262208
    assert found["num_attention_heads"] == 8
    assert found["eos_token_id"] == [1, 106]
    assert found["hidden_size"] == 2560


@pytest.mark.one_in(3)
@pytest.mark.parametrize("changes", [{"partial_rotary_factor": 0.25}, {}, {"head_dim": 16, "attention_bias": False}])
def test_what_glm_4v_does_unlike_glm_4(changes: dict[str, Any], tmp_path: Path) -> None:
    """Its rope rotates whole heads unless it says otherwise, and queries, keys and values have biases, whatever it says."""
    save_multimodal("glm4v", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    del text["rope_parameters"]
    text = {key: value for key, value in text.items() if key != "head_dim"}
    pairs = {"partial_rotary_factor": [1, 1, 0]}.get(next(iter(changes), ""), [2, 3, 3])
    rope = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "mrope_section": pairs}}
    edit(tmp_path, text_config=text | rope | changes)
    assert not differences(tmp_path, reader=AutoModelForImageTextToText)[0]


@pytest.mark.slow
def test_what_a_muse_may_say(tmp_path: Path) -> None:
    language = {"attention_bias": True, "layer_rope_theta": [10.0, 0, 10.0, 10.0, 0], "final_logit_softcapping": 2.0}
    language |= {"output_multiplier": 0.5, "qk_scale_factor": 2.0, "hidden_activation": "gelu_pytorch_tanh"}
    language |= {"post_norm_eps": 0.1, "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]}
    path = save_multimodal("muse_glimmer", tmp_path, language=language)
    assert not differences(path, reader=AutoModelForImageTextToText)[0]
    text = json.loads((path / "config.json").read_text())["text_config"]
    edit(path, text_config=text | {"layer_rope_theta": [1.0]})
    assert "layer_rope_theta" in (native_supports(str(path)) or "")


@pytest.mark.slow
@torch.no_grad()
def test_experts_for_texts_stand_before_those_for_pictures(tmp_path: Path) -> None:
    """With corrections of their own, which an untrained router does not have; also where there are biases."""
    model = multimodal_model(
        "ernie4_5_vl_moe", 1, {"use_bias": True, "moe_norm_min": 0.9, "mlp_layer_types": ["sparse"] * 3}
    )
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith(("e_score_correction_bias", "gate.weight", ".bias")):
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(tmp_path / "whole")
    assert not differences(tmp_path / "whole", reader=AutoModelForImageTextToText)[0]
    found = logits(open_native(quantised(tmp_path / "whole", tmp_path / "out", 8), "fp32"))
    assert np.median(np.abs(found - logits(open_native(tmp_path / "whole", "fp32")))) < 0.05
    text = json.loads((tmp_path / "whole" / "config.json").read_text())["text_config"]
    for wrong in ({"moe_intermediate_size": 32}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}):
        edit(tmp_path / "whole", text_config=text | wrong)
        assert "the native engine does not know" in (native_supports(str(tmp_path / "whole")) or "")


@torch.no_grad()
def test_a_llama_behind_another_librarys_eyes(tmp_path: Path) -> None:
    """Perception LM as it is published, by what a Llama alone computes."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "perception_lm", "text_config": text, "vision_config": {"model_type": "timm_wrapper"}}
    whole |= {"image_token_id": 200, "video_token_id": 201, "projector_pooling_ratio": 2, "vision_use_cls_token": False}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    file = tmp_path / "model.safetensors"
    seen = {
        f"model.{name}": np.ones(2, np.float32)
        for name in ("vision_tower.timm_model.norm.weight", "multi_modal_projector.linear_1.weight")
    }
    own = {name.replace("model.", "model.language_model."): tensor for name, tensor in load_file(file).items()}
    save_file(own | seen, file)
    expected = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    assert np.abs(logits(open_native(tmp_path, "fp32")) - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_layer_that_predicts_further_tokens_is_left_out(tmp_path: Path) -> None:
    """GLM-OCR's lies behind the others."""
    path = save_multimodal("glm_ocr", tmp_path)
    expected = logits(open_native(path, "fp32"))
    file, text = path / "model.safetensors", json.loads((path / "config.json").read_text())["text_config"]
    tensors = load_file(file)
    more = {name.replace("layers.1.", "layers.2."): tensor for name, tensor in tensors.items() if "layers.1." in name}
    assert more
    save_file(tensors | more | {"model.language_model.layers.2.eh_proj.weight": np.ones((2, 2), np.float32)}, file)
    with pytest.raises(ModelError, match="no part of this model asks for"):
        open_native(path, "fp32")
    edit(path, text_config=text | {"num_nextn_predict_layers": 1})
    assert (logits(open_native(path, "fp32")) == expected).all()


@pytest.mark.slow
def test_a_hunyuan_may_keep_no_text_config_apart(tmp_path: Path) -> None:
    """As HunyuanOCR is published; its rope in four directions is the ordinary one."""
    path = save_multimodal("hunyuan_vl", tmp_path)
    expected = logits(open_native(path, "fp32"))
    whole = json.loads((path / "config.json").read_text())
    rope = {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    rope |= {"mscale_all_dim": 1.0, "xdrope_section": [2, 2, 2, 2]}
    flat = whole | {
        key: value for key, value in whole.pop("text_config").items() if key not in ("model_type", "rope_parameters")
    }
    flat |= {"rope_scaling": rope, "rope_theta": 1e4, "attention_head_dim": 16, "org_vocab_size": VOCABULARY, "pad_id": 0}
    (path / "config.json").write_text(json.dumps(flat))
    assert (logits(open_native(path, "fp32")) == expected).all()
    assert not differences(path, reader=AutoModelForImageTextToText)[0]


def test_layers_that_attend_to_pictures(tmp_path: Path) -> None:
    """They do nothing for a text, and a layer that is not there is refused."""
    path = save_multimodal("mllama", tmp_path, language={"cross_attention_layers": [0, 2, 3], "num_hidden_layers": 4})
    assert sum(op.kind is Kind.ATTENTION for op in read_program(path, PRECISIONS["fp32"]).program.ops) == 1
    assert not differences(path, reader=AutoModelForImageTextToText)[0]
    text = json.loads((path / "config.json").read_text())["text_config"]
    for wrong in ([0, 4], [0, 1, 2, 3], 2, ["a"]):
        edit(path, text_config=text | {"cross_attention_layers": wrong})
        assert "cross_attention_layers" in (native_supports(str(path)) or "")


def test_null_is_a_value(tmp_path: Path) -> None:
    """A Mistral whose window is null has none; one that says nothing has one of 4,096 tokens."""
    save_multimodal("mistral3", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit(tmp_path, text_config=text | {"sliding_window": 16})
    assert windows(tmp_path) == {16}
    edit(tmp_path, text_config={key: value for key, value in text.items() if key != "sliding_window"})
    assert windows(tmp_path) == {4096}
    edit(tmp_path, text_config=text | {"sliding_window": None})
    assert windows(tmp_path) == {0}


def windows(path: Path) -> set[int]:
    program = read_program(path, PRECISIONS["fp32"]).program
    return {op.window for op in program.ops if op.kind is Kind.ATTENTION}


def test_what_published_configurations_of_qwen_say_of_what_is_always_so(tmp_path: Path) -> None:
    save_multimodal("qwen3_5_moe", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    said = {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "mlp_only_layers": []}
    ahead = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    edit(tmp_path, text_config=text | said | ahead)
    assert native_supports(str(tmp_path)) is None
    edit(tmp_path, text_config=text | said | {"attn_output_gate": False})
    assert "attn_output_gate" in (native_supports(str(tmp_path)) or "")


def test_a_configuration_that_keeps_no_text_config_apart(tmp_path: Path) -> None:
    """The first releases of Qwen2-VL have the language model's keys among the others."""
    save_multimodal("qwen2_vl", tmp_path)
    nested = json.loads((tmp_path / "config.json").read_text())
    expected = read_config(tmp_path)
    text = nested.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **nested, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    found = read_config(tmp_path)
    assert found["model_type"] == expected["model_type"] == "qwen2"
    assert found["rope_scaling"] == {"type": "default"}
    assert native_supports(str(tmp_path)) is None
    assert not differences(tmp_path, reader=AutoModelForImageTextToText)[0]


def test_its_language_model_may_say_how_it_is_quantised(tmp_path: Path) -> None:
    """As transformers has it."""
    path = edit(save_multimodal("llava", tmp_path), quantization_config=None)
    config = json.loads((path / "config.json").read_text())
    for whole, expected in ((None, "gptq"), ({"quant_method": "awq", "bits": 4, "group_size": 32}, "awq")):
        own = {"quant_method": "gptq", "bits": 4, "group_size": 32}
        edit(path, quantization_config=whole, text_config=config["text_config"] | {"quantization_config": own})
        found = quantisation_of(path)
        assert found is not None and found.name == expected


def test_what_is_known_of_it_is_known_of_its_language_model(tmp_path: Path) -> None:
    info = read_model_info(str(save_multimodal("gemma3", tmp_path)))
    assert (info.family, info.vocabulary, info.context) == ("gemma3_text", VOCABULARY, 512)


def test_experts_that_lie_transposed_or_not(tmp_path: Path) -> None:
    """Published checkpoints have them transposed; transformers asks the shapes."""
    path = save_multimodal("qwen3_vl_moe", tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    experts = [name for name in tensors if ".experts." in name]
    assert tensors[experts[0].rpartition(".")[0] + ".gate_up_proj"].shape == (4, 80, 64)
    save_file(tensors | {name: tensors[name].swapaxes(1, 2).copy() for name in experts}, file)
    found, proposed = differences(path, reader=AutoModelForImageTextToText)
    assert not found
    assert proposed


def test_newer_names_of_tensors(tmp_path: Path) -> None:
    save_multimodal("llava", tmp_path)
    renamed(tmp_path, "language_model.model.", "model.language_model.")
    renamed(tmp_path, "language_model.lm_head.", "lm_head.")
    assert not differences(tmp_path, reader=AutoModelForImageTextToText)[0]


def test_names() -> None:
    assert language_name("model.language_model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert language_name("language_model.lm_head.weight") == "lm_head.weight"
    assert language_name("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert language_name("model.visual.blocks.0.norm1.weight") is None
    assert language_name("vision_tower.post_layernorm.bias") is None
    assert language_name("image_newline") is None


def test_a_tensor_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    renamed(save_multimodal("llava", tmp_path), "vision_tower.", "ears.")
    with pytest.raises(ModelError, match="ears"):
        read_program(tmp_path, PRECISIONS["fp32"])


def test_one_that_is_not_known_is_left_to_transformers(tmp_path: Path) -> None:
    edit(save_multimodal("llava", tmp_path), model_type="paligemma")
    assert "paligemma" in (native_supports(str(tmp_path)) or "")


@pytest.mark.parametrize("text", [5, [], "llama"])
def test_a_text_config_of_another_kind_is_refused(text: object, tmp_path: Path) -> None:
    edit(save_multimodal("llava", tmp_path), text_config=text)
    with pytest.raises(ModelError, match="text_config"):
        read_config(tmp_path)


def quantised(path: Path, out: Path, bits: int) -> Path:
    quantise(Wanted(str(path), str(out), bits, "rtn", None, (), read_model_info(str(path)).digest), lambda line: None)
    return out


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS])
def test_its_language_model_is_quantised_by_itself(kind: str, tmp_path: Path) -> None:
    path = save_multimodal(kind, tmp_path / "whole")
    out = quantised(path, tmp_path / "out", 8)
    assert not json.loads((out / "config.json").read_text()).keys() & {"vision_config", "audio_config", "text_config"}
    expected, found = (logits(open_native(each, "fp32")) for each in (path, out))
    said = (np.abs(expected) < 1e30).all(axis=0)  # not what only stands for pictures
    found, expected = found[:, said], expected[:, said]
    lost = np.sqrt(((found - expected) ** 2).mean(axis=1) / (expected**2).mean())
    assert 0 < np.median(lost) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen2_vl", "qwen3_5"])
def test_transformers_reads_the_quantised_language_model(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    out = quantised(save_multimodal(kind, tmp_path / "whole"), tmp_path / "out", 4)
    assert json.loads((out / "config.json").read_text())["architectures"][0].endswith("ForCausalLM")
    found, proposed = differences(out)
    assert not found
    assert proposed


def test_tokens_of_pictures_keep_a_model_from_being_quantised(tmp_path: Path) -> None:
    """Gemma 3n by itself would take them for a text's."""
    edit(save_multimodal("gemma3", tmp_path), model_type="gemma3n")
    with pytest.raises(ModelError, match="tokens for what it sees"):
        program_of(tmp_path)
