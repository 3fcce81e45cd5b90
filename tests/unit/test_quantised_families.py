"""Quantised checkpoints of the native engine's newer families, in the layouts in which people publish them, against
transformers on the numbers that their codes stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_texts import one_thread
from native_models import TOKENS, logits, open_native
from quantised_families import (
    FP8,
    LAYOUTS,
    NF4,
    Layout,
    auto_round,
    compressed,
    fp8_by_block,
    gptq,
    modelopt,
    quantised,
    sizes_of,
    stored,
    usual,
)
from quantised_models import GPTQ, Tensors, rewritten, set_config
from tiny_models import MIXTURES, TINY, one_by_one, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.kernels.program import Codes, Format, Kind
from outrider.workers.errors import ModelError
from outrider.workers.messages import ModelSpec
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.formats import exact_storage
from outrider.workers.models.formats.configuration import read_quantisation
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.opening import check_weights, open_model
from outrider.workers.models.twins import attention_of
from outrider.workers.precisions import PRECISIONS

DENSE = (
    "gemma4",
    "gemma4-by-layer",
    "ministral3",
    "apertus",
    "nanochat",
    "youtu-wide",
    "granite-hybrid",
    "granite-mamba",
    "falcon-h1",
    "nemotron-h",
    "jais2",
    "lfm2",
    "lfm3",
    "hrm-text",
    "olmo-hybrid",
    "mamba",
    "falcon-mamba",
    "mamba2",
    "bloom",
    "mpt-clipped",
    "falcon",
    "falcon-rw",
    "falcon-new",
)
# gpt-oss' experts have biases and lie inputs by outputs, as nothing but its own MXFP4 has them; DBRX's lie in one matrix.
FAMILIES = [name for name in MIXTURES if not name.startswith(("gpt-oss", "dbrx"))] + list(DENSE)
QUICK = [("deepseek-v3", "gptq, in activation order")]
# Layouts that the fast set meets elsewhere, too.
LONGER = [
    ("deepseek-v3", "fp8 by block"),
    ("glm4-moe-lite", "compressed int4"),
    ("gemma4", "compressed fp8"),
    ("lfm2-moe", "auto-round, as awq"),
    ("gemma4-moe", "modelopt nvfp4"),
]
# Relative to the largest logit: sums of fp32 in another order.
BOUND = 1e-5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def pairs() -> Iterator[object]:
    """Every family in two layouts, so that every layout has a tenth of the families."""
    layouts = list(LAYOUTS)
    found = [
        (name, layouts[(2 * place + more * 11) % len(layouts)]) for place, name in enumerate(FAMILIES) for more in range(2)
    ]
    for pair in dict.fromkeys([*QUICK, *LONGER, *found]):
        narrow = {
            "kv_lora_rank",
            "global_head_dim",
            "num_attention_heads_per_layer",
            "num_sliding_attention_heads",
            "mamba_num_heads",
            "mamba_n_heads",
        }  # (gates have a row for each head)
        if pair[1] == "gptq, 2 bits" and not narrow.isdisjoint((TINY | MIXTURES)[pair[0]][1]):
            continue  # sixteen rows lie in a word
        yield pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)


def made(path: Path, name: str, layout: Layout, chosen: Callable[[str], bool] = usual, **changes: Any) -> Path:
    """The checkpoint; that of its numbers lies beside it as "plain"."""
    tiny_model(name, **(sizes_of(name) | changes)).save_pretrained(path / "model")
    assert quantised(path / "model", path / "plain", layout, chosen)
    return path / "model"


@torch.inference_mode()
def expected(plain: Path) -> np.ndarray:
    attention = attention_of(AutoConfig.from_pretrained(plain), fused=False)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation=attention).eval()
    one_by_one(model)
    found: np.ndarray = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    return found


def far(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def check(model: Path, *, kept: str = "w8af32") -> None:
    plain = model.with_name("plain")
    found = logits(open_native(model, "fp32"))
    with one_thread():
        assert far(found, expected(plain)) < BOUND
    np.testing.assert_array_equal(found, logits(open_native(plain, "fp32")))
    if kept == "bf16":
        # Codes of eight bits stay packed, and give the bits of their numbers in bf16.
        np.testing.assert_array_equal(logits(open_native(model, "bf16")), logits(open_native(plain, "bf16")))
    else:
        assert far(logits(open_native(model, kept)), found) < BOUND


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), pairs())
def test_a_quantised_family_is_what_its_numbers_are(name: str, layout: str, tmp_path: Path) -> None:
    model = made(tmp_path, name, LAYOUTS[layout])
    floats = read_model_info(str(model)).made_for == "bf16"
    check(model, kept="bf16" if floats else "w8af32")
    weights = read_program(model, PRECISIONS["bf16" if floats else "w8af32"]).program.weights
    assert any(weight.storage is not None for weight in weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "mpt-clipped", "falcon", "falcon-rw", "falcon-new", "mamba", "falcon-mamba"])
def test_nf4_of_bitsandbytes_is_what_its_numbers_are(name: str, tmp_path: Path) -> None:
    """Falcon Mamba is published so. Fused matrices are read in parts."""
    model = made(tmp_path, name, NF4)
    check(model, kept="bf16")
    assert any(weight.storage is not None for weight in read_program(model, PRECISIONS["bf16"]).program.weights)


@pytest.mark.parametrize(("layout", "kept"), [("compressed int4", Format.FP16), ("gptq", Format.FP32)])
def test_what_is_transposed_of_codes_is_kept_in_fp16_where_that_has_its_numbers(
    layout: str, kept: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of kv_b_proj what makes keys. Scales in bf16 times seven have the bits that fp16 has, those in fp16 have more."""
    model = made(tmp_path, "glm4-moe-lite", LAYOUTS[layout], num_hidden_layers=2)
    program = read_program(model, PRECISIONS["w4abf16"]).program
    assert {weight.format for weight in program.weights if weight.sources and weight.sources[0].transposed} == {kept}
    if kept is Format.FP16:
        found = logits(open_native(model, "w4abf16"))
        monkeypatch.setattr(exact_storage, "fits_halves", lambda matrix: False)
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "another cache"))
        np.testing.assert_array_equal(found, logits(open_native(model, "w4abf16")))


