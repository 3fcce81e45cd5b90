"""Checkpoints that MLX has quantised, against its own library's words, and against transformers on their numbers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlx_models import affine, by_heads, mlx_model, of_floats
from native_models import logits, open_native
from quantised_families import stored, usual
from quantised_models import rewritten, set_config
from safetensors.numpy import load_file
from test_mixtures import MXFP4, in_mxfp4
from test_quantised_checkpoints import stacked
from test_quantised_families import BOUND, check, far
from tiny_models import tiny_model

from outrider.kernels import storage
from outrider.kernels.program import Weight
from outrider.workers.engines.native import NativeEngine
from outrider.workers.errors import ModelError
from outrider.workers.messages import ModelSpec
from outrider.workers.models.checkpoint import open_checkpoint
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.formats.configuration import read_quantisation
from outrider.workers.models.formats.matrix import Parts
from outrider.workers.models.formats.mlx import MlxMatrix
from outrider.workers.models.formats.raw import RawTensors
from outrider.workers.models.headers import read_entries
from outrider.workers.models.language_model import language_config
from outrider.workers.models.memory_of_program import memory_of
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.opening import check_weights, native_supports, open_model
from outrider.workers.models.packed import PackedModel
from outrider.workers.models.quantisation_libraries import check_library
from outrider.workers.precisions import PRECISIONS

FIXTURES = Path(__file__).parents[1] / "support" / "mlx_fixtures.safetensors"
HELD = load_file(FIXTURES)
FOUR = {"group_size": 32, "bits": 4, "mode": "affine"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", sorted({name.partition(".")[0] for name in HELD}))
def test_words_are_what_the_library_makes_of_them(name: str) -> None:
    raw = RawTensors(read_entries(FIXTURES.parent, [FIXTURES]))
    expected = HELD[f"{name}.expected"]
    matrix = MlxMatrix.of(Parts(raw, name, "mlx"), expected.shape)
    for start, stop in ((0, len(expected)), (1, 3)):
        np.testing.assert_array_equal(matrix.rows(start, stop).dequantise(), expected[start:stop])
    raw.close()


def with_the_embedding(module: str) -> bool:
    return usual(module) or module == "model.embed_tokens"


def test_affine_codes_are_what_they_stand_for(tmp_path: Path) -> None:
    """The embedding, which is the head as well, among them. Scales in fp32, most of which fp16 lacks."""
    settings = {"group_size": 32, "bits": 8}
    sizes = {"tie_word_embeddings": True, "hidden_size": 192}
    model = mlx_model(tmp_path, "llama", affine(8, 32, torch.float32), settings, with_the_embedding, sizes)
    check(model, kept="bf16")
    check(model)
    assert read_model_info(str(model)).made_for == "w4abf16"
    said = open_model(ModelSpec(str(model), "native", "w4abf16", threads=1)).numeric_path["weights"]
    assert said.startswith("dequantised from mlx, 8 bits, groups of 32 (")


HALF, BRAIN = torch.float16, torch.bfloat16
KEPT = [(2, 64, BRAIN), (3, 32, BRAIN), (4, 32, HALF), (4, 64, BRAIN), (4, 128, HALF), (5, 32, HALF), (5, 64, BRAIN)]
KEPT += [(6, 64, BRAIN), (8, 32, HALF), (8, 64, BRAIN), (8, 128, BRAIN)]
WIDE = {"tie_word_embeddings": True, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("bits", "group", "dtype"), KEPT)
def test_affine_codes_stay_packed(bits: int, group: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Each number that is stored is the one that the codes stand for. Scales may be negative."""
    settings = {"group_size": group, "bits": bits}
    model = mlx_model(tmp_path, "llama", affine(bits, group, dtype), settings, with_the_embedding, WIDE)
    assert any((part < 0).any() for name, part in stored(model).items() if name.endswith("scales"))
    check(model)
    assert read_model_info(str(model)).made_for == "w4abf16"
    opened = open_model(ModelSpec(str(model), "native", "w4abf16", threads=1))
    assert re.fullmatch(rf"mlx, {bits} bits, groups of {group} \(\d+\)", opened.numeric_path["weights"])
    assert isinstance(opened.engine, NativeEngine) and isinstance(opened.engine.model._keep, PackedModel)
    checkpoint = open_checkpoint(model)
    sources = {source.name for weight, _ in _unpacked(opened.engine.model._keep) for source in weight.sources}
    assert sources == {name.replace(".scales", ".weight") for name in stored(model) if name.endswith(".scales")}
    for weight, found in _unpacked(opened.engine.model._keep):
        np.testing.assert_array_equal(found, stacked(checkpoint, weight))
    checkpoint.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "granite-moe", "lfm2"])
