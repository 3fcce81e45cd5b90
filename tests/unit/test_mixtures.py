"""Mixtures of experts as checkpoints keep them: one by one, together, in MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_texts import LENGTHS, WRITTEN, difference, one_thread, prompt
from native_models import TOKENS, logits, open_native
from quantised_models import Tensors, block_fp8, compressed, rewritten, set_config
from safetensors.torch import load_file
from tiny_models import one_by_one, tiny_config, tiny_model
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from benchmarks.families.check import write
from outrider.kernels.program import Codes, Format, Kind
from outrider.workers.engines.engine import Feed, Router
from outrider.workers.errors import ModelError
from outrider.workers.messages import Sampling
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.families import build_program
from outrider.workers.models.model_info import read_model_info
from outrider.workers.precisions import PRECISIONS

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "qwen2-moe",
        "qwen3-moe",
        "olmoe",
        "glm4-moe",
        "ernie-moe",
        "minimax-m2",
        "lfm2-moe",
        "phimoe",
        "deepseek-v3",
    ],
)
def test_experts_that_lie_together_are_those_that_lie_apart(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    apart = load_file(tmp_path / "model.safetensors")
    assert any(".experts.0." in tensor for tensor in apart)
    found = logits(open_native(tmp_path, "bf16", threads=1))
    tied = model.config.tie_word_embeddings
    together = {key: value for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")}
    rewritten(tmp_path, lambda tensors: together)
    assert any(tensor.endswith("experts.gate_up_proj") for tensor in load_file(tmp_path / "model.safetensors"))
    np.testing.assert_array_equal(logits(open_native(tmp_path, "bf16", threads=1)), found)


@pytest.mark.parametrize("name", ["granite-moe-shared", "exaone-moe"])
def test_names_of_a_family_s_makers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """As published, and as in transformers' memory."""
    theirs = {"granite-moe-shared": "block_sparse_moe.input_linear.weight", "exaone-moe": "mlp.e_score_correction_bias"}
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    assert f"model.layers.1.{theirs[name]}" in load_file(tmp_path / "model.safetensors")
    found = logits(open_native(tmp_path, "fp32", threads=1))
    rewritten(tmp_path, lambda tensors: dict(model.state_dict()))
    assert f"model.layers.1.{theirs[name]}" not in load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(logits(open_native(tmp_path, "fp32", threads=1)), found)


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3-halves", "glm4-moe-lite"])
def test_layers_that_guess_further_tokens_are_left_out(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    set_config(tmp_path, num_nextn_predict_layers=1)
    rewritten(tmp_path, lambda tensors: tensors | {"model.layers.2.eh_proj.weight": torch.zeros(4, 4)})
    read_program(tmp_path, PRECISIONS["bf16"])
    rewritten(tmp_path, lambda tensors: tensors | {"model.layers.3.eh_proj.weight": torch.zeros(4, 4)})
    with pytest.raises(ModelError, match=r"holds .model\.layers\.3\.eh_proj\.weight., which no part of this model asks"):
        read_program(tmp_path, PRECISIONS["bf16"])


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("glm4-moe", {"n_group": 3}, r'3 of 8 experts cannot be chosen with "n_group": 3, "topk_group": 2'),
        ("glm4-moe", {"topk_group": 5}, r'cannot be chosen with "n_group": 4, "topk_group": 5'),
        ("glm4-moe", {"n_group": 8}, r'cannot be chosen with "n_group": 8, "topk_group": 2'),
        (
            "glm4-moe",
            {"first_k_dense_replace": -1},
            r"must be a whole number of at least 0, got -1",
        ),
        ("exaone-moe", {"mlp_layer_types": ["dense"]}, r'cannot follow "mlp_layer_types"'),
        ("exaone-moe", {"layer_types": None, "sliding_window_pattern": "LG"}, r'"sliding_window_pattern": .LG. without'),
        ("hy3", {"mlp_bias": True}, r'"mlp_bias": True'),
        ("solar-open", {"use_qk_norm": True}, r'"use_qk_norm": True'),
        ("mellum", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, r'"rope_scaling"'),
        ("minimax-m2", {"scoring_func": "softmax"}, r'"scoring_func": .softmax.'),
        ("afmoe", {"route_norm": False}, r'"route_norm": False'),
        ("lfm2-moe", {"layer_types": None}, r'has no "layer_types"'),
        ("deepseek-v3", {"n_group": 8}, r'3 of 8 experts cannot be chosen with "n_group": 8, "topk_group": 2'),
        ("deepseek-v3", {"scoring_func": "softmax"}, r'"scoring_func": .softmax.'),
        ("deepseek-v3", {"topk_method": "greedy"}, r'"topk_method": .greedy.'),
        ("deepseek-v3", {"moe_layer_freq": 2}, r'"moe_layer_freq": 2'),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, r'"topk_method": .noaux_tc.'),
        ("deepseek-v2", {"norm_topk_prob": True}, r'"norm_topk_prob": True'),
        ("deepseek-v2-groups", {"topk_group": 5}, r'cannot be chosen with "n_group": 4, "topk_group": 5'),
        ("glm4-moe-lite", {"mlp_layer_types": None, "first_k_dense_replace": 2}, r'"first_k_dense_replace": 2'),
        ("phimoe", {"num_experts_per_tok": 3}, r'"num_experts_per_tok": 3'),
        ("phimoe", {"num_local_experts": 1}, "a token takes two experts, there is 1"),
        ("cohere2-moe", {"expert_selection_fn": "tanh"}, r'"expert_selection_fn": .tanh.'),
        ("cohere2-moe", {"shared_expert_combination_strategy": "product"}, r'"shared_expert_combination_strategy"'),
        (
            "granite-moe-hybrid",
            {"layer_types": ["mamba", "conv"]},
            r'cannot follow "layer_types": \[.linear_attention., .conv.',
        ),
        ("granite-moe-hybrid", {"layer_types": None}, "a model without a layer of attention"),
        ("granite-moe-mamba", {"time_step_limit": [0.01, 0.1]}, r'"time_step_limit": \[0.01, 0.1\]'),
        ("granite-moe-mamba", {"mamba_d_head": 24}, r'8 heads of "mamba_d_head": 24 are not 384 columns'),
        ("granite-moe-hybrid", {"position_embedding_type": "alibi"}, r'"position_embedding_type": .alibi.'),
        ("granite-hybrid", {"normalization_function": "layernorm"}, r'"normalization_function": .layernorm.'),
        ("hunyuan-moe", {"moe_topk": [2, 3]}, r'"moe_topk": \[2, 3\]'),
        ("hunyuan-moe", {"moe_topk": 9}, r'"moe_topk" is 9, there are 6 experts'),
    ],
)
def test_what_a_router_cannot_do_is_refused_by_name(name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(tiny_config(name).to_dict() | changes, Format.BF16)


def test_long_rope_with_two_factors_is_refused() -> None:
    config = tiny_config("phimoe-long").to_dict()
    rope = config["rope_parameters"] | {"long_mscale": 1.5}
    with pytest.raises(ModelError, match=r"short_mscale and long_mscale are 1.1 and 1.5"):
        build_program(config | {"rope_parameters": rope}, Format.BF16)


def in_mxfp4(path: Path, tensors: Tensors, plain: Tensors) -> Tensors:
    """Random codes and scales in place of every layer's experts; the numbers that they stand for go to ``plain``."""
    generator = torch.Generator().manual_seed(7)
    result = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = result.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert plain[name].shape == (experts, columns, rows)
        result |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return result


@pytest.fixture
def mxfp4(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint as gpt-oss is published, and one with the numbers that its codes stand for."""
    path, dequantised = tmp_path / "mxfp4", tmp_path / "plain"
    model = tiny_model("gpt-oss")
    model.save_pretrained(path)
    model.save_pretrained(dequantised)
    plain: Tensors = {}
    rewritten(path, lambda tensors: in_mxfp4(path, tensors, plain))
    kept = load_file(path / "model.safetensors")
    rewritten(
        dequantised,
        lambda tensors: {name: plain.get(name, kept.get(name, value).float()) for name, value in tensors.items()},
    )
    set_config(path, quantization_config=MXFP4)
    return path, dequantised


@one_thread()
@torch.inference_mode()
def test_mxfp4_is_what_its_codes_stand_for(mxfp4: tuple[Path, Path]) -> None:
    path, dequantised = mxfp4
    model = AutoModelForCausalLM.from_pretrained(dequantised, dtype=torch.float32, attn_implementation="eager").eval()
    expected = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    for precision, bound in (("fp32", 1e-4), ("w8af32", 1e-4), ("w4abf16", 0.03), ("w4a8", 0.06)):
        distance = np.abs(logits(open_native(path, precision, threads=1)) - expected).max() / np.abs(expected).max()
        assert distance < bound, f"{precision}: {distance:.1e}"
    assert read_model_info(str(path)).made_for == "w4abf16"
    built = read_program(path, PRECISIONS["w4abf16"])
    assert "mxfp4, 4 bits, groups of 32" in built.weights and built.kept
    op = next(op for op in built.program.ops if op.kind is Kind.EXPERTS)
    assert built.program.weights[op.weight].stored.codes is Codes.E2M1
    # Codes as they are and activations in fp32: the texts are transformers'.
    engine = open_native(path, "w8af32", threads=1)
    prompts = [prompt(length, 1, engine.vocabulary) for length in LENGTHS]
    texts, (proposed, _) = write(engine, prompts)
    assert proposed > 10 and all(len(text) == WRITTEN for text in texts)
    assert not [each for given, text in zip(prompts, texts, strict=True) if (each := difference(model, given, text))]


@pytest.mark.slow
@one_thread()
@torch.inference_mode()
def test_the_perplexity_in_mxfp4_is_that_of_the_same_weights_in_bf16(tmp_path: Path) -> None:
    path, dequantised = tmp_path / "mxfp4", tmp_path / "plain"
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 4}
    model = tiny_model(
        "gpt-oss", 11, **sizes, num_hidden_layers=4, vocab_size=1000, head_dim=32, max_position_embeddings=1024
    )
    plain: Tensors = {}

    def in_bf16(tensors: Tensors) -> Tensors:
        return {name: value.bfloat16() if value.is_floating_point() else value for name, value in tensors.items()}

    for each in (path, dequantised):
        model.save_pretrained(each)
    rewritten(path, lambda tensors: in_bf16(in_mxfp4(path, tensors, plain)))
    rewritten(dequantised, lambda tensors: in_bf16(tensors | plain))
    set_config(path, quantization_config=MXFP4)
    texts = np.random.default_rng(5).integers(5, 990, (4, 500))
    found = []
    for each, precision in ((path, "w4abf16"), (dequantised, "bf16")):
        engine, losses = open_native(each, precision, threads=1), []
        for text in texts.tolist():
            scores = logits(engine, text)[:-1].astype(np.float64)
            scores -= scores.max(axis=1, keepdims=True)
            chosen = np.take_along_axis(scores, np.array(text[1:])[:, None], axis=1)[:, 0]
            losses.append(np.log(np.exp(scores).sum(axis=1)) - chosen)
        found.append(np.concatenate(losses))
    assert abs(np.exp(found[0].mean() - found[1].mean()) - 1.0) < 1e-3


def test_a_scale_that_is_no_number_is_refused(mxfp4: tuple[Path, Path]) -> None:
    path, _ = mxfp4
    name = "model.layers.1.mlp.experts.down_proj_scales"

    def change(tensors: Tensors) -> Tensors:
        tensors[name][2, 3, 1] = 255
        return tensors

    rewritten(path, change)
    with pytest.raises(ModelError, match=r"down_proj_scales. \(mxfp4\) holds a scale that is not a finite number"):
        open_native(path, "w4abf16", threads=1)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    config = tiny_config("mixtral").to_dict()
    with pytest.raises(ModelError, match=r'"num_experts_per_tok" is 9, there are 5 experts'):
        build_program(config | {"num_experts_per_tok": 9}, Format.BF16)
    assert build_program(config, Format.W4A8).integer and not build_program(config, Format.BF16).integer
    tiny_model("mixtral").save_pretrained(tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    rewritten(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(ModelError, match=r"lacks the weight .model\.layers\.0\.mlp\.experts\.3\.down_proj\.weight"):
        read_program(tmp_path, PRECISIONS["bf16"])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["phi3", "qwen3-moe", "qwen2-moe", "mixtral", "deepseek-v2-groups"])
def test_codes_of_fused_matrices_and_of_experts_are_kept(name: str, tmp_path: Path) -> None:
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 64, "v_head_dim": 16}
    sizes |= {"intermediate_size": 192, "head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    sizes = {key: size for key, size in sizes.items() if hasattr(tiny_config(name), key)}
    model = tiny_model(name, **sizes)
    model.save_pretrained(tmp_path)
    compressed(tmp_path, num_bits=4, strategy="group", group_size=32)
    built = read_program(tmp_path, PRECISIONS["w8af32"])
    assert built.kept
    kept = [weight for weight in built.program.weights if weight.storage is not None]
    assert {weight.stored.codes for weight in kept} == {Codes.INT4} and len(kept) >= 8
    found, dequantised = (logits(open_native(tmp_path, each, threads=1)) for each in ("w8af32", "fp32"))
    assert np.abs(found - dequantised).max() < 1e-4 * np.abs(dequantised).max()


@pytest.mark.one_in(2)
@one_thread()
@torch.inference_mode()
@pytest.mark.parametrize("name", ["youtu-wide", "deepseek-v3"])
def test_fp8_by_blocks_is_what_its_numbers_are_in_the_order_that_rope_wants(name: str, tmp_path: Path) -> None:
    """Rows of queries, keys and values are laid out in another order; blocks end within heads, and one is not whole."""
    sizes = {"intermediate_size": 192, "q_lora_rank": 64, "kv_lora_rank": 32, "v_head_dim": 16}
    model = tiny_model(name, **sizes | ({"moe_intermediate_size": 32} if name == "deepseek-v3" else {}))
    model.save_pretrained(tmp_path)
    block_fp8(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.1.self_attn.q_b_proj.weight_scale_inv"].shape == (5, 2)
    plain = {key: value for key, value in stored.items() if not key.endswith("_scale_inv")}
    for key in [key for key in stored if key.endswith("_scale_inv")]:
        weight = key.removesuffix("_scale_inv")
        scales = stored[key].repeat_interleave(32, 0).repeat_interleave(32, 1)
        rows, columns = plain[weight].shape
        plain[weight] = plain[weight].float() * scales[:rows, :columns]
    numbers = tmp_path / "numbers"
    model.save_pretrained(numbers)
    rewritten(numbers, lambda tensors: plain)
    theirs = AutoModelForCausalLM.from_pretrained(numbers, dtype=torch.float32, attn_implementation="eager").eval()
    one_by_one(theirs)
    expected = theirs(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    found = logits(open_native(tmp_path, "fp32", threads=1))
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    kept = [weight for weight in read_program(tmp_path, PRECISIONS["bf16"]).program.weights if weight.storage is not None]
    assert {weight.stored.codes for weight in kept} == {Codes.E4M3} and len(kept) >= 10


@one_thread()
@torch.inference_mode()
def test_experts_without_weights_are_not_read(tmp_path: Path) -> None:
    """LongCat-Flash's router chooses four of eight, of which three have none."""
    model = tiny_model("longcat")
    model.save_pretrained(tmp_path)
    engine = open_native(tmp_path, "fp32", threads=2)
    assert engine.mixture is not None
    assert engine.mixture.routers == (Router(5, 4 * 5 / 8),) * 2
    engine.open(0, Sampling(), 1)
    engine.feed([Feed(0, TOKENS, len(TOKENS))])
    scores = model(input_ids=torch.tensor([TOKENS]), use_cache=False, output_router_logits=True).router_logits
    corrections = [layer.mlp.router.e_score_correction_bias for layer in model.model.layers]
    needed = [
        {expert for expert in (layer.softmax(1) + more).topk(4).indices.flatten().tolist() if expert < 5}
        for layer, more in zip(scores, corrections, strict=True)
    ]
    assert engine.mixture.read == sum(map(len, needed))


@one_thread()
@torch.inference_mode()
def test_a_pass_tells_how_many_experts_it_read(tmp_path: Path) -> None:
    model = tiny_model("qwen3-moe")
    model.save_pretrained(tmp_path)
    engine = open_native(tmp_path, "fp32", threads=2)
    assert engine.mixture is not None
    experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
    layers = len(engine.mixture.routers)
    assert engine.mixture.routers == (Router(experts, chosen),) * layers and layers == 2
    engine.open(0, Sampling(), 1)
    engine.feed([Feed(0, TOKENS[:1], 1)])
    assert engine.mixture.read == layers * chosen
    # Behind the last attention there are only those tokens behind which something is chosen.
    engine.feed([Feed(0, TOKENS[1:], len(TOKENS) - 1)])
    scores = model(input_ids=torch.tensor([TOKENS]), use_cache=False, output_router_logits=True).router_logits
    needed = [len(set(layer[1:].topk(chosen).indices.flatten().tolist())) for layer in scores]
    assert len(needed) == layers and engine.mixture.read == sum(needed)
    engine.open(1, Sampling(), 1)
    engine.feed([Feed(0, TOKENS[:2], 2), Feed(1, TOKENS[:1], 1)])
    assert layers * chosen < engine.mixture.read <= 3 * layers * chosen
    dense = tmp_path / "dense"
    tiny_model("llama").save_pretrained(dense)
    assert open_native(dense, "fp32", threads=1).mixture is None