@pytest.mark.slow
def test_what_guesses_further_tokens_is_left_out_when_it_is_quantised(tmp_path: Path) -> None:
    """DeepSeek V3's layer behind the last, with a head and an embedding of its own."""
    model = made(tmp_path, "deepseek-v3", LAYOUTS["fp8 by block"])
    set_config(model, num_nextn_predict_layers=1)
    wanted = logits(open_native(model, "bf16"))

    def more(tensors: Tensors) -> Tensors:
        last = {name: value for name, value in tensors.items() if "layers.2." in name}
        behind = {name.replace("layers.2.", "layers.3."): value.clone() for name, value in last.items()}
        for name in ("embed_tokens.weight", "shared_head.head.weight"):
            behind[f"model.layers.3.{name}"] = tensors["lm_head.weight"].clone()
        parts, _ = fp8_by_block("", torch.ones(96, 192))
        return tensors | behind | {f"model.layers.3.eh_proj.{name}": part for name, part in parts.items()}

    rewritten(model, more)
    np.testing.assert_array_equal(logits(open_native(model, "bf16")), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("ordered", ["all", "some"])
def test_every_expert_has_its_own_order_of_columns(ordered: str, tmp_path: Path) -> None:
    """Or none, where the file has it so."""
    in_order, plain = gptq(4, 1, ordered=True), gptq(4, 1)

    def pack(module: str, matrix: torch.Tensor) -> Any:
        return (in_order if ordered == "all" or ".experts.2." in module else plain)(module, matrix)

    model = made(tmp_path, "qwen3-moe", Layout(pack, GPTQ | {"desc_act": True}))
    orders = {
        tuple(value.tolist())
        for name, value in stored(model).items()
        if "1.mlp.experts" in name and "gate_proj.g_idx" in name
    }
    assert len(orders) == (20 if ordered == "all" else 2)
    check(model)
    program = read_program(model, PRECISIONS["w4abf16"]).program
    op = next(op for op in program.ops if op.kind is Kind.EXPERTS)
    assert program.weights[op.weight].ordered
    found = logits(open_native(model, "w4a8"))
    np.testing.assert_array_equal(logits(open_native(model, "w4a8", threads=2), pieces=(1, 7, 3)), found)


def test_gate_and_up_of_an_expert_in_different_orders_are_refused(tmp_path: Path) -> None:
    in_order, plain = gptq(4, 1, ordered=True), gptq(4, 1)

    def pack(module: str, matrix: torch.Tensor) -> Any:
        return (in_order if "up_proj" in module else plain)(module, matrix)

    model = made(tmp_path, "qwen2-moe-windows", Layout(pack, GPTQ), lambda module: ".experts." in module)
    with pytest.raises(ModelError, match=r"experts are quantised in different ways.*; --precision bf16 runs them"):
        check_weights(str(model), "native", precision="w4a8")
    check_weights(str(model), "native", precision="bf16")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", ["gptq", "compressed int4", "fp8 by block"])
def test_a_router_and_a_head_may_be_quantised_too(layout: str, tmp_path: Path) -> None:
    def chosen(module: str) -> bool:
        return usual(module) or module.endswith(("mlp.gate", "lm_head"))

    settings = LAYOUTS[layout].settings | {"ignore": [], "modules_to_not_convert": None}
    model = made(tmp_path, "glm4-moe", Layout(LAYOUTS[layout].pack, settings), chosen, vocab_size=208)
    check(model, kept="bf16" if layout.startswith("fp8") else "w8af32")


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_of_three_bits_has_codes_in_two_words(version: int, tmp_path: Path) -> None:
    """32 rows, and columns, lie in three words."""
    settings = GPTQ | {"bits": 3, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    layout = Layout(gptq(3, 1 if version == 1 else 0, ordered=version == 2), settings)
    model = made(tmp_path, "qwen3-moe", layout, moe_intermediate_size=64, head_dim=32)
    check(model)
    found = open_model(ModelSpec(str(model), "native", "w4abf16", threads=1)).numeric_path["weights"]
    assert found.startswith("gptq, 3 bits, groups of 32 (")
    rewritten(
        model, lambda tensors: {name: value[:-1] if "q_proj.qweight" in name else value for name, value in tensors.items()}
    )
    with pytest.raises(ModelError, match=r"q_proj.qweight. \(gptq\) has shape"):
        check_weights(str(model), "native", precision="w4a8")


def test_gptq_of_three_bits_that_do_not_fill_words_is_refused(tmp_path: Path) -> None:
    model = made(tmp_path, "jais2", LAYOUTS["gptq"], lambda module: module.endswith("0.self_attn.k_proj"))
    set_config(model, quantization_config=GPTQ | {"bits": 3})
    with pytest.raises(ModelError, match=r"has \d+ rows and \d+ columns, 32 of which lie in 3 words|has shape"):
        check_weights(str(model), "native", precision="w4a8")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", ["gptq", "gptq, in activation order", "fp8 by block"])
def test_the_last_group_or_block_of_a_row_need_not_be_whole(layout: str, tmp_path: Path) -> None:
    """DeepSeek-V2-Lite, GLM-4.5-Air and dots.llm1 have rows of 10,944, Gemma 4's mixture such of 704."""
    layouts = {
        "gptq": Layout(gptq(4, 1, group=128), GPTQ | {"group_size": 128}),
        "gptq, in activation order": Layout(gptq(4, 1, ordered=True, group=128), GPTQ | {"group_size": 128}),
        "fp8 by block": Layout(partial(fp8_by_block, block=128), FP8 | {"weight_block_size": [128, 128]}),
    }
    model = made(tmp_path, "dots1", layouts[layout], lambda module: "layers.0.mlp.down_proj" in module)
    kept = "bf16" if layout.startswith("fp8") else "w4abf16"
    weights = [weight for weight in read_program(model, PRECISIONS[kept]).program.weights if weight.storage is not None]
    assert [(weight.columns, weight.group) for weight in weights] == [(192, 64)]
    check(model, kept="bf16" if layout.startswith("fp8") else "w8af32")


# As experts' tensors are called where those of all of a layer lie in one.
JOINED = re.compile(r".*(experts\.(gate_up|down)_proj|_moe\.(input|output)_linear\.weight)")
SINGLE = re.compile(r"\.experts\.\d")
BY_64 = Layout(partial(fp8_by_block, block=64), FP8 | {"weight_block_size": [64, 64]})


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", [BY_64, LAYOUTS["compressed fp8"]], ids=["by block", "by row"])
@pytest.mark.parametrize("name", ["granite-moe-shared", "qwen3-moe", "gemma4-moe"])
def test_experts_in_one_tensor_may_be_of_fp8(name: str, layout: Layout, tmp_path: Path) -> None:
    """An expert has 96 rows of gate and as many of up, so that some blocks of scales have both."""
    width: dict[str, Any] = {"intermediate_size" if name.startswith("granite") else "moe_intermediate_size": 96}
    model = made(tmp_path, name, layout, **width)
    held = tiny_model(name, **(sizes_of(name) | width)).state_dict() if name == "qwen3-moe" else stored(tmp_path / "plain")
    numbers: Tensors = {}

    def joined(tensors: Tensors) -> Tensors:
        found = {key: value for key, value in tensors.items() if not SINGLE.search(key)}
        for key in filter(JOINED.fullmatch, held):
            packed = [layout.pack("", matrix.float()) for matrix in held[key]]
            numbers[key] = torch.stack([values for _, values in packed])
            for part in packed[0][0]:
                found[f"{key}{part.removeprefix('weight')}"] = torch.stack([each[part] for each, _ in packed])
        return found

    rewritten(model, joined)
    assert len(numbers) >= 4
    rewritten(
        tmp_path / "plain",
        lambda tensors: {key: value for key, value in tensors.items() if not SINGLE.search(key)} | numbers,
    )
    check(model, kept="bf16")
    program = read_program(model, PRECISIONS["bf16"]).program
    experts = [program.weights[op.weight] for op in program.ops if op.kind is Kind.EXPERTS]
    assert experts and {weight.stored.codes for weight in experts} == {Codes.E4M3}


MULTIMODAL = {"ministral3": ("mistral3", "language_model.model."), "gemma4-moe": ("gemma4", "model.language_model.")}


def inside_one_that_sees(model: Path, name: str) -> str:
    """The same language model in such a checkpoint; what its names begin with."""
    kind, prefix = MULTIMODAL[name]
    config = json.loads((model / "config.json").read_text())
    settings = config.pop("quantization_config")
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]}
    whole = {"model_type": kind, "vision_config": {}, "text_config": config, "quantization_config": settings} | tied
    (model / "config.json").write_text(json.dumps(whole))
    heads = {"lm_head.": f"{prefix.removesuffix('model.')}lm_head." if prefix.endswith("model.") else "lm_head."}

    def renamed(tensors: Tensors) -> Tensors:
        found = {}
        for tensor, value in tensors.items():
            head = next((new + tensor.removeprefix(old) for old, new in heads.items() if tensor.startswith(old)), "")
            found[head or prefix + tensor.removeprefix("model.")] = value
        return found | {"model.vision_tower.embeddings.weight": torch.zeros(2)}

    rewritten(model, renamed)
    return prefix


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MULTIMODAL)
def test_patterns_may_name_a_layer_as_a_model_that_sees_has_it(name: str, tmp_path: Path) -> None:
    """Some of the layers in eight bits, others in four, and the rest as they were."""
    four, eight = LAYOUTS["compressed int4"], compressed("pack-quantized", num_bits=8, strategy="group", group_size=32)

    def pack(module: str, matrix: torch.Tensor) -> Any:
        return (eight if ".layers.1." in module else four).pack(module, matrix)

    (of_four,), (of_eight,) = (each.settings["config_groups"].values() for each in (four, eight))
    prefix = MULTIMODAL[name][1]
    groups = {
        "a": of_eight | {"targets": [rf"re:{re.escape(prefix)}layers\.1\.(self_attn|mlp|experts)\..*"]},
        "b": of_four | {"targets": [r"re:.*language_model.*layers\.[02345]\..*_proj$"]},
    }
    ignored = ["re:.*vision_tower.*", "re:.*language_model.*per_layer.*", f"{prefix}layers.0.router.proj"]
    settings = four.settings | {"config_groups": groups, "ignore": ignored}
    model = made(tmp_path, name, Layout(pack, settings), lambda module: usual(module) and "per_layer" not in module)
    assert inside_one_that_sees(model, name) == prefix
    check(model)
    set_config(model, quantization_config=settings | {"ignore": [f"{prefix}layers.0.self_attn.q_proj"]})
    with pytest.raises(ModelError, match=r'q_proj. .*is quantised, "ignore" in quantization_config says that it is not'):
        check_weights(str(model), "native", precision="w4a8")