def test_experts_lie_together_and_taps_turned_round(name: str, tmp_path: Path) -> None:
    model = mlx_model(tmp_path, name, affine(4), FOUR)
    check(model, kept="bf16")
    check(model)
    assert "dequantised" not in read_program(model, PRECISIONS["w4abf16"]).weights


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-next", {"head_dim": 32}),
        ("dots1", {}),
        ("afmoe", {}),
        ("lfm2-moe", {}),
        ("nemotron-h-moe-plain", {"head_dim": 32}),
        ("granite-mamba", {"mamba_n_groups": 1}),
    ],
)
def test_families_have_names_and_norms_of_their_own(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Experts by another name, LFM2's layers without experts, Qwen3-Next's norms with their one and its taps,
    Nemotron's two matrices, Granite's layer that stands alone with gate and up apart."""
    model = mlx_model(tmp_path, name, affine(4), FOUR, changes=changes)
    check(model)
    assert "dequantised" not in read_program(model, PRECISIONS["w4abf16"]).weights


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe-lite"])
@pytest.mark.parametrize("quantised", [True, False])
def test_latent_attention_has_its_matrices_by_heads(name: str, quantised: bool, tmp_path: Path) -> None:
    """Where columns fill no group MLX leaves them as they are."""
    sizes = {"qk_nope_head_dim": 32, "num_hidden_layers": 2}
    model = mlx_model(tmp_path, name, affine(4), FOUR, lambda module: usual(module) and "kv_b_proj" not in module, sizes)
    by_heads(model, affine(4) if quantised else None)
    check(model)
    weights = read_program(model, PRECISIONS["w4abf16"]).program.weights
    of_heads = [each for each in weights if each.sources and ".embed_q." in each.sources[0].name]
    assert of_heads and all((each.storage is not None) == quantised for each in of_heads)


def test_gpt_oss_has_its_own_codes_in_words(tmp_path: Path) -> None:
    """And gate and up apart, with their biases: the same codes, the same bits."""
    tiny_model("gpt-oss").save_pretrained(tmp_path / "published")
    rewritten(tmp_path / "published", lambda tensors: in_mxfp4(tmp_path, tensors, {}))
    shutil.copytree(tmp_path / "published", tmp_path / "mlx")
    set_config(tmp_path / "published", quantization_config=MXFP4)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value in tensors.items():
            block, _, kind = name.partition(".experts.")
            last = {"_blocks": "weight", "_scales": "scales", "_bias": "bias"}.get(kind[kind.rfind("_") :])
            if last is None:
                found[name] = value
                continue
            value = value.flatten(2).contiguous().view(torch.uint32) if last == "weight" else value
            if kind.startswith("down_proj"):
                found[f"{block}.experts.down_proj.{last}"] = value
                continue
            found[f"{block}.experts.gate_proj.{last}"] = value[:, ::2].contiguous()
            found[f"{block}.experts.up_proj.{last}"] = value[:, 1::2].contiguous()
        return found

    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    set_config(rewritten(tmp_path / "mlx", change), quantization=settings, quantization_config=settings)
    for precision in ("fp32", "w4abf16"):
        wanted = logits(open_native(tmp_path / "published", precision))
        np.testing.assert_array_equal(logits(open_native(tmp_path / "mlx", precision)), wanted)


@pytest.mark.slow
def test_experts_of_a_layer_stay_together_or_not_at_all(tmp_path: Path) -> None:
    model = mlx_model(tmp_path, "qwen3-moe", affine(4), FOUR)
    name = "model.layers.1.mlp.switch_mlp.up_proj.biases"

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        changed = tensors[name].clone()
        changed[2, 0, 0] = 1e5
        return tensors | {name: changed}

    rewritten(model, change)
    built = read_program(model, PRECISIONS["w4abf16"])
    kept = [weight for weight in built.program.weights if weight.sources and ".1.mlp.experts." in weight.sources[0].name]
    assert {weight.storage is None for weight in kept if "down_proj" in weight.sources[0].name} == {False}
    assert {weight.storage is None for weight in kept if "down_proj" not in weight.sources[0].name} == {True}
    logits(open_native(model, "w4abf16"))


@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma3n_text", "ernie4_5_moe", "minimax_m2", None])
def test_families_that_mlx_changes_are_refused(family: str | None) -> None:
    said = f"whose layout of the type {family!r} is not supported: take it in another format"
    with pytest.raises(ModelError, match=said):
        read_quantisation({"model_type": family, "quantization": FOUR}, "config.json")
    with pytest.raises(ModelError, match=said):
        check_library({"model_type": family, "quantization": FOUR}, "config.json", None)


def test_models_that_see_are_refused() -> None:
    values = {"model_type": "qwen2_5_vl", "quantization": FOUR, "text_config": {"model_type": "qwen2"}}
    with pytest.raises(ModelError, match=r'"quantization" .MLX. of .qwen2_5_vl., a multimodal model, is not read'):
        language_config(values, "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_floats_of_four_and_eight_bits(mode: str, tmp_path: Path) -> None:
    model = mlx_model(
        tmp_path, "qwen3-moe", of_floats(mode), {"group_size": 16 if mode == "nvfp4" else 32, "bits": 4, "mode": mode}
    )
    check(model, kept="bf16" if mode == "mxfp8" else "w8af32")
    assert read_model_info(str(model)).made_for == ("bf16" if mode == "mxfp8" else "w4abf16")


@pytest.mark.slow
def test_layers_may_be_quantised_in_ways_of_their_own(tmp_path: Path) -> None:
    """As mlx-lm writes a mixture of bits, its router in eight and a layer as it was."""
    four, eight, floats = affine(4), affine(8), of_floats("mxfp4")

    def pack(module: str, matrix: torch.Tensor) -> Any:
        return (eight if module.endswith(("mlp.gate", "lm_head")) else floats if ".experts." in module else four)(
            module, matrix
        )

    def chosen(module: str) -> bool:
        return (usual(module) or module.endswith(("mlp.gate", "lm_head"))) and not module.endswith("0.self_attn.o_proj")

    of_floats_said: dict[str, object] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    layers: dict[str, dict[str, object]] = {
        f"model.layers.{layer}.mlp.gate": {"group_size": 32, "bits": 8} for layer in range(3)
    }
    layers |= {
        f"model.layers.{layer}.mlp.switch_mlp.{matrix}_proj": of_floats_said
        for layer in range(3)
        for matrix in ("gate", "up", "down")
    }
    settings = FOUR | layers | {"model.layers.0.self_attn.o_proj": False, "lm_head": {"group_size": 32, "bits": 8}}
    model = mlx_model(tmp_path, "qwen3-moe", pack, settings, chosen, {"tie_word_embeddings": False})
    check(model, kept="bf16")
    check(model)
    kinds = r"mlx mxfp4, 4 bits, .*; mlx, 4 bits, groups of 32 \(\d+\); mlx, 8 bits, groups of 32 \(3\)"
    assert re.fullmatch(kinds, read_program(model, PRECISIONS["w4abf16"]).weights)
    for name, said in {
        "lm_head": {"group_size": 64, "bits": 6},
        "model.layers.1.mlp.switch_mlp.up_proj": {"group_size": 16, "bits": 4},
        "model.layers.1.self_attn.q_proj": False,
    }.items():
        set_config(model, quantization=settings | {name: said})
        with pytest.raises(
            ModelError, match=r'is quantised, "quantization" says that it is not|"quantization" says otherwise'
        ):
            check_weights(str(model), "native", precision="bf16")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"group_size": 64}, 'has no "group_size" and "bits"'),
        (FOUR | {"mode": "mxfp6"}, '"mode": .mxfp6.; affine, mxfp4, nvfp4, mxfp8 are known'),
        (FOUR | {"rotated": 3}, ".rotated., which is not known here"),
        (FOUR | {"lm_head": {"bits": 4, "group_size": 64, "global_scale": True}}, "has .global_scale., which is not known"),
        ([4], "must be an object"),
    ],
)
def test_settings_that_are_not_known_are_refused(settings: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read_quantisation({"model_type": "llama", "quantization": settings}, "config.json")


def _all_with(tensors: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return stored | tensors


def test_what_lies_otherwise_is_refused(tmp_path: Path) -> None:
    model = mlx_model(tmp_path, "llama", affine(4), FOUR)
    whole = stored(model)
    name = "model.layers.0.self_attn.q_proj"
    for changed, said in (
        ({f"{name}.weight": whole[f"{name}.weight"][:, :-1]}, "words and 3 groups in a row, which 96 columns do not fill"),
        ({f"{name}.biases": whole[f"{name}.biases"].float()}, r"biases. \(mlx\) must be of type BF16, it is F32"),
        ({f"{name}.scales": whole[f"{name}.scales"] * torch.nan}, "holds a scale that is not a finite number"),
    ):
        rewritten(model, partial(_all_with, whole | changed))
        with pytest.raises(ModelError, match=said):
            open_native(model, "bf16")


def test_only_the_native_engine_reads_them(tmp_path: Path) -> None:
    model = mlx_model(tmp_path, "llama", affine(4), FOUR)
    assert native_supports(str(model)) is None
    config = json.loads((model / "config.json").read_text())
    for without in ((), ("quantization_config",)):
        (model / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in without}))
        with pytest.raises(
            ModelError, match=r"MLX's quantisation .quantization. is not read by transformers; .* leave out --engine hf"
        ):
            check_weights(str(model), "hf")


SMALL = "model.layers.0.self_attn.o_proj"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("scale", "code", "kept"), [(1e-7, 0, True), (1e-7, 1, False), (2.0**-17, 1, True), (1e5, 1, False)]
)
def test_what_fp16_lacks_is_dequantised(scale: float, code: int, kept: bool, tmp_path: Path) -> None:
    """One group of one matrix. Where all codes are zero nothing is multiplied by the scale: MLX writes 1e-7 then."""
    model = mlx_model(tmp_path, "llama", affine(4), FOUR)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scales, words = tensors[f"{SMALL}.scales"].clone(), tensors[f"{SMALL}.weight"].view(torch.int32).clone()
        scales[5, 1] = scale
        words[5, 4:8] = 0
        words[5, 7] = code << 28
        changed = {f"{SMALL}.scales": scales, f"{SMALL}.weight": words.view(torch.uint32)}
        if scale > 1:
            changed = {f"{SMALL}.biases": tensors[f"{SMALL}.biases"].clone().fill_(1e5)}
        return tensors | changed

    rewritten(model, change)
    built = read_program(model, PRECISIONS["w4abf16"])
    of_it = next(weight for weight in built.program.weights if any(SMALL in each.name for each in weight.sources))
    assert (of_it.storage is not None) == kept
    assert built.weights.endswith("; dequantised from mlx, 4 bits, groups of 32 (1)") == (not kept)
    wanted = logits(open_native(model, "fp32"))
    assert far(logits(open_native(model, "w8af32")), wanted) < BOUND
    logits(open_native(model, "w4abf16"))


def test_a_checkpoint_is_looked_at_again_when_it_has_changed(tmp_path: Path) -> None:
    """Whether fp16 has its scales is remembered."""
    model = mlx_model(tmp_path, "llama", affine(4), FOUR)
    assert "dequantised" not in read_program(model, PRECISIONS["w4abf16"]).weights
    rewritten(
        model, lambda tensors: {name: each * 1e-5 if name.endswith(".biases") else each for name, each in tensors.items()}
    )
    assert read_program(model, PRECISIONS["w4abf16"]).weights.startswith("dequantised from mlx, 4 bits")


def _unpacked(packed: PackedModel) -> Iterator[tuple[Weight, np.ndarray]]:
    for weight, address in zip(packed.program.weights, packed.addresses, strict=True):
        if weight.storage is not None:
            start = address - packed.memory.address
            bytes_ = np.frombuffer(packed.memory.view, np.uint8)[start : start + storage.packed_size(weight)]
            yield weight, storage.unpack(weight, bytes_)


def test_memory_is_counted_by_codes(tmp_path: Path) -> None:
    settings = {"group_size": 64, "bits": 4}
    model = mlx_model(tmp_path, "llama", affine(4, 64), settings, with_the_embedding, WIDE)
    spec = ModelSpec(str(model), "native", "w4abf16", threads=1)
    told, dequantised = memory_of(spec, 8), memory_of(replace(spec, precision="bf16"), 8)
    assert told is not None and dequantised is not None
    [(_, packed)] = open_model(spec).weights
    assert 0 <= packed - told.weights <= 64 * 4096
    assert told.weights < 0.5 * dequantised.weights