def test_fp8_of_ministral_3_as_mistral_publishes_it(tmp_path: Path) -> None:
    model = made(tmp_path, "ministral3", LAYOUTS["fp8, static"])
    inside_one_that_sees(model, "ministral3")
    assert read_model_info(str(model)).made_for == "bf16"
    check(model, kept="bf16")


@pytest.mark.slow
def test_auto_round_says_of_layers_what_they_have_of_their_own(tmp_path: Path) -> None:
    """More bits, smaller groups, or none of it: by name, and by pattern."""
    layout = LAYOUTS["auto-round, as gptq"]
    eight = auto_round(gptq(8, 1), "").pack
    wide = auto_round(gptq(4, 1, group=96), "").pack

    def pack(module: str, matrix: torch.Tensor) -> Any:
        of_its_own = eight if module.endswith("0.self_attn.o_proj") else wide if "self_attn.q" in module else layout.pack
        return of_its_own(module, matrix)

    extra: dict[str, Any] = {
        r".*self_attn\.q.*": {"group_size": 96},
        r".*self_attn.*": {"bits": 2, "group_size": 64},
        "model.layers.0.self_attn.o_proj": {"bits": 8},
        r".*shared_expert.*": {"bits": 16, "data_type": "float"},
        "lm_head": {},
    }
    settings = layout.settings | {"extra_config": extra}

    def chosen(module: str) -> bool:
        left = ("k_proj", "v_proj", "1.self_attn.o_proj")
        return usual(module) and "shared_" not in module and not module.endswith(left)

    model = made(tmp_path, "hunyuan-moe", Layout(pack, settings), chosen)
    check(model)
    found = open_model(ModelSpec(str(model), "native", "w4abf16", threads=1)).numeric_path["weights"]
    assert found == "gptq, 4 bits, groups of 32 (36); gptq, 4 bits, groups of 96 (2); gptq, 8 bits, groups of 32 (1)"
    set_config(model, quantization_config=settings | {"extra_config": {"model.layers.0.self_attn.q_proj": {"bits": 16}}})
    with pytest.raises(ModelError, match=r'is quantised, "extra_config" in quantization_config says that it is not'):
        check_weights(str(model), "native", precision="w4a8")


AUTO_ROUND = LAYOUTS["auto-round, as gptq"].settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (AUTO_ROUND | {"act_bits": 8}, '"act_bits": 8: only weights that are quantised'),
        (AUTO_ROUND | {"data_type": "mx_fp"}, '"data_type": .mx_fp.; int is known'),
        (AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, '"packing_format": .auto_round:llm_compressor.;'),
        (AUTO_ROUND | {"packing_format": None}, 'has no "packing_format"'),
        (AUTO_ROUND | {"rotation_config": {"hadamard_type": "random"}}, '"rotation_config", which is not known'),
        (AUTO_ROUND | {"bits": 5}, '"bits": 5; 2, 3, 4, 8 are known'),
        (AUTO_ROUND | {"bits": 8, "packing_format": "auto_round:auto_awq"}, '"bits": 8; 4 is known'),
        (AUTO_ROUND | {"extra_config": {"(": {"bits": 8}}}, "which is no pattern"),
        (AUTO_ROUND | {"extra_config": {"a": {"bits": 8, "data_type": "mx_fp"}}}, '"data_type": .mx_fp.'),
        (modelopt("NVFP4_AWQ"), '"quant_algo": .NVFP4_AWQ.; FP8, NVFP4, W4A16_NVFP4, MIXED_PRECISION are known'),
        ({"bits": 4, "group_size": 64}, 'no "quant_method", as MLX writes it'),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv_fast"}, "only gemm is read"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read_quantisation({"quantization_config": settings}, "config.json")


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("compressed nvfp4", {"group_size": 32}, "groups of 32 in nvfp4-pack-quantized; 16, symmetric, are read"),
        ("compressed nvfp4", {"symmetric": False}, "groups of 16 in nvfp4-pack-quantized; 16, symmetric, are read"),
        ("compressed nvfp4", {"type": "int"}, "whole numbers in nvfp4-pack-quantized"),
        ("compressed mxfp4", {"num_bits": 6}, "floats of 6 bits in mxfp4-pack-quantized"),
        ("compressed mxfp8", {"type": "int"}, "whole numbers in mxfp8-quantized"),
        ("compressed int4", {"type": "float"}, "floats of 4 bits in pack-quantized"),
    ],
)
def test_numbers_that_a_format_has_not_are_refused(layout: str, change: dict[str, Any], said: str) -> None:
    settings = LAYOUTS[layout].settings
    (group,) = settings["config_groups"].values()
    changed = settings | {"config_groups": {"group_0": group | {"weights": group["weights"] | change}}}
    with pytest.raises(ModelError, match=said):
        read_quantisation({"quantization_config": changed}, "config.json")


@pytest.mark.parametrize(("layout", "part"), [(f"compressed {kind}", 255) for kind in ("mxfp4", "mxfp8", "nvfp4")])
def test_scales_that_are_no_numbers_are_refused(layout: str, part: int, tmp_path: Path) -> None:
    model = made(tmp_path, "ministral3", LAYOUTS[layout])

    def change(tensors: Tensors) -> Tensors:
        tensors["model.layers.1.mlp.up_proj.weight_scale"].view(torch.uint8)[3, 1] = part
        return tensors

    rewritten(model, change)
    with pytest.raises(ModelError, match=r"up_proj\.weight_scale. .*holds a scale that is not a finite number"):
        open_native(model, "fp32")


@pytest.mark.slow
def test_modelopt_may_say_layer_by_layer_what_it_did(tmp_path: Path) -> None:
    def of(module: str) -> Layout:
        return LAYOUTS["modelopt fp8" if "self_attn" in module else "modelopt nvfp4"]

    model = made(tmp_path, "glm4-moe-lite", Layout(lambda module, matrix: of(module).pack(module, matrix), modelopt("")))
    names = {name.removesuffix(".weight_scale") for name in stored(model) if name.endswith(".weight_scale")}
    layers = {name: {"quant_algo": of(name).settings["quant_algo"], "group_size": 16} for name in names}
    settings = modelopt("MIXED_PRECISION") | {"quantized_layers": layers}
    set_config(model, quantization_config=settings)
    check(model, kept="bf16")
    # Of both kinds the codes are kept, those of fp8 for a product in bf16.
    assert read_model_info(str(model)).made_for == "w4abf16"
    codes = {weight.stored.codes for weight in read_program(model, PRECISIONS["w4abf16"]).program.weights}
    assert {Codes.E2M1, Codes.E4M3} <= codes
    assert far(logits(open_native(model, "w4abf16")), expected(model.with_name("plain"))) < 0.05
    layers.pop("model.layers.0.self_attn.o_proj")
    set_config(model, quantization_config=settings)
    with pytest.raises(ModelError, match=r'o_proj. \(modelopt\) is quantised, "quantized_layers" in .* does not say how'):
        check_weights(str(model), "native")


@pytest.mark.parametrize("precision", ["w4abf16", "bf16"])
def test_floats_of_four_bits_with_scales_of_eight_stay_packed(precision: str, tmp_path: Path) -> None:
    model = made(tmp_path, "ministral3", LAYOUTS["compressed nvfp4"])
    assert read_model_info(str(model)).made_for == "w4abf16"
    built = read_program(model, PRECISIONS[precision])
    assert built.weights.startswith("compressed-tensors nvfp4-pack-quantized, 4 bits, groups of 16")
    assert Codes.E2M1 in {weight.stored.codes for weight in built.program.weights}
    np.testing.assert_array_equal(logits(open_native(model, "bf16")), logits(open_native(model.with_name("plain"), "bf16")))


def test_floats_of_four_bits_under_powers_of_two_stay_packed(tmp_path: Path) -> None:
    model = made(tmp_path, "ernie-moe", LAYOUTS["compressed mxfp4"])
    assert read_model_info(str(model)).made_for == "w4abf16"
    program = read_program(model, PRECISIONS["w4abf16"]).program
    experts = [program.weights[op.weight] for op in program.ops if op.kind is Kind.EXPERTS]
    assert experts and {weight.stored.codes for weight in experts} == {Codes.E2M1}
    assert {weight.format for weight in experts} == {Format.W4ABF16}
